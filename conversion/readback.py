"""Converted checkpoints read back, tensor by tensor, and compared with their sources in the release's orientation."""

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from conversion import block_fp8, pieces
from conversion.block_fp8 import Exactness
from conversion.journal import Record
from conversion.maxtext_output import Part, parts
from conversion.pieces import Piece
from conversion.source import Reader, names_of
from MaxText import mxfp4, quantization
from MaxText.configs.model_config import ModelConfig
from MaxText.converted import layout
from MaxText.converted.manifest import Manifest
from MaxText.errors import UserError

Found = tuple[int, int, int]  # tensors, elements compared, those that are inexact


class Mismatch(Exception):
  """A tensor that isn't what it should be: which one, and where."""


class Result(Protocol):
  """A layout that a conversion wrote.

  Attributes:
    units: what is verified at a time.
    names: of all tensors there are.
  """

  units: list[Piece]
  names: set[str]

  def check(self, unit: Piece, records: dict[str, Record]) -> Found:
    """Verifies one unit; raises `Mismatch`. Called from several threads."""


def compare_digest(record: Record, content: Iterable[np.ndarray]) -> None:
  """Compares a tensor's bytes, in parts, with its line in tensors.jsonl."""
  digest = hashlib.sha256()
  for part in content:
    digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
  if digest.hexdigest() != record["sha256"]:
    raise Mismatch(f"{record['name']} isn't what was written: its sha256 is {digest.hexdigest()}")


def compare(record: Record, pairs: Iterable[tuple[str, np.ndarray, np.ndarray]]) -> Found:
  """Compares a decoded tensor with what it was made of.

  Args:
    record: its line in tensors.jsonl, which says how many elements differ, and by how much.
    pairs: of each source its name, and float32 of both sides in the same shape.
  """
  exactness = Exactness(**record["exactness"])
  elements = inexact = 0
  for name, found, wanted in pairs:
    if found.shape != wanted.shape:
      raise Mismatch(f"{record['name']} decodes to {found.shape}, {name} is {wanted.shape}")
    found, wanted = np.ascontiguousarray(found), np.ascontiguousarray(wanted)
    elements += wanted.size
    differing = np.argwhere(found.view(np.uint32) != wanted.view(np.uint32))
    inexact += len(differing)
    if not len(differing):
      continue
    places = tuple(differing.T)
    errors = np.abs(found[places].astype(np.float64) - wanted[places])
    # `not ≤`, as NaN is no small error.
    if not exactness.inexact_elements or not errors.max() <= exactness.largest_absolute_error:
      place = differing[0 if not exactness.inexact_elements else int(errors.argmax())]
      at = tuple(place)
      raise Mismatch(
        f"{record['name']}: element {place.tolist()} of {name} is {found[at]!r}, its source is {wanted[at]!r}"
        + (f"; recorded are differences up to {exactness.largest_absolute_error:.3g}" if inexact else "")
      )
  if inexact != exactness.inexact_elements:
    raise Mismatch(f"{record['name']} differs in {inexact:,} elements, {exactness.inexact_elements:,} are recorded")
  return 1, elements, inexact


