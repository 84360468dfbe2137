"""Safetensors in block-FP8, by DeepSeek's convention: our own export and a stranger's, kept, decoded and refused."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from _converted import SOURCE, assert_equal, converted, decoded, load, refused
from safetensors.numpy import save_file

from conversion import inspect
from MaxText import checkpoint, quantization
from MaxText.converted.manifest import MANIFEST

STEM = "language_model.model.layers.2.block_sparse_moe.experts.5.w2."


@pytest.fixture(scope="module")
def held(tmp_path_factory):
  """(weight_format, scope, layout) -> the tiny model converted so."""
  return lambda *how: converted(tmp_path_factory, *how)


@pytest.fixture(scope="module")
def foreign(held, tmp_path_factory):
  """A checkpoint in this convention that nobody has stamped, large dense matrices included."""
  directory = tmp_path_factory.mktemp("foreign") / "checkpoint"
  shutil.copytree(held("block_fp8", "all", "hf"), directory)
  (directory / MANIFEST).unlink()
  return directory


def read_tensors(path):
  """Every tensor of a file, by the format's own description."""
  data = path.read_bytes()
  size = int.from_bytes(data[:8], "little")
  dtypes = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "U8": np.uint8}
  tensors = {}
  for name, entry in json.loads(data[8 : 8 + size]).items():
    if name != "__metadata__":
      begin, end = (8 + size + offset for offset in entry["data_offsets"])
      tensors[name] = np.frombuffer(data[begin:end], dtypes[entry["dtype"]]).reshape(entry["shape"])
  return tensors


def index_of(directory):
  return json.loads((directory / checkpoint.INDEX).read_text())["weight_map"]


@pytest.mark.parametrize("stamped", [True, False])
def test_values_are_kept_as_they_are(stamped, held, foreign):
  if stamped:
    cfg, params = load(held("block_fp8", "all", "hf"))
  else:
    cfg, params = load(foreign, "weight_format=block_fp8")
  assert (cfg.storage.experts, cfg.storage.dense) == ("block_fp8", "block_fp8")
  wi, qkv = params["kda"]["experts"]["wi"], params["kda"]["attention"]["qkv"]
  assert isinstance(wi, quantization.BlockFP8) and isinstance(qkv, quantization.BlockFP8)
  # Layer 2 of the model is the second KDA layer with experts.
  where, prefix = index_of(foreign), "language_model.model.layers.2."
  file = lambda name: read_tensors(foreign / where[prefix + name])[prefix + name]
  for i, name in enumerate(("w1", "w3")):
    values, scales = (file(f"block_sparse_moe.experts.5.{name}.weight{part}") for part in ("", "_scale_inv"))
    ours = np.asarray(wi.values[1, 5, :, 128 * i : 128 * i + 128])
    np.testing.assert_array_equal(ours.view(np.uint8), values.T.view(np.uint8))
    np.testing.assert_array_equal(wi.scales[1, 5, :, i : i + 1], scales)
  for i, name in enumerate("qkv"):
    values, scales = (file(f"self_attn.{name}_proj.weight{part}") for part in ("", "_scale_inv"))
    ours = np.asarray(qkv.values[1]).reshape(128, 2, 3, 64)[:, :, i]  # head by head its q, k and v
    np.testing.assert_array_equal(ours.view(np.uint8), values.T.reshape(128, 2, 64).view(np.uint8))
    # Heads of 64: the block's scale stands once for each.
    np.testing.assert_array_equal(np.asarray(qkv.scales[1]).reshape(2, 3)[:, i], np.repeat(scales[0], 2))


def test_both_layouts_decode_to_the_same(held):
  for scope in ("experts", "all"):
    hf, arrays = (decoded(load(held("block_fp8", scope, layout))[1]) for layout in ("hf", "maxtext"))
    assert_equal(hf, arrays)


def test_experts_decode_to_the_sources_bits(held):
  cfg, params = load(held("block_fp8", "experts", "hf"))
  assert (cfg.storage.experts, cfg.storage.dense) == ("block_fp8", "plain")
  assert_equal(decoded(params), decoded(load(SOURCE)[1]))
  assert_equal(decoded(load(held("bfloat16", "experts", "hf"))[1]), decoded(params))


def test_unstamped_it_is_decoded_where_nobody_asks_for_a_format(held, foreign):
  cfg, params = load(foreign, "weight_dtype=float32")
  assert (cfg.storage.experts, cfg.storage.dense) == ("plain", "plain")
  assert not isinstance(params["kda"]["experts"]["wi"], quantization.Quantized)
  assert_equal(decoded(params), decoded(load(held("block_fp8", "all"), "weight_dtype=float32")[1]))


def test_packed_experts_are_asked_for_in_vain(foreign):
  refused(lambda: load(foreign, "weight_format=mxfp4"), "experts.0.w1.weight", "isn't packed")


def test_inspect_takes_it_and_names_both_tensors(foreign, capsys):
  inspect.main(["inspect", str(foreign)])
  out = capsys.readouterr().out
  assert "is whole" in out
  assert "576 F32, 576 F8_E4M3" in out  # 12 layers of 16 experts of three matrices


@pytest.mark.parametrize(
  ("change", "say"),
  [
    (lambda s: s.pop("weight_scale_inv"), "is F8_E4M3, not BF16"),
    (lambda s: s.pop("weight"), "without its values"),
    (lambda s: s.update(weight_scale_inv=np.ones((1, 2), np.float32)), "has shape (1, 2), the configuration wants (1,"),
    (lambda s: s.update(weight_scale_inv=np.ones((1, 1), np.float16)), "is F16, not F32"),
    (lambda s: s.update(weight_scale_inv=np.full((1, 1), np.nan, np.float32)), "isn't a finite number"),
    (lambda s: s.update(weight=s["weight"].astype(ml_dtypes.bfloat16)), "is BF16, not F8_E4M3"),
    (lambda s: s.update(weight_packed=np.zeros((128, 64), np.uint8)), "twice"),
  ],
)  # fmt: skip
def test_a_broken_pair_is_named(change, say, foreign, tmp_path):
  directory = Path(shutil.copytree(foreign, tmp_path / "broken"))
  where = index_of(directory)
  path = directory / where[f"{STEM}weight"]
  tensors = read_tensors(path)
  pair = {name: tensors.pop(STEM + name) for name in ("weight", "weight_scale_inv")}
  change(pair)
  tensors |= {STEM + name: value for name, value in pair.items()}
  save_file(tensors, path)
  where = {name: file for name, file in where.items() if file != path.name} | dict.fromkeys(tensors, path.name)
  (directory / checkpoint.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
  refused(lambda: load(directory, "weight_format=block_fp8"), "experts.5.w2", directory, say)


def test_scales_of_what_isnt_a_matrix_are_refused(foreign, tmp_path):
  directory = Path(shutil.copytree(foreign, tmp_path / "broken"))
  where, norm = index_of(directory), "language_model.model.norm.weight"
  path = directory / where[norm]
  save_file(read_tensors(path) | {f"{norm}_scale_inv": np.ones((1, 1), np.float32)}, path)
  (directory / checkpoint.INDEX).write_text(
    json.dumps({"metadata": {}, "weight_map": where | {f"{norm}_scale_inv": path.name}})
  )
  refused(lambda: load(directory), "model.norm.weight", "is BF16, not F8_E4M3")
