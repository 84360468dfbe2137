"""Writes the Hugging Face layout: safetensors files named as the source's, block-FP8 in DeepSeek's convention.

A matrix in block-FP8 is `weight`, e4m3 [out, in], and `weight_scale_inv`, float32 [⌈out/128⌉, ⌈in/128⌉], which values
are multiplied by. What isn't converted, the vision tower too, is copied byte by byte. Files lie in DST/.conversion
until the end, so that nobody takes a half of them for a checkpoint.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from conversion import pieces
from conversion.block_fp8 import BLOCK, Exactness
from conversion.headers import Tensor
from conversion.journal import Record, forget, sync_directory, write_file
from conversion.matrices import to_block_fp8, to_float
from conversion.pieces import Limit, Piece
from conversion.source import Reader, header_size, names_of
from MaxText.checkpoint import INDEX
from MaxText.configs.model_config import ModelConfig
from MaxText.converted.manifest import WORK
from MaxText.errors import UserError
from MaxText.models import kimi_k3
from MaxText.weights import Storage, is_stack

_PIECE = 64 * 2**20  # bytes, about, that are synced and journaled at a time
_LEAST_PIECES = 16  # of a file, if it has that many tensors
_BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
_SHARDS = "shards"  # folder of unfinished files
_BF16 = np.dtype(ml_dtypes.bfloat16)


class Item(NamedTuple):
  """A tensor of the source, or a packed pair, and what becomes of it.

  Attributes:
    names: without the text model's prefix, as `HeaderCheckpoint.tensor` takes them.
    form: "copy", "block_fp8" or "bfloat16".
    made: what is written: names in the file.
  """

  names: tuple[str, ...]
  form: str
  made: tuple[str, ...]


@dataclass
class Shard:
  """A file to be written.

  Attributes:
    items: in the order of the source's bytes.
    header: all that lies before the first tensor.
    tensors: where each tensor lies.
    nbytes: of the whole file.
  """

  file: str
  items: list[Item] = field(default_factory=list)
  header: bytes = b""
  tensors: dict[str, Tensor] = field(default_factory=dict)

  @property
  def nbytes(self) -> int:
    return len(self.header) + sum(tensor.nbytes for tensor in self.tensors.values())


class HfOutput:
  """DST's shards and index; see `pieces.Output`."""

  def __init__(self, reader: Reader, cfg: ModelConfig, experts: str, dense: str, directory: str, limit: Limit):
    """
    Args:
      experts, dense: of `Storage`.
      directory: DST.
    """
    self._reader, self._directory, self._limit = reader, directory, limit
    self._folder = os.path.join(directory, WORK, _SHARDS)
    self.arrays: dict[str, Any] = {}
    # Where nothing changes, files stay as they are, byte by byte, and are linked where that is possible.
    self._verbatim = experts == "mxfp4"
    self._shards = {file: Shard(file) for file in reader.checkpoint.shards}
    for item in _items(reader, cfg, Storage(_BF16, experts, dense)):
      self._shards[reader.checkpoint.tensor(item.names[0]).file].items.append(item)
    for shard in self._shards.values():
      self._describe(shard)
    self.pieces = sorted((p for shard in self._shards.values() for p in self._pieces(shard)), key=lambda p: p.order)

  def _describe(self, shard: Shard) -> None:
    """Fills in the header and where each tensor lies."""
    checkpoint = self._reader.checkpoint
    shard.items.sort(key=lambda item: checkpoint.tensor(item.names[0]).offset)
    if self._verbatim:
      shard.tensors = {name: checkpoint.tensors[name] for item in shard.items for name in item.made}
      first = min((tensor.offset for tensor in shard.tensors.values()), default=0)
      shard.header = bytes(first)  # its length counts; the file gets the source's own
      return
    made = {name: described for item in shard.items for name, described in self._made(item).items()}
    # Wide dtypes first, so that each is aligned.
    order = sorted(made, key=lambda name: (-_width(*made[name]), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
      dtype, shape, nbytes = made[name]
      header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
      end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    shard.header = len(text).to_bytes(8, "little") + text
    for name in order:
      dtype, shape, nbytes = made[name]
      begin = len(shard.header) + header[name]["data_offsets"][0]
      shard.tensors[name] = Tensor(shard.file, dtype, tuple(shape), begin, nbytes)

  def _made(self, item: Item) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """(dtype, shape, bytes) of what becomes of an item."""
    tensor = self._reader.checkpoint.tensor(item.names[0])
    if item.form == "copy":
      return {item.made[0]: (tensor.dtype, tensor.shape, tensor.nbytes)}
    shape = (tensor.shape[0], tensor.shape[1] * 2) if len(item.names) == 2 else tensor.shape
    if item.form == "bfloat16":
      return {item.made[0]: ("BF16", shape, 2 * math.prod(shape))}
    blocks = tuple(-(-n // BLOCK) for n in shape)
    return {
      item.made[0]: ("F8_E4M3", shape, math.prod(shape)),
      item.made[1]: ("F32", blocks, 4 * math.prod(blocks)),
    }

  def _pieces(self, shard: Shard) -> Iterator[Piece]:
    """Runs of a shard's items of about the same bytes."""
    most = min(_PIECE, sum(tensor.nbytes for tensor in shard.tensors.values()) // _LEAST_PIECES)
    held: list[Item] = []
    for i, item in enumerate(shard.items):
      held.append(item)
      if i + 1 == len(shard.items) or self._nbytes(shard, held) >= most:
        yield self._piece(shard, tuple(held))
        held = []

  def _nbytes(self, shard: Shard, items: Sequence[Item]) -> int:
    return sum(shard.tensors[name].nbytes for item in items for name in item.made)

  def _piece(self, shard: Shard, items: tuple[Item, ...]) -> Piece:
    tensors = [self._reader.checkpoint.tensor(name) for item in items for name in item.names]
    start = min((t.file, t.offset) for t in tensors if t.file == shard.file)
    # One item at a time, read, decoded and converted; copies are made in chunks.
    memory = max((4 * self._nbytes(shard, [item]) for item in items if item.form != "copy"), default=0)
    nbytes = self._nbytes(shard, items)
    name = f"{shard.file}/{items[0].made[0]}"
    files = tuple(sorted({tensor.file for tensor in tensors}))
    return Piece(name, files, start, nbytes, memory + 2 * _PIECE, shard.file, (shard, items))

  def _unfinished(self, shard: Shard) -> str:
    return os.path.join(self._folder, shard.file)

  def prepare(self, pieces: Sequence[Piece]) -> None:
    os.makedirs(self._folder, exist_ok=True)
    for shard in {piece.unit: piece.work[0] for piece in pieces}.values():
      path = self._unfinished(shard)
      if os.path.exists(path):
        continue
      source = os.path.join(self._reader.checkpoint.directory, shard.file)
      partial = f"{path}.partial"
      if os.path.lexists(partial):
        os.remove(partial)
      if not self._verbatim or not _link(source, partial):
        header = shard.header
        if self._verbatim:
          with open(source, "rb") as f:
            header = f.read(header_size(source))
        with open(partial, "wb") as f:
          f.write(header)
          f.truncate(shard.nbytes)
          os.fsync(f.fileno())
      os.rename(partial, path)
    sync_directory(self._folder)

  def write(self, piece: Piece) -> list[Record]:
    shard, items = piece.work
    path, source = self._unfinished(shard), os.path.join(self._reader.checkpoint.directory, shard.file)
    linked = self._verbatim and os.path.exists(source) and os.path.samefile(path, source)
    descriptor = os.open(path, os.O_RDONLY if linked else os.O_WRONLY)
    records: list[Record] = []
    try:
      for item in items:
        if item.form == "copy":
          records.append(self._copy(shard, item, None if linked else descriptor))
        else:
          records += self._convert(shard, item, descriptor)
      os.fsync(descriptor)
      forget(descriptor)
    except OSError as error:
      raise UserError(
        f"{path} can't be written: {error.strerror}; what is done is kept: once that is mended, run the same command "
        "again"
      ) from error
    finally:
      os.close(descriptor)
    return records

  def _copy(self, shard: Shard, item: Item, descriptor: int | None) -> Record:
    tensor = self._reader.checkpoint.tensor(item.names[0])
    place = shard.tensors[item.made[0]]
    digest, offset = hashlib.sha256(), place.offset
    for chunk in self._reader.bytes_of(tensor):
      digest.update(chunk)
      if descriptor is not None:
        _write(descriptor, chunk, offset)
      offset += len(chunk)
    scales = item.names[0].endswith(".weight_scale")
    method = pieces.PACKED if item.names[0].endswith(".weight_packed") else pieces.COPIED
    elements = math.prod(tensor.shape) * (2 if method == pieces.PACKED else 1)
    return self._record(
      shard, item, 0, digest, "scales" if scales else method, None if scales else Exactness(elements=elements)
    )

  def _convert(self, shard: Shard, item: Item, descriptor: int) -> Iterator[Record]:
    if item.form == "block_fp8":
      values, scales, method, exactness = to_block_fp8(self._reader, item.names)
      arrays = (values, scales)
    else:
      value, method, exactness = to_float(self._reader.values(item.names), _BF16, len(item.names) == 2)
      arrays = (value,)
    self._limit.add(item.made[0], method, exactness)
    for i, array in enumerate(arrays):
      content = array.reshape(-1).view(np.uint8)
      _write(descriptor, content, shard.tensors[item.made[i]].offset)
      yield self._record(shard, item, i, hashlib.sha256(content), "scales" if i else method, None if i else exactness)

  def _record(self, shard: Shard, item: Item, i: int, digest: Any, method: str, exactness: Exactness | None) -> Record:
    checkpoint, place = self._reader.checkpoint, shard.tensors[item.made[i]]
    return pieces.record(
      item.made[i],
      place.shape,
      place.dtype,
      place.nbytes,
      digest.hexdigest(),
      [checkpoint.full_name(name) for name in item.names],
      [checkpoint.tensor(name).file for name in item.names],
      method,
      exactness,
    )

  def finish(self) -> None:
    for shard in self._shards.values():
      path, final = self._unfinished(shard), os.path.join(self._directory, shard.file)
      where = path if os.path.exists(path) else final
      size = os.path.getsize(where) if os.path.exists(where) else -1
      if size != shard.nbytes:
        found = "is missing" if size < 0 else f"has {size:,} bytes, not {shard.nbytes:,}"
        raise UserError(
          f"{path} {found}, though the journal has it as written; delete {self._directory} and start anew"
        )
      if where == path:
        os.rename(path, final)
    sync_directory(self._directory)
    if os.path.exists(os.path.join(self._reader.checkpoint.directory, INDEX)):
      every = {name: tensor for shard in self._shards.values() for name, tensor in shard.tensors.items()}
      total = sum(tensor.nbytes for tensor in every.values())
      where = {name: every[name].file for name in sorted(every)}
      index = {"metadata": {"total_size": total}, "weight_map": where}
      write_file(os.path.join(self._directory, INDEX), json.dumps(index, indent=2) + "\n")


def _items(reader: Reader, cfg: ModelConfig, storage: Storage) -> Iterator[Item]:
  """Every tensor of the source once, each with what becomes of it."""
  checkpoint = reader.checkpoint
  converted = set()
  for stack in jax.tree.leaves(kimi_k3.weight_tree(cfg), is_leaf=is_stack):
    wanted = {"expert": storage.experts, "dense": storage.dense, "": "plain"}[stack.weight.kind]
    for prefix in stack.prefixes:
      for names in names_of(checkpoint, prefix, stack.weight.sources):
        decoded = wanted == "plain" and len(names) == 2
        narrowed = wanted == "plain" and stack.weight.kind == "expert" and checkpoint.tensor(names[0]).dtype != "BF16"
        if wanted == "mxfp4" and len(names) == 1:
          raise UserError(f"{names[0]} isn't packed: weight_format=mxfp4 needs MXFP4 experts")
        if wanted == "block_fp8" or decoded or narrowed:
          weight = checkpoint.full_name(names[0]).removesuffix("_packed")
          made = (weight, f"{weight}_scale_inv") if wanted == "block_fp8" else (weight,)
          converted.update(names)
          yield Item(names, "block_fp8" if wanted == "block_fp8" else "bfloat16", made)
  for name in sorted(checkpoint.every_name - converted):
    yield Item((name,), "copy", (checkpoint.full_name(name),))


def _width(dtype: str, shape: tuple[int, ...], nbytes: int) -> float:
  """Bytes of one value."""
  count = math.prod(shape)
  return nbytes / count if count else _BYTES.get(dtype, 1)


def _link(source: str, path: str) -> bool:
  """Hard-links a file; False where the two places are on different file systems, or that is forbidden."""
  try:
    os.link(os.path.realpath(source), path)
  except OSError:
    return False
  return True


def _write(descriptor: int, content: np.ndarray, offset: int) -> None:
  view, end = memoryview(content), offset
  while view:
    count = os.pwrite(descriptor, view, end)
    view, end = view[count:], end + count
  forget(descriptor, offset, end - offset)  # so its writing begins
