"""The converter on the tiny model: every format and layout against the source's own reader; what it says, refuses."""

import json
import math
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from _conversions import SHARDS, TINY, copy_of_tiny, edit, quick_folder, read, run, tree
from _converted import decoded
from safetensors import safe_open

from conversion import report, verify
from conversion.convert import main
from conversion.options import Options, parse_keys
from conversion.verify import VerifyOptions
from MaxText import weights
from MaxText.checkpoint import ReleasedCheckpoint
from MaxText.configs.k3_config import initialize
from MaxText.configs.resolve import make_mesh, model_config
from MaxText.converted import layout, loading
from MaxText.converted.manifest import read_manifest
from MaxText.errors import UserError
from MaxText.models import kimi_k3
from MaxText.weights import is_stack

CASES = [
  ("block_fp8", "experts", "maxtext"),
  ("block_fp8", "all", "maxtext"),
  ("mxfp4", "experts", "maxtext"),
  ("mxfp4", "all", "maxtext"),
  ("bfloat16", "experts", "maxtext"),
  ("block_fp8", "experts", "hf"),
  ("block_fp8", "all", "hf"),
  ("mxfp4", "experts", "hf"),
  ("bfloat16", "experts", "hf"),
]
EXPERTS, EXPERT_VALUES = 12 * 16 * 3, 12 * 16 * 3 * 128 * 128  # layers, experts, matrices; each 128 by 128


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
  """(weight_format, scope, layout) -> directory, converted once."""
  made: dict[tuple[str, str, str], Path] = {}
  folder = quick_folder(tmp_path_factory.mktemp("converted"))

  def one(case):
    if case not in made:
      made[case] = folder / "-".join(case)
      run(TINY, made[case], weight_format=case[0], scope=case[1], layout=case[2])
    return made[case]

  yield one
  shutil.rmtree(folder)


@pytest.fixture
def tmp_path(tmp_path):
  folder = quick_folder(tmp_path)
  yield folder
  shutil.rmtree(folder)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
  """float32 arrays, signs of zeros too."""
  return np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


def loaded(directory: Path):
  """(stacks, decoded parameters) of a checkpoint as the model reads it, plain weights in float32."""
  config = initialize(["test", "kimi-k3-tiny.yml", f"load_parameters_path={directory}", "weight_dtype=float32"])
  mesh = make_mesh(config)
  cfg = model_config(config, "cpu", mesh)
  stacks = kimi_k3.weight_tree(cfg)
  placements = weights.formats(weights.shardings(stacks, mesh, config.logical_axis_rules, cfg.storage))
  params = loading.load_parameters(str(directory), cfg, stacks, placements)
  return jax.tree.leaves(stacks, is_leaf=is_stack), jax.tree.leaves(decoded(params))


@pytest.fixture(scope="module")
def source():
  return ReleasedCheckpoint(str(TINY))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_decoded_weights_are_the_sources(case, converted, source):
  """Exact formats in every bit, others as float64 arithmetic says that e4m3 with scales by 448 rounds."""
  stacks, values = loaded(converted(case))
  for stack, value in zip(stacks, values, strict=True):
    instances = value.reshape(-1, *stack.weight.shape)
    for prefix, instance in zip(stack.prefixes, instances, strict=True):
      for declared, found in zip(stack.weight.sources, stack.weight.to_release(instance), strict=True):
        wanted = source.read(prefix, declared).astype(np.float32)
        found = found.reshape(wanted.shape)
        if declared.name == "A_log":
          found, wanted = found[:2], wanted[:2]
        if case[1] == "all" and stack.weight.kind == "dense":
          # Half a step of e4m3: 1/16 of the value, or 2^−10 of the scale of its block; float32 adds next to nothing.
          bound = np.maximum(np.abs(wanted) / 16, np.abs(wanted).max() / 448 / 1024) * 1.0001
          assert np.all(np.abs(found - wanted) <= bound), prefix + declared.name
        else:
          assert same_bits(found, wanted), prefix + declared.name


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_verify_agrees(case, converted):
  said = verify.verify(str(TINY), str(converted(case)), VerifyOptions())
  manifest = read_manifest(str(converted(case)))
  assert f"digests of {manifest.tensors:,} of {manifest.tensors:,} tensors are right" in said
  assert ("0 of them inexact" in said) == (case[1] == "experts")


