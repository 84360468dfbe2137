"""MXFP4, and plain floats, into block-FP8: e4m3 values with one float32 scale for each 128×128 block, errors counted.

A matrix comes in the release's orientation, [out, in], and leaves in it (`weight` and `weight_scale_inv` of the Hugging
Face layout) or inputs first, as `quantization.BlockFP8` holds it, which is the plain transpose of both arrays. Scales
of MXFP4's blocks are powers of two, so a product value · scale is exact wherever float32 can hold it.
"""

import math
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from conversion import e4m3_bytes
from MaxText import mxfp4, quantization

BLOCK = quantization.BLOCK
# e4m3fn holds the multiples of 2^−9 below 2^−6 and four significant bits from there to 448; E2M1 has two significant
# bits. So m·2^k is exact when its lowest bit is ≥ 2^−9 (½·2^k: k ≥ −8) and m·2^k ≤ 448 (6·2^k: k ≤ 6): spread 14.
EXACT_SPREAD = 14
_FP8 = ml_dtypes.float8_e4m3fn
_TOP = 8  # exponent of e4m3's top binade, [256, 448]: E2M1's mantissas, 1 and 1.5, both fit there
_TOP_CODE = 2  # exponent of E2M1's top binade: 4 and 6
# A scale is at least float32's least normal number, as devices flush what is smaller. This costs no bit: E8M0 begins at
# 2^−127, and values down to 2^−9 times the scale are exact.
_LEAST = -126
_NONE = 1000  # beyond every exponent: of bytes that hold only zeros
_BIAS = np.int16(127)  # of E8M0
_MAGNITUDES = np.uint8(0x77)  # a packed byte without its signs
# The k for which all values m·2^k are normal numbers of e4m3, from ½·2^−5 to 6·2^6.
_NORMAL = (-5, 6)
_GROUPS = BLOCK // mxfp4.GROUP  # of one row in a block
_BYTES = mxfp4.GROUP // 2  # of a group
_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


@dataclass(frozen=True)
class Exactness:
  """What a conversion changed. Those of several matrices add up.

  Attributes:
    elements: values converted.
    inexact_elements: values whose decoded result differs from the source's. −0 stays −0 and counts as exact.
    blocks: 128×128 blocks, partial ones included.
    inexact_blocks: blocks with an inexact element.
    largest_absolute_error: |decoded − source|, in the weights' own unit.
    largest_relative_error: |decoded − source| / |source|; 1 where a value became zero.
    squared_error, squared: sums of (decoded − source)² and source², of conversions by `from_float` alone.
  """

  elements: int = 0
  inexact_elements: int = 0
  blocks: int = 0
  inexact_blocks: int = 0
  largest_absolute_error: float = 0.0
  largest_relative_error: float = 0.0
  squared_error: float = field(default=0.0, compare=False)
  squared: float = field(default=0.0, compare=False)

  @property
  def relative_error(self) -> float:
    """Of the whole: root of the mean squared error over that of the mean square."""
    return math.sqrt(self.squared_error / self.squared) if self.squared else 0.0

  def __add__(self, other: "Exactness") -> "Exactness":
    return Exactness(
      self.elements + other.elements,
      self.inexact_elements + other.inexact_elements,
      self.blocks + other.blocks,
      self.inexact_blocks + other.inexact_blocks,
      max(self.largest_absolute_error, other.largest_absolute_error),
      max(self.largest_relative_error, other.largest_relative_error),
      self.squared_error + other.squared_error,
      self.squared + other.squared,
    )


# Tables from a packed byte to its two values, one row for each k in m·2^k. From k = 9, where a group of halves alone
# still fits (½·2^9 = 256), down to k = −13, where 6 is under half of 2^−9 and all values become zero.
_SHIFTS = np.arange(9, -14, -1)
_PACKED = np.arange(256)


def _pairs(table: np.ndarray) -> np.ndarray:
  """[…, 16], by code -> […, 256, 2], by packed byte."""
  return table[..., np.stack([_PACKED & 15, _PACKED >> 4], axis=-1)]


