"""One tile's product: rows of x by all inputs, times a tile of one matrix, from VMEM."""

import jax
import jax.numpy as jnp

from quantized_matmul.formats import LANES
from quantized_matmul.reference import dot, widen


def spread_scales(scales: jax.Array, column, width: int, run: int) -> jax.Array:
  """The scales of one output tile, one for each of its outputs.

  A product with a 0/1 matrix on the matrix unit, exact at HIGHEST: a float32 is the sum of three bfloat16.

  Args:
    scales: [I / ri, O / ro] float32, a whole matrix's.
    column: the output tile; width: its outputs; run: ro.

  Returns:
    [I / ri, width] float32.
  """
  shape = (scales.shape[1], width)
  output = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + column * width
  select = jnp.where(jax.lax.div(output, run) == jax.lax.broadcasted_iota(jnp.int32, shape, 0), 1.0, 0.0)
  return jnp.dot(scales, select, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def block_fp8_product(x, values, scale_rows, run: int) -> jax.Array:
  """Refs x [R, I], values [I, width], scale_rows [I / run, width] -> [R, width] float32.

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


def decode_mxfp4(values, scales, decoded, run: int) -> None:
  """decoded [I, width] of x's dtype ← values [I, width] float4 times the powers of two of scales [I / run, width]."""
  wide = widen(scales[...]).astype(decoded.dtype)
  for block in range(values.shape[0] // run):
    rows = slice(block * run, (block + 1) * run)
    decoded[rows] = values[rows].astype(decoded.dtype) * wide[block : block + 1]
