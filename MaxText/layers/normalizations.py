"""RMSNorm as K3 has it."""

import jax
import jax.numpy as jnp

from MaxText.weights import Source, Weight, constant

# K3's two latent norms (q_a_layernorm, kv_a_layernorm) use this epsilon whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


def norm_weight(size: int, name: str, float32: bool = False) -> Weight:
  """Declares a norm's scale [size], initialised to one."""
  return Weight((size,), (None,), (Source(name, (size,)),), constant(1.0), float32=float32)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  """x · rsqrt(mean x² + eps) over the last axis in float32, cast to x's dtype, then times the weight.

  Args:
    x: [..., D], any float dtype.
    weight: [D].
    eps: added to the mean of squares. It matters: read-outs and small latents have mean squares near 1e-5.

  Returns:
    [..., D] in x's dtype.
  """
  x32 = x.astype(jnp.float32)
  normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
  return normed.astype(x.dtype) * weight.astype(x.dtype)
