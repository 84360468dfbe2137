"""MXFP4: bytes to numbers and back, against hand-written bytes and ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _models import rng

from MaxText import mxfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_unpack_reads_hand_written_bytes():
  # One row: elements 0, 1, 2, … of two groups; the low nibble comes first.
  packed = np.zeros((1, 32), np.uint8)
  packed[0, 0] = 0x21  # element 0 is code 1, element 1 is code 2
  packed[0, 1] = 0xF7  # 6, then -6
  packed[0, 15] = 0x80  # +0, then -0
  packed[0, 16] = 0x5C  # second group: -2, then 3
  values = mxfp4.unpack(packed, np.array([[127, 130]], np.uint8))
  assert values.dtype == np.float32
  np.testing.assert_array_equal(values[0, :4], [0.5, 1.0, 6.0, -6.0])
  assert np.signbit(values[0, 31]) and values[0, 31] == 0
  np.testing.assert_array_equal(values[0, 32:34], [-16.0, 24.0])
  assert not values[0, 4:32].any() and not values[0, 34:].any()


def test_unpack_decodes_every_code_at_every_scale():
  codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
  for exponent in range(253):  # beyond, 6 overflows float32
    ours = mxfp4.unpack(codes, np.full((16, 1), exponent, np.uint8))
    signed = np.array([*E2M1, *(-v for v in E2M1)])
    expected = np.stack([signed[codes & 15], signed[codes >> 4]], axis=-1).reshape(16, 32) * 2.0 ** (exponent - 127)
    np.testing.assert_array_equal(ours, expected)
    # Exact in bfloat16 as well.
    np.testing.assert_array_equal(ours.astype(ml_dtypes.bfloat16).astype(np.float32), ours)


def test_unpack_agrees_with_ml_dtypes():
  generator = rng()
  packed = generator.integers(0, 256, (8, 64), dtype=np.uint8)
  scale = generator.integers(100, 150, (8, 4), dtype=np.uint8)
  nibbles = np.stack([packed % 16, packed // 16], axis=-1).reshape(8, 128)
  values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
  scales = np.repeat(scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, axis=1)
  np.testing.assert_array_equal(mxfp4.unpack(packed, scale), values * scales)


def test_unpack_refuses_nan_scales_and_shapes_that_dont_belong_together():
  with pytest.raises(ValueError, match="255"):
    mxfp4.unpack(np.zeros((1, 16), np.uint8), np.array([[255]], np.uint8))
  for scale in ((1, 2), (2, 1)):
    with pytest.raises(ValueError, match="belong together"):
      mxfp4.unpack(np.zeros((1, 16), np.uint8), np.zeros(scale, np.uint8))


def test_pack_takes_the_nearest_value():
  """Against an exhaustive search over E2M1, with the scale that the OCP specification prescribes."""
  w = (rng(1).standard_normal((32, 128)) * np.exp2(rng(2).integers(-30, 30, (32, 1)))).astype(np.float32)
  packed, scale = mxfp4.pack(w)
  groups = w.reshape(32, 4, 32).astype(np.float64)
  exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2
  np.testing.assert_array_equal(scale, exponents + 127)
  grid = np.array([*E2M1, *(-v for v in E2M1)])
  unscaled = groups / np.exp2(exponents)[..., None]
  nearest = np.abs(unscaled[..., None] - grid).min(-1)
  ours = mxfp4.unpack(packed, scale).reshape(groups.shape) / np.exp2(exponents)[..., None]
  np.testing.assert_array_equal(np.abs(ours - unscaled), nearest)


def test_pack_rounds_ties_to_even_clips_and_keeps_signs_and_zero_groups():
  row = np.zeros(64, np.float32)
  # The group's scale is 1 (its largest is in [4, 8)); ties: 0.25 → 0, 0.75 → 1, 1.25 → 1, 2.5 → 2, 3.5 → 4, 5 → 4.
  row[:9] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9, -0.75]
  packed, scale = mxfp4.pack(row[None])
  np.testing.assert_array_equal(scale, [[127, 127]])
  np.testing.assert_array_equal(mxfp4.unpack(packed, scale)[0, :9], [0, 1, 1, 2, 2, 4, 4, 6, -1])
  assert not mxfp4.unpack(packed, scale)[0, 32:].any()


def test_packing_what_was_unpacked_changes_no_value():
  packed = rng(3).integers(0, 256, (16, 64), dtype=np.uint8)
  scale = rng(4).integers(60, 190, (16, 4), dtype=np.uint8)
  values = mxfp4.unpack(packed, scale)
  np.testing.assert_array_equal(mxfp4.unpack(*mxfp4.pack(values)), values)


@pytest.mark.parametrize("axis", [0, 1])
def test_fake_quantize_is_pack_and_unpack_and_idempotent(axis):
  w = jnp.asarray(rng(5).standard_normal((64, 96)) * 0.05, jnp.float32)
  quantized = mxfp4.fake_quantize(w, axis)
  # Not w + (rounded − w) rounded once more: what is trained must be what is shipped, to the bit.
  ours = np.moveaxis(np.asarray(quantized), axis, -1)
  np.testing.assert_array_equal(ours, mxfp4.unpack(*mxfp4.pack(np.moveaxis(np.asarray(w), axis, -1))))
  np.testing.assert_array_equal(mxfp4.fake_quantize(quantized, axis), quantized)


def test_fake_quantize_has_the_gradient_of_the_identity():
  w = jnp.asarray(rng(6).standard_normal((4, 64)), jnp.float32)
  factors = jnp.asarray(rng(7).standard_normal((4, 64)), jnp.float32)
  gradient = jax.grad(lambda x: jnp.sum(mxfp4.fake_quantize(x, 1) * factors))(w)
  np.testing.assert_array_equal(gradient, factors)
