"""Headers and indices from a stranger: what is whole is read, and each thing wrong is one line with file and tensor."""

import json
import os
import struct

import pytest

from conversion import headers
from conversion.headers import HeaderCheckpoint, Tensor, read_shard
from MaxText.checkpoint import INDEX, SINGLE
from MaxText.errors import UserError

A, B = "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"
FIRST, SECOND, THIRD, FOURTH = "first.weight", "second.weight", "third.weight", "fourth.weight"


def entry(dtype, shape, begin, end):
  return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_shard(path, header, data=None):
  """A shard of a header (a dict, or its bytes) and so many bytes of data: by default as many as its offsets ask."""
  if data is None:
    data = max((e["data_offsets"][1] for e in header.values() if "data_offsets" in e), default=0)
  raw = header if isinstance(header, bytes) else json.dumps(header).encode()
  path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(data))


class Small:
  """A checkpoint of two shards and four tensors that a test may damage."""

  def __init__(self, directory):
    self.directory = directory
    self.a = {FIRST: entry("F32", [2, 3], 0, 24), SECOND: entry("BF16", [4], 24, 32)}
    self.b = {"__metadata__": {"format": "pt"}, THIRD: entry("U8", [3, 2], 0, 6), FOURTH: entry("F4", [2, 8], 6, 14)}
    self.where = {FIRST: A, SECOND: A, THIRD: B, FOURTH: B}
    self.metadata = {"total_size": 46}
    self.write()

  def write(self, index=True):
    write_shard(self.directory / A, self.a)
    write_shard(self.directory / B, self.b)
    if index:
      self.index({"metadata": self.metadata, "weight_map": self.where})

  def index(self, value):
    (self.directory / INDEX).write_text(value if isinstance(value, str) else json.dumps(value))

  def refused(self, *culprits):
    """Reading fails with one line that names all of `culprits`."""
    with pytest.raises(UserError) as caught:
      HeaderCheckpoint(str(self.directory))
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1000, message
    for culprit in culprits:
      assert culprit in message, message
    return message


@pytest.fixture
def small(tmp_path):
  return Small(tmp_path)


def test_a_whole_checkpoint_is_read_as_it_is(small):
  checkpoint = HeaderCheckpoint(str(small.directory))
  start = {file: 8 + struct.unpack("<Q", (small.directory / file).read_bytes()[:8])[0] for file in (A, B)}
  assert checkpoint.tensors == {
    FIRST: Tensor(A, "F32", (2, 3), start[A], 24),
    SECOND: Tensor(A, "BF16", (4,), start[A] + 24, 8),
    THIRD: Tensor(B, "U8", (3, 2), start[B], 6),
    FOURTH: Tensor(B, "F4", (2, 8), start[B] + 6, 8),
  }
  assert checkpoint.nbytes == 46 and checkpoint.shards == [A, B]
  assert checkpoint.names == {FIRST, SECOND, THIRD, FOURTH}


def test_a_single_file_an_index_without_total_and_a_header_with_padding_are_read(small):
  small.metadata = {}
  small.write()
  assert len(HeaderCheckpoint(str(small.directory)).tensors) == 4
  (small.directory / INDEX).unlink()
  write_shard(small.directory / SINGLE, json.dumps(small.a).encode() + b"   ", 32)
  assert HeaderCheckpoint(str(small.directory)).shards == [SINGLE]


def test_empty_tensors_scalars_and_a_shard_of_nothing_are_read(tmp_path):
  header = {"a": entry("F32", [0, 5], 4, 4), "b": entry("F32", [], 0, 4), "c": entry("U8", [0], 0, 0)}
  write_shard(tmp_path / A, header)
  assert {n: t.nbytes for n, t in read_shard(str(tmp_path), A).items()} == {"a": 0, "b": 4, "c": 0}
  write_shard(tmp_path / A, {})
  assert read_shard(str(tmp_path), A) == {}


