"""Files that `conversion.shard_file` writes are TensorStore's own, byte by byte."""

import google_crc32c
import numpy as np
import pytest

from conversion import shard_file
from conversion.shard_file import ShardFile
from MaxText.converted.layout import DiskArray


def test_the_checksum_is_the_published_one():
  """RFC 3720, B.4: 32 bytes of zeros have the CRC32C 8a9136aa."""
  assert google_crc32c.value(bytes(32)) == 0x8A9136AA
  assert shard_file._checksum(np.zeros(32, np.uint8)) == bytes.fromhex("aa36918a")


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_tensorstore_writes_the_same_file(dtype, tmp_path):
  array = DiskArray("x", (2, 6, 8, 16), dtype, (1, 3, 8, 16), (1, 1, 8, 16))
  values = np.random.default_rng(0).integers(0, 256, (1, 3, 8, 16)).astype(dtype)
  array.open(str(tmp_path), create=True)[1:2, 3:6].write(values).result()
  theirs = tmp_path / "weights" / "x" / "c" / "1" / "1" / "0" / "0"
  ours = tmp_path / "new" / "folder" / "0"
  with ShardFile(str(ours)) as file:
    for part in values[0]:
      file.add(part)
  assert ours.read_bytes() == theirs.read_bytes()
  assert [path.name for path in ours.parent.iterdir()] == ["0"]


def test_nothing_takes_a_files_place_before_it_is_whole(tmp_path):
  path = tmp_path / "0"
  path.write_bytes(b"before")
  with pytest.raises(OSError, match="the disk is gone"), ShardFile(str(path)) as file:
    file.add(np.ones(8, np.uint8))
    raise OSError("the disk is gone")
  assert path.read_bytes() == b"before"
