"""One decode step of Kimi Delta Attention in plain jnp: the readable form, and the model's path on a CPU.

The formulas are Kimi K3's (docs/kda_decode.md): a causal depthwise convolution of width W with SiLU, l2-normalised q
and k, a per-channel decay, the gated delta rule, and a per-head RMSNorm times an output gate. Each is a small
function of arrays with free leading dimensions, so that prefill shares them with decode. All arithmetic is float32;
a value is rounded only where it's stored or returned.

Letters: B batch rows, H heads, K key dim, V value dim, W taps of the convolution, N layers of a pool, S slots.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

L2_EPS = 1e-6  # added to the sum of squares of q and k, not to their mean


def causal_conv(taps: Sequence[jax.Array], weight: jax.Array) -> jax.Array:
  """SiLU(Σ_i weight[:, i] · taps[i]), the depthwise causal convolution, given its shifted inputs.

  Args:
    taps: W arrays [..., 3, H, K], any float dtype, oldest first; the last one is the current token. Prefill passes
      shifted views of one padded sequence.
    weight: [3, W, H, K] float32.

  Returns:
    [..., 3, H, K] float32.
  """
  y = sum(weight[:, i].astype(jnp.float32) * tap.astype(jnp.float32) for i, tap in enumerate(taps))
  return jax.nn.silu(y)


def short_conv_step(x: jax.Array, history: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The convolution for one new token, and the history it leaves.

  Args:
    x: [B, 3, H, K], the pre-convolution q, k and v of this token.
    history: [B, W-1, 3, H, K], those of the W-1 tokens before, oldest first.
    weight: [3, W, H, K] float32.

  Returns:
    (y [B, 3, H, K] float32, new history [B, W-1, 3, H, K] in the history's dtype).
  """
  width = weight.shape[1]
  y = causal_conv([*(history[:, i] for i in range(width - 1)), x], weight)
  return y, jnp.concatenate([history[:, 1:], x[:, None].astype(history.dtype)], axis=1)


def l2norm(x: jax.Array) -> jax.Array:
  """x / √(Σ x² + 1e-6) over the last axis, float32. The epsilon stands on the sum."""
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def log_decay(decay: jax.Array, a_log: jax.Array, dt_bias: jax.Array, gate_lower_bound: float | None) -> jax.Array:
  """The log of the per-channel decay, g ≤ 0.

  With a bound: gate_lower_bound · sigmoid(exp(a_log) · (decay + dt_bias)), which reaches the bound and −0 exactly.
  Without one: −exp(a_log) · softplus(decay + dt_bias).

  Args:
    decay: [..., H, K] raw low-rank gate, any float dtype.
    a_log: [H] float32.
    dt_bias: [H, K] float32.
    gate_lower_bound: a negative number, or None.

  Returns:
    [..., H, K] float32.
  """
  rate = jnp.exp(a_log.astype(jnp.float32))[:, None]
  x = decay.astype(jnp.float32) + dt_bias.astype(jnp.float32)
  if gate_lower_bound is None:
    return -rate * jax.nn.softplus(x)
  return gate_lower_bound * jax.nn.sigmoid(rate * x)


def delta_step(
  state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The gated delta rule for one token: decay, correct, write, read.

  S ← diag(exp g)·S; r = v − Sᵀk; S ← S + β·k·rᵀ; o = Sᵀq with the *updated* S.

  Args:
    state: [..., K, V] float32.
    q, k: [..., K] float32, normalised; q carries its K^-1/2.
    v: [..., V] float32.
    g: [..., K] float32, the log of the decay.
    beta: [...] float32, in (0, 1).

  Returns:
    (o [..., V], new state [..., K, V]), float32.
  """
  # XLA would compute the exponential anew for each of the V columns that it meets.
  state = state * jax.lax.optimization_barrier(jnp.exp(g))[..., None]
  predicted = jnp.einsum("...kv,...k->...v", state, k, precision=jax.lax.Precision.HIGHEST)
  correction = beta[..., None] * (v - predicted)
  state = state + k[..., None] * correction[..., None, :]
  return jnp.einsum("...kv,...k->...v", state, q, precision=jax.lax.Precision.HIGHEST), state


def gated_rms_norm(o: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  """o · rsqrt(mean o² + eps) · weight · sigmoid(gate) over the last axis, float32.

  Args:
    o, gate: [..., V], any float dtype.
    weight: [V].
    eps: added to the mean of squares.
  """
  o = o.astype(jnp.float32)
  o = o * jax.lax.rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + eps)
  return o * weight.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))


def kda_decode_reference(
    q, k, v, decay, beta, gate, state, conv_state, layer, slots, *, conv_weight, a_log, dt_bias, o_norm,
    gate_lower_bound, norm_eps,
):  # fmt: skip
  """`kda_decode` in jnp. Shapes, dtypes and meaning are those of `kda_decode.api.kda_decode`."""
  key_dim = q.shape[-1]
  layers, num_slots = state.shape[:2]
  active = (slots >= 0) & (slots < num_slots) & (layer >= 0) & (layer < layers)
  # jnp wraps a negative index, so an idle row goes out of range at the upper end, where gathers fill and scatters
  # drop. Each gets an index of its own: the scatter below promises that its indices are unique.
  rows = jnp.where(active, slots, num_slots + jnp.arange(slots.shape[0], dtype=slots.dtype))

  history = conv_state.at[layer, rows].get(mode="fill", fill_value=0)
  old = state.at[layer, rows].get(mode="fill", fill_value=0).astype(jnp.float32)

  y, history = short_conv_step(jnp.stack([q, k, v], axis=1), history, conv_weight)
  q_n = l2norm(y[:, 0]) * key_dim**-0.5
  k_n = l2norm(y[:, 1])
  g = log_decay(decay, a_log, dt_bias, gate_lower_bound)
  # XLA would compute these small things anew for each of the state's K·V entries that they meet.
  q_n, k_n, v_n, g, b = jax.lax.optimization_barrier((q_n, k_n, y[:, 2], g, jax.nn.sigmoid(beta.astype(jnp.float32))))
  o, new = delta_step(old, q_n, k_n, v_n, g, b)
  out = gated_rms_norm(o, gate, o_norm, norm_eps)
  # A select, not a product: an idle row's inputs may be NaN.
  out = jnp.where(active[:, None, None], out, 0.0).astype(q.dtype)

  put = dict(mode="drop", unique_indices=True)
  state = state.at[layer, rows].set(new.astype(state.dtype), **put)
  conv_state = conv_state.at[layer, rows].set(history, **put)
  return out, state, conv_state
