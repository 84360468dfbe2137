"""Kimi Delta Attention: short convolutions, a per-channel decay, the delta rule, a gated norm.

Formulas: Kimi Linear's and K3's reports. B rows or slots, T tokens, D hidden, H heads, K = V head dim, W conv taps,
N layers of the cache, S slots.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from kda_decode import kda_decode, reference
from MaxText.configs.model_config import ModelConfig
from MaxText.layers import kda_prefill
from MaxText.layers.linears import linear_weight, matmul
from MaxText.layers.normalizations import norm_weight
from MaxText.weights import Source, Weight, fan_in, uniform

_PADDED_A_LOG = 128  # the release stores A_log with one value a head and then zeros, up to this length


class KdaCache(NamedTuple):
  """Decode state of a stack of KDA layers.

  Attributes:
    state: [N, S, H, K, V] float32 (or bfloat16, by `kda_state_dtype`), the delta rule's memory.
    conv: [N, S, W-1, 3, H, K] activation dtype, the last pre-convolution q, k, v, oldest first.
  """

  state: jax.Array
  conv: jax.Array


def cache_shapes(cfg: ModelConfig, layers: int, slots: int) -> KdaCache:
  """Shapes and dtypes of a `KdaCache`."""
  h, k = cfg.kda_num_heads, cfg.kda_head_dim
  return KdaCache(
    jax.ShapeDtypeStruct((layers, slots, h, k, k), cfg.kda_state_dtype),
    jax.ShapeDtypeStruct((layers, slots, cfg.kda_conv_kernel_size - 1, 3, h, k), cfg.dtype),
  )


def weights(cfg: ModelConfig) -> dict[str, Weight]:
  """Declares a KDA layer's weights."""
  d, h, k, taps = cfg.hidden_size, cfg.kda_num_heads, cfg.kda_head_dim, cfg.kda_conv_kernel_size
  declared = {
    "qkv": Weight(
      # Head by head its q, k and v, so that a device's heads are consecutive columns.
      (d, h * 3 * k),
      ("embed", "heads"),
      tuple(Source(f"{n}_proj", (h * k, d)) for n in "qkv"),
      fan_in(d),
      # Whole rows are moved, and the transpose is a view: as values it would be copied one by one.
      assemble=lambda *qkv: np.stack([x.reshape(h, k, -1) for x in qkv], axis=1).reshape(h * 3 * k, -1).T,
      disassemble=lambda w: tuple(w.reshape(d, h, 3, k)[:, :, i].reshape(d, h * k).T for i in range(3)),
      kind="dense",
    ),
    "conv": Weight(
      (3, taps, h, k),
      (None, None, "heads", "kv"),
      tuple(Source(f"{n}_conv1d", (h * k, 1, taps), also=((h * k, taps),)) for n in "qkv"),
      fan_in(taps),
      assemble=lambda *qkv: np.stack([x.reshape(h * k, taps).T for x in qkv]),
      disassemble=lambda w: tuple(w[i].reshape(taps, h * k).T[:, None, :] for i in range(3)),
      float32=True,
    ),
    "f_a": linear_weight(d, k, "f_a_proj", ("embed", None)),
    "f_b": linear_weight(k, h * k, "f_b_proj", (None, "heads")),
    "b": linear_weight(d, h, "b_proj", ("embed", "heads")),
    "a_log": Weight(
      (h,),
      ("heads",),
      (Source("A_log", (max(h, _PADDED_A_LOG),), also=((h,), (1, 1, h, 1)), suffix=""),),
      uniform(1.0, 16.0, jnp.log),
      # Values beyond the heads are padding.
      assemble=lambda x: x.reshape(-1)[:h],
      disassemble=lambda w: (np.pad(w, (0, max(h, _PADDED_A_LOG) - h)),),
      float32=True,
    ),
    "dt_bias": Weight(
      (h, k), ("heads", "kv"), (Source("dt_bias", (h * k,), suffix=""),), uniform(-6.0, 0.0), float32=True
    ),
    "o_norm": norm_weight(k, "o_norm", float32=True),
    "o": linear_weight(h * k, d, "o_proj", ("heads", "embed"), "dense"),
  }
  if cfg.kda_full_rank_gate:
    declared["g"] = linear_weight(d, h * k, "g_proj", ("embed", "heads"), "dense")
  else:
    declared["g_a"] = linear_weight(d, k, "g_a_proj", ("embed", None))
    declared["g_b"] = linear_weight(k, h * k, "g_b_proj", (None, "heads"))
  return declared


