"""The grouped product as one Pallas TPU kernel.

Everything stays in HBM, and the kernel fetches tiles by asynchronous copies (streams.py): the weights of each group
that has rows once, straight from the stack of all layers. It goes through the output tiles, and for each through the
list of work. The arithmetic of a tile stands in arithmetic.py.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from quantized_matmul import arithmetic, streams
from quantized_matmul.formats import LANES, Form, Format, format_of
from quantized_matmul.reference import dot
from quantized_matmul.tiles import FUSED_ROWS, ROW_ALIGNMENT, Tiles, choose_tiles

_WITHOUT_FLOAT4 = ("TPU v6 lite", "TPU v5", "TPU v5p", "TPU v5 lite", "TPU v5e", "TPU v4")
_VMEM_BYTES = 56 << 20  # of the 64 MiB of a v7x


def _kernel(group_sizes, first_group, x, values, *rest, fmt: Format, tiles: Tiles, outputs: int, known_size):
  hbm = dict(x=x, values=values)
  if fmt.form is not Form.PLAIN:
    hbm["scales"], *rest = rest
  hbm["out"], pairs, active, *rest = rest
  names = [name for name in ("x", "values", "scales", "out") if name in hbm]
  buffers, semaphores, scratch = rest[: len(names)], rest[len(names) : 2 * len(names)], rest[2 * len(names) :]
  rings = {n: streams.Ring(b, s) for n, b, s in zip(names, buffers, semaphores, strict=True)}
  size = (lambda group: group_sizes[group]) if known_size is None else lambda group: jnp.int32(known_size)
  work = streams.Work(size, pairs, active, tiles.rows)
  copies = streams.Streams(
    fmt=fmt, tiles=tiles, outputs=outputs, first_group=first_group[0], work=work, hbm=hbm, rings=rings
  )

  def step(_, position):
    """One pair of the list of work, for one output tile."""
    column, pair = position
    group, tile = work.group(pair), work.tile(pair)
    before, after = jnp.maximum(pair - 1, 0), jnp.minimum(pair + 1, work.pairs - 1)
    last = pair == work.pairs - 1
    new_weights = (pair == 0) | (group != work.group(before))
    new_tile = (pair == 0) | (tile != work.tile(before))
    done = last | (tile != work.tile(after))
    weights_index, out_index = column * work.groups + group, column * work.row_tiles + tile
    x_index = jnp.where(work.row_tiles == 1, 0, out_index)

    @pl.when(new_weights)
    def _():
      copies.weights("wait", weights_index)
      ahead = weights_index + tiles.depth - 1
      pl.when(ahead < copies.weight_copies)(lambda: copies.weights("start", ahead))

    @pl.when(new_tile & ((column == 0) | (work.row_tiles > 1)))
    def _():
      copies.x("wait", x_index)
      ahead = x_index + streams.ROW_BUFFERS - 1
      pl.when(ahead < copies.x_copies)(lambda: copies.x("start", ahead))

    @pl.when(new_tile & (out_index >= streams.ROW_BUFFERS))
    def _():
      copies.out("wait", out_index - streams.ROW_BUFFERS)

    start, end = (row - tile * tiles.rows for row in work.rows(pair))
    multiply = _Multiply(
      fmt=fmt, tiles=tiles, x=rings["x"].at(x_index), out=rings["out"].at(out_index), start=start, end=end,
      values=rings["values"].at(weights_index), scratch=scratch,
      scales=rings["scales"].at(weights_index) if "scales" in rings else None,
    )  # fmt: skip
    pl.when(pair == 0)(lambda: multiply.prepare_column(column))
    pl.when(new_weights)(multiply.prepare_weights)
    multiply.rows_of_group()
    pl.when(done)(lambda: copies.out("start", out_index))
    return jnp.where(last, column + 1, column), jnp.where(last, 0, pair + 1)

  for i in range(tiles.depth - 1):
    pl.when(i < copies.weight_copies)(functools.partial(copies.weights, "start", i))
  pl.when(work.pairs > 0)(lambda: copies.x("start", 0))
  zero = jnp.int32(0)
  jax.lax.fori_loop(0, copies.column_tiles * work.pairs, step, (zero, zero))
  for i in range(streams.ROW_BUFFERS, 0, -1):
    pl.when(copies.out_copies >= i)(functools.partial(copies.out, "wait", copies.out_copies - i))


@dataclasses.dataclass(frozen=True)
class _Multiply:
  """One step's arithmetic. All but the first two fields and the bounds are Refs in VMEM.

  Attributes:
    x: [tile's rows, I]; out: [tile's rows, width].
    start, end: the group's rows, counted from the tile's first; either may lie outside the tile.
    values, scales: of the group's matrix and the output tile; block-FP8: the scales of the whole matrix.
    scratch: block-FP8: `scale_selector` of the output tile, and its `spread_scales`; MXFP4: the decoded tile of a group
      with many rows.
  """

  fmt: Format
  tiles: Tiles
  x: Any
  out: Any
  start: Any
  end: Any
  values: Any
  scales: Any
  scratch: Any

  def prepare_column(self, column):
    if self.fmt.form is Form.BLOCK_FP8:
      selector = self.scratch[0]
      selector[...] = arithmetic.scale_selector(selector.shape, column, self.fmt.ro)

  def prepare_weights(self):
    if self.fmt.form is Form.MXFP4 and self.tiles.rows > FUSED_ROWS:
      decode = functools.partial(arithmetic.decode_mxfp4, self.values, self.scales, self.scratch[0])
      pl.when(self._many_rows())(decode)

  def _block_fp8(self, x):
    # Once for each block, not once for each tile of weights: so the compiler can do it while it loads weights.
    selector, scale_rows = self.scratch
    scale_rows[...] = arithmetic.spread_scales(self.scales[...], selector[...])
    return arithmetic.block_fp8_product(x, self.values, scale_rows, self.fmt.ri)

  def _many_rows(self):
    return self.end - self.start > FUSED_ROWS

  def rows_of_group(self):
    """Multiplies the group's rows in this tile, in blocks; other rows of a block are computed too, and dropped."""
    heights = self.tiles.blocks(self.fmt.form)
    if self.fmt.form is not Form.MXFP4:
      product = {
        Form.PLAIN: lambda x: dot(x[...], self.values[...]),
        Form.BLOCK_FP8: self._block_fp8,
      }[self.fmt.form]
      self._in_blocks(heights, product)
      return
    fused = lambda x: arithmetic.mxfp4_product(x, self.values, self.scales)
    few = tuple(height for height in heights if height <= FUSED_ROWS)
    if self.tiles.rows <= FUSED_ROWS:
      self._in_blocks(few, fused)
      return
    many = self._many_rows()
    pl.when(many)(lambda: self._in_blocks(heights[1:], lambda x: dot(x[...], self.scratch[0][...])))
    pl.when(jnp.logical_not(many))(lambda: self._in_blocks(few, fused))

  def _in_blocks(self, heights: tuple[int, ...], product):
    """As many blocks of the greatest height as rows fill, or nearly; then at most one lower one for the rest."""
    tallest = heights[-1]
    first = jnp.maximum(self.start, 0)
    first = first - jax.lax.rem(first, ROW_ALIGNMENT)
    count = jnp.minimum(self.end, self.tiles.rows) - first
    blocks = jax.lax.div(count, tallest)
    rest = count - blocks * tallest
    if len(heights) > 1:
      blocks = blocks + jnp.where(rest > heights[-2], 1, 0)
    else:
      blocks = blocks + jnp.where(rest > 0, 1, 0)

    def block(height, at):
      # Moved back into the tile where it would reach beyond.
      at = pl.multiple_of(jnp.minimum(at, self.tiles.rows - height), ROW_ALIGNMENT)
      rows = pl.ds(at, height)
      result = product(self.x.at[rows])
      row = jax.lax.broadcasted_iota(jnp.int32, result.shape, 0) + at
      mine = (row >= self.start) & (row < self.end)
      # Through float32: exact for the other groups' rows, which are kept.
      kept = self.out[rows].astype(jnp.float32)
      self.out[rows] = jnp.where(mine, result, kept).astype(self.out.dtype)

    jax.lax.fori_loop(0, blocks, lambda i, _: block(tallest, first + i * tallest), None)
    for lower, height in zip((0, *heights), heights[:-1], strict=False):
      pl.when((rest > lower) & (rest <= height))(functools.partial(block, height, first + count - rest))


