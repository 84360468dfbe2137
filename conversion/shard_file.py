"""A file of an array's parts (`layout.DiskArray`), written from where they lie.

TensorStore writes the same bytes, but copies a file twice in memory first, which takes longer than converting it.
"""

import os
import struct
from collections.abc import Iterable

import google_crc32c
import numpy as np

from conversion.journal import sync_directory

UNFINISHED = ".__lock"  # TensorStore's own ending for a file that isn't whole yet


def write(path: str, parts: Iterable[np.ndarray]) -> None:
  """Writes a shard as zarr3's codec `sharding_indexed` has it, checksums and all; it is on disk when this returns.

  Args:
    path: replaced if it is there.
    parts: contiguous each, in the order of their places in the file; taken one at a time.

  Raises:
    OSError: nothing is at `path` then that wasn't there before.
  """
  folder = os.path.dirname(path)
  os.makedirs(folder, exist_ok=True)
  places, end = b"", 0
  with open(path + UNFINISHED, "wb") as f:
    for part in parts:
      content = part.reshape(-1).view(np.uint8)
      f.write(content)
      f.write(_checksum(content))
      places += struct.pack("<QQ", end, content.nbytes + 4)
      end += content.nbytes + 4
    f.write(places + _checksum(places))
    f.flush()
    os.fsync(f.fileno())
  os.rename(path + UNFINISHED, path)
  sync_directory(folder)


def _checksum(content: np.ndarray | bytes) -> bytes:
  return struct.pack("<I", google_crc32c.value(content))
