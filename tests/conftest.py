"""What every test shares: one CPU device, no waiting for a TPU's metadata server, and the --run-compile switch.

JAX reads its environment when it is first imported, which pytest does after this file. A caller's own values stand:
`JAX_PLATFORMS=tpu ./setup.sh test …` tests on a TPU, JAX_COMPILATION_CACHE_DIR=… keeps compiled programs for later.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu compiles here without a TPU, and must not look for one
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several test processes may compile at once


def pytest_addoption(parser):
  parser.addoption("--run-compile", action="store_true", help="run the longer checks as well")


def pytest_collection_modifyitems(config, items):
  if config.getoption("--run-compile"):
    return
  longer = [item for item in items if any(item.get_closest_marker(name) for name in ("compile", "long"))]
  if longer:
    config.hook.pytest_deselected(items=longer)
    items[:] = [item for item in items if item not in longer]