def test_a_symlink_within_the_directory_is_followed(small):
  (small.directory / A).rename(small.directory / "elsewhere")
  (small.directory / A).symlink_to("elsewhere")
  assert len(HeaderCheckpoint(str(small.directory)).tensors) == 4


# One entry of a header; the second tensor is the culprit.


def change(**fields):
  return lambda e: e | fields


ENTRIES = {
  "no object": (lambda e: [1, 2], "list"),
  "no dtype": (lambda e: {k: v for k, v in e.items() if k != "dtype"}, "lacks dtype"),
  "no shape": (lambda e: {k: v for k, v in e.items() if k != "shape"}, "lacks shape"),
  "no offsets": (lambda e: {k: v for k, v in e.items() if k != "data_offsets"}, "lacks data_offsets"),
  "unknown key": (change(strides=[1]), "strides"),
  "unknown dtype": (change(dtype="F12"), "F12"),
  "dtype of another case": (change(dtype="bf16"), "bf16"),
  "dtype no text": (change(dtype=16), "dtype 16"),
  "dtype a list": (change(dtype=["BF16"]), "dtype"),
  "negative shape": (change(shape=[-4]), "[-4]"),
  "two negative": (change(shape=[-2, -2]), "[-2, -2]"),
  "bool in shape": (change(shape=[True, 4]), "True"),
  "float in shape": (change(shape=[4.0]), "4.0"),
  "shape a text": (change(shape="4"), "shape 4"),
  "shape null": (change(shape=None), "None"),
  "shape overflows": (change(shape=[2**62, 2**62]), "overflows"),
  "shape overflows to itself": (change(shape=[2**32, 2**31, 2, 4]), "overflows"),
  "shape overflows before a zero": (change(shape=[2**40, 2**40, 0], data_offsets=[24, 24]), "overflows"),
  "shape too small": (change(shape=[3]), "BF16 [3] is 6"),
  "shape too large": (change(shape=[5]), "BF16 [5] is 10"),
  "another dtype": (change(dtype="F32"), "8 bytes, but F32 [4] is 16"),
  "half a byte": (change(dtype="F4", shape=[15]), "7.5"),
  "offsets reversed": (change(data_offsets=[32, 24]), "ends before it begins"),
  "negative offset": (change(data_offsets=[-8, 0]), "data_offsets"),
  "bool offset": (change(data_offsets=[True, 9]), "data_offsets"),
  "float offset": (change(data_offsets=[24.0, 32.0]), "data_offsets"),
  "one offset": (change(data_offsets=[24]), "data_offsets"),
  "three offsets": (change(data_offsets=[24, 28, 32]), "data_offsets"),
  "offset overflows": (change(data_offsets=[2**63, 2**63 + 8]), "overflow"),
  "overlap": (change(data_offsets=[20, 28]), "overlaps first.weight by 4"),
  "the same bytes": (change(dtype="F32", shape=[6], data_offsets=[0, 24]), "overlaps"),
  "hole": (change(data_offsets=[28, 36]), "hole of 4 bytes behind first.weight"),
}


@pytest.mark.parametrize("fault", ENTRIES)
def test_a_wrong_entry_is_one_line_with_file_and_tensor(small, fault):
  function, culprit = ENTRIES[fault]
  small.a[SECOND] = function(small.a[SECOND])
  write_shard(small.directory / A, small.a, 36 if fault == "hole" else 32)
  small.refused(str(small.directory / A), SECOND, culprit)


def test_a_hole_before_the_first_tensor_is_named(small):
  small.b[FOURTH]["data_offsets"], small.b[THIRD]["data_offsets"] = [9, 17], [3, 9]
  small.write()
  small.refused(B, THIRD, "hole of 3 bytes before any tensor")


# A whole file

