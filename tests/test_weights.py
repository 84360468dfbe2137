"""The released layout read and written, and what a broken checkpoint says."""

import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _models import GOLDEN, assert_same, golden, golden_text_config, load, settings
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from MaxText import checkpoint, checkpoint_writer, mxfp4
from MaxText.configs.resolve import model_config
from MaxText.errors import UserError
from MaxText.models import kimi_k3

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.0.w2"


class Copy:
  """A copy of a golden checkpoint that a test may damage; shards are rewritten as a whole."""

  def __init__(self, directory, name):
    self.name, self.directory = name, directory / name
    shutil.copytree(GOLDEN / name, self.directory, ignore=shutil.ignore_patterns("goldens.npz"))

  @property
  def index(self):
    return json.loads((self.directory / checkpoint.INDEX).read_text())["weight_map"]

  def shard_of(self, tensor):
    return self.directory / self.index[tensor]

  def write_index(self, where):
    (self.directory / checkpoint.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))

  def change(self, tensor, function, new_name=None):
    """Replaces a tensor by `function` of it (None: takes it out), or adds it under another name; the index follows."""
    path, where = self.shard_of(tensor), self.index
    tensors = load_file(path)
    value = function(tensors[tensor])
    target = new_name or tensor
    if value is None:
      del tensors[tensor], where[tensor]
    else:
      tensors[target] = np.ascontiguousarray(value)
      where[target] = path.name
    save_file(tensors, path)
    self.write_index(where)

  def load(self):
    cfg = model_config(settings(self.name), "cpu")
    return load(self.name, cfg, self.directory)

  def refused(self, *culprits):
    """Loading fails with one line that names all of `culprits`."""
    with pytest.raises(UserError) as caught:
      self.load()
    message = str(caught.value)
    assert "\n" not in message
    for culprit in culprits:
      assert culprit in message, message
    return message


@pytest.fixture
def k3(tmp_path):
  return Copy(tmp_path, "k3-a")


@pytest.fixture
def kl(tmp_path):
  return Copy(tmp_path, "kl-a")


# Reading


def test_loaded_weights_are_the_files_values():
  """Tensor by tensor, read here by hand: where each lies, which way round, and how experts are packed."""
  cfg, params = golden("k3-a")
  files = {}
  for file in sorted((GOLDEN / "k3-a").glob("*.safetensors")):
    files |= load_file(file)
  model = {name.removeprefix("language_model.model."): value for name, value in files.items()}

  def f32(name):
    return model[name].astype(np.float32)

  def same(ours, theirs):
    np.testing.assert_array_equal(np.asarray(ours), theirs)

  same(params["embed"], f32("embed_tokens.weight"))
  same(params["lm_head"], files["language_model.lm_head.weight"].astype(np.float32).T)
  same(params["output_res"]["proj"], f32("output_attn_res_proj.weight")[0])
  # Layer 5 of the model (from zero) is its fourth KDA layer with experts: 1, 2, 4, 5.
  kda, attention = params["kda"], params["kda"]["attention"]
  h, k = 2, 128
  for i, n in enumerate("qkv"):
    ours = attention["qkv"][3].reshape(-1, h, 3, k)[:, :, i]
    same(ours, f32(f"layers.5.self_attn.{n}_proj.weight").T.reshape(-1, h, k))
    same(attention["conv"][3, i], f32(f"layers.5.self_attn.{n}_conv1d.weight")[:, 0].T.reshape(4, h, k))
  same(attention["a_log"][3], f32("layers.5.self_attn.A_log")[:h])
  same(attention["dt_bias"][3], f32("layers.5.self_attn.dt_bias").reshape(h, k))
  same(attention["o"][3], f32("layers.5.self_attn.o_proj.weight").T)
  same(kda["mlp_res"]["norm"][3], f32("layers.5.mlp_res_norm.weight"))
  # Expert 7 of it: nibbles, low one first, times 2^(scale − 127).
  value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
  for name, ours in (
    ("w1", kda["experts"]["wi"][3, 7, :, :64]),
    ("w3", kda["experts"]["wi"][3, 7, :, 64:]),
    ("w2", kda["experts"]["wo"][3, 7]),
  ):
    packed, scale = (model[f"layers.5.block_sparse_moe.experts.7.{name}.weight_{part}"] for part in ("packed", "scale"))
    decoded = np.stack([value[packed & 15], value[packed >> 4]], axis=-1).reshape(packed.shape[0], -1)
    same(ours, (decoded * np.repeat(2.0 ** (scale.astype(float) - 127), 32, axis=1)).T)
  # The second MLA layer is layer 7.
  same(params["mla"]["attention"]["kv_b"][1], f32("layers.7.self_attn.kv_b_proj.weight").T)
  same(params["mla"]["moe"]["bias"][1], f32("layers.7.block_sparse_moe.gate.e_score_correction_bias"))
  assert cfg.layer_ids("kda", False)[3] == 5 and cfg.layer_ids("mla", False)[1] == 7


