"""A file of an array's parts (`layout.DiskArray`), written part by part from where they lie.

TensorStore writes the same bytes, but wants a whole file at a time and copies it twice in memory: that takes longer
than converting it.
"""

import os
import struct
from types import TracebackType
from typing import Self

import google_crc32c
import numpy as np

from conversion.journal import forget, sync_directory

UNFINISHED = ".__lock"  # TensorStore's own ending for a file that isn't whole yet


class ShardFile:
  """A shard as zarr3's codec `sharding_indexed` has it, checksums and all.

  A context: at its end the file is on disk under its name, in place of one that was there; after an error it isn't.
  """

  def __init__(self, path: str):
    """Raises OSError, as everything here does."""
    self._path, self._places, self._end = path, b"", 0
    os.makedirs(os.path.dirname(path), exist_ok=True)
    self._file = open(path + UNFINISHED, "wb")  # noqa: SIM115

  def add(self, part: np.ndarray) -> None:
    """Writes the next part, in the order of places; contiguous."""
    content = part.reshape(-1).view(np.uint8)
    self._file.write(content)
    self._file.write(_checksum(content))
    self._file.flush()
    size = content.nbytes + 4
    forget(self._file.fileno(), self._end, size)  # so its writing begins
    self._places += struct.pack("<QQ", self._end, size)
    self._end += size

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    with self._file:
      if error is not None:
        return
      self._file.write(self._places + _checksum(self._places))
      self._file.flush()
      os.fsync(self._file.fileno())
      forget(self._file.fileno())
    os.rename(self._path + UNFINISHED, self._path)
    sync_directory(os.path.dirname(self._path))


def _checksum(content: np.ndarray | bytes) -> bytes:
  return struct.pack("<I", google_crc32c.value(content))
