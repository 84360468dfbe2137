"""The single-step KDA decode as one Pallas TPU kernel.

The pools stay in HBM, and the kernel fetches the slots it needs by asynchronous copies (copies.py). A grid step
takes several batch rows: reads of the next step and writes of the last one run while it computes. Activations come as
[B, H·K], the layout in which a projection leaves them, so that rows lie on sublanes and a head's channels on lanes.
The arithmetic stands in arithmetic.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_decode import arithmetic, copies
from kda_decode.blocks import GROUP, Blocks, check_supported, choose_blocks
from kda_decode.reference import gated_rms_norm

VECTORS = 6  # what arithmetic.head_vectors returns


def _history_to_rows(conv_buffer, taps, blocks: Blocks) -> None:
  """taps [tap, 3, row · padded_heads + head, K] ← the history in float32. Strided reads take one head's rows of it."""
  rows, width_1 = conv_buffer.shape[:2]
  for j in range(rows):
    for tap in range(width_1):
      for x in range(3):
        base = j * blocks.padded_heads
        taps[tap, x, base : base + blocks.heads] = conv_buffer[j, tap, x].astype(jnp.float32)


def _push_token(conv_buffer, taps, x_refs, blocks: Blocks) -> None:
  """Shifts the history by one token, in place, and appends the current one."""
  rows, width_1 = conv_buffer.shape[:2]
  key_dim = conv_buffer.shape[-1]
  for x, x_ref in enumerate(x_refs):
    for h in range(blocks.heads):
      head_rows = pl.ds(h, rows, stride=blocks.padded_heads)
      taps.at[width_1, x][head_rows] = x_ref[:, h * key_dim : (h + 1) * key_dim].astype(jnp.float32)
  for j in range(rows):
    base = j * blocks.padded_heads
    for x in range(3):
      for tap in range(width_1 - 1):
        conv_buffer[j, tap, x] = conv_buffer[j, tap + 1, x]
      # Through float32 and back: exact, as the value was of this dtype.
      conv_buffer[j, width_1 - 1, x] = taps[width_1, x, base : base + blocks.heads].astype(conv_buffer.dtype)


def _mark_active(active, slot_copies: copies.SlotCopies, block) -> None:
  """active [rows, K] ← 1 on active rows, 0 on idle ones."""
  active[...] = jnp.ones(active.shape, active.dtype)

  @pl.when(jnp.logical_not(slot_copies.all_active(block)))
  def _():
    for j in range(active.shape[0]):
      row = slot_copies.active(block, j).astype(active.dtype)
      active[j : j + 1] = jnp.full((1, active.shape[1]), row)