def cost_estimate(x, values, scales, groups: int, out_dtype) -> pl.CostEstimate:
  """Flops and bytes of a call in which every row is live and every group has rows, for XLA's scheduler."""
  rows, inputs = x.shape
  outputs = values.shape[2]
  bits = jax.dtypes.itemsize_bits
  moved = [(rows * inputs, x.dtype), (groups * inputs * outputs, values.dtype), (rows * outputs, out_dtype)]
  if scales is not None:
    moved.append((groups * math.prod(scales.shape[1:]), scales.dtype))
  return pl.CostEstimate(
    flops=2 * rows * inputs * outputs,
    bytes_accessed=sum(size * bits(dtype) // 8 for size, dtype in moved),
    transcendentals=0,
  )


def _check_float4() -> None:
  """Raises ValueError on a TPU that is known to lack float4. Where the chip isn't known, its compiler will object."""
  device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
  if device.device_kind in _WITHOUT_FLOAT4:
    raise ValueError(
      f"grouped_matmul: {device.device_kind} has no float4_e2m1fn, which MXFP4 values are read as; it needs a TPU v7x."
      " Convert them to block-FP8."
    )


def grouped_matmul_pallas(
    x, values, scales, group_sizes, first_group, *, out_dtype, interpret: bool | pltpu.InterpretParams,
    tiles: Tiles | None = None, known_size: int | None = None,
):  # fmt: skip
  """`grouped_matmul` as a Pallas TPU kernel. Arguments, meaning and result are those of `api.grouped_matmul`.

  Args:
    interpret: run it on the CPU, in Pallas's TPU interpreter; or that interpreter's parameters.
    tiles: chosen from the shapes if None.
    known_size: for estimates only: every group's rows, whatever group_sizes says. The compiler's profile runs the
      scalar code, and so knows what the loops do.
  """
  fmt = format_of(values, scales)
  rows, inputs = x.shape
  outputs = values.shape[2]
  groups = group_sizes.shape[0]
  if fmt.form is Form.MXFP4 and not interpret:
    _check_float4()
  tiles = tiles or choose_tiles(x, values, groups)
  # A narrower last tile is copied in whole lanes: on a TPU the arrays are padded to them. The interpreter's aren't.
  aligned = outputs if interpret else pl.cdiv(outputs, LANES) * LANES
  padded = pl.cdiv(rows, tiles.rows) * tiles.rows
  x = jnp.pad(x, ((0, padded - rows), (0, 0)))

  tile = lambda *shape: (*shape, tiles.outputs)
  rings = [
    (streams.ROW_BUFFERS, (tiles.rows, inputs), x.dtype),
    (tiles.depth, tile(inputs), values.dtype),
    (streams.ROW_BUFFERS, tile(tiles.rows), out_dtype),
  ]
  stacks, scratch = [values], []
  if fmt.form is Form.BLOCK_FP8:
    scratch = [(tile(scales.shape[2]), jnp.bfloat16), (tile(scales.shape[1]), jnp.float32)]
  elif fmt.form is Form.MXFP4 and tiles.rows > FUSED_ROWS:
    scratch = [(tile(inputs), x.dtype)]
  if fmt.form is not Form.PLAIN:
    stacks.append(scales)
    shape = scales.shape[1:] if fmt.form is Form.BLOCK_FP8 else tile(scales.shape[1])
    rings.insert(2, (tiles.depth, shape, scales.dtype))

  in_smem, anywhere, in_hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pl.ANY, pltpu.HBM))
  if not interpret:
    # XLA may place x and the output in VMEM. It mustn't the stacks: it would copy all layers' scales there, each time.
    stacks = [pltpu.with_memory_space_constraint(stack, pltpu.HBM) for stack in stacks]
  out = pl.pallas_call(
    functools.partial(_kernel, fmt=fmt, tiles=tiles, outputs=aligned, known_size=known_size),
    in_specs=[in_smem, in_smem, anywhere, *[in_hbm] * len(stacks)],
    out_specs=anywhere,
    scratch_shapes=[
      pltpu.SMEM((4, streams.most_pairs(padded, tiles.rows, groups)), jnp.int32),
      pltpu.SMEM((groups,), jnp.int32),
      *[pltpu.VMEM((depth, *shape), dtype) for depth, shape, dtype in rings],
      *[pltpu.SemaphoreType.DMA((depth,)) for depth, *_ in rings],
      *[pltpu.VMEM(*buffer) for buffer in scratch],
    ],
    out_shape=jax.ShapeDtypeStruct((padded, outputs), out_dtype, manual_axis_type=jax.typeof(x).manual_axis_type),
    # Copies stay within the arrays as long as first_group and group_sizes do, which a traced one can't be checked for.
    compiler_params=pltpu.CompilerParams(
      vmem_limit_bytes=_VMEM_BYTES, disable_bounds_checks=True, disable_semaphore_checks=True
    ),
    cost_estimate=cost_estimate(x, values, scales, groups, out_dtype),
    interpret=pltpu.InterpretParams() if interpret is True else interpret,
    name=f"grouped_matmul_{fmt.form.name.lower()}_m{rows}_e{groups}_i{inputs}_o{outputs}",
  )(group_sizes, first_group.reshape(1), x, *stacks)
  return out[:rows]
