"""What the kernel copies between HBM and VMEM, and the list of work that orders it.

A call's work is a list of pairs (group, row tile), in the order of the rows: a group's tiles follow one another, and so
do the groups that share a tile. The list is gone through once for each output tile. Weights change with the group and
the output tile; x changes with the row tile; an output tile stays in VMEM while consecutive pairs write rows of it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from quantized_matmul.formats import Form, Format
from quantized_matmul.tiles import Tiles

ROW_BUFFERS = 2  # for x, and for the output
_GROUP, _TILE, _START, _END = range(4)  # rows of the work list


class Work:
  """The list of work, which the scalar core makes from the sizes of the groups.

  Attributes:
    pairs: its length.
    groups: how many groups have rows.
    row_tiles: how many row tiles hold rows of groups.
  """

  def __init__(self, group_size, pairs, groups, tile_rows: int):
    """Fills the list.

    Args:
      group_size: a group's index -> its rows.
      pairs: [4, most] int32 in SMEM. A column for each pair: the group's number among those that have rows, the row
        tile, the group's first row and the one after its last.
      groups: [E] int32 in SMEM: the groups that have rows.
    """
    self._pairs, self._groups = pairs, groups

    def per_group(group, carry):
      start, count, active = carry
      end = start + group_size(group)
      first = jax.lax.div(start, tile_rows)
      tiles = jnp.where(end > start, jax.lax.div(end + tile_rows - 1, tile_rows) - first, 0)

      def per_tile(i, _):
        for row, value in ((_GROUP, active), (_TILE, first + i), (_START, start), (_END, end)):
          pairs[row, count + i] = value

      jax.lax.fori_loop(0, tiles, per_tile, None)

      @pl.when(tiles > 0)
      def _():
        groups[active] = group

      return end, count + tiles, active + jnp.where(tiles > 0, 1, 0)

    zero = jnp.int32(0)
    rows, self.pairs, self.groups = jax.lax.fori_loop(0, groups.shape[0], per_group, (zero, zero, zero))
    self.row_tiles = jax.lax.div(rows + tile_rows - 1, tile_rows)

  def group(self, pair):
    """The pair's group, numbered among those that have rows."""
    return self._pairs[_GROUP, pair]

  def tile(self, pair):
    return self._pairs[_TILE, pair]

  def rows(self, pair):
    """The first row of the pair's group, and the one after its last."""
    return self._pairs[_START, pair], self._pairs[_END, pair]

  def matrix(self, group):
    """Which of the call's E matrices a group, numbered among those that have rows, is multiplied by."""
    return self._groups[group]


def most_pairs(rows: int, tile_rows: int, groups: int) -> int:
  """The longest list of work: each group's end adds at most one pair to the row tiles."""
  return pl.cdiv(rows, tile_rows) + groups - 1


@dataclass(frozen=True)
class Ring:
  """Buffers [n, ...] in VMEM that are filled, or emptied, in turn; a semaphore for each."""

  buffers: Any
  semaphores: Any

  def slot(self, index):
    return jax.lax.rem(index, self.buffers.shape[0])

  def at(self, index):
    return self.buffers.at[self.slot(index)]

  def semaphore(self, index):
    return self.semaphores.at[self.slot(index)]


class Streams:
  """The copies of one call. Each kind is counted: copy `index` of a kind uses buffer `index` mod the ring's length.

  Attributes:
    column_tiles: output tiles.
    weight_copies: one for each output tile and group that has rows, in this order.
    out_copies: one for each output tile and row tile that holds rows.
    x_copies: the same; but if there is a single row tile, one in all.
  """

  def __init__(self, *, fmt: Format, tiles: Tiles, outputs: int, first_group, work: Work, hbm, rings):
    """Args: outputs: O, rounded up to what copies may touch; hbm, rings: arrays and their buffers by name."""
    self.fmt, self.tiles = fmt, tiles
    self.first_group, self.work = first_group, work
    self.hbm, self.rings = hbm, rings
    self.outputs = outputs
    self.column_tiles = pl.cdiv(hbm["out"].shape[1], tiles.outputs)
    self.weight_copies = self.column_tiles * work.groups
    self.out_copies = self.column_tiles * work.row_tiles
    self.x_copies = jnp.where(work.row_tiles == 1, 1, self.out_copies)

  def _per_width(self, column, use):
    """Calls use(columns in HBM, columns in VMEM): the last output tile may be narrower than the others."""
    width = self.tiles.outputs
    tail = self.outputs % width
    # A single tile starts at a constant, so that O need not be a multiple of the lanes.
    start = 0 if self.column_tiles == 1 else pl.multiple_of(column * width, width)
    if tail == 0 or self.column_tiles == 1:
      use(pl.ds(start, width), pl.ds(0, width))
      return
    last = column == self.column_tiles - 1
    pl.when(jnp.logical_not(last))(lambda: use(pl.ds(start, width), pl.ds(0, width)))
    pl.when(last)(lambda: use(pl.ds(start, tail), pl.ds(0, tail)))

  def _rows(self, tile):
    return pl.ds(pl.multiple_of(tile * self.tiles.rows, self.tiles.rows), self.tiles.rows)

  def _run(self, action, source, target, semaphore):
    copy = pltpu.make_async_copy(source, target, semaphore)
    copy.start() if action == "start" else copy.wait()

  def x(self, action, index):
    ring = self.rings["x"]
    rows = self._rows(jax.lax.rem(index, self.work.row_tiles))
    self._run(action, self.hbm["x"].at[rows], ring.at(index), ring.semaphore(index))

  def weights(self, action, index):
    column = jax.lax.div(index, self.work.groups)
    matrix = self.first_group + self.work.matrix(index - column * self.work.groups)

    def values_and_scales(in_hbm, in_vmem):
      for name in ("values", "scales"):
        if name in self.rings:
          ring = self.rings[name]
          source, target = self.hbm[name].at[matrix], ring.at(index)
          if name == "values" or self.fmt.form is Form.MXFP4:  # block-FP8 has few scales: all of a matrix come along
            source, target = source.at[:, in_hbm], target.at[:, in_vmem]
          self._run(action, source, target, ring.semaphore(index))

    self._per_width(column, values_and_scales)

  def out(self, action, index):
    ring = self.rings["out"]
    column = jax.lax.div(index, self.work.row_tiles)
    rows = self._rows(index - column * self.work.row_tiles)
    self._per_width(
      column,
      lambda in_hbm, in_vmem: self._run(
        action, ring.at(index).at[:, in_vmem], self.hbm["out"].at[rows, in_hbm], ring.semaphore(index)
      ),
    )