def _kernel(
    layer, slots, q, k, v, decay, beta, gate, conv_weight, a_log, dt_bias, o_norm, state_in, conv_in,
    out, state_hbm, conv_hbm,
    state_buffer, conv_buffer, taps, vectors, outputs, selectors, active, count,
    state_read, state_write, conv_read, conv_write,
    *, blocks: Blocks, gate_lower_bound, norm_eps,
):  # fmt: skip
  del state_in, conv_in  # The same buffers as state_hbm and conv_hbm.
  rows, heads = blocks.rows, blocks.heads
  key_dim = state_buffer.shape[-1]
  width = conv_weight.shape[1]
  slot_copies = copies.SlotCopies(
    blocks=blocks,
    state=copies.Pool(state_hbm, state_buffer, state_read, state_write),
    conv=copies.Pool(conv_hbm, conv_buffer, conv_read, conv_write),
    layer=layer[0],
    slots=slots,
    count=count,
  )
  step = pl.program_id(0)
  block = slot_copies.row_block(step)
  head_step = slot_copies.head_step(step)
  lanes = lambda h: slice(h * key_dim, (h + 1) * key_dim)

  @pl.when(step == 0)
  def _():
    slot_copies.start_read(step)
    for j in range(selectors.shape[0]):
      selectors[j] = arithmetic.selector(j, key_dim)
    if blocks.padded_rows != rows:
      vectors[...] = jnp.zeros(vectors.shape, vectors.dtype)  # rows that no one writes still enter the products

  if blocks.steps > 2:
    pl.when(step >= 2)(lambda: slot_copies.wait_write(step - 2))
  if blocks.steps > 1:
    pl.when(step + 1 < blocks.steps)(lambda: slot_copies.start_read(step + 1))

  def prepare():
    """Convolution, normalisation and gates of all heads of this block of rows."""
    _mark_active(active, slot_copies, block)
    slot_copies.wait_read_conv(block)
    conv_rows = conv_buffer.at[copies.ring(block)]
    x_refs = (q, k, v)
    _history_to_rows(conv_rows, taps, blocks)
    rate = jnp.exp(a_log[...])
    raw_beta = beta[...].astype(jnp.float32)
    is_active = active[...] > 0
    for h in range(heads):
      head_rows = pl.ds(h, rows, stride=blocks.padded_heads)
      values = arithmetic.head_vectors(
        [[*(taps.at[t, x][head_rows] for t in range(width - 1)), x_refs[x][:, lanes(h)]] for x in range(3)],
        [[conv_weight[x, t, h : h + 1] for t in range(width)] for x in range(3)],
        decay[:, lanes(h)],
        rate[:, h : h + 1],
        dt_bias[h : h + 1],
        raw_beta[:, h : h + 1],
        is_active,
        gate_lower_bound,
      )
      for i, value in enumerate(values):
        vectors[i, h, :rows] = value
    _push_token(conv_rows, taps, x_refs, blocks)
    slot_copies.start_write_conv(block)

  def finish():
    """Norm and output gate of all heads of this block of rows."""
    for h in range(heads):
      value = gated_rms_norm(outputs[h], gate[:, lanes(h)], o_norm[...], norm_eps)
      out[:, lanes(h)] = jnp.where(active[...] > 0, value, 0.0).astype(out.dtype)

  def when_head_step(index, run):
    run() if blocks.head_steps == 1 else pl.when(head_step == index)(run)

  when_head_step(0, prepare)
  slot_copies.wait_read_state(step)
  states = state_buffer.at[copies.ring(step)]
  for i in range(blocks.head_block):
    h = head_step * blocks.head_block + i
    for first in range(0, rows, GROUP):
      d, k_rows, q_rows = (vectors[x, h, first : first + GROUP] for x in range(3))
      pieces = arithmetic.transposed_pieces(d, k_rows)
      q_columns = q_rows.T
      group_out = []
      for j in range(min(GROUP, rows - first)):
        row = slice(first + j, first + j + 1)
        o, new_state = arithmetic.state_step(
          states[first + j, i].astype(jnp.float32),
          *arithmetic.broadcast_columns(pieces, selectors[j]),
          jnp.broadcast_to(q_columns[:, j : j + 1], (key_dim, key_dim)),
          *(vectors[x, h, row] for x in range(3, VECTORS)),
        )
        states[first + j, i] = new_state.astype(states.dtype)
        group_out.append(o)
      outputs[h, first : first + len(group_out)] = jnp.concatenate(group_out, axis=0)
  slot_copies.start_write_state(step)
  when_head_step(blocks.head_steps - 1, finish)

  @pl.when(step + 1 == blocks.steps)
  def _():
    if blocks.steps > 1:
      slot_copies.wait_write(step - 1)
    slot_copies.wait_write(step)


def cost_estimate(batch: int, heads: int, key_dim: int, width: int, act_bytes: int, state_bytes: int):
  """Flops, bytes and transcendentals of a step with every row active, for XLA's scheduler and cost analysis."""
  states = batch * heads
  history = 2 * (width - 1) * 3 * act_bytes
  return pl.CostEstimate(
    flops=states * (8 * key_dim * key_dim + (6 * width + 40) * key_dim),
    bytes_accessed=states * key_dim * (2 * key_dim * state_bytes + history + 6 * act_bytes),
    transcendentals=states * 6 * key_dim,
  )


