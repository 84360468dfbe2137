"""Quantised weights as pytrees: block-FP8 and MXFP4 kept as they are stored, decoded inside the product.

A layer doesn't know what it holds: `layers.linears.matmul` and `grouped_matmul` take a plain array or either of these.
Both see a weight as a matrix [I, O], its input and output dimensions flattened, after any leading (stacked) axes.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from MaxText import mxfp4

FORMATS = ("plain", "block_fp8", "mxfp4")
BLOCK = 128
_FP8 = ml_dtypes.float8_e4m3fn
_FP8_MAX = 448.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockFP8:
  """e4m3 values with one float32 scale for each 128×128 block of the matrix; blocks at the ends may be partial.

  Attributes:
    values: [..., *in, *out] float8_e4m3fn, in the shape of the plain weight.
    scales: [..., ⌈I/128⌉, ⌈O/128⌉] float32; a value is value · scale.
  """

  values: jax.Array
  scales: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MXFP4:
  """E2M1 values with one E8M0 scale for 32 inputs (OCP MX), as the release stores them, inputs first.

  Attributes:
    values: [..., *in, *out] float4_e2m1fn, in the shape of the plain weight.
    scales: [..., I/32, *out] uint8, biased exponents. They stay integers: widened where they are used.
  """

  values: jax.Array
  scales: jax.Array


Quantized = BlockFP8 | MXFP4


def _matrix(values: jax.Array, in_dims: int) -> jax.Array:
  """[*in, *out] -> [I, O]."""
  inputs = int(np.prod(values.shape[:in_dims]))
  return values.reshape(inputs, -1)


def dequantize(w: Quantized, in_dims: int, dtype: Any) -> jax.Array:
  """One weight (no leading axes) as a plain array of its shape. Exact in float32; MXFP4 also in bfloat16."""
  matrix = _matrix(w.values, in_dims).astype(jnp.float32)
  inputs, outputs = matrix.shape
  if isinstance(w, BlockFP8):
    scales = jnp.repeat(jnp.repeat(w.scales, BLOCK, 0)[:inputs], BLOCK, 1)[:, :outputs]
  else:
    scales = jnp.repeat(_widen(w.scales.reshape(-1, outputs)), mxfp4.GROUP, 0)
  return (matrix * scales).reshape(w.values.shape).astype(dtype)


def _widen(exponents: jax.Array) -> jax.Array:
  """Biased exponents [..] uint8 -> float32 2^(b − 127); 0, the subnormal 2^−127, comes out as 0."""
  return jax.lax.bitcast_convert_type(exponents.astype(jnp.uint32) << 23, jnp.float32)


def scaled_matmul(x: jax.Array, w: Quantized, in_dims: int) -> jax.Array:
  """x [M, I] times a quantised matrix, its scales applied to the partial sums of each block of inputs.

  No decoded copy of the weight is made beyond the values' cast inside the product.

  Returns:
    [M, O] float32.
  """
  matrix = _matrix(w.values, in_dims)
  inputs, outputs = matrix.shape
  block = BLOCK if isinstance(w, BlockFP8) else mxfp4.GROUP
  pad = -inputs % block
  blocks = jnp.pad(x, ((0, 0), (0, pad))).reshape(len(x), -1, block)
  values = jnp.pad(matrix.astype(x.dtype), ((0, pad), (0, 0))).reshape(-1, block, outputs)
  partial_sums = jnp.einsum("mbi,bio->mbo", blocks, values, preferred_element_type=jnp.float32)
  if isinstance(w, BlockFP8):
    scales = jnp.repeat(w.scales, BLOCK, axis=1)[:, :outputs]
  else:
    scales = _widen(w.scales.reshape(-1, outputs))
  return jnp.sum(partial_sums * scales, axis=1)


def quantize_block_fp8(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """[I, O] float32 -> (values e4m3 [I, O], scales float32 [⌈I/128⌉, ⌈O/128⌉]): a block's largest magnitude is 448.

  A block of zeros has scale 1.
  """
  inputs, outputs = matrix.shape
  padded = np.pad(matrix.astype(np.float32), ((0, -inputs % BLOCK), (0, -outputs % BLOCK)))
  blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
  largest = np.abs(blocks).max(axis=(1, 3))
  scales = np.where(largest > 0, largest / _FP8_MAX, 1.0).astype(np.float32)
  values = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:inputs, :outputs]
  return values.astype(_FP8), scales
