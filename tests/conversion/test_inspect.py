"""`python -m conversion.inspect`: whole checkpoints pass, what is wrong with one is a line; at K3's full size too."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conversion.headers import HeaderCheckpoint
from conversion.inspect import describe, inspect, read_model
from MaxText.checkpoint import INDEX
from MaxText.configs.k3_config import initialize
from MaxText.configs.resolve import model_config
from MaxText.errors import UserError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
TINY = ROOT / "MaxText" / "assets" / "kimi-k3-tiny"
sys.path.insert(0, str(ROOT / "scripts"))

import skeleton_checkpoint  # noqa: E402

LAYER = "language_model.model.layers"
EXPERT = f"{LAYER}.1.block_sparse_moe.experts.0.w2"


def read_header(path):
  """(the header, the file's first byte of data)."""
  with open(path, "rb") as f:
    (length,) = struct.unpack("<Q", f.read(8))
    return json.loads(f.read(length)), 8 + length


def put_header(path, header):
  """Replaces a shard's header by one whose offsets are made anew; its data becomes a hole of the right size."""
  path, end = Path(path), 0
  for name, entry in header.items():
    if name != "__metadata__":
      size = entry["data_offsets"][1] - entry["data_offsets"][0]
      entry["data_offsets"] = [end, end + size]
      end += size
  raw = json.dumps(header).encode()
  path.unlink()  # it may be a hard link
  path.write_bytes(struct.pack("<Q", len(raw)) + raw)
  os.truncate(path, 8 + len(raw) + end)


def entry(dtype, shape, nbytes):
  return {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}


def link_or_copy(source, target):
  try:
    os.link(source, target)
  except OSError:  # the temporary folder is on another file system
    shutil.copyfile(source, target)


class Copy:
  """A golden checkpoint under hard links; a test replaces the files that it damages. Tensors are never looked at."""

  def __init__(self, directory, name):
    self.directory = directory / name
    shutil.copytree(GOLDEN / name, self.directory, copy_function=link_or_copy, ignore=shutil.ignore_patterns("*.npz"))
    self.where = json.loads((self.directory / INDEX).read_text())["weight_map"]

  def write(self, name, value):
    path = self.directory / name
    path.unlink()
    path.write_text(value if isinstance(value, str) else json.dumps(value))

  def change(self, tensor, new, name=None):
    """Gives a tensor another entry (None: takes it out), or adds one of another name beside it; the index follows."""
    path = self.directory / self.where[tensor]
    header, _ = read_header(path)
    if new is None:
      del header[tensor], self.where[tensor]
    else:
      header[name or tensor] = new
      self.where[name or tensor] = path.name
    put_header(path, header)
    self.write(INDEX, {"weight_map": self.where})

  def refused(self, *culprits):
    with pytest.raises(UserError) as caught:
      inspect(str(self.directory))
    message = str(caught.value)
    assert message.isprintable(), message
    for culprit in culprits:
      assert culprit in message, message


@pytest.fixture
def k3(tmp_path):
  return Copy(tmp_path, "k3-a")


def run(*arguments, measure=False):
  """`python -m conversion.inspect`: (exit status, stdout, stderr without measurements, peak MiB)."""
  command = [sys.executable, "-m", "conversion.inspect", *map(str, arguments)]
  if measure:
    # Its own peak: what the kernel tells a parent of its child counts the parent's memory at the fork.
    code = (
      "import atexit, runpy, sys; sys.path.insert(0, '')\n"
      "peak = lambda: next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
      "atexit.register(lambda: print(peak(), file=sys.stderr))\n"
      "runpy.run_module('conversion.inspect', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
  paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
  done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
  peak = re.search(r"VmHWM:\s*(\d+) kB\s*", done.stderr)
  stderr = done.stderr if peak is None else done.stderr.replace(peak[0], "")
  return done.returncode, done.stdout, stderr.strip(), int(peak[1]) // 1024 if peak else 0


# Whole checkpoints


@pytest.mark.parametrize(
  ("directory", "tensors", "nbytes", "vision"),
  [(GOLDEN / "k3-a", 1494, 11_747_136, 2), (GOLDEN / "kl-a", 361, 7_226_704, 0), (TINY, 1492, 9_599_232, 0)],
  ids=["k3-a", "kl-a", "tiny"],
)
def test_a_whole_checkpoint_passes(directory, tensors, nbytes, vision):
  checkpoint, summary = inspect(str(directory))
  assert (summary.total.tensors, summary.total.nbytes) == (tensors, nbytes)
  assert checkpoint.nbytes == nbytes and len(checkpoint.tensors) == tensors
  assert vision == (summary.kinds["vision (not read)"].tensors if vision else 0)
  assert not summary.narrowed
  report = describe(checkpoint, summary)
  assert f"is whole: {tensors:,} tensors in {len(checkpoint.shards)} shards, {nbytes:,} bytes" in report


def test_the_program_prints_a_report_or_one_line():
  status, out, err, _ = run(TINY)
  assert status == 0 and "1,492 tensors in 2 shards" in out and "1,152 U8" in out and not err
  status, out, err, _ = run("/nowhere")
  assert (status, out, err) == (2, "", "error: /nowhere is not a directory")


def test_tensors_are_read_through_the_same_object():
  """Checked headers serve whoever reads tensors afterwards."""
  checkpoint = HeaderCheckpoint(str(TINY))
  values = checkpoint._get("model.norm.weight")
  assert values.shape == checkpoint.tensor("model.norm.weight").shape and values.any()


def test_narrowed_tensors_and_stray_files_are_told(k3):
  name = f"{LAYER}.0.self_attn.dt_bias"
  k3.change(name, entry("BF16", [256], 512))
  (k3.directory / "model-00009-of-000003.safetensors").write_bytes(b"")
  report = describe(*inspect(str(k3.directory)))
  assert "1 tensors that K3 stores as F32 are narrower here, such as model.layers.0.self_attn.dt_bias" in report
  assert "not looked at: model-00009-of-000003.safetensors" in report


# What doesn't fit the model

FAULTS = {
  "missing": (f"{LAYER}.4.mlp_res_norm.weight", None, None, ["lacks model.layers.4.mlp_res_norm.weight"]),
  "unknown": (f"{LAYER}.4.mlp_res_norm.weight", entry("BF16", [2], 4), f"{LAYER}.13.norm", ["layers.13.norm", "place"]),
  "another tower": (EXPERT + ".weight_scale", entry("U8", [2], 2), "audio_tower.x", ["audio_tower.x", "place"]),
  "wrong shape": (f"{LAYER}.3.self_attn.o_proj.weight", entry("BF16", [64, 3], 384), None, ["o_proj", "(64, 3)"]),
  "packed shape": (EXPERT + ".weight_packed", entry("U8", [64, 3], 192), None, ["w2.weight_packed", "(64, 3)"]),
  "scale shape": (EXPERT + ".weight_scale", entry("U8", [64, 3], 192), None, ["w2.weight_scale", "(64, 3)"]),
  "wrong dtype": ("language_model.model.norm.weight", "I16", None, ["norm.weight", "is I16"]),
  "packed dtype": (EXPERT + ".weight_packed", "I8", None, ["w2.weight_packed", "is I8, not U8"]),
  "half a pair": (EXPERT + ".weight_scale", None, None, ["w2.weight_packed without its scale"]),
  "plain and packed": (EXPERT + ".weight_scale", entry("BF16", [2], 4), EXPERT + ".weight", ["w2.weight twice"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_model_doesnt_want_is_named_with_its_shard(k3, fault):
  tensor, new, name, culprits = FAULTS[fault]
  shard = k3.where[tensor]
  if isinstance(new, str):
    header, _ = read_header(k3.directory / shard)
    new = header[tensor] | {"dtype": new}
  k3.change(tensor, new, name)
  k3.refused(*culprits, *([] if fault == "missing" else [shard]))


CONFIGS = {
  "missing": (None, "missing"),
  "no JSON": ("{", "not JSON"),
  "very deep": ('{"text_config":' + "[" * 200_000, "deep"),
  "a key twice": ('{"model_type": "kimi_k3", "model_type": "kimi_k3"}', "model_type twice"),
  "a list": ("[]", "list"),
  "another model": ('{"model_type": "llama"}', "llama"),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_wrong_config_is_named(k3, fault):
  text, culprit = CONFIGS[fault]
  if text is None:
    (k3.directory / "config.json").unlink()
  else:
    k3.write("config.json", text)
  k3.refused("config.json", culprit)


def test_a_config_of_another_size_is_named(k3):
  config = json.loads((k3.directory / "config.json").read_text())
  for key, value, culprit in (("num_experts", 10**12, "experts"), ("vocab_size", 7, "lm_head|embed_tokens")):
    k3.write("config.json", config | {"text_config": config["text_config"] | {key: value}})
    with pytest.raises(UserError, match=culprit):
      inspect(str(k3.directory))


# Full size


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory):
  directory = tmp_path_factory.mktemp("skeleton")
  tensors, nbytes = skeleton_checkpoint.write(str(directory))
  assert tensors == 497_220 and round(nbytes / 1e7) == 156_086  # as released: 1,560.86 GB
  yield directory
  shutil.rmtree(directory)


@pytest.mark.slow
def test_the_full_size_skeleton_passes_in_time_and_memory(skeleton):
  """96 shards, 1.56 TB apparent; megabytes on the disk."""
  files = [path.stat() for path in skeleton.glob("*.safetensors")]
  assert len(files) == 96 and sum(f.st_size for f in files) > 1.56e12
  assert sum(f.st_blocks * 512 for f in files) < 200e6
  start = time.monotonic()
  status, out, err, peak = run(skeleton, measure=True)
  seconds = time.monotonic() - start
  assert status == 0, err
  assert "497,220 tensors in 96 shards" in out and "494,592 U8" in out and "vision (not read)" in out
  assert "168 tensors" in out
  assert seconds < 120 and 100 < peak < 2048, (seconds, peak)


@pytest.mark.slow
def test_the_skeletons_config_is_kimi_k3s(skeleton):
  assert read_model(str(skeleton)) == model_config(initialize(["test", "kimi-k3.yml"]), "cpu")


class Planted:
  """Faults in files of the skeleton, each of which is put aside first."""

  def __init__(self, directory):
    self.directory, self.kept = directory, []

  def _put_aside(self, path):
    kept = path.with_suffix(".kept")
    path.rename(kept)
    self.kept.append((kept, path))
    return kept

  def header(self, shard, change, more=0):
    """Changes a header in place, and the bytes of data behind it; returns the shard's name."""
    path = self.directory / f"model-{shard:05d}-of-000096.safetensors"
    kept = self._put_aside(path)
    header, start = read_header(kept)
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(path, 8 + len(raw) + kept.stat().st_size - start + more)
    return path.name

  def index(self, old, new):
    path = self.directory / INDEX
    text = self._put_aside(path).read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return INDEX

  def take_back(self):
    for kept, path in self.kept:
      kept.replace(path)


@pytest.fixture
def planted(skeleton):
  faults = Planted(skeleton)
  yield faults
  faults.take_back()


FULL_EXPERT = f"{LAYER}.50.block_sparse_moe.experts.700.w1.weight_packed"
NORM = f"{LAYER}.7.input_layernorm.weight"


def shard_of(planted, tensor):
  text = (planted.directory / INDEX).read_text()
  return int(re.search(rf'"{re.escape(tensor)}": "model-(\d+)-', text)[1])


def absolute_path(planted):
  place = f'"{NORM}": "'
  return planted.index(place, f"{place}/etc/"), NORM, "/etc/model-"


def listed_twice(planted):
  place = f'"{NORM}": "'
  return planted.index(place, f'"{NORM}": "x",\n{place}'), NORM, "twice"


def total_off_by_one(planted):
  return planted.index('"total_size": 1560860324864', '"total_size": 1560860324863'), "1,560,860,324,864"


def another_shard(planted):
  shard = shard_of(planted, NORM)
  there = f"model-{shard:05d}-"
  planted.index(f'"{NORM}": "{there}', f'"{NORM}": "model-{shard % 96 + 1:05d}-')
  return there, NORM, INDEX


def last_of(header):
  return max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])


def truncated(planted):
  last = []
  return planted.header(2, lambda h: last.append(last_of(h)), -1), *last, "cut short"


def trailing_byte(planted):
  last = []
  return planted.header(96, lambda h: last.append(last_of(h)), 1), *last, "1 bytes behind"


def overlap(planted):
  def change(header):
    last = header[last_of(header)]
    last["data_offsets"] = [n - 1 for n in last["data_offsets"]]
    names.append(last_of(header))

  names = []
  return planted.header(1, change, -1), *names, "overlaps"


def unknown_dtype(planted):
  shard = shard_of(planted, FULL_EXPERT)
  return planted.header(shard, lambda h: h[FULL_EXPERT].update(dtype="MXFP4")), FULL_EXPERT, "MXFP4"


def transposed(planted):
  shard = shard_of(planted, FULL_EXPERT)
  wrong = planted.header(shard, lambda h: h[FULL_EXPERT].update(shape=[1792, 3072]))
  return wrong, FULL_EXPERT.removeprefix("language_model."), "(1792, 3072)"


def renamed(planted):
  """A tensor that the model lacks, while another one, unknown, has its place."""
  wrong = NORM.replace("input_layernorm", "input_norm")
  planted.header(shard_of(planted, NORM), lambda h: h.update({wrong: h.pop(NORM)}))
  planted.index(f'"{NORM}"', f'"{wrong}"')
  return "lacks", NORM.removeprefix("language_model.")


@pytest.mark.slow
@pytest.mark.parametrize(
  "fault",
  [
    absolute_path,
    listed_twice,
    total_off_by_one,
    another_shard,
    truncated,
    trailing_byte,
    overlap,
    unknown_dtype,
    transposed,
    renamed,
  ],
  ids=lambda fault: fault.__name__,
)
def test_each_of_ten_faults_is_found_at_full_size(planted, fault):
  culprits = fault(planted)
  with pytest.raises(UserError) as caught:
    inspect(str(planted.directory))
  message = str(caught.value)
  assert message.isprintable()
  for culprit in culprits:
    assert culprit in message, message
