"""The public face of the single-step KDA decode: one function, its checks, and the choice of implementation."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from kda_decode import reference

Implementation = Literal["pallas", "pallas_interpret", "reference"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


def kda_decode(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  decay: jax.Array,
  beta: jax.Array,
  gate: jax.Array,
  state: jax.Array,
  conv_state: jax.Array,
  layer: jax.Array | int,
  slots: jax.Array,
  *,
  conv_weight: jax.Array,
  a_log: jax.Array,
  dt_bias: jax.Array,
  o_norm: jax.Array,
  gate_lower_bound: float | None,
  norm_eps: float,
  implementation: Implementation,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """One token of Kimi Delta Attention for a batch of slots: everything between the input and output projections.

  Per row and head, in float32 (the formulas of Kimi K3, in docs/kda_decode.md):
    q, k, v ← SiLU(causal conv of width W);  q, k ← x / √(Σx² + 1e-6);  q ← q · K^-1/2
    g = gate_lower_bound · sigmoid(exp(a_log)·(decay + dt_bias)), or −exp(a_log)·softplus(decay + dt_bias) without one
    S ← diag(exp g)·S;  r = v − Sᵀk;  S ← S + sigmoid(beta)·k·rᵀ;  o = Sᵀq
    out = o · rsqrt(mean o² + norm_eps) · o_norm · sigmoid(gate), cast once to q's dtype

  The pools are updated in place when their buffers are donated or carried by a loop: only the given layer's given
  slots are read and written. On a mesh, call it inside `jax.shard_map` with the heads split over devices.

  Args:
    q, k: [B, H, K] projections before the convolution; bfloat16 or float32, the activation dtype.
    v: [B, H, V], V = K, same dtype.
    decay: [B, H, K] raw low-rank decay gate, same dtype.
    beta: [B, H] raw, same dtype; its sigmoid is taken here, after the cast to float32.
    gate: [B, H, V] raw output gate, same dtype; its sigmoid is taken here, in float32.
    state: [layers, S, H, K, V] float32, or bfloat16 (arithmetic stays float32, each store rounds).
    conv_state: [layers, S, W-1, 3, H, K] activation dtype: the pre-convolution q, k, v (in this order on the axis of
      three) of the last W-1 tokens, oldest first.
    layer: int32 scalar, may be traced. Out of [0, layers) every row is idle.
    slots: [B] int32. A slot outside [0, S), such as -1, marks an idle row: its output is zero and nothing of the
      pools is touched. Active slots must differ from one another.
    conv_weight: [3, W, H, K] float32.
    a_log: [H] float32.
    dt_bias: [H, K] float32.
    o_norm: [V] float32.
    gate_lower_bound: a negative number (K3: -5.0), or None for the softplus decay.
    norm_eps: epsilon of the output RMSNorm, on the mean.
    implementation: "pallas" (a TPU, K = V = 128, H ≤ 96), "pallas_interpret" (the same kernel on a CPU, K = V a
      multiple of 32) or "reference" (jnp; any backend, any H, K = V).

  Returns:
    (out [B, H, V] in q's dtype, state, conv_state).

  Raises:
    ValueError: a shape, dtype or implementation that isn't supported. Nothing falls back to another implementation.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"kda_decode: implementation={implementation!r} is unknown; choose one of {IMPLEMENTATIONS}.")
  _check(q, k, v, decay, beta, gate, state, conv_state, layer, slots, conv_weight, a_log, dt_bias, o_norm)
  if gate_lower_bound is not None and not gate_lower_bound < 0:
    raise ValueError(
      f"kda_decode: gate_lower_bound={gate_lower_bound} must be negative (K3: -5.0), or None for the softplus decay."
    )
  layer = jnp.asarray(layer, jnp.int32)
  arrays = (q, k, v, decay, beta, gate, state, conv_state, layer, slots)
  options = dict(
      conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias, o_norm=o_norm,
      gate_lower_bound=gate_lower_bound, norm_eps=norm_eps,
  )  # fmt: skip
  if implementation == "reference":
    return reference.kda_decode_reference(*arrays, **options)
  from kda_decode import kernel  # Pallas loads only for those who use it.

  return kernel.kda_decode_pallas(*arrays, **options, interpret=implementation == "pallas_interpret")


def pool_format(ndim: int, sharding: jax.sharding.Sharding) -> Format:
  """The format in which a pool crosses the boundary of a jitted function on a TPU: row-major.

  Left to itself, XLA gives a parameter like conv_state [layers, S, W-1, 3, H, K] a layout that pads least, with the
  layers next to K, and copies the pool at each entry and exit of the program. So pools are created, passed and
  returned in this format: as `in_shardings` and `out_shardings` of every jitted function that takes them, or on a
  `jax.ShapeDtypeStruct`. `state` is row-major by itself. On a CPU the format changes nothing.

  Args:
    ndim: 5 for state, 6 for conv_state.
    sharding: of the pool.
  """
  return Format(Layout(major_to_minor=tuple(range(ndim))), sharding)


def _check(q, k, v, decay, beta, gate, state, conv_state, layer, slots, conv_weight, a_log, dt_bias, o_norm):
  """Raises ValueError for the first argument whose shape or dtype contradicts the others."""
  if q.ndim != 3:
    raise ValueError(f"kda_decode: q has shape {q.shape}; it must be [B, H, K].")
  if conv_weight.ndim != 4 or conv_weight.shape[1] < 2:
    raise ValueError(f"kda_decode: conv_weight has shape {conv_weight.shape}; it must be [3, W, H, K] with W >= 2.")
  if state.ndim != 5:
    raise ValueError(f"kda_decode: state has shape {state.shape}; it must be [layers, slots, H, K, V].")
  b, h, kd = q.shape
  vd = v.shape[-1]
  if vd != kd:
    raise ValueError(f"kda_decode: K={kd} and V={vd} differ; only K = V is supported (K3 and Kimi-Linear: 128).")
  layers, num_slots = state.shape[:2]
  width = conv_weight.shape[1]
  act = (q.dtype,)
  f32 = (jnp.dtype(jnp.float32),)
  bf16 = jnp.dtype(jnp.bfloat16)
  expected = {
    "q": (q, (b, h, kd), (*f32, bf16)),
    "k": (k, (b, h, kd), act),
    "v": (v, (b, h, vd), act),
    "decay": (decay, (b, h, kd), act),
    "beta": (beta, (b, h), act),
    "gate": (gate, (b, h, vd), act),
    "state": (state, (layers, num_slots, h, kd, vd), (*f32, bf16)),
    "conv_state": (conv_state, (layers, num_slots, width - 1, 3, h, kd), act),
    "slots": (slots, (b,), (jnp.dtype(jnp.int32),)),
    "conv_weight": (conv_weight, (3, width, h, kd), f32),
    "a_log": (a_log, (h,), f32),
    "dt_bias": (dt_bias, (h, kd), f32),
    "o_norm": (o_norm, (vd,), f32),
  }
  for name, (array, shape, dtypes) in expected.items():
    if array.shape != shape:
      raise ValueError(
        f"kda_decode: {name} has shape {array.shape}; with q {q.shape}, state {state.shape} and conv_weight"
        f" {conv_weight.shape} it must be {shape}."
      )
    if array.dtype not in dtypes:
      raise ValueError(
        f"kda_decode: {name} is {array.dtype}; it must be {' or '.join(str(d) for d in dtypes)}"
        f" (q, the activation dtype, is {q.dtype}). Cast it before the call."
      )
  if jnp.ndim(layer) != 0:
    raise ValueError(f"kda_decode: layer has shape {jnp.shape(layer)}; it must be an int32 scalar.")
