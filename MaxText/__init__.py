"""Kimi K3 for people who live in MaxText: an overlay of configuration, layers and engine on the `maxtext` package."""

import os

# Before JAX and transformers are imported: XLA's clients and transformers' model configurations, which MaxText imports,
# announce themselves on every start. Whoever wants that sets the variable.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
