"""Quantised weights as pytrees: block-FP8 and MXFP4 kept as they are stored, decoded inside the product.

A layer doesn't know what it holds: `layers.linears.matmul` and `grouped_matmul` take a plain array or either of these.

A weight is a matrix [inputs, outputs]. Scales have two dimensions too, so that both are split over devices by the same
logical axes: a scale covers a run of consecutive inputs and a run of consecutive outputs.
"""

import math
from dataclasses import dataclass, field
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
  """e4m3 values; quantised with one float32 scale for each 128×128 block of the released matrix.

  Attributes:
    values: [..., I, O] float8_e4m3fn, in the shape of the plain weight.
    scales: same rank, float32; a value is value · scale. Where 128 doesn't divide a dimension (or a device's part of
      it), a scale covers a shorter run, and a block's scale stands several times.
  """

  values: jax.Array
  scales: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MXFP4:
  """E2M1 values with one E8M0 scale for 32 inputs (OCP MX), as the release stores them, inputs first.

  Attributes:
    values: [..., I, O] float4_e2m1fn, in the shape of the plain weight.
    scales: [..., I/32, O] uint8, biased exponents. They stay integers: widened where they are used.
  """

  values: jax.Array
  scales: jax.Array


Quantized = BlockFP8 | MXFP4
FORMS: dict[str, type[Quantized]] = {"block_fp8": BlockFP8, "mxfp4": MXFP4}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InStack:
  """One matrix among a stack's, left where it lies: a kernel that reads it in place wants the whole stack.

  Attributes:
    stack: arrays [N, …].
    index: int32 scalar, which of the N is meant.
    implementation: of `quantized_matmul.grouped_matmul`.
  """

  stack: Quantized
  index: jax.Array
  implementation: str = field(metadata={"static": True})


def runs(form: type[Quantized], shape: tuple[int, int]) -> tuple[int, int]:
  """How many consecutive inputs and outputs one scale covers.

  Args:
    shape: [I, O] of one matrix, or of the part of it that one device holds.
  """
  if form is MXFP4:
    return mxfp4.GROUP, 1
  return math.gcd(BLOCK, shape[0]), math.gcd(BLOCK, shape[1])


def _widen(exponents: jax.Array) -> jax.Array:
  """Biased exponents [..] uint8 -> float32 2^(b − 127); 0, the subnormal 2^−127, comes out as 0."""
  return jax.lax.bitcast_convert_type(exponents.astype(jnp.uint32) << 23, jnp.float32)


def _blocks(w: Quantized) -> tuple[jax.Array, jax.Array]:
  """One matrix -> values [blocks of inputs, run, O] as stored, scales [blocks of inputs, O] float32."""
  inputs, outputs = w.values.shape
  scales = w.scales if isinstance(w, BlockFP8) else _widen(w.scales)
  scales = jnp.repeat(scales, outputs // w.scales.shape[1], axis=1)
  return w.values.reshape(len(scales), inputs // len(scales), outputs), scales


def dequantize(w: Quantized, dtype: Any) -> jax.Array:
  """One matrix as a plain array of its shape. Exact in float32; MXFP4 also in bfloat16."""
  values, scales = _blocks(w)
  return (values.astype(jnp.float32) * scales[:, None]).reshape(w.values.shape).astype(dtype)


def scaled_matmul(x: jax.Array, w: Quantized) -> jax.Array:
  """x [M, I] times a quantised matrix, its scales applied to the partial sums of each block of inputs.

  No decoded copy of the weight is made beyond the values' cast inside the product.

  Returns:
    [M, O] float32.
  """
  values, scales = _blocks(w)
  blocks = x.reshape(len(x), *values.shape[:2])
  partial_sums = jnp.einsum("mbi,bio->mbo", blocks, values.astype(x.dtype), preferred_element_type=jnp.float32)
  return jnp.sum(partial_sums * scales, axis=1)


def quantize_block_fp8(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """[I, O] float32 -> (values e4m3 [I, O], scales float32 [⌈I/128⌉, ⌈O/128⌉]): a block's largest magnitude is 448.

  A block whose scale would be under float32's least normal number (largest magnitude below 5.3e-36) has scale 1, and so
  zeros: devices flush such a scale to zero anyhow. Blocks at the ends may be partial.
  """
  inputs, outputs = matrix.shape
  padded = np.pad(matrix.astype(np.float32), ((0, -inputs % BLOCK), (0, -outputs % BLOCK)))
  blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
  scales = np.abs(blocks).max(axis=(1, 3)) / _FP8_MAX
  scales[scales < np.finfo(np.float32).tiny] = 1
  values = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:inputs, :outputs]
  return values.astype(_FP8), scales


def spread_scales(scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
  """[⌈I/128⌉, ⌈O/128⌉] -> [I, O]: each value's scale, from which `BlockFP8.scales` are picked run by run."""
  return np.repeat(np.repeat(scales, BLOCK, 0)[: shape[0]], BLOCK, 1)[:, : shape[1]]
