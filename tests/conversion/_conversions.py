"""What the tests of the converter share: conversions of the tiny model, digests of whole directories, edited copies."""

import hashlib
import json
import os
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np

from conversion.convert import convert
from conversion.options import Options

TINY = Path(__file__).parents[2] / "MaxText" / "assets" / "kimi-k3-tiny"
SHARDS = ("model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors")


def quick_folder(tmp_path: Path) -> Path:
  """A folder in memory where there is one: hundreds of files that are synced each take long on a busy disk."""
  memory = Path("/dev/shm")
  if not memory.is_dir() or shutil.disk_usage(memory).free < 2**30:
    return tmp_path
  return Path(tempfile.mkdtemp(prefix="conversion-", dir=memory))


def run(source: Path, directory: Path, **keys):
  return convert(str(source), str(directory), Options(**keys))


def tree(directory: Path) -> dict[str, str]:
  """sha256 of every file below a directory, by its path."""
  return {
    str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(directory.rglob("*"))
    if path.is_file()
  }


def copy_of_tiny(directory: Path) -> Path:
  directory.mkdir()
  for path in TINY.iterdir():
    shutil.copy(path, directory)
  return directory


def place(source: Path, name: str) -> tuple[Path, int, tuple[int, ...]]:
  """(file, first byte, shape) of a tensor, from the header itself."""
  index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
  path = source / index[name]
  with open(path, "rb") as f:
    (length,) = struct.unpack("<Q", f.read(8))
    entry = json.loads(f.read(length))[name]
  return path, 8 + length + entry["data_offsets"][0], tuple(entry["shape"])


def edit(source: Path, name: str, values: np.ndarray) -> None:
  """Overwrites a tensor with bytes."""
  path, start, shape = place(source, name)
  assert values.shape == shape
  with open(path, "r+b") as f:
    f.seek(start)
    f.write(values.tobytes())


def read(source: Path, name: str, dtype=np.uint8) -> np.ndarray:
  path, start, shape = place(source, name)
  count = int(np.prod(shape))
  return np.fromfile(path, dtype, count, offset=start).reshape(shape)


def fail_reads(monkeypatch, fails, outcome) -> None:
  """Makes reads of tensors fail.

  Args:
    fails: (path of the file, how many reads there were before) -> whether this one does.
    outcome: what a failing read does.
  """
  original, count = os.preadv, 0

  def preadv(descriptor, buffers, offset):
    nonlocal count
    count += 1
    if fails(os.readlink(f"/proc/self/fd/{descriptor}"), count - 1):
      return outcome()
    return original(descriptor, buffers, offset)

  monkeypatch.setattr(os, "preadv", preadv)