def test_the_report_counts(converted):
  manifest = read_manifest(str(converted(CASES[0])))
  said = report.describe("DST", manifest)
  # One weight for w1 beside w3, and one for w2.
  assert f"MXFP4 to block-FP8: {12 * 16 * 2} tensors, {EXPERTS} blocks (0 inexact), {EXPERT_VALUES:,} elements" in said
  assert "0 of them inexact" in said and "lossless" not in said
  every = report.describe("DST", read_manifest(str(converted(CASES[1]))))
  # Three bits after the leading one: steps of 1/8, errors spread evenly over ±1/16 of the binade's foot. Over mantissas
  # from 1 to 2, spread evenly too, that is √(1/12)/8 / √(7/3) = 0.0236; subnormals and uneven mantissas add some.
  relative = float(every.split("(root mean square) ")[1].split("\n")[0])
  assert 0.02 < relative < 0.032


def test_orbax_restores_it(converted):
  directory = converted(CASES[0])
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)) as checkpointer:
    restored = checkpointer.restore(directory / layout.WEIGHTS)
  cfg = model_config(initialize(["test", "kimi-k3-tiny.yml"]), "cpu")
  stored = layout.stored_weights(cfg, layout.disk_storage(cfg, ml_dtypes.bfloat16, "block_fp8", "plain"))
  arrays = {array.name: array for one in stored.values() for array in one.arrays}
  leaves = {".".join(k.key for k in path): leaf for path, leaf in jax.tree.leaves_with_path(restored)}
  assert leaves.keys() == arrays.keys()
  for name, leaf in leaves.items():
    held = arrays[name].open(str(directory)).read().result()
    assert leaf.dtype == ts.dtype(arrays[name].dtype).numpy_dtype and leaf.tobytes() == held.tobytes(), name


