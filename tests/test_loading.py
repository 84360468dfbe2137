"""Converted checkpoints, read: every element against the source, on meshes and in processes; what is refused."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from _converted import SOURCE, assert_equal, converted, decoded, load, refused, settings
from _hosts import Hosts

from conversion import inspect
from MaxText import checkpoint, decode, mxfp4, quantization, score, weights
from MaxText.configs.k3_config import initialize
from MaxText.configs.resolve import model_config
from MaxText.converted import layout, loading
from MaxText.converted.manifest import MANIFEST, WORK
from MaxText.models import kimi_k3
from MaxText.weights import Source, Stack, Storage, Weight, fan_in

WORKER = os.path.join(os.path.dirname(__file__), "_loading_worker.py")


@pytest.fixture(scope="module")
def held(tmp_path_factory):
  """(weight_format, scope, layout) -> the tiny model converted so."""
  return lambda *how: converted(tmp_path_factory, *how)


@pytest.fixture(scope="module")
def original():
  return load(SOURCE)[1]


@pytest.fixture
def copy(held, tmp_path):
  """A converted checkpoint that a test may damage."""
  return Path(shutil.copytree(held("block_fp8"), tmp_path / "copy"))


# What is read


@pytest.mark.parametrize("weight_format", ["block_fp8", "mxfp4", "bfloat16"])
def test_every_weight_decodes_to_the_sources_bits(weight_format, held, original):
  cfg, params = load(held(weight_format))
  assert cfg.storage.experts == {"bfloat16": "plain"}.get(weight_format, weight_format)
  assert cfg.storage.dense == "plain"
  assert_equal(decoded(params), decoded(original))
  experts = params["kda"]["experts"]["wi"]
  if weight_format == "mxfp4":
    released = checkpoint.ReleasedCheckpoint(str(SOURCE))
    packed, scale = released.read_packed("model.layers.2.block_sparse_moe.experts.5.", Source("w3", (128, 128)))
    # Layer 2 of the model is the second KDA layer with experts.
    np.testing.assert_array_equal(np.asarray(experts.values[1, 5, :, 128:]).view(np.uint8), mxfp4.nibbles(packed).T)
    np.testing.assert_array_equal(experts.scales[1, 5, :, 128:], scale.T)


def test_dense_matrices_are_the_sources_blocks_scaled_by_their_largest(held, original):
  """scope=all, by the formula: a released 128×128 block's scale is max/448, values are rounded to e4m3."""
  cfg, params = load(held("block_fp8", "all"))
  assert (cfg.storage.experts, cfg.storage.dense) == ("block_fp8", "block_fp8")
  ours = decoded(params)
  released = checkpoint.ReleasedCheckpoint(str(SOURCE))
  seen = 0
  leaves = jax.tree.leaves(kimi_k3.weight_tree(cfg), is_leaf=weights.is_stack)
  for stack, value, source in zip(leaves, jax.tree.leaves(ours), jax.tree.leaves(original), strict=True):
    if stack.weight.kind != "dense":
      np.testing.assert_array_equal(value, np.asarray(source, np.float32))
      continue
    seen += 1
    for instance, prefix in zip(value.reshape(-1, *stack.weight.shape), stack.prefixes, strict=True):
      tensors = [released.read(prefix, s).astype(np.float32) for s in stack.weight.sources]
      for tensor in tensors:
        for i in range(0, tensor.shape[0], 128):
          for j in range(0, tensor.shape[1], 128):
            block = tensor[i : i + 128, j : j + 128]
            scale = np.float32(np.abs(block).max() / np.float32(448))
            block[...] = (block / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
      np.testing.assert_array_equal(instance, stack.weight.from_release(*tensors))
  assert seen > 15


@pytest.mark.long
def test_every_shard_on_every_mesh_is_its_slice_of_the_whole(held):
  directories = [str(held(*one)) for one in (("block_fp8", "all"), ("mxfp4",))]
  done = subprocess.run(
    [sys.executable, WORKER, "meshes", "8", *directories], capture_output=True, text=True, timeout=600
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == ""


@pytest.mark.long
def test_four_processes_read_each_byte_once(held, tmp_path):
  directory = held("block_fp8", "all")
  mesh = ("ici_data_parallelism=2", "ici_tensor_parallelism=2")
  with Hosts(tmp_path, 4, WORKER, "hosts", str(tmp_path / "read"), str(directory), *mesh, devices=1) as hosts:
    assert hosts.wait() == [0] * 4, "".join(map(hosts.err, range(4)))
  read = [json.loads((tmp_path / f"read{i}").read_text())[str(directory)] for i in range(4)]
  size = sum(file.stat().st_size for file in (directory / layout.WEIGHTS).rglob("c/**/*") if file.is_file())
  total = sum(counted for counted, _ in read)
  assert size < total <= 1.05 * size  # seen 1.01: files' indices are read by all who read of them
  # The kernel has seen these bytes go to these processes; beside them the exchange and what Python opens.
  assert all(counted <= kernel <= counted + 2e6 for counted, kernel in read), read


# Blocks that a split cuts


def _plain_reader(array):
  return lambda index: lambda: array[index]


@pytest.mark.parametrize("ways", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("columns", [192, 576, 1056])
def test_scales_of_any_split_are_the_released_blocks(columns, axis, ways):
  """K3's narrowest parts at 32 ways: shared experts, q_b, the dense MLP. A value has its released block's scale."""
  size = 32 * columns
  shape = (384, size) if axis else (size, 384)
  weight = Weight(
    shape, ("embed", "mlp") if axis else ("mlp", "embed"), (Source("w", shape[::-1]),), fan_in(1), kind="dense"
  )
  blocks = (
    np.random.default_rng(0).standard_normal((math.ceil(shape[1] / 128), math.ceil(shape[0] / 128))).astype(np.float32)
  )
  of_each_value = quantization.spread_scales(blocks, shape[::-1]).T
  stack = Stack(weight, ("model.",))
  disk, memory = (Storage(np.float32, dense="block_fp8", ways=(("mlp", n),)) for n in (32, ways))
  stored = stack.block_scales([blocks], stack.runs(disk))
  wanted = stack.arrays(memory).scales
  whole = loading._with_runs(_plain_reader(stored), wanted.shape, stack.runs(disk), stack.runs(memory))
  step = [n // ways if i == axis else n for i, n in enumerate(shape)]
  for device in range(ways):
    values = tuple(slice(device * n, device * n + n) if i == axis else slice(None) for i, n in enumerate(step))
    scales = [wanted.shape[i] // ways if i == axis else wanted.shape[i] for i in range(2)]
    index = tuple(slice(device * n, device * n + n) if i == axis else slice(None) for i, n in enumerate(scales))
    got = whole(index)()
    assert got.shape == tuple(scales)
    spread = got.repeat(step[0] // scales[0], 0).repeat(step[1] // scales[1], 1)
    np.testing.assert_array_equal(spread, of_each_value[values])


def test_sources_that_alternate_have_scales_of_their_own():
  """q, k and v of heads of 64: a block of 128 columns of the arranged matrix holds two sources' blocks."""
  cfg = model_config(settings(SOURCE), "cpu")
  qkv = kimi_k3.weight_tree(cfg)["kda"]["attention"]["qkv"]
  storage = Storage(np.float32, dense="block_fp8")
  assert qkv.runs(storage) == (128, 64)
  scales = qkv.block_scales([np.full((1, 1), value, np.float32) for value in (2, 3, 5)], qkv.runs(storage))
  np.testing.assert_array_equal(scales, [[2, 3, 5, 2, 3, 5]])
  full = model_config(initialize(["test", "kimi-k3.yml"]), "cpu")
  assert kimi_k3.weight_tree(full)["kda"]["attention"]["qkv"].runs(storage) == (128, 128)


# What is refused


def flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 3] ^= 1
  path.write_bytes(data)


def halve(path):
  os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
  ("name", "damage"),
  [
    ("kda.experts.wi.values", flip),
    ("kda.experts.wo.scales", flip),
    ("mla.attention.kv_b", flip),
    ("kda.experts.wi.values", halve),
    ("embed", halve),
    ("kda.experts.wi.values", os.remove),
    ("kda.experts.wo.scales", os.remove),
    ("norm", os.remove),
  ],
)
def test_a_damaged_file_is_one_line_that_names_the_array(name, damage, copy):
  damage(next(p for p in sorted((copy / layout.WEIGHTS / name / "c").rglob("*")) if p.is_file()))
  refused(lambda: load(copy), copy, name, "can't be read")


def test_an_array_that_is_gone_is_named(copy):
  shutil.rmtree(copy / layout.WEIGHTS / "mla.attention.o")
  refused(lambda: load(copy), copy, "mla.attention.o", "can't be read")


def change_manifest(directory, change):
  path = directory / MANIFEST
  value = json.loads(path.read_text())
  change(value)
  path.write_text(json.dumps(value))


def test_another_models_checkpoint_names_the_first_array_that_differs(copy):
  refused(
    lambda: load(copy, "routed_expert_hidden_size=256"),
    copy,
    "kda.experts.wi.values",
    "[8, 16, 128, 256]",
    "[8, 16, 256, 256]",
  )
  refused(lambda: load(copy, "base_moe_mlp_dim=64"), copy, "kda.experts.wi.values", "[8, 16, 128, 128]")
  change_manifest(copy, lambda m: m["arrays"].pop("lm_head"))
  refused(lambda: load(copy), copy, "lacks lm_head")


def test_a_checkpoint_with_more_arrays_or_other_files_is_refused(copy):
  change_manifest(copy, lambda m: m["arrays"].update({"extra": m["arrays"]["norm"]}))
  refused(lambda: load(copy), copy, "no place for extra")
  change_manifest(copy, lambda m: m["arrays"]["norm"].update(part=[64]))
  refused(lambda: load(copy), copy, "norm", "convert it again")


@pytest.mark.parametrize(
  ("change", "culprit"),
  [
    (lambda m: m.update(version=2), "version 2"),
    (lambda m: m.update(format="x"), "'x'"),
    (lambda m: m.pop("layout"), "layout"),
    (lambda m: m.update(layout="odd"), "'odd'"),
    (lambda m: m.update(weight_format="plain"), "'plain'"),
    (lambda m: m.update(arrays=3), "arrays"),
    (lambda m: m.update(arrays={"norm": 3}), "arrays"),
  ],
)
def test_a_manifest_that_isnt_one_is_named(change, culprit, copy):
  change_manifest(copy, change)
  refused(lambda: load(copy), copy, culprit)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_manifest_that_isnt_json_is_named(text, copy):
  (copy / MANIFEST).write_text(text)
  refused(lambda: load(copy), copy / MANIFEST)


def readers(directory, tmp_path):
  np.save(tmp_path / "ids.npy", np.zeros((1, 4), int))
  given = ["kimi-k3-tiny.yml", f"load_parameters_path={directory}"]
  scored = [f"score_tokens={tmp_path / 'ids.npy'}", f"score_output={tmp_path / 'out.npz'}"]
  return {
    "decode": lambda: decode.main(["decode.py", *given, "prompt=The"]),
    "score": lambda: score.main(["score.py", *given, *scored]),
    "inspect": lambda: inspect.main(["inspect", str(directory)]),
    "ReleasedCheckpoint": lambda: checkpoint.ReleasedCheckpoint(str(directory)),
  }


@pytest.mark.parametrize("layout_", ["maxtext", "hf"])
@pytest.mark.parametrize("reader", ["decode", "score", "inspect", "ReleasedCheckpoint"])
def test_a_conversion_that_hasnt_finished_is_refused_by_every_reader(layout_, reader, tmp_path):
  """Whatever is there already: arrays, whole shards, or nothing but the work folder."""
  directory = tmp_path / "half"
  if layout_ == "hf":
    shutil.copytree(SOURCE, directory)
  (directory / WORK).mkdir(parents=True)
  refused(readers(directory, tmp_path)[reader], directory, "hasn't finished", "again")


@pytest.mark.parametrize("reader", ["inspect", "ReleasedCheckpoint"])
def test_arrays_given_to_who_reads_safetensors_are_called_what_they_are(reader, held, tmp_path):
  directory = held("block_fp8")
  refused(readers(directory, tmp_path)[reader], directory, "layout=maxtext", "decode.py")


# Formats


def test_auto_is_what_the_checkpoint_holds(held):
  def formats(directory, *overrides):
    storage = model_config(settings(directory, *overrides), "cpu").storage
    return storage.experts, storage.dense

  assert formats(held("mxfp4")) == formats(held("mxfp4"), "weight_format=mxfp4") == ("mxfp4", "plain")
  assert formats(held("block_fp8", "all"), "dense_weight_format=block_fp8") == ("block_fp8", "block_fp8")
  assert formats(held("bfloat16")) == ("plain", "plain")
  assert formats(SOURCE) == ("plain", "plain")
  assert formats(SOURCE, "weight_format=mxfp4") == ("mxfp4", "block_fp8")
  full = model_config(initialize(["test", "kimi-k3.yml"]), "cpu").storage  # no checkpoint
  assert (full.experts, full.dense) == ("plain", "plain")


@pytest.mark.parametrize(
  ("how", "given", "say"),
  [
    (("block_fp8",), "weight_format=mxfp4", ("block_fp8", "weight_format=mxfp4", "leave weight_format out")),
    (("block_fp8",), "weight_format=plain", ("block_fp8", "weight_format=bfloat16")),
    (("block_fp8",), "dense_weight_format=block_fp8", ("plain", "scope=all", "leave dense_weight_format out")),
    (("block_fp8", "all"), "dense_weight_format=plain", ("block_fp8", "scope=experts")),
  ],
)
def test_a_format_that_the_checkpoint_doesnt_hold_is_refused(how, given, say, held):
  refused(lambda: model_config(settings(held(*how), given), "cpu"), given, held(*how), *say)
