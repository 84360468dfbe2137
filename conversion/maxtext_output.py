"""Writes `MaxText.converted.layout`: each file of each array, made of the tensors that belong in it."""

import functools
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tensorstore as ts

from conversion import block_fp8, pieces, shard_file
from conversion.block_fp8 import Exactness
from conversion.journal import Record, sync_directory, write_file
from conversion.matrices import bits, contiguous, to_block_fp8, to_float
from conversion.pieces import Limit, Piece
from conversion.shard_file import ShardFile
from conversion.source import Reader, names_of
from MaxText import quantization
from MaxText.configs.model_config import ModelConfig
from MaxText.converted import layout
from MaxText.converted.layout import DiskArray, StoredWeight
from MaxText.errors import UserError
from MaxText.weights import Weight

_BF16 = np.dtype(ml_dtypes.bfloat16)


class Converted(NamedTuple):
  """One instance of a weight, or a part of one, as it is stored."""

  values: np.ndarray
  scales: np.ndarray | None
  method: str
  exactness: Exactness


@dataclass(frozen=True)
class Part:
  """What one file holds of a weight.

  Attributes:
    stored: the weight.
    number: of the file, as `DiskArray.files` counts.
    index: the part of the values' array.
    instances: the lead indices of its instances.
    rows: of the released tensor, which is cut along its first dimension; None where it is read whole.
  """

  stored: StoredWeight
  number: int
  index: tuple[slice, ...]
  instances: tuple[tuple[int, ...], ...]
  rows: slice | None

  def prefix(self, instance: tuple[int, ...]) -> str:
    stack = self.stored.stack
    return stack.prefixes[int(np.ravel_multi_index(instance, stack.lead_shape)) if instance else 0]

  def name(self, array: DiskArray, instance: tuple[int, ...]) -> str:
    """Of a tensor in the manifest, such as "kda.experts.wi.values[3,17]" or "embed[0:5120,:]"."""
    parts = [str(i) for i in instance]
    if self.rows is not None:
      cut = self.index[len(instance) :]
      sizes = array.shape[len(instance) :]
      parts += [":" if s.stop - s.start == n else f"{s.start}:{s.stop}" for s, n in zip(cut, sizes, strict=True)]
    return f"{array.name}[{','.join(parts)}]" if parts else array.name


def parts(stored: StoredWeight) -> list[Part]:
  """All files of a weight."""
  found, lead = [], len(stored.stack.lead_shape)
  axes = stored.stack.weight.axes
  for number, index in enumerate(stored.values.files()):
    instances = tuple(itertools.product(*(range(s.start, s.stop) for s in index[:lead])))
    # The two matrices that are cut are cut along the vocabulary, the first dimension of their released tensors.
    whole = stored.values.file_shape[lead:] == stored.values.shape[lead:]
    rows = None if whole else index[lead + axes.index("vocab")]
    found.append(Part(stored, number, index, instances, rows))
  return found