@pytest.mark.parametrize("scope", ["experts", "all"])
def test_other_engines_find_deepseeks_convention(scope, converted):
  directory = converted(("block_fp8", scope, "hf"))
  config = json.loads((directory / "config.json").read_text())
  quantization = config["text_config"]["quantization_config"]
  plain = quantization.pop("modules_to_not_convert")
  assert quantization == {
    "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
  }  # fmt: skip
  index = json.loads((directory / "model.safetensors.index.json").read_text())
  shapes, total = {}, 0
  for file in SHARDS:
    with safe_open(directory / file, "numpy") as f:
      for name in f.keys():  # noqa: SIM118
        held = f.get_slice(name)
        shapes[name] = (held.get_dtype(), tuple(held.get_shape()))
        total += math.prod(held.get_shape()) * {"F8_E4M3": 1, "BF16": 2, "F32": 4}[held.get_dtype()]
        assert index["weight_map"][name] == file
  assert index["metadata"]["total_size"] == total and index["weight_map"].keys() == shapes.keys()
  quantized = {name for name, (dtype, _) in shapes.items() if dtype == "F8_E4M3"}
  for name in quantized:
    assert shapes[f"{name}_scale_inv"] == ("F32", tuple(-(-n // 128) for n in shapes[name][1]))
  matrices = {name for name, (_, shape) in shapes.items() if name.endswith(".weight") and len(shape) == 2}
  assert {f"{module}.weight" for module in plain} == matrices - quantized
  assert len(quantized) == EXPERTS + (0 if scope == "experts" else 124)


def test_unchanged_shards_are_hard_links(tmp_path):
  source = copy_of_tiny(tmp_path / "source")
  run(source, tmp_path / "made", weight_format="mxfp4", layout="hf")
  for file in (*SHARDS, "model.safetensors.index.json", "config.json"):
    same = (source / file).stat().st_ino == (tmp_path / "made" / file).stat().st_ino
    assert same == file.endswith(".safetensors")
  assert (tmp_path / "made" / "config.json").read_text() == (source / "config.json").read_text()


def spread_by_15(source: Path) -> tuple[str, int]:
  """Gives one expert's block a spread of 15; returns its name and how many values that loses."""
  name = "language_model.model.layers.3.block_sparse_moe.experts.5.w2"
  scale, packed = read(source, f"{name}.weight_scale"), read(source, f"{name}.weight_packed")
  scale[:] = 120
  scale[0, 0] = 135
  packed[0, 0] = 0x77  # sixes, so that the group counts
  edit(source, f"{name}.weight_scale", scale)
  edit(source, f"{name}.weight_packed", packed)
  codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(128, 4, 32)
  # ½ and 1½ need a bit below e4m3's last once 6·2^15 fits; all other values of E2M1 are whole.
  lost = np.isin(codes & 7, [1, 3])
  lost[0, 0] = False
  return name, int(lost.sum())


@pytest.mark.parametrize("kind", ["maxtext", "hf"])
def test_what_would_be_inexact_is_refused_until_it_is_allowed(kind, tmp_path):
  source, made = copy_of_tiny(tmp_path / "source"), tmp_path / "made"
  name, lost = spread_by_15(source)
  assert lost > 100
  short = name.removeprefix("language_model.")
  with pytest.raises(UserError) as refused:
    run(source, made, layout=kind, workers=1)
  said = str(refused.value)
  assert short in said and f"would change {lost:,} of 16,384 elements in 1 of 1 blocks" in said
  assert f"max_inexact={lost} or more" in said and "\n" not in said
  with pytest.raises(UserError, match="hasn't finished"):
    read_manifest(str(made))
  before = {path: path.stat().st_mtime_ns for path in made.rglob("0") if path.is_file()}
  with pytest.raises(UserError, match=f"max_inexact={lost - 1} refuses"):
    run(source, made, layout=kind, workers=1, max_inexact=lost - 1)
  manifest = run(source, made, layout=kind, max_inexact=lost)
  assert all(path.stat().st_mtime_ns == when for path, when in before.items())  # nothing is done twice
  assert manifest.exactness["MXFP4 to block-FP8"]["inexact_elements"] == lost
  assert f"1 inexact), {EXPERT_VALUES:,} elements, {lost:,} of them inexact" in report.describe("DST", manifest)
  assert f"{lost:,} of them inexact" in verify.verify(str(source), str(made), VerifyOptions())


def test_wider_plain_tensors_count_as_inexact(tmp_path):
  """A value that bfloat16 doesn't hold, in float16, which the family's other members may use."""
  from conversion.matrices import to_float

  value = np.array([1, 1 + 2**-8, -0.0, 3.0], np.float32)  # 8 bits after the leading one: bfloat16 has 7
  stored, method, exactness = to_float(value, np.dtype(ml_dtypes.bfloat16), decoded=False)
  assert method == "narrowed to bfloat16" and stored.dtype == ml_dtypes.bfloat16
  assert (exactness.elements, exactness.inexact_elements) == (4, 1)
  assert exactness.largest_absolute_error == 2**-8  # a tie, to the even 1


def test_workers_on_several_machines_make_the_same_bytes(tmp_path, converted):
  for kind in ("maxtext", "hf"):
    made = tmp_path / kind
    for index in (2, 0, 1):
      assert run(TINY, made, layout=kind, worker_index=index, worker_count=3) is None
      with pytest.raises(UserError, match="hasn't finished"):
        read_manifest(str(made))
    journals = sorted((made / ".conversion").glob("journal-*"))
    sizes = [path.stat().st_size for path in journals]
    # The unit of layout=hf is a shard, and there are two of them.
    assert len(sizes) == 3 and sum(size > 0 for size in sizes) == (3 if kind == "maxtext" else 2)
    run(TINY, made, layout=kind)
    assert tree(made) == tree(converted(("block_fp8", "experts", kind)))


def test_the_same_command_on_a_finished_conversion_is_content(tmp_path, converted, capsys):
  directory = converted(CASES[0])
  before = tree(directory)
  main(["convert", str(TINY), str(directory)])
  assert "is finished already" in capsys.readouterr().err and tree(directory) == before
  with pytest.raises(UserError, match="is finished, with scope=experts, not all"):
    run(TINY, directory, scope="all")


@pytest.mark.parametrize(
  ("pairs", "said"),
  [
    (["scop=all"], "unknown key 'scop'; did you mean scope?"),
    (["scope=some"], "scope=some is none of experts, all"),
    (["scope"], "'scope' is not key=value"),
    (["scope=all", "scope=all"], "scope is given twice"),
    (["max_inexact=x"], "max_inexact=x must be a whole number"),
    (["max_inexact=-1"], "max_inexact=-1 must be at least 0"),
    (["free_source=yes"], "free_source=yes must be true or false"),
    (["weight_format=bfloat16", "scope=all"], "ask for scope=experts"),
    (["layout=hf", "weight_format=mxfp4", "scope=all"], "two schemes in one quantization_config"),
    (["worker_index=0"], "go together"),
    (["worker_index=3", "worker_count=3"], "must be from 0 to worker_count - 1=2"),
    (["worker_index=0", "worker_count=3", "free_source=true"], "free_source=true needs one machine alone"),
  ],
)
def test_keys_that_make_no_sense(pairs, said):
  with pytest.raises(UserError) as refused:
    parse_keys(Options, pairs)
  assert said in str(refused.value)


def test_places_that_make_no_sense(tmp_path, converted):
  source = copy_of_tiny(tmp_path / "source")
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "something").touch()
  for made, said in (
    (source, "must not lie within each other"),
    (source / "below", "must not lie within each other"),
    (tmp_path, "must not lie within each other"),
    (tmp_path / "full", "isn't a conversion's"),
  ):
    with pytest.raises(UserError, match=said):
      run(source, made)
  with pytest.raises(UserError, match=r"is itself the work of conversion\.convert"):
    run(converted(CASES[0]), tmp_path / "made")
  with pytest.raises(UserError, match="is not a directory"):
    run(tmp_path / "nowhere", tmp_path / "made")
  assert not (tmp_path / "made").exists()


def test_a_source_that_others_converted_is_refused(tmp_path, converted):
  source = copy_of_tiny(tmp_path / "source")
  for path in converted(("block_fp8", "experts", "hf")).glob("*"):
    if path.name not in ("manifest.json", "tensors.jsonl"):
      (source / path.name).write_bytes(path.read_bytes())
  with pytest.raises(UserError, match="is in block-FP8 already"):
    run(source, tmp_path / "made")


def test_a_nan_scale_is_named(tmp_path):
  source = copy_of_tiny(tmp_path / "source")
  name = "language_model.model.layers.2.block_sparse_moe.experts.1.w1.weight_scale"
  scale = read(source, name)
  scale[7, 2] = 255
  edit(source, name, scale)
  with pytest.raises(UserError, match=r"experts.1.w1.weight_scale holds 255, which is NaN, at \[7, 2\]"):
    run(source, tmp_path / "made", layout="hf")


def test_the_readers_of_both_layouts_agree_on_scope_all(converted):
  """The model's own quantisation of the source, and both layouts: the same bytes."""
  stacks, ours = loaded(converted(CASES[1]))
  _, theirs = loaded(converted(("block_fp8", "all", "hf")))
  for stack, a, b in zip(stacks, ours, theirs, strict=True):
    assert same_bits(a, b), stack.weight.sources[0].name
