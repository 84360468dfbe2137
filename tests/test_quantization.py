"""Quantised weights: the stored numbers, the products with them, and their reading from a released checkpoint."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from MaxText import mxfp4, quantization
from MaxText.layers.linears import grouped_matmul, matmul
from MaxText.quantization import BLOCK, MXFP4, BlockFP8, dequantize, quantize_block_fp8, runs, spread_scales

RNG = np.random.default_rng(0)


def block_fp8(shape):
  """A random BlockFP8 [..., I, O] and its values in float64, block by block from the definition."""
  w = RNG.standard_normal(shape).astype(np.float32) / 16
  flat = w.reshape(-1, *shape[-2:])
  pairs = [quantize_block_fp8(m) for m in flat]
  exact = np.zeros(flat.shape)
  for n, (values, scales) in enumerate(pairs):
    for i in range(values.shape[0]):
      for j in range(values.shape[1]):
        exact[n, i, j] = float(values[i, j]) * float(scales[i // BLOCK, j // BLOCK])
  every = tuple(slice(None, None, run) for run in runs(BlockFP8, shape[-2:]))
  values = np.stack([v for v, _ in pairs]).reshape(shape)
  scales = np.stack([spread_scales(s, v.shape)[every] for v, s in pairs])
  scales = scales.reshape(*shape[:-2], *scales.shape[1:])
  return BlockFP8(jnp.asarray(values), jnp.asarray(scales)), exact.reshape(shape), w


def mx(shape, lead=0):
  """A random MXFP4 [*lead, I, *out] and its values in float64, by ml_dtypes' own casts."""
  codes = RNG.integers(0, 16, shape).astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
  scale_shape = (*shape[:lead], shape[lead] // mxfp4.GROUP, *shape[lead + 1 :])
  scales = RNG.integers(118, 124, scale_shape).astype(np.uint8)
  wide = np.repeat(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), mxfp4.GROUP, axis=lead)
  return MXFP4(jnp.asarray(codes), jnp.asarray(scales)), codes.astype(np.float64) * wide


def test_block_fp8_keeps_three_bits_of_mantissa_and_uses_its_whole_range():
  w = RNG.standard_normal((300, 200)).astype(np.float32)
  values, block_scales = quantize_block_fp8(w)
  assert block_scales.shape == (3, 2)
  # e4m3 rounds to nearest within 2^-4 of a normal value, and within half its smallest step (2^-10 · scale) below.
  scales = spread_scales(block_scales, w.shape)
  error = np.abs(values.astype(np.float64) * scales - w)
  assert np.all(error <= np.maximum(2.0**-4 * np.abs(w), 2.0**-10 * scales) * (1 + 1e-6))
  largest = np.abs(values.astype(np.float32))
  assert largest[:128, :128].max() == largest[256:, 128:].max() == 448


@pytest.mark.parametrize("largest", [0, 1e-45, 1e-40, 5.2e-36])
def test_a_block_without_a_normal_scale_is_zero(largest):
  """448 · 2^−126 is 5.27e-36; the least float32 divided by 448 is 0."""
  values, scales = quantize_block_fp8(np.full((128, 256), -largest, np.float32))
  assert np.all(values.astype(np.float32) == 0)
  assert np.all(scales == 1)


@pytest.mark.parametrize("shape", [(256, 128), (128, 384), (128, 200), (72, 136)])
def test_block_fp8_products(shape):
  w, exact, _ = block_fp8(shape)
  x = RNG.standard_normal((5, shape[0])).astype(np.float32)
  # float32 sums of a few hundred terms of size one.
  np.testing.assert_allclose(matmul(jnp.asarray(x), w), x.astype(np.float64) @ exact, atol=2e-5)
  np.testing.assert_allclose(dequantize(w, jnp.float32), exact, rtol=1e-7)


def test_mxfp4_products():
  w, exact = mx((64, 48))
  x = RNG.standard_normal((7, 64)).astype(np.float32)
  expected = x.astype(np.float64) @ exact
  np.testing.assert_allclose(matmul(jnp.asarray(x), w), expected, atol=2e-5)
  np.testing.assert_array_equal(dequantize(w, jnp.float32), exact)
  # Every decoded value is exact in bfloat16.
  np.testing.assert_array_equal(dequantize(w, jnp.bfloat16).astype(np.float64), exact)


@pytest.mark.parametrize("make", [lambda: mx((6, 64, 64), lead=1), lambda: block_fp8((6, 64, 64))[:2]])
def test_grouped_products_of_quantised_experts(make):
  w, exact = make()
  sizes = np.array([3, 0, 21])
  x = RNG.standard_normal((24, 64)).astype(np.float32)
  expected = np.concatenate(
    [x[:3].astype(np.float64) @ exact.reshape(6, 64, 64)[2], x[3:] @ exact.reshape(6, 64, 64)[4]]
  )
  out = grouped_matmul(jnp.asarray(x), w, jnp.asarray(sizes, jnp.int32), 2, jnp.float32, "loop")
  np.testing.assert_allclose(out, expected, atol=2e-5)
  with pytest.raises(ValueError, match="ragged_dot"):
    grouped_matmul(jnp.asarray(x), w, jnp.asarray(sizes, jnp.int32), 2, jnp.float32, "ragged_dot")


def test_scales_widen_exactly():
  exponents = np.arange(1, 255, dtype=np.uint8)
  expected = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
  np.testing.assert_array_equal(np.asarray(quantization._widen(jnp.asarray(exponents))).astype(np.float64), expected)
