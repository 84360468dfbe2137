"""Headers of a released checkpoint, read as what they are: files from a stranger.

Only the index and the first bytes of each shard are read, never a tensor. Whatever doesn't add up is one line that
names the file and the tensor. The safetensors library checks most of a header, but it takes duplicate keys, says
neither which tensor is wrong nor where a tensor lies, and knows nothing of an index. So the header is parsed here, and
the library is asked afterwards: what it would refuse to load is refused as well.
"""

import contextlib
import gc
import json
import math
import os
import stat
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from MaxText.checkpoint import INDEX, SINGLE, ReleasedCheckpoint
from MaxText.errors import UserError
from MaxText.progress import progress
from MaxText.weights import Source

MAX_HEADER = 100_000_000  # bytes, the format's own limit
_MAX_INDEX = 256_000_000  # bytes; K3's has 60 million
_MAX_NUMBER = 2**63 - 1  # of a dimension, an offset or a count of bytes
_SHOWN = 200  # characters of a value from a file that a message repeats
_MAX_NAME = 200  # characters of a tensor's name; K3's have up to 75
_METADATA = "__metadata__"
_KEYS = {"dtype", "shape", "data_offsets"}

# Bits of one value, of every dtype that the format knows.
_BITS = {
  "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
  "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
  "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
_DTYPES = {name: name for name in _BITS}  # one string for each, instead of one a tensor


class Tensor(NamedTuple):
  """What a header says of one tensor.

  Attributes:
    file: the shard's name in its directory.
    dtype: the format's name, such as "BF16" or "U8".
    shape: torch order.
    offset: of its first byte in the file.
    nbytes: how many there are.
  """

  file: str
  dtype: str
  shape: tuple[int, ...]
  offset: int
  nbytes: int


class _Doubled(dict):
  """A JSON object in which a key stands twice."""

  key = ""


def shown(value: Any) -> str:
  """A name or value from a file as a message may repeat it: short, on one line, without control characters."""
  text = value if isinstance(value, str) else repr(value)
  if not text.isprintable() or not text:
    text = ascii(text)
  return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  made = dict(pairs)
  if len(made) == len(pairs):
    return made
  doubled, seen = _Doubled(made), set()
  doubled.key = next(key for key, _ in pairs if key in seen or seen.add(key))
  return doubled


def _no_number(text: str) -> Any:
  raise ValueError(f"{text} is no number of JSON")


def _parse(raw: bytes, what: str) -> dict[str, Any]:
  """A JSON object; objects within it may still be `_Doubled`.

  Raises:
    UserError: `what` isn't UTF-8, isn't JSON, is nested too deeply, or isn't an object.
  """
  try:
    value = json.loads(raw.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_number)
  except RecursionError as error:
    raise UserError(f"{what} is nested too deeply") from error
  except ValueError as error:
    raise UserError(f"{what} is not JSON: {shown(str(error))}") from error
  if not isinstance(value, dict):
    raise UserError(f"{what} holds a {type(value).__name__}, not an object")
  return value


def locate(directory: str, file: str) -> str:
  """The path of a file that lies in a directory.

  Raises:
    UserError: it is missing, leads out of the directory as a symlink, or isn't a regular file.
  """
  path = os.path.join(directory, file)
  if not os.path.exists(path):
    raise UserError(f"{path} is missing" + (": its symlink leads nowhere" if os.path.islink(path) else ""))
  real, root = os.path.realpath(path), os.path.realpath(directory)
  if os.path.commonpath([real, root]) != root:
    raise UserError(f"{path} is a symlink that leads out of its directory, to {real}; put the file itself there")
  if not stat.S_ISREG(os.stat(real).st_mode):
    raise UserError(f"{path} is not a regular file")
  return path


def read_json(directory: str, file: str) -> dict[str, Any]:
  """A JSON object from a file of a checkpoint.

  Raises:
    UserError: see `locate`; or the file can't be read, is too large, isn't a JSON object, or gives a key twice in the
      outermost object or in an object that is a value of it.
  """
  path = locate(directory, file)
  try:
    with open(path, "rb") as f:
      raw = f.read(_MAX_INDEX + 1)
  except OSError as error:
    raise UserError(f"{path}: {error.strerror}") from error
  if len(raw) > _MAX_INDEX:
    raise UserError(f"{path} is larger than {_MAX_INDEX:,} bytes")
  value = _parse(raw, path)
  for name, node in (("", value), *value.items()):
    if isinstance(node, _Doubled):
      raise UserError(f"{path} gives {shown(node.key)} twice" + (f" in {shown(name)}" if name else ""))
  return value


def read_shard(directory: str, file: str) -> dict[str, Tensor]:
  """All tensors of a shard, from its header.

  Raises:
    UserError: naming the file, and the tensor where one is to blame: a file that isn't one or is cut short, a header
      too large, not JSON or with a key twice, an unknown dtype, a shape that overflows or doesn't match its bytes,
      holes, overlaps, or bytes behind the last tensor.
  """
  path = locate(directory, file)
  try:
    with open(path, "rb") as f:
      size = os.fstat(f.fileno()).st_size
      if size < 8:
        raise UserError(f"{path} is cut short: {size} bytes hold no header")
      (length,) = struct.unpack("<Q", f.read(8))
      if length > MAX_HEADER:
        raise UserError(f"{path}: its header claims {length:,} bytes, more than the {MAX_HEADER:,} of the format")
      if 8 + length > size:
        raise UserError(f"{path} is cut short: its header claims {length:,} bytes, the file has {size:,}")
      raw = f.read(length)
  except OSError as error:
    raise UserError(f"{path}: {error.strerror}") from error
  if len(raw) != length:
    raise UserError(f"{path} is cut short: it ends within its header")
  header = _parse(raw, f"{path}: its header")
  del raw
  if isinstance(header, _Doubled):
    raise UserError(f"{path} holds {shown(header.key)} twice")
  _check_metadata(path, header.pop(_METADATA, {}))
  start = 8 + length
  tensors = {name: _tensor(path, file, name, entry, start) for name, entry in header.items()}
  _check_layout(path, tensors, start, size)
  _ask_library(path, tensors)
  return tensors


def _check_metadata(path: str, metadata: Any) -> None:
  if type(metadata) is not dict or not all(isinstance(value, str) for value in metadata.values()):
    raise UserError(f"{path}: {_METADATA} of its header must be an object of texts, no key twice")


def _tensor(path: str, file: str, name: str, entry: Any, start: int) -> Tensor:
  """One entry of a header.

  Args:
    start: the file's first byte of data, from which offsets count.
  """

  def wrong(what: str) -> UserError:
    return UserError(f"{path}: {shown(name)} {what}")

  # Names go into messages and manifests: none may move a terminal's cursor or fill a screen.
  if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
    raise wrong(f"can't be a tensor's name: up to {_MAX_NAME} printable characters are wanted")
  if isinstance(entry, _Doubled):
    raise wrong(f"gives {shown(entry.key)} twice")
  if not isinstance(entry, dict):
    raise wrong(f"is described by a {type(entry).__name__}, not an object")
  if entry.keys() != _KEYS:
    missing, more = sorted(_KEYS - entry.keys()), sorted(entry.keys() - _KEYS)
    raise wrong(f"lacks {missing[0]}" if missing else f"has an unknown key {shown(more[0])}")
  dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
  if not isinstance(dtype, str) or dtype not in _BITS:
    raise wrong(f"has an unknown dtype {shown(dtype)}")
  if not _are_counts(shape):
    raise wrong(f"has shape {shown(shape)}: a list of whole numbers from 0 is wanted")
  if not _are_counts(span) or len(span) != 2:
    raise wrong(f"has data_offsets {shown(span)}: two whole numbers from 0 are wanted")
  begin, end = span
  if begin > end or end > _MAX_NUMBER:
    raise wrong(f"has data_offsets {shown(span)}: " + ("it ends before it begins" if begin > end else "they overflow"))
  # Zeros don't excuse what others overflow to: the library multiplies from the left.
  bits = math.prod(n for n in shape if n) * _BITS[dtype]
  if bits > _MAX_NUMBER * 8:
    raise wrong(f"has shape {shown(shape)}, which overflows")
  bits *= 0 not in shape
  if bits != 8 * (end - begin):
    raise wrong(f"takes {end - begin:,} bytes, but {dtype} {shown(shape)} is {bits / 8:,.10g}")
  return Tensor(file, _DTYPES[dtype], tuple(shape), start + begin, end - begin)


def _are_counts(values: Any) -> bool:
  # `type` and not `isinstance`: true is an int of Python's.
  return type(values) is list and all(type(n) is int and n >= 0 for n in values)


def _check_layout(path: str, tensors: dict[str, Tensor], start: int, size: int) -> None:
  """Tensors must cover the data from its first byte to the file's end, without holes or overlaps."""
  reached, last = start, ""
  for name in sorted(tensors, key=lambda n: (tensors[n].offset, tensors[n].nbytes)):
    _, _, _, offset, nbytes = tensors[name]
    if offset < reached:
      raise UserError(f"{path}: {shown(name)} overlaps {shown(last)} by {reached - offset:,} bytes")
    if offset > reached:
      behind = f"behind {shown(last)}" if last else "before any tensor"
      raise UserError(f"{path}: {shown(name)} leaves a hole of {offset - reached:,} bytes {behind}")
    reached, last = offset + nbytes, name
  if reached > size:
    raise UserError(f"{path} is cut short: {shown(last)} ends at byte {reached:,}, the file has {size:,}")
  if reached < size:
    behind = f"behind its last tensor, {shown(last)}" if last else "and no tensor"
    raise UserError(f"{path} has {size - reached:,} bytes {behind}")


def _ask_library(path: str, tensors: dict[str, Tensor]) -> None:
  """What loads a tensor later must agree; it maps the file and reads its header only."""
  try:
    with safe_open(path, "numpy") as f:
      if set(f.keys()) != tensors.keys():
        raise UserError(f"{path}: the safetensors library finds other tensors in its header")
  except (SafetensorError, OSError) as error:
    raise UserError(f"{path} is refused by the safetensors library: {shown(str(error))}") from error


def read_index(directory: str) -> tuple[dict[str, str], int | None]:
  """The index of a sharded checkpoint.

  Returns:
    (the shard of each tensor, bytes of all tensors or None where it doesn't say).

  Raises:
    UserError: see `read_json`; or the index isn't one, or names a file that isn't plainly in the directory.
  """
  path = os.path.join(directory, INDEX)
  index = read_json(directory, INDEX)
  if "weight_map" not in index:
    raise UserError(f"{path} lacks weight_map")
  where, metadata = index["weight_map"], index.get("metadata", {})
  for key, value in (("weight_map", where), ("metadata", metadata)):
    if not isinstance(value, dict):
      raise UserError(f"{path}: {key} is a {type(value).__name__}, not an object")
  checked = set()
  for name, file in where.items():
    if not isinstance(file, str):
      raise UserError(f"{path}: {shown(name)} is placed in {shown(file)}, which is no file name")
    if file in checked:
      continue
    # Shards of the released layout lie side by side. That leaves no room for absolute paths and `..`.
    if file in ("", ".", "..") or not file.isprintable() or "/" in file or "\\" in file:
      raise UserError(f"{path}: {shown(name)} is placed in {shown(file)}, which is no plain name of a file beside it")
    checked.add(file)
  total = metadata.get("total_size")
  if total is not None and (type(total) is not int or total < 0):
    raise UserError(f"{path}: total_size is {shown(total)}, not a number of bytes")
  return where, total


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
  """Half the time of reading would go to looking for cycles among millions of objects that have none."""
  enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    if enabled:
      gc.enable()


class HeaderCheckpoint(ReleasedCheckpoint):
  """A checkpoint of which headers alone have been read, and checked against each other and the index.

  Attributes:
    tensors: every tensor, vision included, by its full name in the files.
  """

  def __init__(self, directory: str, twins: str | None = None):
    """Raises `UserError`: see `read_index` and `read_shard`; or index and shards contradict each other.

    Args:
      twins: a folder with stand-ins for shards that have been deleted since, headers with a hole behind.
    """
    if not os.path.isdir(directory):
      raise UserError(f"{directory} is not a directory")
    self._twins = twins
    self.tensors: dict[str, Tensor] = {}
    with _no_collector():
      super().__init__(directory)

  @property
  def nbytes(self) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in self.tensors.values())

  @property
  def shards(self) -> list[str]:
    """Names of the files that hold tensors."""
    return sorted({tensor.file for tensor in self.tensors.values()})

  @property
  def every_name(self) -> frozenset[str]:
    """Names of all tensors, vision too, without the text model's prefix."""
    return frozenset(self._where)

  def vision(self) -> list[Tensor]:
    """Tensors that may be there and that the text model doesn't read."""
    return [self.tensor(name) for name in self._where if name not in self.names]

  def tensor(self, name: str) -> Tensor:
    """A tensor by its name without the text model's prefix."""
    return self.tensors[self._where[name][1]]

  def full_name(self, name: str) -> str:
    """A tensor's name in the files, by its name without the text model's prefix."""
    return self._where[name][1]

  def _read_index(self) -> dict[str, str]:
    folders = [folder for folder in (self.directory, self._twins) if folder]
    there = [file for file in (INDEX, SINGLE) if any(os.path.lexists(os.path.join(f, file)) for f in folders)]
    if not there:
      raise UserError(f"{self.directory} holds neither {INDEX} nor {SINGLE}")
    if there[0] == SINGLE:
      self.tensors = self._read_shard(SINGLE)
      return dict.fromkeys(self.tensors, SINGLE)
    where, total = read_index(self.directory)
    listed: dict[str, set[str]] = {}
    for name, file in where.items():
      listed.setdefault(file, set()).add(name)
    for file, names in progress(sorted(listed.items()), len(listed), "reading headers"):
      held = self._read_shard(file)
      if names - held.keys():
        raise UserError(
          f"{os.path.join(self.directory, INDEX)} places {shown(min(names - held.keys()))} in {file}, which doesn't "
          "hold it"
        )
      if held.keys() - names:
        name = min(held.keys() - names)
        placed = f"places it in {where[name]}" if name in where else "doesn't list it"
        raise UserError(f"{os.path.join(self.directory, file)} holds {shown(name)}, but {INDEX} {placed}")
      self.tensors |= held
    if total is not None and total != self.nbytes:
      raise UserError(
        f"{os.path.join(self.directory, INDEX)}: total_size is {total:,}, the tensors of its shards have "
        f"{self.nbytes:,} bytes"
      )
    return where

  def _read_shard(self, file: str) -> dict[str, Tensor]:
    gone = self._twins and not os.path.lexists(os.path.join(self.directory, file))
    return read_shard(self._twins if gone and os.path.exists(os.path.join(self._twins, file)) else self.directory, file)

  def tensors_of(self, prefix: str, source: Source) -> tuple[str, ...]:
    """As `ReleasedCheckpoint.tensors_of`; an error names the shards as well."""
    try:
      return super().tensors_of(prefix, source)
    except UserError as error:
      stem = f"{prefix}{source.name}"
      suffixes = dict.fromkeys((source.suffix, ".weight_packed", ".weight_scale", ".weight_scale_inv"))
      files = sorted({self._where[stem + s][0] for s in suffixes if stem + s in self._where})
      raise UserError(f"{error} (in {' and '.join(files)})" if files else str(error)) from error

  def _shape(self, name: str) -> tuple[int, ...]:
    return self.tensor(name).shape

  def _dtype(self, name: str) -> str:
    return self.tensor(name).dtype
