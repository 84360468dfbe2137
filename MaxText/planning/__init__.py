"""The planner: this project's own programs compiled for a described slice, and what the compiler says of them."""

import os

# Read when libtpu is loaded, which the first topology does. A weight stacked over layers is otherwise copied whole into
# another tiling (its second-minor dimension being large), once more a copy of all weights.
_LIBTPU_ARGS = "--xla_tpu_impure_enable_large_2nd_minor_layout=false"
if _LIBTPU_ARGS not in os.environ.get("LIBTPU_INIT_ARGS", ""):
  os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {_LIBTPU_ARGS}".strip()
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_WORKER_ID", "0")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "tpu7x-8")  # of a host that isn't there; without it libtpu complains
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several processes may compile at once