def test_weights_declared_float32_stay_float32_in_a_bfloat16_model():
  cfg = model_config(settings("k3-a", "dtype=bfloat16", "weight_dtype=bfloat16"), "cpu")
  params, full = load("k3-a", cfg), golden("k3-a")[1]
  for name in ("a_log", "dt_bias", "conv", "o_norm"):
    assert params["kda"]["attention"][name].dtype == jnp.float32
  assert params["kda"]["moe"]["bias"].dtype == jnp.float32
  assert params["kda"]["experts"]["wi"].dtype == jnp.bfloat16
  # Nothing is lost: the release's values, MXFP4 ones too, are exact in bfloat16.
  for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(full), strict=True):
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs))


def test_a_single_file_without_an_index_loads(kl):
  tensors = {}
  for file in sorted(kl.directory.glob("*.safetensors")):
    tensors |= load_file(file)
    file.unlink()
  (kl.directory / checkpoint.INDEX).unlink()
  save_file(tensors, kl.directory / checkpoint.SINGLE)
  assert_same(kl.load(), golden("kl-a")[1])


@pytest.mark.parametrize("shape", [(2,), (128,), (1, 1, 2, 1)])
def test_a_log_loads_in_every_shape_that_the_family_stores(kl, shape):
  name = "model.layers.0.self_attn.A_log"
  if shape == (128,):
    # What lies beyond the heads is padding, and not read.
    kl.change(name, lambda a: np.concatenate([a.reshape(-1), np.full(126, 77, a.dtype)]))
  else:
    kl.change(name, lambda a: a.reshape(shape))
  assert_same(kl.load(), golden("kl-a")[1])


def test_a_log_of_k3_loads_unpadded_and_of_rank_four(k3):
  k3.change("language_model.model.layers.0.self_attn.A_log", lambda a: a[:2])
  k3.change("language_model.model.layers.1.self_attn.A_log", lambda a: a[:2].reshape(1, 1, 2, 1))
  assert_same(k3.load(), golden("k3-a")[1])


def test_convolutions_of_rank_two_load(k3):
  for layer, n in ((0, "q"), (1, "k"), (10, "v")):
    name = f"language_model.model.layers.{layer}.self_attn.{n}_conv1d.weight"
    k3.change(name, lambda w: w.reshape(w.shape[0], w.shape[-1]))
  assert_same(k3.load(), golden("k3-a")[1])


def test_float32_tensors_stored_as_bfloat16_load(kl):
  """As Kimi-Linear stores its A_log, dt_bias, convolutions, o_norm and bias."""
  attention = "model.layers.0.self_attn."
  names = [f"{attention}A_log", f"{attention}dt_bias", f"{attention}q_conv1d.weight", f"{attention}o_norm.weight"]
  for name in names:
    kl.change(name, lambda a: a.astype(ml_dtypes.bfloat16))
  ours = kl.load()["leading_kda"]["attention"]
  assert ours["a_log"].dtype == jnp.float32
  theirs = golden("kl-a")[1]["leading_kda"]["attention"]
  for name in ("a_log", "dt_bias", "o_norm"):
    np.testing.assert_array_equal(ours[name], np.asarray(theirs[name]).astype(ml_dtypes.bfloat16).astype(np.float32))


def test_experts_stored_unpacked_load_the_same(k3):
  """Presence of `weight_packed` decides, for each tensor alone."""
  packed, scale = (load_file(k3.shard_of(f"{EXPERT}.{p}"))[f"{EXPERT}.{p}"] for p in ("weight_packed", "weight_scale"))
  plain = mxfp4.unpack(packed, scale).astype(ml_dtypes.bfloat16)
  k3.change(f"{EXPERT}.weight_packed", lambda _: plain, new_name=f"{EXPERT}.weight")
  k3.change(f"{EXPERT}.weight_packed", lambda _: None)
  k3.change(f"{EXPERT}.weight_scale", lambda _: None)
  assert_same(k3.load(), golden("k3-a")[1])


