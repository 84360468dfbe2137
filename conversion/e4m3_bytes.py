"""E2M1 codes into the bytes of e4m3, by XLA on the CPU: a whole matrix in a few calls.

NumPy would need twenty calls for each cacheful, at every one of which Python's threads wait for each other: two of them
were no faster than one.
"""

from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np

from MaxText import mxfp4

_BYTES = mxfp4.GROUP // 2  # of a group of packed codes
_WORD = 4  # bytes


def encode(packed: np.ndarray, fields: np.ndarray, inputs_first: bool) -> np.ndarray:
  """Packed codes into normal numbers of e4m3.

  Args:
    packed: [out, in / 2] uint8, the first of two codes low.
    fields: [out, in / 32] uint8: k + 6 for a group whose values are m·2^k, so 1 to 12. Groups of zeros may have
      any; what other groups become by another number, and their neighbours in a run of four outputs, is of no use.
    inputs_first: whether the result is [in, out], or else [out, in].

  Returns:
    uint8, contiguous, read-only.
  """
  outputs = len(packed)
  with _cpu():
    if not inputs_first:
      return np.asarray(_outputs_first(packed, fields)).view(np.uint8)
    if outputs % _WORD:
      packed, fields = (np.pad(a, ((0, -outputs % _WORD), (0, 0))) for a in (packed, fields))
    # Packed bytes are transposed, half as many as values, and by JAX as it takes them: it copies tile by tile.
    words = _inputs_first(packed.T, fields.T)
    values = np.asarray(words).view(np.uint8)
    return values if values.shape[1] == outputs else np.ascontiguousarray(values[:, :outputs])


def turn(matrix: np.ndarray) -> np.ndarray:
  """The transpose, contiguous; read-only. JAX copies tile by tile, several times as fast as NumPy."""
  with _cpu():
    return np.asarray(jnp.asarray(matrix.T))


def _cpu() -> AbstractContextManager[None]:
  return jax.default_device(jax.local_devices(backend="cpu")[0])


def _e4m3(codes: jax.Array, fields: jax.Array) -> jax.Array:
  """Arithmetic on the bytes of a word, all at once: many times as fast as a table.

  Both have a sign, an exponent and then a mantissa: E2M1's exponent and its one bit move left by 2, and the field is
  added. Two codes are no normal numbers of E2M1: 0 stays 0, and ½, 1·2^−1, has the field alone.

  Args:
    codes: unsigned words; what their bytes have beside the low 4 bits doesn't matter.
    fields: of the same type, a field in each byte; broadcast to the codes' shape.
  """
  word = codes.dtype.type

  def each(byte: int) -> np.generic:
    return word(int.from_bytes(bytes([byte] * word(0).itemsize)))

  def at_least(least: int) -> jax.Array:
    """All bits of the bytes whose magnitude, at most 7, is that large: the others have no bit 7 after the sum."""
    return ((magnitudes + each(0x80 - least) & each(0x80)) >> 7) * word(0xFF)

  magnitudes = codes & each(0x7)
  numbers = (magnitudes << 2 & at_least(2)) + ((fields & at_least(1)) << 3)
  return (codes & each(0x8)) << 4 | numbers


@jax.jit
def _inputs_first(packed: jax.Array, fields: jax.Array) -> jax.Array:
  """[in / 2, out] and [in / 32, out] uint8 -> four e4m3 values in each word, uint32 [in, out / 4]."""
  groups, words = len(fields), fields.shape[1] // _WORD
  packed = jax.lax.bitcast_convert_type(packed.reshape(groups, _BYTES, words, _WORD), jnp.uint32)
  fields = jax.lax.bitcast_convert_type(fields.reshape(groups, words, _WORD), jnp.uint32)
  values = jnp.stack([_e4m3(packed, fields[:, None]), _e4m3(packed >> 4, fields[:, None])], axis=2)
  return values.reshape(groups * mxfp4.GROUP, words)


@jax.jit
def _outputs_first(packed: jax.Array, fields: jax.Array) -> jax.Array:
  """[out, in / 2] and [out, in / 32] uint8 -> two e4m3 values, the first low, uint16 [out, in / 2]."""
  packed = packed.reshape(*fields.shape, _BYTES).astype(jnp.uint16)
  fields = fields.astype(jnp.uint16)[..., None] * jnp.uint16(0x101)
  return _e4m3(packed | packed << 4, fields).reshape(len(packed), -1)
