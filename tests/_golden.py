"""What tests against the golden files share: tolerances, prompts, and a prefill whose layers are seen.

Where the tolerances come from: tests/test_golden.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from _models import (
  COMPILE_QUICKLY,
  assert_close,
  empty_cache,
  golden_arrays,
)
from _tracing import recorded

from MaxText.models import kimi_k3

CHECKPOINTS = ("k3-a", "kl-a")
LENGTHS = (1, 31, 64, 65, 130)
LOGITS = 5e-4  # standard deviation of the logits: 2
TRACE = 2e-4  # of values of unit scale; of smaller ones, this part of their root mean square
# README of the goldens: root mean square of what bfloat16 changed in the independent implementation's logits.
BF16_RMS = {
  "k3-a": {1: 0.04, 31: 0.11, 64: 0.12, 65: 0.09, 130: 0.13},
  "kl-a": {1: 0.03, 31: 0.22, 64: 0.26, 65: 0.23, 130: 0.20},
}
BF16_FACTOR = 2


def prompts(name, n):
  return golden_arrays(name)[f"input_ids_{n}"].astype(np.int32)


def unrolled_prefill(cfg):
  """Unrolled prefill of one prompt whose tagged values are kept: (tokens, params, cache) -> ((logits, cache), tags)."""
  cfg = dataclasses.replace(cfg, rolled=False)

  def run(tokens, params, cache):
    length = jnp.full(1, tokens.shape[1], jnp.int32)
    return kimi_k3.prefill(cfg, params, tokens, length, jnp.arange(len(tokens)), cache, all_logits=True)

  return jax.jit(recorded(run), compiler_options=COMPILE_QUICKLY)


@dataclasses.dataclass
class Trace:
  logits: np.ndarray
  cache: kimi_k3.DecodeCache
  tags: dict[str, list[jax.Array]]

  def layers(self, tag, n=None):
    """A tag's values of one batch row, [layers, tokens, ...]."""
    values = [np.asarray(v) for v in self.tags[tag][:n]]
    return np.stack([v[0] if v.shape[0] == 1 else v for v in values])


def trace(name, cfg, params) -> Trace:
  tokens = jnp.asarray(golden_arrays(name)["trace_input_ids"], jnp.int32)[None]
  (logits, cache), tags = unrolled_prefill(cfg)(tokens, params, empty_cache(cfg, 1))
  return Trace(logits, cache, tags)


def assert_layers_close(actual, expected, what, tolerance=TRACE):
  """Layer by layer, so that a layer of small values is held to a small difference."""
  assert actual.shape == expected.shape
  for layer, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
    scale = min(1.0, float(np.sqrt(np.mean(theirs.astype(np.float64) ** 2))))
    assert_close(ours, theirs, tolerance * scale, f"{what} of layer {layer}")


def root_mean_square(actual, expected):
  return np.sqrt(np.mean((np.asarray(actual, np.float64) - expected) ** 2))
