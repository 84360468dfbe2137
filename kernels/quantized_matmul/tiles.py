"""How a product is cut into tiles."""

import math
from dataclasses import dataclass

import jax
from jax.experimental import pallas as pl

from quantized_matmul.formats import LANES, Form

ROW_ALIGNMENT = 16  # sublanes of a bfloat16 register
_DEPTH = 3  # weight tiles in VMEM: one in use, two on their way
_BLOCKS = (16, 32, 64, 128, 256)  # heights of the blocks of rows that are multiplied at a time
FUSED_ROWS = 64  # MXFP4: up to here a group's weights are decoded once for each block, on their way to the matrix unit
_FEW = 1024  # rows of x up to which a call is taken for a decode step's, whose groups are small
_ROW_TILE = {True: 256, False: 512}  # rows of a row tile, and its bytes, for few rows and for many
_ROW_TILE_BYTES = {True: 4 << 20, False: 8 << 20}
# Bytes of a weight tile. Few rows are bound by HBM: the first tile's copy is waited for, and then each step costs as
# much as copying some 0.9 MB whatever it does; so the best tile is about the root of that times all the weights. For
# many rows, x is read once for each output tile.
_STEP_BYTES = 0.9e6
_LEAST_WEIGHT_TILE, _MOST_WEIGHT_TILE = 1 << 20, 6 << 20
_MANY_ROWS_WEIGHT_TILE = 4 << 20
_MOST_OUTPUTS = {True: 2048, False: 1024}  # of a tile with few inputs
_MOST_MXFP4_VALUES = 4 << 20  # of a tile, as its decoding is unrolled: more take long to compile


@dataclass(frozen=True)
class Tiles:
  """Sizes of a step of the kernel: a group's rows in one row tile, times all inputs by `outputs` of its matrix.

  Attributes:
    rows: of a row tile; a multiple of 16.
    outputs: of an output tile; a multiple of 128, or all of O.
    depth: buffers for weight tiles.
  """

  rows: int
  outputs: int
  depth: int = _DEPTH

  def blocks(self, form: Form) -> tuple[int, ...]:
    """Heights of the blocks into which a group's rows in a tile are cut, ascending; the last is for all but the rest.

    At 256 rows, loading a weight into the matrix unit hides behind the rows that pass it. Partial sums of 128 inputs
    keep it half empty anyway, and there 256 rows only take longer to compile.
    """
    most = 128 if form is Form.BLOCK_FP8 else 256
    return tuple(height for height in _BLOCKS if height <= min(most, self.rows))


def choose_tiles(x: jax.Array, values: jax.Array, groups: int) -> Tiles:
  """The tiles for x [M, I] and a stack `values` [G, I, O], of which `groups` matrices are multiplied."""
  rows, inputs = x.shape
  outputs = values.shape[2]
  few = rows <= _FEW
  most = min(_ROW_TILE[few], _ROW_TILE_BYTES[few] // (inputs * x.dtype.itemsize))
  aligned = lambda size: pl.cdiv(size, ROW_ALIGNMENT) * ROW_ALIGNMENT
  tile_rows = min(aligned(rows), max(2 * ROW_ALIGNMENT, most // ROW_ALIGNMENT * ROW_ALIGNMENT))

  bits = jax.dtypes.itemsize_bits(values.dtype)
  tile_bytes = _MANY_ROWS_WEIGHT_TILE
  if few:
    weights = groups * inputs * outputs * bits / 8
    tile_bytes = min(max(math.sqrt(_STEP_BYTES * weights), _LEAST_WEIGHT_TILE), _MOST_WEIGHT_TILE)
  size = tile_bytes * 8 // bits
  if bits == 4:
    size = min(size, _MOST_MXFP4_VALUES)
  columns = min(max(1, int(size) // (inputs * LANES)) * LANES, _MOST_OUTPUTS[few])
  if outputs <= columns:
    return Tiles(tile_rows, outputs)
  # A width that divides O, if one is at least half as wide: then every copy has the same size.
  for width in range(columns, columns // 2, -LANES):
    if outputs % width == 0:
      return Tiles(tile_rows, width)
  return Tiles(tile_rows, columns)
