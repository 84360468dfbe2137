"""MXFP4: 4-bit floats (E2M1), two a byte, with one power-of-two scale (E8M0) for 32 inputs (OCP MX specification).

Byte j holds element 2j in its low nibble and 2j+1 in its high one, along the input axis, the last.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

GROUP = 32
NAN_SCALE = 255
_MAX = 6.0  # the largest magnitude of E2M1
_MAX_EXPONENT = 2  # 6 = 1.5 · 2²


def nibbles(packed: np.ndarray) -> np.ndarray:
  """[out, in / 2] uint8 -> [out, in] uint8, one 4-bit code each."""
  return np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(packed.shape[0], -1)


def unpack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
  """Decodes to float32; every value is exact in bfloat16 too.

  Args:
    packed: [out, in / 2] uint8.
    scale: [out, in / 32] uint8, biased exponents: 2^(b − 127).

  Raises:
    ValueError: shapes that don't belong together, or a scale of 255 (NaN).
  """
  if packed.shape[0] != scale.shape[0] or packed.shape[1] * 2 != scale.shape[1] * GROUP:
    raise ValueError(f"weight_packed {packed.shape} and weight_scale {scale.shape} don't belong together")
  if np.any(scale == NAN_SCALE):
    raise ValueError(f"weight_scale holds {NAN_SCALE}, which is NaN")
  values = nibbles(packed).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
  scales = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
  return (values.reshape(*scale.shape, GROUP) * scales[..., None]).reshape(values.shape)


def pack(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Encodes [out, in] floats as (packed [out, in / 2] uint8, scale [out, in / 32] uint8).

  A value that `fake_quantize` made comes back exactly from `unpack`.
  """
  groups = w.astype(np.float32).reshape(w.shape[0], -1, GROUP)
  exponent = np.asarray(_shared_exponent(jnp.asarray(groups)))
  scaled = np.clip(groups / np.exp2(exponent)[..., None], -_MAX, _MAX)
  codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(w.shape)
  return codes[:, 0::2] | codes[:, 1::2] << 4, (exponent + 127).astype(np.uint8)


def _shared_exponent(groups: jax.Array) -> jax.Array:
  """[..., 32] -> [...]: the exponent that brings a group's largest magnitude into E2M1's top binade."""
  largest = jnp.max(jnp.abs(groups), axis=-1)
  # frexp gives a mantissa in [0.5, 1), so floor(log2 x) is its exponent less one.
  exponent = jnp.where(largest > 0, jnp.frexp(largest)[1] - 1 - _MAX_EXPONENT, 0).astype(jnp.float32)
  return jnp.clip(exponent, -127, 127)


def fake_quantize(w: jax.Array, axis: int) -> jax.Array:
  """Rounds to MXFP4 along the input axis `axis` and back, with the gradient of the identity (for training).

  Args:
    w: any float32 array whose `axis` 32 divides.
  """
  shape = w.shape
  groups = jax.lax.stop_gradient(w).reshape(*shape[:axis], shape[axis] // GROUP, GROUP, *shape[axis + 1 :])
  exponent = _shared_exponent(jnp.moveaxis(groups, axis + 1, -1))
  scaled = groups * jnp.exp2(-jnp.expand_dims(exponent, axis + 1))
  # E2M1 has steps of 1/2 below 2, of 1 below 4, of 2 up to 6; ties go to the even mantissa, as jnp.round's do.
  # Written out, since XLA's own cast to float4 is several times slower on a CPU.
  magnitude = jnp.abs(scaled)
  step = jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))
  rounded = jnp.clip(jnp.round(scaled / step) * step, -_MAX, _MAX) * jnp.exp2(jnp.expand_dims(exponent, axis + 1))
  return w + (rounded.reshape(shape) - jax.lax.stop_gradient(w))