def _project(cfg: ModelConfig, w: dict, x: jax.Array) -> tuple[jax.Array, ...]:
  """x [..., D] -> q, k and v together [..., H, 3, K]; raw decay [..., H, K], beta [..., H] and gate [..., H, V]."""
  gate = matmul(x, w["g"]) if cfg.kda_full_rank_gate else matmul(matmul(x, w["g_a"]), w["g_b"])
  decay = matmul(matmul(x, w["f_a"]), w["f_b"])

  def heads(y, *inner):
    return y.reshape(*x.shape[:-1], -1, *inner, cfg.kda_head_dim)

  return heads(matmul(x, w["qkv"]), 3), heads(decay), matmul(x, w["b"]), heads(gate)


def prefill(
  cfg: ModelConfig,
  w: dict,
  x: jax.Array,
  length: jax.Array,
  slots: jax.Array,
  cache: KdaCache,
  layer: jax.Array | int,
) -> tuple[jax.Array, KdaCache]:
  """A chunk of tokens for some slots.

  Args:
    w: this layer's weights (`weights`).
    x: [n, D], normed input: this device's part of the R·T tokens, row by row.
    length: [R] int32, valid tokens of each row of the chunk; those after it are padding and move no state.
    slots: [R] int32, each row's slot; one that the cache doesn't have stores nothing.
    cache: the stack's cache; `layer` is this layer's place in it.

  Returns:
    (out [n, D], cache).
  """
  rows = len(length)
  x = cfg.parallel.gather_tokens(x)
  t = len(x) // rows
  qkv, decay, beta, gate = _project(cfg, w, x.reshape(rows, t, -1))
  valid = jnp.arange(t) < length[:, None]

  # The pool and the weight, both small, are brought into the projection's order [H, 3, K], not the chunk into theirs.
  history = jnp.moveaxis(cache.conv.at[layer, slots].get(mode="fill", fill_value=0), 2, 3)
  sequence = jnp.concatenate([history, qkv], axis=1)
  taps = cfg.kda_conv_kernel_size
  y = reference.causal_conv([sequence[:, i : i + t] for i in range(taps)], jnp.swapaxes(w["conv"], 0, 2))
  # The history that the chunk leaves ends at its last valid token.
  last = length[:, None] + jnp.arange(taps - 1)
  history = jnp.moveaxis(jnp.take_along_axis(sequence, last[:, :, None, None, None], axis=1), 3, 2)

  y = checkpoint_name(y, "kda_qkv")
  old = cache.state.at[layer, slots].get(mode="fill", fill_value=0)
  out, state = kda_prefill.delta_rule(
    reference.l2norm(y[:, :, :, 0]),
    reference.l2norm(y[:, :, :, 1]),
    y[:, :, :, 2],
    decay,
    checkpoint_name(jax.nn.sigmoid(beta.astype(jnp.float32)), "kda_beta"),
    old.astype(jnp.float32),
    valid,
    a_log=w["a_log"],
    dt_bias=w["dt_bias"],
    gate_lower_bound=cfg.kda_gate_lower_bound,
    implementation=cfg.kda_prefill_implementation,
  )
  # Selected, not computed: an idle row keeps its state to the bit, whatever it holds.
  state = jnp.where((length > 0)[:, None, None, None], state.astype(old.dtype), old)
  out = reference.gated_rms_norm(checkpoint_name(out, "kda_read_out"), gate, w["o_norm"], cfg.rms_norm_eps)
  cache = KdaCache(
    cache.state.at[layer, slots].set(state, mode="drop"), cache.conv.at[layer, slots].set(history, mode="drop")
  )
  return cfg.parallel.sum_tokens(matmul(out.astype(x.dtype).reshape(rows * t, -1), w["o"])), cache


def decode(
  cfg: ModelConfig, w: dict, x: jax.Array, slots: jax.Array, cache: KdaCache, layer: jax.Array | int
) -> tuple[jax.Array, KdaCache]:
  """One token a row: the autoregressive mode.

  Args:
    x: [B, D], normed input.
    slots: [B] int32, each row's slot; -1 marks an idle row (its output is that of a zero read-out, no state moves).

  Returns:
    (out [B, D], cache).
  """
  qkv, decay, beta, gate = _project(cfg, w, x)
  out, state, conv = kda_decode(
    qkv[:, :, 0],
    qkv[:, :, 1],
    qkv[:, :, 2],
    decay,
    beta,
    gate,
    cache.state,
    cache.conv,
    layer,
    slots,
    conv_weight=w["conv"],
    a_log=w["a_log"],
    dt_bias=w["dt_bias"],
    o_norm=w["o_norm"],
    gate_lower_bound=cfg.kda_gate_lower_bound,
    norm_eps=cfg.rms_norm_eps,
    implementation=cfg.kda_decode_implementation,
  )
  return cfg.parallel.sum_tensor(matmul(out.reshape(len(x), -1), w["o"])), KdaCache(state, conv)