class MaxTextResult:
  """DST/weights; see `Result`."""

  def __init__(self, reader: Reader | None, cfg: ModelConfig, directory: str, manifest: Manifest):
    """
    Args:
      reader: of the source; None compares digests alone.
    """
    self._reader = reader
    stored = layout.stored_weights(cfg, layout.disk_storage(cfg, ml_dtypes.bfloat16, manifest.experts, manifest.dense))
    if layout.arrays_of(stored) != manifest.arrays:
      raise Mismatch(f"{directory}: arrays of its manifest aren't those of the model of the source's config.json")
    try:
      self._open = {array.name: array.open(directory) for one in stored.values() for array in one.arrays}
    except (ValueError, OSError) as error:
      raise UserError(f"{directory} can't be read: {str(error).splitlines()[0]}") from error
    self.units = list(self._units(stored))
    self.names = {name for unit in self.units for name in unit.work[2]}

  def _units(self, stored: dict[str, layout.StoredWeight]) -> Iterator[Piece]:
    """One instance of a weight, or the part of one that a file holds, each."""
    for one in stored.values():
      for part in parts(one):
        for instance in part.instances:
          names = [part.name(array, instance) for array in one.arrays]
          lead = len(instance)
          nbytes = sum(math.prod(array.file_shape[lead:]) * np.dtype(array.dtype).itemsize for array in one.arrays)
          elements = math.prod(one.values.file_shape[lead:]) * (2 if one.form is quantization.MXFP4 else 1)
          yield Piece(names[0], (), ("", 0), nbytes, nbytes + 24 * elements, "", (part, instance, names))

  def _read(self, part: Part, instance: tuple[int, ...]) -> list[np.ndarray]:
    lead = len(instance)
    read = []
    for array in part.stored.arrays:
      index = (*instance, *array.files()[part.number][lead:])
      try:
        read.append(self._open[array.name][index].read().result())
      except (ValueError, OSError) as error:
        raise Mismatch(f"{part.name(array, instance)} can't be read: {str(error).splitlines()[0]}") from error
    return read

  def check(self, unit: Piece, records: dict[str, Record]) -> Found:
    part, instance, names = unit.work
    arrays = self._read(part, instance)
    for name, array in zip(names, arrays, strict=True):
      compare_digest(records[name], [array])
    if self._reader is None:
      return len(names), 0, 0
    _, elements, inexact = compare(records[names[0]], self._pairs(part, instance, arrays))
    return len(names), elements, inexact

  def _pairs(
    self, part: Part, instance: tuple[int, ...], arrays: list[np.ndarray]
  ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """See `compare`."""
    weight, prefix = part.stored.stack.weight, part.prefix(instance)
    value = _decode(part.stored, arrays)
    if part.rows is None:
      released = weight.to_release(value)
    else:  # of one matrix: `to_release` takes whole ones
      released = weight.disassemble(value) if weight.disassemble else (value.T,)
    kept = math.prod(weight.shape)
    for names, found in zip(names_of(self._reader.checkpoint, prefix, weight.sources), released, strict=True):
      wanted = self._reader.values(names, part.rows).astype(np.float32)
      if found.size > kept:  # A_log, whose values beyond the model's heads are padding
        found, wanted = found.reshape(-1)[:kept], wanted.reshape(-1)[:kept]
      # Members of the family have some tensors in shapes that differ by axes of size 1.
      yield names[0], found.reshape(wanted.shape) if found.size == wanted.size else found, wanted


def _decode(stored: layout.StoredWeight, arrays: list[np.ndarray]) -> np.ndarray:
  """Arrays of one instance -> float32 in the shape of the plain weight."""
  if stored.form is None:
    return arrays[0].astype(np.float32)
  values, scales = arrays
  if stored.form is quantization.MXFP4:
    values = layout.codes_of(values).view(ml_dtypes.float4_e2m1fn)
    scales = scales.view(ml_dtypes.float8_e8m0fnu)
  spread = scales.astype(np.float32)
  for axis, run in enumerate(stored.runs):
    spread = np.repeat(spread, run, axis)
  with np.errstate(over="ignore"):
    return values.astype(np.float32) * spread


class HfResult:
  """DST's safetensors; see `Result`."""

  def __init__(self, reader: Reader | None, made: Reader):
    """
    Args:
      reader: of the source; None compares digests alone.
      made: of DST.
    """
    self._reader, self._made = reader, made
    self.names = set(made.checkpoint.tensors)
    scales = ("_scale_inv", "_scale")
    values = sorted(name for name in self.names if not name.endswith(scales))
    self.units = [self._unit(name) for name in values]

  def _unit(self, name: str) -> Piece:
    stem = name.removesuffix("_packed")
    names = [n for n in (name, f"{stem}_scale_inv", f"{stem}_scale") if n in self.names]
    tensors = [self._made.checkpoint.tensors[n] for n in names]
    converted = tensors[0].dtype in ("F8_E4M3", "BF16") and len(tensors[0].shape) == 2
    nbytes = sum(tensor.nbytes for tensor in tensors)
    memory = 16 * math.prod(tensors[0].shape) if converted else 0
    return Piece(name, (), ("", 0), nbytes, memory + 2**28, "", names)

  def check(self, unit: Piece, records: dict[str, Record]) -> Found:
    names: list[str] = unit.work
    record = records[names[0]]
    tensors = [self._made.checkpoint.tensors[name] for name in names]
    for name, tensor in zip(names, tensors, strict=True):
      compare_digest(records[name], self._made.bytes_of(tensor))
    if self._reader is None:
      return len(names), 0, 0
    held = self._reader.checkpoint.tensors
    unknown = [source for name in names for source in records[name]["source"] if source not in held]
    if unknown:
      raise Mismatch(f"{names[0]} names {unknown[0]} as its source, which isn't there")
    if record["method"] in (pieces.COPIED, pieces.PACKED):
      for name, tensor in zip(names, tensors, strict=True):
        self._compare_copy(name, tensor, held[name])
      elements = math.prod(tensors[0].shape) * (2 if record["method"] == pieces.PACKED else 1)
      return len(names), elements, 0
    found = self._made.array(tensors[0])
    found = found.astype(np.float32) if len(names) == 1 else block_fp8.decode(found, self._made.array(tensors[1]))
    sources = [self._reader.array(held[source]) for source in record["source"]]
    wanted = mxfp4.unpack(*sources) if len(sources) == 2 else sources[0].astype(np.float32)
    _, elements, inexact = compare(record, [(record["source"][0], found, wanted)])
    return len(names), elements, inexact

  def _compare_copy(self, name: str, tensor: Any, source: Any) -> None:
    if (tensor.dtype, tensor.shape) != (source.dtype, source.shape):
      raise Mismatch(f"{name} is {tensor.dtype} {tensor.shape}, its source {source.dtype} {source.shape}")
    done = 0
    for found, wanted in zip(self._made.bytes_of(tensor), self._reader.bytes_of(source), strict=True):
      differing = np.flatnonzero(found != wanted)
      if len(differing):
        element = (done + int(differing[0])) * math.prod(tensor.shape) // tensor.nbytes
        place = [int(i) for i in np.unravel_index(element, tensor.shape)]
        raise Mismatch(f"{name}: element {place} isn't its source's")
      done += len(found)
