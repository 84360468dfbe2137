"""How a product is cut into tiles."""

from dataclasses import dataclass

import jax
from jax.experimental import pallas as pl

from quantized_matmul.formats import LANES

_WEIGHT_TILE_BYTES = 2 << 20  # one copy from HBM: long enough to hide its latency and a step's fixed cost
_DEPTH = 3  # weight tiles in VMEM: one in use, two on their way
_FEW_ROWS = 1024  # up to here a call is a decode step, whose groups hold few rows
_ROW_ALIGNMENT = 16  # sublanes of a bfloat16 register


@dataclass(frozen=True)
class Tiles:
  """Sizes of a grid step: `rows` of x by all inputs, times all inputs by `outputs` of one matrix.

  Attributes:
    rows: of a row tile.
    outputs: of an output tile; a multiple of 128, or all of O.
    depth: buffers for weight tiles.
  """

  rows: int
  outputs: int
  depth: int = _DEPTH


def choose_tiles(rows: int, values: jax.Array) -> Tiles:
  """The tiles for x [rows, I] and a stack `values` [G, I, O]."""
  _, inputs, outputs = values.shape
  aligned = pl.cdiv(rows, _ROW_ALIGNMENT) * _ROW_ALIGNMENT
  most = 64 if rows <= _FEW_ROWS else 128
  bits = jax.dtypes.itemsize_bits(values.dtype)
  columns = max(1, _WEIGHT_TILE_BYTES * 8 // (inputs * bits * LANES)) * LANES
  if outputs <= columns:
    return Tiles(min(aligned, most), outputs)
  # A width that divides O, if one is at least half as wide: then every copy has the same size.
  for width in range(columns, columns // 2, -LANES):
    if outputs % width == 0:
      return Tiles(min(aligned, most), width)
  return Tiles(min(aligned, most), columns)
