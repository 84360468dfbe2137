"""The grouped product in plain jnp: any shape, any backend. It reads every group's weights."""

import jax
import jax.numpy as jnp

from quantized_matmul.formats import Form, format_of


def widen(exponents: jax.Array) -> jax.Array:
  """Biased exponents [..] uint8 -> float32 2^(b − 127); 0 comes out as 0, 255 as infinity."""
  return jax.lax.bitcast_convert_type(exponents.astype(jnp.uint32) << 23, jnp.float32)


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
  """x [M, I] times w [I, O], read in x's dtype, in float32: one pass for bfloat16, exact products for float32."""
  precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
  return jnp.dot(x, w.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)


def _product(x, values, scales, fmt):
  """x [M, I] times one matrix: values [I, O], scales [I / ri, O / ro] or None."""
  if fmt.form is Form.PLAIN:
    return dot(x, values)
  if fmt.form is Form.MXFP4:
    # In float32 on the way: XLA's CPU has no product of bfloat16 by float4.
    return dot(x, values.astype(jnp.float32) * jnp.repeat(widen(scales), fmt.ri, axis=0))
  precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
  partial_sums = jnp.einsum(
    "mbi,bio->bmo",
    x.reshape(x.shape[0], -1, fmt.ri),
    values.reshape(-1, fmt.ri, values.shape[1]).astype(x.dtype),
    precision=precision,
    preferred_element_type=jnp.float32,
  )
  return jnp.sum(partial_sums * jnp.repeat(scales, fmt.ro, axis=1)[:, None], axis=0)


def grouped_matmul_reference(x, values, scales, group_sizes, first_group, *, out_dtype):
  """`grouped_matmul` in jnp. Arguments, meaning and result are those of `quantized_matmul.api.grouped_matmul`.

  Rows beyond sum(group_sizes) come out as zero.
  """
  fmt = format_of(values, scales)
  ends = jnp.cumsum(group_sizes)
  starts = ends - group_sizes
  row = jnp.arange(x.shape[0])[:, None]

  def body(group, out):
    pick = lambda a: jax.lax.dynamic_index_in_dim(a, first_group + group, 0, keepdims=False)
    result = _product(x, pick(values), None if scales is None else pick(scales), fmt)
    return jnp.where((row >= starts[group]) & (row < ends[group]), result, out)

  # Zeros made from x, so that they vary over a mesh's axes as x does.
  out = jnp.zeros_like(x, jnp.float32, shape=(x.shape[0], values.shape[2]))
  return jax.lax.fori_loop(0, group_sizes.shape[0], body, out).astype(out_dtype)
