"""The verifier finds what was planted: in a conversion's files, in its manifest, and in its source."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from _conversions import TINY, copy_of_tiny, edit, quick_folder, read, run

from conversion import verify
from conversion.readback import Mismatch
from conversion.verify import VerifyOptions, main
from MaxText.errors import UserError

EXPERT = "language_model.model.layers.6.block_sparse_moe.experts.2.w3"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """The source's copy and both layouts of it, to be copied before they are changed."""
  folder = quick_folder(tmp_path_factory.mktemp("verified"))
  source = copy_of_tiny(folder / "source")
  for layout in ("maxtext", "hf"):
    run(source, folder / layout, layout=layout)
  run(source, folder / "all", layout="hf", scope="all")
  yield folder
  shutil.rmtree(folder)


@pytest.fixture
def folder(made, tmp_path):
  copied = quick_folder(tmp_path) / "copy"
  shutil.copytree(made, copied)
  yield copied
  shutil.rmtree(copied)


def check(source: Path, directory: Path, **keys) -> str:
  return verify.verify(str(source), str(directory), VerifyOptions(**keys))


def flip(path: Path, place: int) -> None:
  with open(path, "r+b") as f:
    f.seek(place)
    byte = f.read(1)[0]
    f.seek(place)
    f.write(bytes([byte ^ 1]))


def restamp(directory: Path, change) -> None:
  """Changes lines of tensors.jsonl and the manifest's digest of them, as a forger would."""
  lines = [change(json.loads(line)) for line in (directory / "tensors.jsonl").read_text().splitlines()]
  text = "".join(json.dumps(line) + "\n" for line in lines if line is not None)
  (directory / "tensors.jsonl").write_text(text)
  manifest = json.loads((directory / "manifest.json").read_text())
  manifest["tensors_sha256"] = hashlib.sha256(text.encode()).hexdigest()
  (directory / "manifest.json").write_text(json.dumps(manifest))


def test_a_bit_of_a_file_of_the_maxtext_layout(folder):
  # kda.experts.wi.values[4,2,…]: a file is one expert here.
  flip(folder / "maxtext/weights/kda.experts.wi.values/c/4/2/0/0", 1000)
  with pytest.raises(Mismatch, match=r"^kda\.experts\.wi\.values\[4,2\] can't be read: .*DATA_LOSS|checksum|CRC"):
    check(folder / "source", folder / "maxtext")


def test_a_file_that_is_missing(folder):
  (folder / "maxtext/weights/kda.experts.wi.values/c/4/2/0/0").unlink()
  with pytest.raises(Mismatch, match=r"^kda\.experts\.wi\.values\[4,2\] can't be read: .* is missing"):
    check(folder / "source", folder / "maxtext")


def test_a_bit_of_a_shard_of_the_hf_layout(folder):
  from _conversions import place

  path, start, _ = place(folder / "hf", f"{EXPERT}.weight")
  flip(path, start + 130)
  with pytest.raises(Mismatch, match=rf"^{EXPERT}\.weight isn't what was written: its sha256 is"):
    check(folder / "source", folder / "hf")


@pytest.mark.parametrize(("layout", "name"), [("maxtext", r"kda\.experts\.wi\.values"), ("hf", EXPERT + r"\.weight")])
def test_another_value_in_the_source_is_found_element_by_element(layout, name, folder):
  """Headers, and so the source's identity, are the same: only the comparison of elements can tell."""
  packed = read(folder / "source", f"{EXPERT}.weight_packed")
  packed[5, 3] ^= 0x10  # output 5, input 7
  edit(folder / "source", f"{EXPERT}.weight_packed", packed)
  with pytest.raises(Mismatch, match=rf"^{name}.*: element \[5, 7\] of .*w3\.weight_packed is .*, its source is"):
    check(folder / "source", folder / layout)


def test_minus_zero_is_another_value(folder):
  packed = read(folder / "source", f"{EXPERT}.weight_packed")
  row, column = np.argwhere((packed & 0x0F) == 0)[0]  # 0 at an even input
  packed[row, column] |= 0x08
  edit(folder / "source", f"{EXPERT}.weight_packed", packed)
  with pytest.raises(
    Mismatch, match=rf"element \[{row}, {2 * column}\] of .* is np.float32\(0.0\), its source is np.float32\(-0.0\)"
  ):
    check(folder / "source", folder / "maxtext")


def test_errors_larger_than_recorded_ones(folder):
  name = "language_model.model.layers.0.mlp.up_proj.weight"
  values = read(folder / "source", name, np.uint16)
  place = np.unravel_index(np.argmax(values & 0x7FFF), values.shape)
  values[place] ^= 0x8000  # the largest one, with the other sign
  edit(folder / "source", name, values)
  with pytest.raises(
    Mismatch, match=rf"^{name}: element \[{place[0]}, {place[1]}\] of {name} is .*; recorded are differences up to"
  ):
    check(folder / "source", folder / "all")


def test_records_and_tensors_must_be_the_same(folder):
  restamp(folder / "hf", lambda line: None if line["name"] == f"{EXPERT}.weight" else line)
  with pytest.raises(Mismatch, match=rf"^tensors\.jsonl lacks {EXPERT}\.weight"):
    check(folder / "source", folder / "hf")
  restamp(folder / "maxtext", lambda line: line | {"name": line["name"] + "x"} if line["name"] == "norm" else line)
  with pytest.raises(Mismatch, match=r"^tensors\.jsonl lacks norm, which"):
    check(folder / "source", folder / "maxtext")


def test_a_count_that_was_recorded_wrong(folder):
  def change(line):
    if line["name"] == f"{EXPERT}.weight":
      line["exactness"]["inexact_elements"] = 3
    return line

  restamp(folder / "hf", change)
  with pytest.raises(Mismatch, match=rf"^{EXPERT}\.weight differs in 0 elements, 3 are recorded"):
    check(folder / "source", folder / "hf")


def test_tensors_jsonl_belongs_to_the_manifest(folder, capsys):
  path = folder / "hf/tensors.jsonl"
  path.write_text(path.read_text() + "\n")
  with pytest.raises(SystemExit) as ended:
    main(["verify", str(folder / "source"), str(folder / "hf")])
  assert ended.value.code == 1
  said = capsys.readouterr().err
  assert said.startswith("mismatch: ") and "isn't the file that manifest.json has the digest of" in said


def test_bad_input(folder):
  with pytest.raises(UserError, match="it isn't a conversion's"):
    check(folder / "source", folder / "source")
  with pytest.raises(UserError, match="isn't the one that the conversion was made of"):
    (folder / "source/config.json").write_text((TINY / "config.json").read_text() + " ")
    check(folder / "source", folder / "hf")
  (folder / "hf/manifest.json").unlink()
  (folder / "hf/.conversion").mkdir()
  with pytest.raises(UserError, match="hasn't finished"):
    check(folder / "source", folder / "hf")


def test_a_sample_is_chosen_by_its_seed(folder):
  first, again, other = (check(folder / "source", folder / "hf", sample=12, seed=s) for s in (1, 1, 2))
  assert first == again and "(seed 1)" in first and first != other.replace("seed 2", "seed 1")
  # Whoever changes one weight of 916 is found by all of them, and not by a sample that hasn't got it.
  assert "digests of 1,492 of 1,492 tensors" in check(folder / "source", folder / "hf", sample=10_000)