VALID = b'{"first.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}%s}'
FILES = {
  "empty": (b"", "cut short"),
  "seven bytes": (b"\0" * 7, "cut short"),
  "header over the limit": (struct.pack("<Q", headers.MAX_HEADER + 1) + b"{}", "100,000,001 bytes, more than the"),
  "header of 2⁶⁴−1": (b"\xff" * 8 + b"{}", "18,446,744,073,709,551,615 bytes, more than"),
  "header beyond the file": (struct.pack("<Q", 3) + b"{}", "cut short"),
  "no JSON": (b"{]", "not JSON"),
  "no header": (b"", "not JSON"),
  "no UTF-8": (b'{"\xff":1}', "not JSON"),
  "bytes behind the JSON": (b"{}\0", "not JSON"),
  "NaN": (b'{"first.weight":NaN}', "NaN"),
  "a list": (b"[]", "list"),
  "a number": (b"1" * 5000, "not JSON"),
  "very deep": (b"[" * 200_000, "deep"),
  "a tensor twice": (
    VALID % b',"first.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}',
    "first.weight twice",
  ),
  "a key twice": (VALID.replace(b'"shape"', b'"dtype":"F32","shape"') % b"", "first.weight gives dtype twice"),
  "metadata of numbers": (VALID % b',"__metadata__":{"a":1}', "__metadata__"),
  "metadata twice": (VALID % b',"__metadata__":{"a":"1","a":"2"}', "__metadata__"),
  "metadata a list": (VALID % b',"__metadata__":[]', "__metadata__"),
}


@pytest.mark.parametrize("fault", FILES)
def test_a_wrong_file_is_one_line_with_its_name(small, fault):
  content, culprit = FILES[fault]
  whole = fault in ("empty", "seven bytes") or fault.startswith("header")
  (small.directory / A).write_bytes(content if whole else struct.pack("<Q", len(content)) + content + bytes(24))
  small.refused(str(small.directory / A), culprit)


@pytest.mark.parametrize(("by", "culprit"), [(-1, "is cut short"), (1, "1 bytes behind its last tensor")])
def test_a_file_too_short_or_too_long_is_named_with_its_last_tensor(small, by, culprit):
  os.truncate(small.directory / A, (small.directory / A).stat().st_size + by)
  small.refused(str(small.directory / A), SECOND, culprit)


def test_bytes_that_no_tensor_has_are_named(small):
  write_shard(small.directory / A, {}, 3)
  small.refused(A, "3 bytes and no tensor")


def test_what_is_in_no_way_a_file_is_named(small):
  path = small.directory / A
  path.unlink()
  small.refused(str(path), "missing")
  path.mkdir()
  small.refused(str(path), "not a regular file")
  path.rmdir()
  os.mkfifo(path)  # opening it would wait forever
  small.refused(str(path), "not a regular file")


def test_a_symlink_that_leads_out_or_nowhere_is_named(small, tmp_path_factory):
  path, outside = small.directory / A, tmp_path_factory.mktemp("outside") / "shard"
  path.rename(outside)
  path.symlink_to(outside)
  small.refused(str(path), str(outside), "leads out")
  outside.unlink()
  small.refused(str(path), "leads nowhere")


def test_an_index_that_is_a_symlink_out_is_named(small, tmp_path_factory):
  outside = tmp_path_factory.mktemp("outside") / INDEX
  (small.directory / INDEX).rename(outside)
  (small.directory / INDEX).symlink_to(outside)
  small.refused(INDEX, "leads out")


@pytest.mark.parametrize("name", ["\x1b[2Jcleared", "two\nlines", "\ud800", "", "x" * 100_000])
def test_a_name_that_would_spoil_a_terminal_is_refused(small, name):
  small.a[name] = small.a.pop(SECOND)
  small.write()
  message = small.refused(A, "can't be a tensor's name")
  assert name == "" or name not in message


# The index

