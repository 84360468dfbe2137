"""Products of blocks of rows with one tile of a matrix, from VMEM. x, values, scales and scratch are Refs."""

import jax
import jax.numpy as jnp

from quantized_matmul.formats import LANES, MX_RUN
from quantized_matmul.reference import dot, widen

_MXU_DEPTH = 256  # inputs that the matrix unit of a v6e or v7x sums at once
_PIECES = 3  # bfloat16 pieces that hold a float32: 3 × 8 bits of significand


def scale_selector(shape: tuple[int, int], column, run: int) -> jax.Array:
  """The 0/1 matrix [O / ro, width] bfloat16 that gives each output of output tile `column` its block's scale."""
  output = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + column * shape[1]
  block = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
  # run divides 128; a shift, because the vector unit divides integers slowly.
  return jnp.where(output >> (run.bit_length() - 1) == block, 1.0, 0.0).astype(jnp.bfloat16)


def spread_scales(scales: jax.Array, selector: jax.Array) -> jax.Array:
  """[I / ri, O / ro] float32 -> [I / ri, width] float32: the scales of each output of a tile, exactly.

  On the matrix unit: each sum has one term, and a float32 is the sum of three bfloat16.
  """
  spread = None
  for i in range(_PIECES):
    piece = scales.astype(jnp.bfloat16)
    part = dot(piece, selector)
    spread = part if i == 0 else spread + part
    scales = scales - piece.astype(jnp.float32)
  return spread


def block_fp8_product(x, values, scale_rows, run: int) -> jax.Array:
  """x [R, I], values [I, width], scale_rows [I / run, width] -> [R, width] float32.

  Partial sums of each run of inputs, times its scales. Where a run is shorter than the lanes, the other runs' lanes of
  x are zeroed: the matrix unit takes the same time for it, and nothing is shifted.
  """
  inputs = x.shape[1]
  total = None
  for first in range(0, inputs, LANES):
    lanes = min(LANES, inputs - first)
    chunk, weights = x[:, first : first + lanes], values[first : first + lanes, :]
    for start in range(0, lanes, run):
      part = chunk
      if lanes > run:
        lane = jax.lax.broadcasted_iota(jnp.int32, chunk.shape, 1)
        part = jnp.where((lane >= start) & (lane < start + run), chunk, jnp.zeros_like(chunk))
      block = (first + start) // run
      term = dot(part, weights) * scale_rows[block : block + 1, :]
      total = term if total is None else total + term
  return total


def _decoded_rows(values, powers, first: int, last: int) -> jax.Array:
  """Inputs first to last of an MXFP4 tile [I, width], times their powers of two [I / 32, width], in powers' dtype."""
  runs = range(first // MX_RUN, last // MX_RUN)
  rows = [values[i * MX_RUN : (i + 1) * MX_RUN].astype(powers.dtype) * powers[i : i + 1] for i in runs]
  return jnp.concatenate(rows, axis=0)


def mxfp4_product(x, values, scales) -> jax.Array:
  """x [R, I], values [I, width] float4, scales [I / 32, width] uint8 -> [R, width] float32.

  Decodes on the way to the matrix unit, which for few rows is faster than by way of memory.
  """
  powers = widen(scales[...]).astype(x.dtype)
  inputs = x.shape[1]
  total = None
  for first in range(0, inputs, _MXU_DEPTH):
    last = min(first + _MXU_DEPTH, inputs)
    term = dot(x[:, first:last], _decoded_rows(values, powers, first, last))
    total = term if total is None else total + term
  return total


def decode_mxfp4(values, scales, decoded) -> None:
  """decoded [I, width] of x's dtype ← values [I, width] float4 times the powers of two of scales [I / 32, width]."""
  powers = widen(scales[...]).astype(decoded.dtype)
  for first in range(0, values.shape[0], MX_RUN):
    decoded[first : first + MX_RUN] = _decoded_rows(values, powers, first, first + MX_RUN)
