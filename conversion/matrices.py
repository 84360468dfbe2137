"""One matrix in another format, and what that changed; shared by the layouts."""

import ml_dtypes
import numpy as np

from conversion import block_fp8, e4m3_bytes, pieces
from conversion.block_fp8 import Exactness
from conversion.source import Reader
from MaxText.errors import UserError

_BF16 = np.dtype(ml_dtypes.bfloat16)


def to_block_fp8(reader: Reader, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray, str, Exactness]:
  """A released matrix in block-FP8, in the release's orientation, [out, in].

  Args:
    names: of its tensors: one, or a packed pair.

  Returns:
    Values, scales, what was done, what was lost.

  Raises:
    UserError: a tensor that can't be read, or holds what can't be converted.
  """
  if len(names) == 2:
    values, scales, exactness = block_fp8.from_mxfp4(*reader.packed(names), inputs_first=False)
    return values, scales, pieces.POWER_OF_TWO, exactness
  matrix = reader.values(names)
  try:
    values, scales, exactness = block_fp8.from_float(matrix)
  except ValueError as error:
    raise UserError(f"{names[0]} can't be put into block-FP8: {error}") from error
  return values, scales, pieces.ROUNDED, exactness


def to_float(value: np.ndarray, dtype: np.dtype, decoded: bool) -> tuple[np.ndarray, str, Exactness]:
  """A plain array in another float dtype.

  Args:
    value: floats of any kind.
    decoded: whether they come from a packed tensor.

  Returns:
    The array, what was done, what was lost.
  """
  if value.dtype == dtype:
    return value, pieces.COPIED, Exactness(elements=value.size)
  with np.errstate(over="ignore"):
    stored = value.astype(dtype)
  if dtype != _BF16:
    return stored, pieces.WIDENED, Exactness(elements=value.size)
  return stored, pieces.DECODED if decoded else pieces.NARROWED, _narrowing(value, stored)


def bits(array: np.ndarray) -> np.ndarray:
  """The same memory as unsigned numbers: NumPy copies its own types several times as fast as those of others."""
  return array.view(f"u{array.dtype.itemsize}")


def contiguous(array: np.ndarray) -> np.ndarray:
  """The same values in the order of their indices, copied where they lie otherwise."""
  if array.ndim == 2 and array.T.flags.c_contiguous:
    return e4m3_bytes.turn(bits(array.T)).view(array.dtype)
  return np.ascontiguousarray(bits(array)).view(array.dtype)


def _narrowing(value: np.ndarray, stored: np.ndarray) -> Exactness:
  """What a narrower float lost. A value that overflowed counts with a relative error of 1."""
  inexact = np.nonzero((stored.astype(np.float32) != value) & ~np.isnan(value))
  source, found = value[inexact].astype(np.float64), stored[inexact].astype(np.float64)
  errors = np.where(np.isfinite(found), np.abs(found - source), np.abs(source))
  return Exactness(
    elements=value.size,
    inexact_elements=len(errors),
    largest_absolute_error=float(errors.max(initial=0)),
    largest_relative_error=float((errors / np.abs(source)).max(initial=0)),
  )
