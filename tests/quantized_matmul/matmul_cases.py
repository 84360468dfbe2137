"""Random arguments in each format, and the product in float64 numpy, written from the formula."""

import math

import ml_dtypes
import numpy as np

FORMATS = ("plain", "block_fp8", "mxfp4")


def arguments(form, rows, sizes, inputs, outputs, *, layers=3, dtype=np.float32, seed=0, weight_dtype=None):
  """(x, values, scales, group_sizes) as numpy arrays for `layers` layers of len(sizes) groups.

  Rows beyond the groups are NaN.
  """
  rng = np.random.default_rng(seed)
  stack = (layers * len(sizes), inputs, outputs)
  x = rng.standard_normal((rows, inputs)).astype(dtype)
  x[sum(sizes) :] = np.nan
  values, scales = rng.standard_normal(stack).astype(np.float32), None
  if form == "plain":
    values = values.astype(weight_dtype or dtype)
  elif form == "block_fp8":
    values = (values * 60).astype(ml_dtypes.float8_e4m3fn)
    runs = [n // math.gcd(128, n) for n in (inputs, outputs)]
    scales = rng.uniform(1e-3, 2e-2, (stack[0], *runs)).astype(np.float32)
  else:
    values = (values * 2).astype(ml_dtypes.float4_e2m1fn)
    scales = rng.integers(118, 128, (stack[0], inputs // 32, outputs)).astype(np.uint8)
  return x, values, scales, np.array(sizes, np.int32)


def decoded(values, scales):
  """One matrix [I, O] in float64."""
  wide = values.astype(np.float64)
  if scales is None:
    return wide
  if scales.dtype == np.uint8:
    scales = np.exp2(scales.astype(np.float64) - 127)
  runs = [n // m for n, m in zip(values.shape, scales.shape, strict=True)]
  return wide * np.repeat(np.repeat(scales.astype(np.float64), runs[0], 0), runs[1], 1)


def expected(x, values, scales, sizes, first_group, *, cast=None):
  """Rows of the groups, in float64, and the sum of the magnitudes that each was added from.

  Args:
    cast: the dtype in which plain weights are read.
  """
  products, magnitudes = [], []
  start = 0
  for group, size in enumerate(sizes):
    matrix = values[first_group + group]
    w = decoded(
      matrix if cast is None else matrix.astype(cast), None if scales is None else scales[first_group + group]
    )
    rows = x[start : start + size].astype(np.float64)
    products.append(rows @ w)
    magnitudes.append(np.abs(rows) @ np.abs(w))
    start += size
  return np.concatenate(products), np.concatenate(magnitudes)


def assert_close(result, x, values, scales, sizes, first_group, *, cast=None):
  """Each element within the error of a float32 sum of its terms, in any order, and of one rounding of the result.

  A sum of n products in float32 is off by at most n · 2^-24 of the sum of their magnitudes; the scales add two
  roundings a term. A bfloat16 result adds half a unit of its 8 bits.
  """
  want, magnitude = expected(x, values, scales, sizes, first_group, cast=cast)
  got = np.asarray(result)[: len(want)]
  tolerance = (x.shape[1] + 2) * 2.0**-24 * magnitude
  if got.dtype != np.float32:
    tolerance = tolerance * (1 + 2.0**-8) + 2.0**-8 * np.abs(want)
  error = np.abs(got.astype(np.float64) - want)
  assert np.all(error <= tolerance), f"worst error {np.max(error / tolerance)} of the tolerance"
