"""The kernel, interpreted, and the jnp reference, against float64 numpy, element by element."""

import functools

import jax
import jax.numpy as jnp
import matmul_cases as cases
import ml_dtypes
import numpy as np
import pytest

from quantized_matmul import grouped_matmul
from quantized_matmul.kernel import grouped_matmul_pallas
from quantized_matmul.tiles import Tiles

IMPLEMENTATIONS = ("pallas_interpret", "reference")
BF16 = ml_dtypes.bfloat16


def on_device(arrays):
  return [None if a is None else jnp.asarray(a) for a in arrays]


def check(
  form, rows, sizes, inputs, outputs, implementation, *, first_group=None, dtype=np.float32, out_dtype=np.float32
):
  arrays = cases.arguments(form, rows, sizes, inputs, outputs, dtype=dtype)
  first_group = len(sizes) if first_group is None else first_group
  result = grouped_matmul(*on_device(arrays), first_group, out_dtype=out_dtype, implementation=implementation)
  assert result.shape == (rows, outputs) and result.dtype == out_dtype
  cases.assert_close(result, *arrays, first_group)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", cases.FORMATS)
@pytest.mark.parametrize("dtype", (np.float32, BF16))
def test_formats(form, dtype, implementation):
  check(form, 40, (5, 0, 20, 9), 256, 384, implementation, dtype=dtype)


@pytest.mark.parametrize("form", cases.FORMATS)
def test_bfloat16_result(form):
  check(form, 40, (5, 0, 20, 9), 256, 256, "pallas_interpret", dtype=BF16, out_dtype=BF16)


@pytest.mark.parametrize(
  "sizes", ((0, 0, 0, 7), (7, 0, 0, 0), (0, 3, 0, 4), (16, 16, 16, 16), (1, 1, 1, 1), (15, 1, 17, 31), (64, 0, 0, 0))
)
def test_groups(sizes):
  """Empty groups, groups that share a row tile, that end with one, and that cross several."""
  arrays = cases.arguments("block_fp8", 64, sizes, 128, 256)
  result = grouped_matmul_pallas(
    *on_device(arrays), jnp.int32(4), out_dtype=jnp.float32, interpret=True, tiles=Tiles(16, 128)
  )
  cases.assert_close(result, *arrays, 4)


@pytest.mark.parametrize("form", cases.FORMATS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows_at_all(form, implementation):
  arrays = cases.arguments(form, 16, (0, 0), 128, 256)
  result = grouped_matmul(*on_device(arrays), 0, out_dtype=jnp.float32, implementation=implementation)
  assert result.shape == (16, 256)


@pytest.mark.parametrize("first_group", (0, 4, 8))
def test_first_group(first_group):
  check("mxfp4", 24, (8, 1, 0, 11), 64, 128, "pallas_interpret", first_group=first_group)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
  "inputs,outputs", ((192, 576), (112, 112), (384, 2112), (1056, 128), (32, 64), (16, 16), (64, 448))
)
def test_odd_widths_of_block_fp8(inputs, outputs, implementation):
  """Widths that a 32-way split leaves: scales for 16, 32 or 64 values, a last tile narrower than the others."""
  check("block_fp8", 20, (9, 11), inputs, outputs, implementation)
  check("block_fp8", 20, (20,), inputs, outputs, implementation, dtype=BF16)


@pytest.mark.parametrize(
  "form,inputs,outputs", (("plain", 56, 72), ("plain", 1, 3), ("mxfp4", 96, 72), ("mxfp4", 32, 5))
)
def test_odd_widths_of_other_formats(form, inputs, outputs):
  check(form, 20, (9, 11), inputs, outputs, "pallas_interpret")


@pytest.mark.parametrize("rows", (1, 3, 17, 33, 100))
def test_odd_row_counts(rows):
  check("block_fp8", rows, (rows - 1, 1), 128, 128, "pallas_interpret")


def test_many_rows():
  check("block_fp8", 1100, (300, 500, 0, 290), 256, 128, "pallas_interpret", dtype=BF16)
  check("mxfp4", 1100, (1100,), 64, 128, "pallas_interpret", dtype=BF16)


@pytest.mark.parametrize("form", cases.FORMATS)
def test_narrow_last_tile_and_deep_ring(form):
  arrays = cases.arguments(form, 48, (20, 3, 25), 64, 320)
  for depth in (2, 3):
    result = grouped_matmul_pallas(
      *on_device(arrays), jnp.int32(0), out_dtype=jnp.float32, interpret=True, tiles=Tiles(16, 128, depth)
    )
    cases.assert_close(result, *arrays, 0)


@pytest.mark.parametrize("form", ("plain", "block_fp8"))
def test_nan_stays_where_it_is(form):
  """Weights of empty groups and of other layers are never used, and a row's NaN stays in that row."""
  x, values, scales, sizes = cases.arguments(form, 32, (6, 0, 10), 128, 256)
  x[2] = np.nan
  values[0:3], values[4], values[6:] = np.nan, np.nan, np.nan
  result = np.asarray(
    grouped_matmul(*on_device((x, values, scales, sizes)), 3, out_dtype=jnp.float32, implementation="pallas_interpret")
  )
  assert np.isnan(result[2]).all()
  live = np.arange(16) != 2
  assert np.isfinite(result[:16][live]).all()


@pytest.mark.parametrize("form", cases.FORMATS)
def test_exponents(form):
  """All of MXFP4's codes and a wide range of exponents; float8's subnormals; both exact for one-hot rows."""
  x = np.eye(32, dtype=BF16)
  if form == "plain":
    values, scales = np.random.default_rng(0).standard_normal((1, 32, 128)).astype(BF16), None
  elif form == "block_fp8":
    codes = np.arange(32 * 128) % 256
    codes[codes % 128 == 127] = 0  # NaN
    values = codes.astype(np.uint8).reshape(1, 32, 128).view(ml_dtypes.float8_e4m3fn)
    scales = np.full((1, 1, 1), 0.37, np.float32)
  else:
    codes = ((np.arange(32)[:, None] + np.arange(128)) % 16).astype(np.float32)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)[codes.astype(int)]
    values = values.astype(ml_dtypes.float4_e2m1fn)[None]
    scales = np.linspace(2, 250, 128).astype(np.uint8).reshape(1, 1, 128)
  arrays = x, values, scales, np.array([32], np.int32)
  for implementation in IMPLEMENTATIONS:
    result = grouped_matmul(*on_device(arrays), 0, out_dtype=jnp.float32, implementation=implementation)
    want = cases.decoded(values[0], None if scales is None else scales[0]).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(result), want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_loop_over_layers(implementation):
  """A traced first_group, and sizes that differ from layer to layer."""
  x, values, scales, _ = cases.arguments("block_fp8", 24, (8, 16), 128, 128)
  sizes = np.array([[8, 16], [0, 24], [20, 1]], np.int32)
  product = functools.partial(grouped_matmul, out_dtype=jnp.float32, implementation=implementation)

  @jax.jit
  def every_layer(x, values, scales, sizes):
    return jax.lax.map(lambda layer: product(x, values, scales, sizes[layer], 2 * layer), jnp.arange(3))

  results = every_layer(*on_device((x, values, scales, sizes)))
  for layer in range(3):
    cases.assert_close(results[layer], x, values, scales, sizes[layer], 2 * layer)