def test_vision_tensors_and_only_those_are_skipped(k3):
  vision = "vision_tower.encoder.final_layernorm.weight"
  assert vision in k3.index
  k3.change(vision, lambda w: w, new_name="mm_projector.proj.0.weight")
  k3.load()
  k3.change(vision, lambda w: w, new_name="audio_tower.encoder.weight")
  k3.refused("audio_tower.encoder.weight")


# A broken checkpoint


def test_a_missing_tensor_is_named(k3):
  k3.change("language_model.model.layers.4.mlp_res_norm.weight", lambda _: None)
  k3.refused("lacks model.layers.4.mlp_res_norm.weight")


def test_an_unknown_tensor_is_named(k3):
  k3.change("language_model.model.norm.weight", lambda w: w, new_name="language_model.model.layers.13.norm.weight")
  k3.refused("model.layers.13.norm.weight", "no place")


def test_several_unknown_tensors_are_counted(k3):
  for i in (13, 14, 15):
    k3.change("language_model.model.norm.weight", lambda w: w, new_name=f"language_model.model.layers.{i}.norm.weight")
  k3.refused("model.layers.13.norm.weight (and 2 more)")


@pytest.mark.parametrize(
  ("tensor", "function"),
  [
    ("language_model.model.layers.3.self_attn.o_proj.weight", lambda w: w[:, :-1]),
    ("language_model.model.layers.0.self_attn.A_log", lambda a: a[:3]),
    ("language_model.model.layers.0.self_attn.q_conv1d.weight", lambda w: w[..., :3]),
    (f"{EXPERT}.weight_packed", lambda w: w[:, :-16]),
    (f"{EXPERT}.weight_scale", lambda w: w.T),
    ("language_model.lm_head.weight", lambda w: w.T),
  ],
)
def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(k3, tensor, function):
  right = []
  k3.change(tensor, lambda w: right.append(w.shape) or function(w))
  message = k3.refused(tensor.removeprefix("language_model."), str(right[0]))
  assert re.search(r"has shape \(.*\), the configuration wants", message)


def test_a_tensor_of_the_wrong_kind_of_number_is_named(k3):
  k3.change("language_model.model.layers.2.self_attn.o_proj.weight", lambda w: w.astype(np.uint8))
  k3.refused("model.layers.2.self_attn.o_proj.weight", "is U8, not BF16")


def test_a_missing_shard_is_named(k3):
  shard = "model-00002-of-000003.safetensors"
  (k3.directory / shard).unlink()
  k3.refused(shard, "missing")


@pytest.mark.parametrize("left", ["half", "header", "nothing"])
def test_a_truncated_shard_is_named(k3, left):
  shard = k3.directory / "model-00003-of-000003.safetensors"
  size = {"half": shard.stat().st_size // 2, "header": 100, "nothing": 0}[left]
  os.truncate(shard, size)
  k3.refused(shard.name, "broken or truncated")


def test_a_shard_with_a_byte_too_many_is_named(k3):
  shard = k3.directory / "model-00001-of-000003.safetensors"
  with open(shard, "ab") as f:
    f.write(b"\0")
  k3.refused(shard.name, "broken or truncated")


def test_a_tensor_stored_plain_and_packed_is_named(k3):
  k3.change(f"{EXPERT}.weight_packed", lambda w: w, new_name=f"{EXPERT}.weight")
  k3.refused(f"{EXPERT}.weight".removeprefix("language_model."), "twice")


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale"])
def test_half_a_packed_pair_is_named(k3, part):
  k3.change(f"{EXPERT}.{part}", lambda _: None)
  other = {"weight_packed": "weight_scale", "weight_scale": "weight_packed"}[part]
  k3.refused(f"{EXPERT}.{other}".removeprefix("language_model."), "without its")


def test_a_tensor_stored_with_and_without_the_prefix_is_named(k3):
  k3.change("language_model.model.norm.weight", lambda w: w + 1, new_name="model.norm.weight")
  k3.refused("model.norm.weight", "twice")


def test_a_scale_of_255_is_named(k3):
  def spoil(scale):
    scale = scale.copy()
    scale[3, 0] = 255
    return scale

  k3.change(f"{EXPERT}.weight_scale", spoil)
  k3.refused(EXPERT.removeprefix("language_model."), "255")


def test_no_index_is_named(k3):
  (k3.directory / checkpoint.INDEX).unlink()
  k3.refused(str(k3.directory), checkpoint.INDEX)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "{}"])