def convert(reader: Reader, stored: StoredWeight, prefix: str, rows: slice | None = None) -> Converted:
  """Reads and converts one instance of a weight; blocks are those of each of its released matrices.

  Args:
    rows: see `Part`.

  Raises:
    UserError: a tensor that can't be read, or holds what can't be converted.
  """
  weight = stored.stack.weight
  names = names_of(reader.checkpoint, prefix, weight.sources)
  if stored.form is quantization.MXFP4:
    unpacked = [pair[0] for pair in names if len(pair) == 1]
    if unpacked:
      raise UserError(f"{unpacked[0]} isn't packed: weight_format=mxfp4 needs MXFP4 experts")
    values, scales = zip(*(reader.packed(pair) for pair in names), strict=True)
    values, scales = weight.arrange(*values), weight.arrange(*scales)
    return Converted(values, scales, pieces.PACKED, Exactness(elements=2 * values.size))
  if stored.form is quantization.BlockFP8:
    if all(len(pair) == 2 for pair in names) and _follow(weight):
      values, scales, exactness = block_fp8.from_mxfp4(*reader.stacked(names))
      ends = np.cumsum([-(-source.shape[0] // quantization.BLOCK) for source in weight.sources])
      scales = stored.stack.block_scales(np.split(scales.T, ends[:-1]), stored.runs)
      return Converted(values, scales, pieces.POWER_OF_TWO, exactness)
    made = [to_block_fp8(reader, pair) for pair in names]
    values = weight.arrange(*(values for values, _, _, _ in made)).reshape(weight.shape)
    scales = stored.stack.block_scales([scales for _, scales, _, _ in made], stored.runs)
    methods = {method for _, _, method, _ in made}
    if len(methods) > 1:
      raise UserError(f"{', '.join(itertools.chain(*names))}: of one weight some are packed and some aren't")
    return Converted(values, scales, methods.pop(), sum((e for *_, e in made), Exactness()))
  value = weight.arrange(*(reader.values(pair, rows) for pair in names))
  value = value if rows is not None else value.reshape(weight.shape)
  dtype = ts.dtype(stored.values.dtype).numpy_dtype
  value, method, exactness = to_float(value, dtype, any(len(pair) == 2 for pair in names))
  return Converted(value, None, method, exactness)


def _follow(weight: Weight) -> bool:
  """Whether outputs of the sources follow each other, and no 128×128 block would hold those of two."""
  *before, last = (source.shape[0] for source in weight.sources)
  outputs = np.arange(sum(before) + last)
  (order,) = weight.arrange(*(part[:, None] for part in np.split(outputs, np.cumsum(before, dtype=int))))
  return np.array_equal(order, outputs) and not any(n % quantization.BLOCK for n in before)


def _cut(values: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
  """The parts of an instance, contiguous each, in the order of their places."""
  counts = tuple(n // size for n, size in zip(values.shape, shape, strict=True))
  for number in np.ndindex(counts):
    place = tuple(slice(i * size, (i + 1) * size) for i, size in zip(number, shape, strict=True))
    yield np.ascontiguousarray(bits(values[place]))


class MaxTextOutput:
  """DST/weights, piece by piece; see `pieces.Output`."""

  def __init__(self, reader: Reader, cfg: ModelConfig, experts: str, dense: str, directory: str, limit: Limit):
    """
    Args:
      experts, dense: of `layout.disk_storage`.
      directory: DST.
    """
    self._reader, self._directory, self._limit = reader, directory, limit
    stored = layout.stored_weights(cfg, layout.disk_storage(cfg, _BF16, experts, dense))
    self._parts = {f"{name}/{part.number}": part for name, one in stored.items() for part in parts(one)}
    self._arrays = [array for one in stored.values() for array in one.arrays]
    self.arrays = layout.arrays_of(stored)
    self.pieces = sorted((self._piece(key, part) for key, part in self._parts.items()), key=lambda p: p.order)

  def _piece(self, key: str, part: Part) -> Piece:
    checkpoint, sources = self._reader.checkpoint, part.stored.stack.weight.sources
    tensors = [
      checkpoint.tensor(name)
      for instance in part.instances
      for names in names_of(checkpoint, part.prefix(instance), sources)
      for name in names
    ]
    starts = []
    for tensor in tensors:
      skipped = 0 if part.rows is None else part.rows.start * (tensor.nbytes // tensor.shape[0])
      starts.append((tensor.file, tensor.offset + skipped))
    nbytes = sum(_file_bytes(array) for array in part.stored.arrays)
    read = sum(tensor.nbytes for tensor in tensors) // len(part.instances)
    read = read if part.rows is None else nbytes
    # One instance: as it is read, twice while it is rearranged, and the result.
    memory = nbytes // len(part.instances) + 3 * read
    return Piece(key, tuple(sorted({t.file for t in tensors})), min(starts), nbytes, memory, key, part)

  def prepare(self, pieces: Sequence[Piece]) -> None:
    try:
      for array in self._arrays:
        array.open(self._directory, create=True)
    except (ValueError, OSError) as error:
      raise self._failed(array.name, error) from error

  def write(self, piece: Piece) -> list[Record]:
    part: Part = piece.work
    stored, lead = part.stored, len(part.instances[0])
    paths = [
      os.path.join(self._directory, layout.WEIGHTS, array.name, file_name(array, array.files()[part.number]))
      for array in stored.arrays
    ]
    records: list[Record] = []
    try:
      with ExitStack() as stack:
        files = [stack.enter_context(ShardFile(path)) for path in paths]
        for instance in part.instances:
          made = convert(self._reader, stored, part.prefix(instance), part.rows)
          self._limit.add(part.prefix(instance) + stored.stack.weight.sources[0].name, made.method, made.exactness)
          contents = [contiguous(array) for array in (made.values, made.scales) if array is not None]
          for file, array, content in zip(files, stored.arrays, contents, strict=True):
            for cut in _cut(content, array.part_shape[lead:]):
              file.add(cut)
          records += self._records(part, instance, contents, made)
    except OSError as error:
      raise self._failed(piece.id, error) from error
    return records

  def _records(
    self, part: Part, instance: tuple[int, ...], contents: list[np.ndarray], made: Converted
  ) -> Iterator[Record]:
    """Digests of one instance's values and scales, contiguous as they are written."""
    checkpoint, stored = self._reader.checkpoint, part.stored
    sources = list(itertools.chain(*names_of(checkpoint, part.prefix(instance), stored.stack.weight.sources)))
    files = [checkpoint.tensor(name).file for name in sources]
    for array, content in zip(stored.arrays, contents, strict=True):
      is_scales = array is stored.scales
      yield pieces.record(
        part.name(array, instance),
        content.shape,
        array.dtype,
        content.nbytes,
        hashlib.sha256(content.reshape(-1).view(np.uint8)).hexdigest(),
        sources,
        files,
        "scales" if is_scales else made.method,
        None if is_scales else made.exactness,
      )

  def _failed(self, name: str, error: Exception) -> UserError:
    reason = str(error).splitlines()[0]
    return UserError(
      f"{self._directory}: {name} can't be written: {reason}; what is done is kept: once that is mended, run the same "
      "command again"
    )

  def finish(self) -> None:
    for array in self._arrays:
      folder = os.path.join(self._directory, layout.WEIGHTS, array.name)
      for index in array.files():
        path = os.path.join(folder, file_name(array, index))
        size = os.path.getsize(path) if os.path.exists(path) else -1
        if size != _file_bytes(array):
          found = "is missing" if size < 0 else f"has {size:,} bytes, not {_file_bytes(array):,}"
          raise UserError(
            f"{path} {found}, though the journal has it as written; delete {self._directory} and convert again"
          )
      for parent, _, names in os.walk(folder):
        for name in names:  # of writes that a killed run began
          if name.endswith(shard_file.UNFINISHED):
            os.remove(os.path.join(parent, name))
        sync_directory(parent)
    weights = os.path.join(self._directory, layout.WEIGHTS)
    write_file(os.path.join(weights, "_METADATA"), json.dumps(_orbax_metadata(self._arrays), sort_keys=True))
    sync_directory(weights)


def file_name(array: DiskArray, index: tuple[slice, ...]) -> str:
  """Of the file that holds a part of an array, in the array's folder."""
  numbers = [s.start // size for s, size in zip(index, array.file_shape, strict=True)]
  return os.path.join("c", *map(str, numbers))


@functools.lru_cache(maxsize=1024)
def _file_bytes(array: DiskArray) -> int:
  """Of each file: its parts with a checksum of 4 bytes each, and an index with 16 bytes for each and a checksum."""
  count = math.prod(n // part for n, part in zip(array.file_shape, array.part_shape, strict=True))
  return math.prod(array.file_shape) * ts.dtype(array.dtype).numpy_dtype.itemsize + 20 * count + 4


def _orbax_metadata(arrays: Sequence[DiskArray]) -> dict[str, Any]:
  """What Orbax wants to know of a tree of arrays before it restores it."""

  def leaf(array: DiskArray) -> tuple[str, dict[str, Any]]:
    keys = tuple(array.name.split("."))
    value = {"value_type": "np.ndarray", "skip_deserialize": False, "write_shape": list(array.file_shape)}
    return str(keys), {"key_metadata": [{"key": key, "key_type": 2} for key in keys], "value_metadata": value}

  return {
    "tree_metadata": dict(map(leaf, arrays)),
    "use_ocdbt": False,
    "use_zarr3": True,
    "store_array_data_equal_to_fill_value": True,
    "custom_metadata": None,
  }
