"""One device = many: the tiny model on meshes of fake CPU devices, each in a process of its own."""

import os
import subprocess
import sys

import numpy as np
import pytest

WORKER = os.path.join(os.path.dirname(__file__), "_mesh_worker.py")
# Chunks that end inside and across stripes; dispatches of several steps.
COMMON = ("kimi-k3-tiny.yml", "prefill_chunk_size=24", "decode_steps_per_dispatch=4")
THROUGHPUT = ("ici_data_parallelism=2", "parallel_mode=throughput", "mla_cache_mode=striped")


def run(output, devices, *overrides):
  command = [sys.executable, WORKER, str(output), str(devices), *COMMON, *overrides]
  return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def results(tmp_path, devices, *overrides):
  output = tmp_path / "out.npz"
  done = run(output, devices, *overrides)
  assert done.returncode == 0, done.stderr
  return dict(np.load(output))


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
  """Results on one device, by weight format, each computed once."""
  known = {}

  def get(weight_format):
    if weight_format not in known:
      known[weight_format] = results(tmp_path_factory.mktemp("one"), 1, f"weight_format={weight_format}")
    return known[weight_format]

  return get


@pytest.mark.parametrize(
  ("devices", "overrides", "weight_format"),
  [
    (2, ("mla_cache_mode=striped",), "plain"),
    (4, ("ici_data_parallelism=2",), "plain"),
    (4, THROUGHPUT, "plain"),
    (4, THROUGHPUT, "mxfp4"),
    (4, THROUGHPUT, "block_fp8"),
    (8, ("ici_data_parallelism=4", "ici_tensor_parallelism=2"), "plain"),
  ],
)
def test_many_devices_compute_what_one_does(devices, overrides, weight_format, tmp_path, one_device):
  expected = one_device(weight_format)
  got = results(tmp_path, devices, f"weight_format={weight_format}", *overrides)
  np.testing.assert_array_equal(got["tokens"], expected["tokens"])
  for name in ("prefill", "after"):
    # float32 sums over devices come in another order: seen 1e-5.
    np.testing.assert_allclose(got[name], expected[name], atol=1e-4)


@pytest.mark.parametrize(
  ("devices", "overrides", "culprit"),
  [
    (4, (), "kda_num_heads=2 can't be split over a tensor group of 4"),
    (4, ("ici_tensor_parallelism=2", "ici_fsdp_parallelism=2"), "fsdp"),
    (3, ("ici_data_parallelism=3", "ici_tensor_parallelism=1"), "num_experts=16 can't be split over 3"),
    (2, ("ici_tensor_parallelism=4",), "kda_num_heads=2 can't be split over ici_tensor_parallelism=4"),
    (2, ("ici_tensor_parallelism=1",), "2 devices"),
  ],
)
def test_a_mesh_that_does_not_fit_is_refused_by_name(devices, overrides, culprit, tmp_path):
  done = run(tmp_path / "out.npz", devices, *overrides)
  assert done.returncode == 2
  assert culprit in done.stderr
  assert len(done.stderr.splitlines()) == 1