INDICES = {
  "no JSON": ("{", INDEX, "not JSON"),
  "a list": ("[]", INDEX, "list"),
  "very deep": ('{"weight_map":' + "[" * 200_000, INDEX, "deep"),
  "no weight_map": ("{}", INDEX, "lacks weight_map"),
  "weight_map a list": ('{"weight_map": []}', INDEX, "weight_map is a list"),
  "metadata a text": ('{"weight_map": {}, "metadata": "x"}', INDEX, "metadata is a str"),
  "weight_map twice": ('{"weight_map": {}, "weight_map": {}}', INDEX, "weight_map twice"),
}


@pytest.mark.parametrize("fault", INDICES)
def test_a_wrong_index_is_named(small, fault):
  text, *culprits = INDICES[fault]
  small.index(text)
  small.refused(*culprits)


def test_a_tensor_that_the_index_lists_twice_is_named(small):
  small.index(f'{{"weight_map": {{"{FIRST}": "{A}", "{SECOND}": "{A}", "{FIRST}": "{B}"}}}}')
  small.refused(INDEX, f"{FIRST} twice in weight_map")


PLACES = [f"/tmp/{A}", f"../{A}", f"below/{A}", f"below\\{A}", "..", ".", "", f"{A}\0", f"{A}\n", 7, None, [A]]


@pytest.mark.parametrize("place", PLACES, ids=repr)
def test_a_place_outside_the_directory_is_named(small, place):
  small.where[SECOND] = place
  small.write()
  small.refused(str(small.directory / INDEX), SECOND, headers.shown(place))


def test_an_index_and_shards_that_contradict_each_other_are_named(small):
  where = small.where
  small.where = where | {SECOND: B}
  small.write()
  small.refused(A, SECOND, f"{INDEX} places it in {B}")
  small.where = {n: f for n, f in where.items() if n != SECOND}
  small.write()
  small.refused(A, SECOND, "doesn't list it")
  small.where = where | {"fifth.weight": B}
  small.write()
  small.refused(INDEX, "fifth.weight", B, "doesn't hold it")
  small.where = where | {"fifth.weight": "model-00003-of-000002.safetensors"}
  small.write()
  small.refused("model-00003-of-000002.safetensors is missing")


def test_a_tensor_in_two_shards_is_named(small):
  small.b[SECOND] = entry("BF16", [4], 14, 22)
  small.write()
  small.refused(B, SECOND, f"places it in {A}")


def test_a_tensor_with_and_without_prefix_is_named(small):
  name = f"language_model.{FIRST}"
  small.b[name] = entry("F32", [1], 14, 18)
  small.where[name], small.metadata = B, {"total_size": 50}
  small.write()
  small.refused(FIRST, "twice", name)


@pytest.mark.parametrize("total", [45, 47, 0, -46, 46.0, True, "46", 10**30])
def test_a_total_size_that_disagrees_is_named(small, total):
  small.metadata = {"total_size": total}
  small.write()
  small.refused(str(small.directory / INDEX), "total_size")


def test_a_directory_without_a_checkpoint_is_named(tmp_path):
  with pytest.raises(UserError, match="neither"):
    HeaderCheckpoint(str(tmp_path))
  with pytest.raises(UserError, match="not a directory"):
    HeaderCheckpoint(str(tmp_path / "nowhere"))


def test_what_the_library_refuses_is_refused(small, monkeypatch):
  """Were this project's checks to miss something."""
  monkeypatch.setattr(headers, "_check_layout", lambda *_: None)
  small.a[SECOND]["data_offsets"] = [20, 28]
  small.write()
  small.refused(A, "safetensors library")


def test_no_tensor_is_read(small):
  """A terabyte, in a sparse file."""
  write_shard(small.directory / A, {FIRST: entry("U8", [2**40], 0, 2**40)}, 0)
  os.truncate(small.directory / A, (small.directory / A).stat().st_size + 2**40)
  assert read_shard(str(small.directory), A)[FIRST].nbytes == 2**40
