"""The grouped product as one Pallas TPU kernel.

Everything stays in HBM, and the kernel fetches tiles by asynchronous copies (streams.py): the weights of each group
that has rows once, straight from the stack of all layers. It goes through the output tiles, and for each through the
list of work. The arithmetic of a tile stands in arithmetic.py.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from quantized_matmul import arithmetic, streams
from quantized_matmul.formats import LANES, Form, Format, format_of
from quantized_matmul.reference import dot
from quantized_matmul.tiles import Tiles, choose_tiles

_WITHOUT_FLOAT4 = ("TPU v6 lite", "TPU v5", "TPU v5p", "TPU v5 lite", "TPU v5e", "TPU v4")
_VMEM_BYTES = 56 << 20  # of the 64 MiB of a v7x


def _kernel(group_sizes, first_group, x, values, *rest, fmt: Format, tiles: Tiles, outputs: int, pairs_known):
  hbm = dict(x=x, values=values)
  if fmt.form is not Form.PLAIN:
    hbm["scales"], *rest = rest
  hbm["out"], work, active, *rest = rest
  names = [name for name in ("x", "values", "scales", "out") if name in hbm]
  buffers, semaphores, scratch = rest[: len(names)], rest[len(names) : 2 * len(names)], rest[2 * len(names) :]
  rings = {n: streams.Ring(b, s) for n, b, s in zip(names, buffers, semaphores, strict=True)}

  pairs, groups, row_tiles = streams.list_work(group_sizes, work, active, tiles.rows)
  if pairs_known is not None:
    pairs = pairs_known
  copies = streams.Streams(
    fmt=fmt, tiles=tiles, outputs=outputs, first_group=first_group[0], active=active, groups=groups,
    row_tiles=row_tiles, hbm=hbm, rings=rings,
  )  # fmt: skip

  def product(column, index, new_weights):
    x_tile, weights = rings["x"].at(index["x"]), rings["values"].at(index["weights"])
    if fmt.form is Form.PLAIN:
      return dot(x_tile[...], weights[...])
    scales = rings["scales"].at(index["weights"])
    (prepared,) = scratch  # block-FP8: a scale for each output; MXFP4: the decoded tile
    if fmt.form is Form.BLOCK_FP8:

      @pl.when(new_weights)
      def _():
        prepared[...] = arithmetic.spread_scales(scales[...], column, tiles.outputs, fmt.ro)

      return arithmetic.block_fp8_product(x_tile, weights, prepared, fmt.ri)
    pl.when(new_weights)(lambda: arithmetic.decode_mxfp4(weights, scales, prepared, fmt.ri))
    return dot(x_tile[...], prepared[...])

  def step(column, pair):
    group, tile = work[streams.GROUP, pair], work[streams.TILE, pair]
    before, after = jnp.maximum(pair - 1, 0), jnp.minimum(pair + 1, pairs - 1)
    new_weights = (pair == 0) | (group != work[streams.GROUP, before])
    new_tile = (pair == 0) | (tile != work[streams.TILE, before])
    done = (pair == pairs - 1) | (tile != work[streams.TILE, after])
    index = dict(weights=column * groups + group, out=column * row_tiles + tile)
    index["x"] = jnp.where(row_tiles == 1, 0, index["out"])

    @pl.when(new_weights)
    def _():
      copies.weights("wait", index["weights"])
      ahead = index["weights"] + tiles.depth - 1
      pl.when(ahead < copies.weight_copies)(lambda: copies.weights("start", ahead))

    @pl.when(new_tile & ((column == 0) | (row_tiles > 1)))
    def _():
      copies.x("wait", index["x"])
      ahead = index["x"] + streams.ROW_BUFFERS - 1
      pl.when(ahead < copies.x_copies)(lambda: copies.x("start", ahead))

    @pl.when(new_tile & (index["out"] >= streams.ROW_BUFFERS))
    def _():
      copies.out("wait", index["out"] - streams.ROW_BUFFERS)

    result = product(column, index, new_weights)
    row = jax.lax.broadcasted_iota(jnp.int32, result.shape, 0) + tile * tiles.rows
    mine = (row >= work[streams.START, pair]) & (row < work[streams.END, pair])
    out = rings["out"].at(index["out"])
    # Through float32: exact for the other groups' rows, which are kept.
    out[...] = jnp.where(mine, result, out[...].astype(jnp.float32)).astype(out.dtype)
    pl.when(done)(lambda: copies.out("start", index["out"]))

  for i in range(tiles.depth - 1):
    pl.when(i < copies.weight_copies)(functools.partial(copies.weights, "start", i))
  pl.when(pairs > 0)(lambda: copies.x("start", 0))

  def column_loop(column, _):
    jax.lax.fori_loop(0, pairs, lambda pair, _: step(column, pair), None)

  jax.lax.fori_loop(0, copies.column_tiles, column_loop, None)
  for i in range(streams.ROW_BUFFERS, 0, -1):
    pl.when(copies.out_copies >= i)(functools.partial(copies.out, "wait", copies.out_copies - i))


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
    tiles: Tiles | None = None, pairs_known: int | None = None,
):  # fmt: skip
  """`grouped_matmul` as a Pallas TPU kernel. Arguments, meaning and result are those of `api.grouped_matmul`.

  Args:
    interpret: run it on the CPU, in Pallas's TPU interpreter; or that interpreter's parameters.
    tiles: chosen from the shapes if None.
    pairs_known: for estimates only: the length of the list of work, which the compiler's profile can't know.
  """
  fmt = format_of(values, scales)
  rows, inputs = x.shape
  outputs = values.shape[2]
  groups = group_sizes.shape[0]
  if fmt.form is Form.MXFP4 and not interpret:
    _check_float4()
  tiles = tiles or choose_tiles(rows, values)
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
  if fmt.form is not Form.PLAIN:
    stacks.append(scales)
    shape = scales.shape[1:] if fmt.form is Form.BLOCK_FP8 else tile(scales.shape[1])
    rings.insert(2, (tiles.depth, shape, scales.dtype))
    prepared = (scales.shape[1], jnp.float32) if fmt.form is Form.BLOCK_FP8 else (inputs, x.dtype)
    scratch = [pltpu.VMEM(tile(prepared[0]), prepared[1])]

  in_smem, anywhere, in_hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pl.ANY, pltpu.HBM))
  if not interpret:
    # XLA may place x and the output in VMEM. It mustn't the stacks: it would copy all layers' scales there, each time.
    stacks = [pltpu.with_memory_space_constraint(stack, pltpu.HBM) for stack in stacks]
  out = pl.pallas_call(
    functools.partial(_kernel, fmt=fmt, tiles=tiles, outputs=aligned, pairs_known=pairs_known),
    in_specs=[in_smem, in_smem, anywhere, *[in_hbm] * len(stacks)],
    out_specs=anywhere,
    scratch_shapes=[
      pltpu.SMEM((4, streams.most_pairs(padded, tiles.rows, groups)), jnp.int32),
      pltpu.SMEM((groups,), jnp.int32),
      *[pltpu.VMEM((depth, *shape), dtype) for depth, shape, dtype in rings],
      *[pltpu.SemaphoreType.DMA((depth,)) for depth, *_ in rings],
      *scratch,
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