def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Flat tables; the first four have an entry for row · 256 + packed byte.

  Returns:
    Two e4m3 bytes as one uint16; how many of the two are inexact (uint8); the larger error of the two, as a multiple of
    the group's scale and relative to the value (float64). Entries that overflow e4m3 are NaN: no group reaches them.
    By packed byte: the exponent of its larger value, rounded down (int16); −`_NONE` where both are zero.
  """
  codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
  shifted = np.ldexp(codes, _SHIFTS[:, None])
  stored = shifted.astype(_FP8)  # to nearest, ties to even
  errors = np.ldexp(np.abs(stored.astype(np.float64) - shifted), -_SHIFTS[:, None])
  relative = errors / np.where(codes == 0, 1, np.abs(codes))
  exponents = np.where(codes == 0, -_NONE, np.frexp(codes)[1] - 1).astype(np.int16)
  return (
    np.ascontiguousarray(_pairs(stored.view(np.uint8))).view(np.uint16).ravel(),
    (_pairs(errors) != 0).sum(axis=-1, dtype=np.uint8).ravel(),
    _pairs(errors).max(axis=-1).ravel(),
    _pairs(relative).max(axis=-1).ravel(),
    _pairs(exponents).max(axis=-1),
  )


_E4M3, _INEXACT, _ERRORS, _RELATIVE, _EXPONENTS = _tables()


def from_mxfp4(
  packed: np.ndarray, scale: np.ndarray, *, inputs_first: bool = True
) -> tuple[np.ndarray, np.ndarray, Exactness]:
  """A packed matrix in block-FP8, exact wherever a block can be.

  A block can be when the E8M0 exponents of its groups spread over at most `EXACT_SPREAD`, and for wider ones when the
  values at the ends happen to fit all the same; groups of zeros don't count. The scale is 2^−6 times the largest
  group's (at least 2^−126). In wider blocks it is the least power of two that overflows nothing, so that the bits that
  are lost are the smallest values', rounded to nearest, ties to even. −0 stays −0. A block of zeros has scale 1.

  Args:
    packed: [out, in / 2] uint8, as `mxfp4.unpack` takes it.
    scale: [out, in / 32] uint8, biased exponents.
    inputs_first: whether results are [in, out], or else [out, in].

  Returns:
    Values e4m3fn [in, out], read-only unless a block is wide; scales float32 [⌈in/128⌉, ⌈out/128⌉]; both transposed
    where inputs aren't first; what was lost. Beyond the result, memory is twice that of `packed`.

  Raises:
    ValueError: other dtypes, shapes that don't belong together, nothing in them, or a scale of 255 (NaN): says where.
  """
  _check(packed, scale)
  outputs, groups = scale.shape
  block_exponents, spreads, normal, fields = _blocks(packed, scale)
  values = e4m3_bytes.encode(packed, fields, inputs_first)
  exactness = Exactness(elements=outputs * groups * mxfp4.GROUP, blocks=normal.size)
  if not normal.all():
    values = values.copy()
    by_output = values.T if inputs_first else values
    for i, j in np.argwhere(~normal):
      codes, exponents = _block(packed, scale, i, j)
      if spreads[i, j] > EXACT_SPREAD:
        block_exponents[i, j], lost = _wide(codes, exponents)
        exactness += lost
      pairs = np.take(_E4M3, _entries(codes, exponents, block_exponents[i, j])).view(np.uint8)
      by_output[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] = pairs.reshape(len(codes), -1)
  scales = np.ldexp(np.float32(1), block_exponents)
  return values.view(_FP8), np.ascontiguousarray(scales.T) if inputs_first else scales, exactness


def from_float(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, Exactness]:
  """A plain matrix in block-FP8 as `quantization.quantize_block_fp8` makes it: a block's largest magnitude is 448.

  The zeros that blocks of very small values become there are counted as what they are, inexact.

  Args:
    matrix: [out, in] float32, bfloat16 or float16.

  Returns:
    Values e4m3fn [out, in]; scales float32 [⌈out/128⌉, ⌈in/128⌉]; what was lost, errors being those of `decode`, in
    float32.

  Raises:
    ValueError: another dtype or rank, nothing in it, or a value that isn't finite: says where.
  """
  if matrix.dtype not in _FLOATS or matrix.ndim != 2 or not matrix.size:
    raise ValueError(f"a matrix of float32, bfloat16 or float16 is wanted, not {matrix.dtype} {matrix.shape}")
  outputs, inputs = matrix.shape
  starts = np.arange(0, inputs, BLOCK)
  values, scales = np.empty(matrix.shape, _FP8), np.empty((-(-outputs // BLOCK), len(starts)), np.float32)
  exactness = Exactness(elements=matrix.size, blocks=scales.size)
  for number, first in enumerate(range(0, outputs, BLOCK)):  # rows of blocks; the last may be partial
    source = matrix[first : first + BLOCK].astype(np.float32)
    if not np.isfinite(source).all():
      output, column = np.argwhere(~np.isfinite(source))[0]
      raise ValueError(f"the matrix holds {source[output, column]} at output {first + output}, input {column}")
    # Blocks are squares, so the transpose of a matrix has the transposed values and scales.
    made, of_blocks = quantization.quantize_block_fp8(source)
    errors = np.abs(decode(made, of_blocks).astype(np.float64) - source)
    inexact = np.logical_or.reduceat(errors.any(axis=0), starts)
    relative = np.divide(errors, np.abs(source), out=np.zeros_like(errors), where=errors > 0)
    values[first : first + BLOCK], scales[number] = made, of_blocks[0]
    exactness += Exactness(
      inexact_elements=int(np.count_nonzero(errors)),
      inexact_blocks=int(inexact.sum()),
      largest_absolute_error=float(errors.max()),
      largest_relative_error=float(relative.max()),
      squared_error=float(np.square(errors).sum()),
      squared=float(np.square(source, dtype=np.float64).sum()),
    )
  return values, scales, exactness


def decode(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Block-FP8 of either orientation -> float32 of the same shape, for verification.

  What `from_mxfp4` made without loss equals `mxfp4.unpack` of its source bit for bit; beyond float32's range both are
  infinite.

  Args:
    values: [I, O] e4m3fn.
    scales: [⌈I/128⌉, ⌈O/128⌉] float32.

  Raises:
    ValueError: other dtypes, or shapes that don't belong together.
  """
  wanted = tuple(-(-n // BLOCK) for n in values.shape)
  if values.dtype != _FP8 or scales.dtype != np.float32 or values.ndim != 2 or scales.shape != wanted:
    raise ValueError(
      f"values {values.dtype} {values.shape} and scales {scales.dtype} {scales.shape} aren't block-FP8 of a matrix"
    )
  with np.errstate(over="ignore"):
    return values.astype(np.float32) * quantization.spread_scales(scales, values.shape)


def _check(packed: np.ndarray, scale: np.ndarray) -> None:
  """Raises what `from_mxfp4` says."""
  if packed.dtype != np.uint8 or scale.dtype != np.uint8:
    raise ValueError(f"weight_packed and weight_scale must be uint8, not {packed.dtype} and {scale.dtype}")
  fitting = packed.ndim == scale.ndim == 2 and packed.shape == (scale.shape[0], scale.shape[1] * _BYTES)
  if not fitting or not packed.size:
    raise ValueError(f"weight_packed {packed.shape} and weight_scale {scale.shape} don't belong together, or are empty")
  bad = scale == mxfp4.NAN_SCALE
  if bad.any():
    output, group = np.argwhere(bad)[0]
    first = group * mxfp4.GROUP
    raise ValueError(
      f"weight_scale holds {mxfp4.NAN_SCALE}, which is NaN, at [{output}, {group}]: output {output}, "
      f"inputs {first} to {first + mxfp4.GROUP - 1} ({np.count_nonzero(bad)} in all)"
    )


def _block(packed: np.ndarray, scale: np.ndarray, i: int, j: int) -> tuple[np.ndarray, np.ndarray]:
  """A block's packed bytes [≤ 128, ≤ 4, 16] and the exponents of its groups [≤ 128, ≤ 4], int16."""
  rows, part = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * _GROUPS, (j + 1) * _GROUPS)
  return packed.reshape(*scale.shape, _BYTES)[rows, part], scale[rows, part].astype(np.int16) - _BIAS


def _blocks(packed: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """What is to be known of blocks before they are encoded.

  Nearly always all of it follows from the scales, and from one group of each block that isn't zero.

  Args:
    packed: [out, in / 2] uint8.
    scale: [out, in / 32] uint8.

  Returns:
    Three arrays [⌈out/128⌉, ⌈in/128⌉]: the scales' exponents (int16), where spreads allow it; how far the exponents of
    the groups spread, or more, where that makes no difference; whether all results are normal numbers of e4m3. And what
    `e4m3_bytes.encode` wants of the groups of normal blocks, for others anything.
  """
  outputs, groups = scale.shape
  # Copies of the last row and column change no block's extremes.
  padded = np.pad(scale, ((0, -outputs % BLOCK), (0, -groups % _GROUPS)), "edge")
  columns = padded.shape[1]
  padded = padded.reshape(-1, BLOCK, columns)
  shape = (len(padded), columns // _GROUPS, _GROUPS)
  highest, lowest = padded.max(axis=1).reshape(shape), padded.min(axis=1).reshape(shape)
  largest, smallest = (a.astype(np.int16) - _BIAS for a in (highest.max(axis=-1), lowest.min(axis=-1)))
  # Of each block a group with the largest scale: its column, then its row.
  column = highest.argmax(axis=-1) + np.arange(0, columns, _GROUPS)
  places = np.arange(0, padded.size, columns).reshape(-1, BLOCK, 1) + column[:, None]
  row = np.take(padded, places).argmax(axis=1) + np.arange(0, len(padded) * BLOCK, BLOCK)[:, None]
  tops = packed.reshape(outputs, groups, _BYTES)[row, column]

  def results() -> tuple[np.ndarray, np.ndarray]:
    exponents = np.maximum(largest + _TOP_CODE - _TOP, _LEAST)
    least, most = _NORMAL
    return exponents, (smallest - exponents >= least) & (largest - exponents <= most)

  zeros = np.zeros(largest.shape, bool)
  for i, j in np.argwhere(~((tops & _MAGNITUDES).any(axis=-1) & results()[1])):
    codes, exponents = _block(packed, scale, i, j)
    filled = exponents[(codes & _MAGNITUDES).any(axis=-1)]
    zeros[i, j] = not filled.size
    largest[i, j], smallest[i, j] = (filled.max(), filled.min()) if filled.size else (0, 0)
  block_exponents, normal = results()
  block_exponents[zeros] = 0
  # E2M1's bias is 1 and e4m3's is 7, so m·2^k has E2M1's exponent and k + 6.
  offsets = np.repeat((block_exponents + _BIAS - 6).astype(np.uint8), _GROUPS, axis=1)
  fields = (padded - offsets[:, None]).reshape(-1, columns)[:outputs, :groups]
  return block_exponents, largest - smallest, zeros | normal, fields


def _entries(groups: np.ndarray, exponents: np.ndarray, scale_exponents: np.ndarray | int) -> np.ndarray:
  """Packed bytes [R, G, 16] and their groups' exponents [R, G] -> where to look them up, uint16 [R, G, 16]."""
  # Outside the table lie groups of zeros, for which every row is right, and those that become zero.
  rows = np.clip(_SHIFTS[0] - (exponents - scale_exponents), 0, len(_SHIFTS) - 1).astype(np.uint16)
  return (rows << 8)[..., None] | groups


def _wide(groups: np.ndarray, exponents: np.ndarray) -> tuple[int, Exactness]:
  """The scale's exponent of a block whose groups' exponents spread too far, found from its values, and what is lost.

  Args:
    groups: [R, ≤ 4, 16] uint8.
    exponents: [R, ≤ 4] int16.
  """
  # Not below `_LEAST`: with such a spread the top is at least 2^−113.
  scale_exponent = int((_EXPONENTS[groups].max(axis=-1) + exponents).max()) - _TOP
  entries = _entries(groups, exponents, scale_exponent)
  inexact = int(_INEXACT[entries].sum(dtype=np.int64))
  lost = Exactness(
    inexact_elements=inexact,
    inexact_blocks=int(inexact > 0),
    largest_absolute_error=float(np.ldexp(_ERRORS[entries].max(axis=-1), exponents).max()),
    largest_relative_error=float(_RELATIVE[entries].max()),
  )
  return scale_exponent, lost