def test_a_broken_index_is_named(k3, text):
  (k3.directory / checkpoint.INDEX).write_text(text)
  k3.refused(checkpoint.INDEX)


def test_an_index_that_contradicts_its_shards_is_named(k3):
  where = k3.index
  first = min(where)
  other = next(file for file in where.values() if file != where[first])
  k3.write_index(where | {first: other})
  k3.refused(first, other)
  k3.write_index({name: file for name, file in where.items() if name != first})
  k3.refused(first, where[first])


def test_a_directory_that_isnt_there_is_named(tmp_path):
  with pytest.raises(UserError, match="nowhere is not a directory"):
    checkpoint.ReleasedCheckpoint(str(tmp_path / "nowhere"))


def test_a_checkpoint_of_another_model_is_refused(k3):
  with pytest.raises(UserError):
    load("kl-a", golden("kl-a")[0], k3.directory)


# Writing


@pytest.mark.parametrize("name", ["k3-a", "kl-a"])
def test_what_was_written_loads_the_same_to_the_bit(name, tmp_path):
  cfg, params = golden(name)
  tree = kimi_k3.weight_tree(cfg)
  ids = {key: golden_text_config(name)[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
  checkpoint_writer.write(str(tmp_path), tree, params, settings(name), ids, shards=3)
  assert len(list(tmp_path.glob("model-0000?-of-000003.safetensors"))) == 3
  if name == "k3-a":
    assert_same(load(name, cfg, tmp_path), params)
  else:
    # This checkpoint's experts aren't MXFP4, the writer's are: all else is equal, and the experts are quantised.
    again = load(name, cfg, tmp_path)
    for part in ("kda", "mla"):
      ours, theirs = again[part].pop("experts"), dict(params[part]).pop("experts")
      for key, axis in (("wi", 2), ("wo", 2)):
        np.testing.assert_array_equal(ours[key], mxfp4.fake_quantize(theirs[key], axis))
    rest = {
      part: {k: v for k, v in w.items() if k != "experts"} if part in ("kda", "mla") else w
      for part, w in params.items()
    }
    assert_same(again, rest)


def test_the_written_layout_is_the_golden_checkpoints(tmp_path):
  """Names, shapes, dtypes, bytes of every tensor but vision; and config.json, field by field."""
  cfg, params = golden("k3-a")
  text = golden_text_config("k3-a")
  ids = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
  checkpoint_writer.write(str(tmp_path), kimi_k3.weight_tree(cfg), params, settings("k3-a"), ids, shards=2)
  ours, theirs = ({}, {})
  for tensors, directory in ((ours, tmp_path), (theirs, GOLDEN / "k3-a")):
    for file in sorted(directory.glob("*.safetensors")):
      tensors |= load_file(file)
  theirs = {name: value for name, value in theirs.items() if not name.startswith(checkpoint.VISION_PREFIXES)}
  assert ours.keys() == theirs.keys()
  for name, value in theirs.items():
    assert ours[name].dtype == value.dtype and ours[name].shape == value.shape, name
  for name in theirs:
    if not name.endswith(("weight_packed", "weight_scale")):  # a group of values has several right encodings
      np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
  written = json.loads((tmp_path / "config.json").read_text())["text_config"]
  assert {k for k in text if k not in written} <= {
    "architectures",
    "initializer_range",
    "use_cache",
    "use_grouped_topk",
  }
  for field, value in text.items():
    if field in written and field not in ("quantization_config",):
      assert written[field] == value, field
  index = json.loads((tmp_path / checkpoint.INDEX).read_text())
  assert index["metadata"]["total_size"] == sum(t.nbytes for t in ours.values())
  for name, file in index["weight_map"].items():
    with safe_open(tmp_path / file, "numpy") as f:
      assert tuple(f.get_slice(name).get_shape()) == ours[name].shape