def kda_decode_pallas(
    q, k, v, decay, beta, gate, state, conv_state, layer, slots, *, conv_weight, a_log, dt_bias, o_norm,
    gate_lower_bound, norm_eps, interpret: bool | pltpu.InterpretParams, blocks: Blocks | None = None,
):  # fmt: skip
  """`kda_decode` as a Pallas TPU kernel. Shapes, dtypes and meaning are those of `kda_decode.api.kda_decode`.

  Args:
    interpret: run it on the CPU, in Pallas's TPU interpreter, which has semaphores and NaN in fresh memory; or that
      interpreter's parameters.
    blocks: how to cut the batch into grid steps; chosen from the shape if None.

  Raises:
    ValueError: K isn't 128 (a multiple of 32 if interpreted), or there are more than 96 heads.
  """
  batch, heads, key_dim = q.shape
  width = conv_weight.shape[1]
  check_supported(heads, key_dim, bool(interpret))
  blocks = blocks or choose_blocks(batch, heads)
  rows = blocks.rows
  f32 = jnp.float32

  flat = lambda x: x.reshape(batch, heads * key_dim)
  by_rows = lambda x: pl.BlockSpec((rows, x.shape[1]), lambda i, *_: (jax.lax.div(i, blocks.head_steps), 0))
  whole = lambda x: pl.BlockSpec(x.shape, lambda i, *_: (0,) * x.ndim)
  in_hbm = pl.BlockSpec(memory_space=pl.ANY)

  scalars = (layer.reshape(1), slots)
  per_row = (flat(q), flat(k), flat(v), flat(decay), beta, flat(gate))
  weights = (conv_weight, a_log.reshape(1, heads), dt_bias, o_norm.reshape(1, key_dim))
  first_pool = len(scalars) + len(per_row) + len(weights)
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
  out, state, conv_state = pl.pallas_call(
    functools.partial(_kernel, blocks=blocks, gate_lower_bound=gate_lower_bound, norm_eps=norm_eps),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(blocks.steps,),
      in_specs=[*map(by_rows, per_row), *map(whole, weights), in_hbm, in_hbm],
      out_specs=[by_rows(per_row[0]), in_hbm, in_hbm],
      scratch_shapes=[
        pltpu.VMEM((copies.BUFFERS, rows, blocks.head_block, key_dim, key_dim), state.dtype),
        pltpu.VMEM((copies.BUFFERS, rows, width - 1, 3, heads, key_dim), conv_state.dtype),
        pltpu.VMEM((width, 3, rows * blocks.padded_heads, key_dim), f32),
        pltpu.VMEM((VECTORS, heads, blocks.padded_rows, key_dim), f32),
        pltpu.VMEM((heads, rows, key_dim), f32),
        pltpu.VMEM((min(rows, GROUP), *arithmetic.selector_shape(key_dim)), jnp.bfloat16),
        pltpu.VMEM((rows, key_dim), f32),
        pltpu.SMEM((copies.BUFFERS,), jnp.int32),
        *[pltpu.SemaphoreType.DMA((copies.BUFFERS,))] * 4,
      ],
    ),
    out_shape=[shape(per_row[0]), shape(state), shape(conv_state)],
    input_output_aliases={first_pool: 1, first_pool + 1: 2},
    # Slots and the layer are checked by the kernel itself, once a row, rather than at every copy.
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary",), disable_bounds_checks=True, disable_semaphore_checks=True
    ),
    cost_estimate=cost_estimate(batch, heads, key_dim, width, q.dtype.itemsize, state.dtype.itemsize),
    interpret=pltpu.InterpretParams() if interpret is True else interpret,
    name=f"kda_decode_b{batch}_h{heads}",
  )(*scalars, *per_row, *weights, state, conv_state)
  return out.reshape(q.shape), state, conv_state
