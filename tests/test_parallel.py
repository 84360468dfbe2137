"""One device = many: the tiny model on meshes of fake CPU devices, each in a process of its own."""

import os
import subprocess
import sys

import numpy as np
import pytest
from _models import random_params

from MaxText import checkpoint_writer
from MaxText.configs.k3_config import initialize
from MaxText.configs.resolve import model_config
from MaxText.models import kimi_k3

WORKER = os.path.join(os.path.dirname(__file__), "_mesh_worker.py")
# Chunks that end inside and across stripes; dispatches of several steps.
COMMON = ("kimi-k3-tiny.yml", "prefill_chunk_size=24", "decode_steps_per_dispatch=4")
DATA2 = ("ici_data_parallelism=2",)
STRIPED, SHARDED = "mla_cache_mode=striped", "latent_projections=sharded"
THROUGHPUT = (*DATA2, "parallel_mode=throughput")
# A model that 32 devices divide: heads, experts, vocabulary, MLPs, latent.
WIDE = (
  "vocab_size=640", "base_emb_dim=64", "base_num_decoder_layers=5", "base_mlp_dim=64", "full_attn_layers=[4,5]",
  "kda_layers=[1,2,3]", "base_num_query_heads=32", "base_num_kv_heads=32", "kda_num_heads=32", "kda_head_dim=32",
  "qk_nope_head_dim=16", "qk_rope_head_dim=8", "v_head_dim=16", "num_experts=64", "base_moe_mlp_dim=32",
  "routed_expert_hidden_size=64",
)  # fmt: skip


def run(output, devices, *overrides):
  command = [sys.executable, WORKER, str(output), str(devices), *COMMON, *overrides]
  return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)


def results(tmp_path, devices, *overrides):
  output = tmp_path / "out.npz"
  done = run(output, devices, *overrides)
  assert done.returncode == 0, done.stderr
  return dict(np.load(output))


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
  """Results on one device, by overrides, each computed once."""
  known = {}

  def get(*overrides):
    if overrides not in known:
      known[overrides] = results(tmp_path_factory.mktemp("one"), 1, *overrides)
    return known[overrides]

  return get


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
  """The overrides of a model of random weights that 32 devices divide, its checkpoint among them."""
  directory = tmp_path_factory.mktemp("wide")
  config = initialize(["test", COMMON[0], *WIDE])
  cfg = model_config(config, "cpu")
  ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
  checkpoint_writer.write(str(directory), kimi_k3.weight_tree(cfg), random_params(cfg, 3), config, ids, shards=1)
  return (*WIDE, f"load_parameters_path={directory}")


def assert_same(got, expected, atol=1e-4):
  """float32 sums over devices come in another order: seen 1e-5 with the trained model."""
  np.testing.assert_array_equal(got["tokens"], expected["tokens"])
  for name in ("prefill", "after"):
    np.testing.assert_allclose(got[name], expected[name], atol=atol)


@pytest.mark.parametrize(
  ("devices", "overrides", "weight_format"),
  [
    (2, (STRIPED,), "plain"),
    (2, (SHARDED,), "block_fp8"),
    (4, DATA2, "mxfp4"),
    (4, (*THROUGHPUT, STRIPED, SHARDED), "plain"),
    (4, (*THROUGHPUT, STRIPED), "mxfp4"),
    (4, (*THROUGHPUT, STRIPED), "block_fp8"),
    (8, (STRIPED,), "plain"),  # laid out by itself: data 4 × tensor 2
  ],
)
def test_many_devices_compute_what_one_does(devices, overrides, weight_format, tmp_path, one_device):
  weight_format = f"weight_format={weight_format}"
  assert_same(results(tmp_path, devices, weight_format, *overrides), one_device(weight_format))


@pytest.mark.parametrize(
  "overrides",
  [(STRIPED,), ("weight_format=block_fp8", "ici_tensor_parallelism=16", *THROUGHPUT, STRIPED, SHARDED)],
)
def test_32_devices_compute_what_one_does(overrides, wide, tmp_path, one_device):
  formats = tuple(o for o in overrides if o.startswith("weight_format"))
  # Random weights amplify rounding more: logits of order 1 differ by 2e-5 … 1.1e-4 from mesh to mesh and from machine
  # to machine. The bound is the one of the golden files in float32.
  assert_same(results(tmp_path, 32, *wide, *overrides), one_device(*wide, *formats), atol=5e-4)


@pytest.mark.parametrize(
  ("devices", "overrides", "culprit"),
  [
    (4, ("ici_data_parallelism=1",), "kda_num_heads=2 can't be split over a tensor group of 4"),
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
