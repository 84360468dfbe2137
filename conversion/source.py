"""Tensors of a released checkpoint, read with `preadv`: a disk's fault is an error here, not a signal."""

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from conversion.headers import HeaderCheckpoint, Tensor, locate
from conversion.inspect import CONFIG
from MaxText import mxfp4
from MaxText.checkpoint import INDEX
from MaxText.errors import UserError
from MaxText.weights import Source

_DTYPES = {
  "U8": np.dtype(np.uint8),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F16": np.dtype(np.float16),
  "F32": np.dtype(np.float32),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_CHUNK = 64 * 2**20


class Reader:
  """Reads tensors of which the headers are known. Safe to use from several threads.

  Attributes:
    checkpoint: the headers.
  """

  def __init__(self, checkpoint: HeaderCheckpoint):
    self.checkpoint = checkpoint
    self._open: dict[str, int] = {}
    self._lock = threading.Lock()

  def bytes_of(self, tensor: Tensor) -> Iterator[np.ndarray]:
    """A tensor's bytes, some at a time."""
    for start in range(0, tensor.nbytes, _CHUNK):
      buffer = np.empty(min(_CHUNK, tensor.nbytes - start), np.uint8)
      self._fill(tensor.file, tensor.offset + start, memoryview(buffer))
      yield buffer

  def array(self, tensor: Tensor, rows: slice | None = None, out: np.ndarray | None = None) -> np.ndarray:
    """A tensor's values.

    Args:
      rows: of its first dimension; all where None.
      out: where they go, contiguous and of their shape and dtype; made where None.

    Raises:
      UserError: the file can't be read, or is shorter than its header says.
    """
    shape, offset, nbytes = tensor.shape, tensor.offset, tensor.nbytes
    if rows is not None:
      first, last, _ = rows.indices(shape[0])
      row = nbytes // shape[0]
      shape, offset, nbytes = (last - first, *shape[1:]), offset + first * row, (last - first) * row
    out = np.empty(shape, _DTYPES[tensor.dtype]) if out is None else out
    self._fill(tensor.file, offset, memoryview(out.reshape(-1).view(np.uint8)))
    return out

  def _fill(self, file: str, offset: int, buffer: memoryview) -> None:
    path = os.path.join(self.checkpoint.directory, file)
    try:
      descriptor = self._descriptor(file)
      while buffer:
        count = os.preadv(descriptor, [buffer], offset)
        if not count:
          raise UserError(f"{path} is cut short: it ends before byte {offset + len(buffer):,}")
        buffer, offset = buffer[count:], offset + count
    except OSError as error:
      raise UserError(f"{path} can't be read at byte {offset:,}: {error.strerror}") from error

  def _descriptor(self, file: str) -> int:
    with self._lock:
      if file not in self._open:
        self._open[file] = os.open(locate(self.checkpoint.directory, file), os.O_RDONLY | os.O_CLOEXEC)
      return self._open[file]

  def close(self, file: str) -> None:
    """Forgets an open shard, before it is deleted."""
    with self._lock:
      if file in self._open:
        os.close(self._open.pop(file))

  def packed(
    self,
    names: tuple[str, str],
    rows: slice | None = None,
    out: tuple[np.ndarray | None, np.ndarray | None] = (None,) * 2,
  ) -> tuple[np.ndarray, np.ndarray]:
    """A packed matrix: values [out, in / 2] and scales [out, in / 32], uint8.

    Args:
      rows, out: of both, see `array`.

    Raises:
      UserError: see `array`; or a scale is NaN.
    """
    packed, scale = (self.checkpoint.tensor(name) for name in names)
    scales = self.array(scale, rows, out[1])
    bad = scales == mxfp4.NAN_SCALE
    if bad.any():
      output, group = np.argwhere(bad)[0]
      raise UserError(
        f"{os.path.join(self.checkpoint.directory, scale.file)}: {names[1]} holds {mxfp4.NAN_SCALE}, which is NaN, at "
        f"[{output}, {group}] ({np.count_nonzero(bad):,} in all)"
      )
    return self.array(packed, rows, out[0]), scales

  def stacked(self, pairs: Sequence[tuple[str, str]]) -> tuple[np.ndarray, np.ndarray]:
    """Packed matrices of the same inputs as one, their outputs one after the other; otherwise as `packed`."""
    shapes = [[self.checkpoint.tensor(name).shape for name in pair] for pair in pairs]
    ends = np.cumsum([0] + [values[0] for values, _ in shapes])
    whole = tuple(np.empty((ends[-1], shape[1]), np.uint8) for shape in shapes[0])
    for pair, first, last in zip(pairs, ends, ends[1:], strict=False):
      self.packed(pair, out=tuple(array[first:last] for array in whole))
    return whole

  def values(self, names: tuple[str, ...], rows: slice | None = None) -> np.ndarray:
    """What a source holds: as it is stored where it is plain, float32 where it is packed."""
    if len(names) == 1:
      return self.array(self.checkpoint.tensor(names[0]), rows)
    return mxfp4.unpack(*self.packed(names, rows))


def names_of(checkpoint: HeaderCheckpoint, prefix: str, sources: Iterable[Source]) -> list[tuple[str, ...]]:
  """For each source of an instance the tensors that hold it: one, or a packed pair.

  Raises:
    UserError: see `HeaderCheckpoint.tensors_of`; or one is in block-FP8 already.
  """
  names = [checkpoint.tensors_of(prefix, source) for source in sources]
  for pair in names:
    if len(pair) == 2 and not pair[0].endswith("_packed"):
      raise UserError(f"{pair[0]} in {checkpoint.directory} is in block-FP8 already; give the released checkpoint")
  return names


def identity(checkpoint: HeaderCheckpoint, twins: str) -> dict[str, Any]:
  """What tells a source from another: sha256 of its config.json, its index, and the header of each shard.

  Args:
    twins: folder with stand-ins for shards that are gone (`keep_headers`).
  """

  def digest(path: str, count: int | None = None) -> str:
    with open(path, "rb") as f:
      return hashlib.sha256(f.read() if count is None else f.read(count)).hexdigest()

  def shard(file: str) -> dict[str, Any]:
    path = os.path.join(checkpoint.directory, file)
    path = path if os.path.exists(path) else os.path.join(twins, file)
    return {"nbytes": os.path.getsize(path), "header_sha256": digest(path, header_size(path))}

  index = os.path.join(checkpoint.directory, INDEX)
  return {
    "config_sha256": digest(os.path.join(checkpoint.directory, CONFIG)),
    "index_sha256": digest(index) if os.path.exists(index) else None,
    "shards": {file: shard(file) for file in checkpoint.shards},
  }


def header_size(path: str) -> int:
  """Bytes before the first tensor of a safetensors file."""
  with open(path, "rb") as f:
    return 8 + int.from_bytes(f.read(8), "little")


def keep_headers(checkpoint: HeaderCheckpoint, twins: str) -> None:
  """Makes a stand-in for each shard, its header and a hole of its size, so that a run goes on without the shard."""
  os.makedirs(twins, exist_ok=True)
  for file in checkpoint.shards:
    path, twin = os.path.join(checkpoint.directory, file), os.path.join(twins, file)
    if os.path.exists(twin):
      continue
    with open(path, "rb") as f, open(f"{twin}.partial", "wb") as g:
      g.write(f.read(header_size(path)))
      g.truncate(os.path.getsize(path))
      os.fsync(g.fileno())
    os.rename(f"{twin}.partial", twin)


def encode(value: Any) -> str:
  """JSON on one line, the same for the same value."""
  return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
