"""Kimi K3: embedding, layers, head; prefill of a chunk and one decode step as pure functions.

The layers come in two parts: the leading ones with a dense MLP (K3 has one), and the pattern that repeats. Rolled, the
program holds one KDA body and one MLA body, whatever the depth: a loop over MLA layers, and inside it a loop over the
KDA layers before each. Unrolled (`scan_layers=false`) the same functions are called layer by layer.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from MaxText.configs.model_config import ModelConfig
from MaxText.inference.cache import DecodeCache
from MaxText.layers import attention_kda, attention_mla, attention_residuals, moe
from MaxText.layers.attention_residuals import Residual
from MaxText.layers.linears import mlp, mlp_weights
from MaxText.layers.normalizations import norm_weight, rms_norm
from MaxText.quantization import InStack, Quantized
from MaxText.weights import Source, Stack, Weight, fan_in

_ATTENDED_TOKENS = 8192  # of a data group's chunk that attention takes at a time

_ATTENTION_WEIGHTS = {"kda": attention_kda.weights, "mla": attention_mla.weights}

Params = dict[str, Any]
# (kind, weights, x, layer's cache stack, its place there) -> (out, cache stack)
Attend = Callable[[str, dict, jax.Array, Any, Any], tuple[jax.Array, Any]]


def weight_tree(cfg: ModelConfig) -> dict[str, Any]:
  """All weights of a model as a tree of `Stack`s; the shape of every tree of parameters.

  {"embed", "norm", "output_res", "lm_head", "leading_kda", "leading_mla", "kda", "mla"}; a kind that has no layers is
  left out. Below a kind: the layer's norms and mixtures, "attention", and "mlp" (leading) or "moe" and "experts".
  """
  v, d = cfg.vocab_size, cfg.hidden_size
  prefix = ("model.",)

  def globals_(weight):
    return jax.tree.map(lambda w: Stack(w, prefix), weight, is_leaf=lambda w: isinstance(w, Weight))

  tree = {
    "embed": globals_(
      Weight((v, d), ("vocab", "embed"), (Source("embed_tokens", (v, d)),), fan_in(d), lambda x: x, lambda x: (x,))
    ),
    "norm": globals_(norm_weight(d, "norm")),
    "output_res": globals_(attention_residuals.mix_weights(cfg, "output_attn_res")),
    "lm_head": Stack(Weight((d, v), ("embed", "vocab"), (Source("lm_head", (v, d)),), fan_in(d)), ("",)),
  }
  for leading in (True, False):
    for kind in ("kda", "mla"):
      layers = cfg.layer_ids(kind, leading)
      if layers:
        tree[f"leading_{kind}" if leading else kind] = _layer_stacks(cfg, kind, leading, layers)
  return tree


def _layer_stacks(cfg: ModelConfig, kind: str, leading: bool, layers: tuple[int, ...]) -> dict[str, Any]:
  def stacked(declared, below="", each=("",), lead=()):
    prefixes = tuple(f"model.layers.{i}.{below}{one}" for i in layers for one in each)
    lead = (("layers", len(layers)), *lead)
    return jax.tree.map(lambda w: Stack(w, prefixes, lead), declared, is_leaf=lambda w: isinstance(w, Weight))

  tree = {
    "input_norm": stacked(norm_weight(cfg.hidden_size, "input_layernorm")),
    "post_attention_norm": stacked(norm_weight(cfg.hidden_size, "post_attention_layernorm")),
    "attention_res": stacked(attention_residuals.mix_weights(cfg, "self_attention_res")),
    "mlp_res": stacked(attention_residuals.mix_weights(cfg, "mlp_res")),
    "attention": stacked(_ATTENTION_WEIGHTS[kind](cfg), "self_attn."),
  }
  if leading:
    return tree | {"mlp": stacked(mlp_weights(cfg, cfg.mlp_size), "mlp.")}
  experts = tuple(f"experts.{e}." for e in range(cfg.num_experts))
  return tree | {
    "moe": stacked(moe.weights(cfg), "block_sparse_moe."),
    "experts": stacked(moe.expert_weights(cfg), "block_sparse_moe.", experts, (("exp", cfg.num_experts),)),
  }


def _apply_layer(
  cfg: ModelConfig,
  kind: str,
  w: Params,
  experts: Params | None,
  residual: Residual,
  cache: Any,
  layer: int | jax.Array,
  index: int | jax.Array,
  valid: jax.Array,
  attend: Attend,
) -> tuple[Residual, Any]:
  """One layer: `layer` is its number in the model, `index` its place in its stack; either may be traced."""
  h = attention_residuals.attention_input(cfg, w["attention_res"], residual, layer)
  x = rms_norm(h, w["input_norm"], cfg.rms_norm_eps)
  out, cache = attend(kind, w["attention"], x, cache, index)
  residual = attention_residuals.add_attention(cfg, residual, layer, checkpoint_name(out, "attention_out"))

  h = attention_residuals.feed_forward_input(cfg, w["mlp_res"], residual, layer)
  x = rms_norm(h, w["post_attention_norm"], cfg.rms_norm_eps)
  if experts is None:
    out = _dense_mlp(cfg, w["mlp"], x)
  else:
    out = moe.moe(cfg, w["moe"], experts, x, valid, index)
  residual = attention_residuals.add_feed_forward(residual, checkpoint_name(out, "feed_forward_out"))
  return residual._replace(stream=checkpoint_name(residual.stream, "layer_out")), cache


def _dense_mlp(cfg: ModelConfig, w: Params, x: jax.Array) -> jax.Array:
  """[n, D] -> [n, D], as many tokens at a time as go through the experts."""

  def some(x):
    return cfg.parallel.sum_tokens(mlp(cfg, w, cfg.parallel.gather_tokens(x)))

  return moe.in_parts(cfg, some, x)


def _split_experts(stack: Params) -> tuple[Params, Params | None]:
  """Experts stay flat outside a loop's per-layer slices: slicing them would copy a whole layer's experts."""
  return {k: v for k, v in stack.items() if k != "experts"}, stack.get("experts")


def _apply_layers(
  cfg: ModelConfig, params: Params, residual: Residual, cache: DecodeCache, valid: jax.Array, attend: Attend
) -> tuple[Residual, DecodeCache]:
  """All layers, rolled or unrolled by the configuration.

  Args:
    valid: [n] bool, which of this device's tokens aren't padding.
  """
  in_place = cfg.quantized_matmul_implementation

  def take(a, index):
    if isinstance(a, Quantized) and in_place:
      return InStack(a, jnp.asarray(index, jnp.int32), in_place)
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), a)

  def one(part: str, residual, part_cache, layer, index):
    stack, experts = _split_experts(params[part])
    w = jax.tree.map(lambda a: take(a, index), stack, is_leaf=lambda a: isinstance(a, Quantized))
    kind = part.removeprefix("leading_")
    return _apply_layer(cfg, kind, w, experts, residual, part_cache, layer, index, valid, attend)

  caches = cache._asdict()

  def unrolled(layers, leading):
    nonlocal residual
    for layer in layers:
      kind = cfg.layers[layer][0]
      part = f"leading_{kind}" if leading else kind
      index = cfg.layer_ids(kind, leading).index(layer)
      residual, caches[part] = one(part, residual, caches[part], layer, index)

  unrolled(range(cfg.num_leading_layers), leading=True)
  repeating = range(cfg.num_leading_layers, cfg.num_layers)
  if not cfg.rolled:
    unrolled(repeating, leading=False)
    return residual, DecodeCache(**caches)

  kda_ids = np.array(cfg.layer_ids("kda", False), np.int32)
  mla_ids = np.array(cfg.layer_ids("mla", False), np.int32)

  def kda_layers(first, last, carry):
    def body(i, carry):
      residual, kda_cache = carry
      return one("kda", residual, kda_cache, jnp.asarray(kda_ids)[i], i)

    return jax.lax.fori_loop(first, last, body, carry) if kda_ids.size else carry

  # KDA layers before each MLA layer, as places in the KDA stack: first and last.
  up_to = np.searchsorted(kda_ids, mla_ids)
  between = np.stack([np.append(0, up_to[:-1]), up_to], axis=1).astype(np.int32)

  def block(m, carry):
    residual, kda_cache, mla_cache = carry
    first, last = jnp.asarray(between)[m]
    residual, kda_cache = kda_layers(first, last, (residual, kda_cache))
    residual, mla_cache = one("mla", residual, mla_cache, jnp.asarray(mla_ids)[m], m)
    return residual, kda_cache, mla_cache

  carry = (residual, caches["kda"], caches["mla"])
  if mla_ids.size:
    carry = jax.lax.fori_loop(0, mla_ids.size, block, carry)
  residual, caches["kda"], caches["mla"] = carry
  done = int(up_to[-1]) if mla_ids.size else 0
  if done < kda_ids.size:
    residual, caches["kda"] = kda_layers(done, kda_ids.size, (residual, caches["kda"]))
  return residual, DecodeCache(**caches)


def _embed(cfg: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
  """[N] ids of a data group -> [n, D]; a device holds a part of the vocabulary."""
  table = params["embed"]
  if cfg.parallel.tensor == 1:
    return table[tokens].astype(cfg.dtype)
  row = tokens - cfg.parallel.tensor_index() * table.shape[0]
  mine = (row >= 0) & (row < table.shape[0])
  rows = table[jnp.where(mine, row, 0)].astype(cfg.dtype)
  return cfg.parallel.sum_tokens(jnp.where(mine[:, None], rows, 0))


def _pick_tokens(cfg: ModelConfig, residual: Residual, index: jax.Array, parts: int) -> Residual:
  """The residual of tokens `index` [R] of a data group, on every device.

  Args:
    index: in the order of a chunk's parts, each of which the tensor group has divided.
    parts: of the chunk.
  """
  n = residual.stream.shape[0] // parts  # tokens of a part that a device holds
  whole = n * cfg.parallel.tensor
  owner, place = index % whole // n, index // whole * n + index % n
  return Residual(*cfg.parallel.pick_tokens(tuple(residual), owner, place, (0, 1)))


def _normed_output(cfg: ModelConfig, params: Params, residual: Residual) -> jax.Array:
  """[..., D] streams -> [..., D], what the head multiplies."""
  h = checkpoint_name(attention_residuals.output(cfg, params["output_res"], residual), "output_mix")
  return rms_norm(h, params["norm"], cfg.rms_norm_eps)


def _logits(cfg: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
  """[..., D], the same on every device of a tensor group -> [..., V] float32."""
  logits = jnp.dot(x, params["lm_head"].astype(x.dtype), preferred_element_type=jnp.float32)
  return cfg.parallel.gather_tensor(logits, axis=-1)


def prefill(
  cfg: ModelConfig,
  params: Params,
  tokens: jax.Array,
  length: jax.Array,
  slots: jax.Array,
  cache: DecodeCache,
  all_logits: bool = False,
) -> tuple[jax.Array, DecodeCache]:
  """A chunk of tokens for some slots of a cache, continuing where each slot is.

  In a tensor group each device holds an equal part of the tokens between sublayers: AttnRes reads up to nine streams
  twice a layer, and their bytes are the larger part of what a chunk moves.

  Args:
    params: arrays in the shape of `weight_tree`.
    tokens: [R, T] int32; any R and T.
    length: [R] int32 in [0, T], valid tokens of each row. Padding moves no state; a row of length 0 is left as it is.
    slots: [R] int32, each row's slot, all different; a row of length 0 may name one that the cache doesn't have.
    cache: a `DecodeCache` with room for the tokens (the caller checks: positions out of range are dropped).
    all_logits: whether to return logits of all positions, or of each row's last valid one.

  Returns:
    (logits [R, T, V] or [R, V], float32; cache).
  """
  cfg = dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, sequence=True))
  rows, t = tokens.shape
  # Attention takes the chunk part by part, so that what it needs beside the streams doesn't grow with the chunk.
  parts = -(-rows * t // _ATTENDED_TOKENS)
  part = -(-t // (parts * cfg.parallel.tensor)) * cfg.parallel.tensor  # tokens of a row

  def by_part(a):
    """[R, parts · part, …] -> [parts, R · part, …]; of each part, a device of the tensor group holds a piece."""
    return jnp.moveaxis(a.reshape(rows, parts, part, *a.shape[2:]), 1, 0).reshape(parts, rows * part, *a.shape[2:])

  def each_part(function, *arrays):
    """Applies a function to the parts of [parts, …] one after the other; what it returns, side by side."""
    out = jax.lax.map(lambda a: function(*a), arrays) if parts > 1 else function(*(a[0] for a in arrays))[None]
    return out.reshape(-1, *out.shape[2:])

  tokens = by_part(jnp.pad(tokens, ((0, 0), (0, parts * part - t))))
  valid = by_part(jnp.arange(parts * part) < length[:, None])
  # A negative index would count from the end.
  slots = jnp.where(slots >= 0, slots, cache.lengths.shape[0])
  start = cache.lengths.at[slots].get(mode="fill", fill_value=0)

  def attend(kind, w, x, layer_cache, index):
    def one(i, x, layer_cache):
      before = jnp.minimum(i * part, length)
      here = jnp.minimum(length - before, part)
      if kind == "kda":
        return attention_kda.prefill(cfg, w, x, here, slots, layer_cache, index)
      return attention_mla.prefill(cfg, w, x, start + before, here, slots, layer_cache, index)

    if parts == 1:
      return one(0, x, layer_cache)

    def body(i, carry):
      out, layer_cache = carry
      out_here, layer_cache = one(i, x.reshape(parts, -1, x.shape[1])[i], layer_cache)
      return jax.lax.dynamic_update_index_in_dim(out, out_here, i, 0), layer_cache

    start_with = (jnp.zeros((parts, len(x) // parts, x.shape[1]), x.dtype), layer_cache)
    out, layer_cache = jax.lax.fori_loop(0, parts, body, start_with)
    return out.reshape(x.shape), layer_cache

  with jax.default_matmul_precision(cfg.matmul_precision):
    residual = attention_residuals.start(cfg, each_part(partial(_embed, cfg, params), tokens))
    residual, new = _apply_layers(cfg, params, residual, cache, each_part(cfg.parallel.own_tokens, valid), attend)
    if all_logits:
      x = _normed_output(cfg, params, residual).reshape(parts, -1, cfg.hidden_size)
      x = each_part(cfg.parallel.gather_tokens, x).reshape(parts, rows, part, -1)
      logits = _logits(cfg, params, jnp.moveaxis(x, 0, 1).reshape(rows, parts * part, -1)[:, :t])
    else:
      last = jnp.maximum(length - 1, 0)
      # Its place among the tokens of its part, and that part's among all.
      index = last // part * rows * part + jnp.arange(rows) * part + last % part
      logits = _logits(cfg, params, _normed_output(cfg, params, _pick_tokens(cfg, residual, index, parts)))
  return logits, new._replace(lengths=cache.lengths.at[slots].add(length, mode="drop"))


def decode_step(
  cfg: ModelConfig, params: Params, tokens: jax.Array, active: jax.Array, cache: DecodeCache
) -> tuple[jax.Array, DecodeCache]:
  """One token for every active slot.

  Args:
    tokens: [B] int32, row i for slot i.
    active: [B] bool; an idle slot's state doesn't move and its logits mean nothing.
    cache: a `DecodeCache` of B slots.

  Returns:
    (logits [B, V] float32, cache).
  """
  slots = jnp.where(active, jnp.arange(tokens.shape[0], dtype=jnp.int32), -1)

  def attend(kind, w, x, layer_cache, index):
    if kind == "kda":
      return attention_kda.decode(cfg, w, x, slots, layer_cache, index)
    return attention_mla.decode(cfg, w, x, slots, cache.lengths, layer_cache, index)

  with jax.default_matmul_precision(cfg.matmul_precision):
    residual = attention_residuals.start(cfg, _embed(cfg, params, tokens))
    residual, new = _apply_layers(cfg, params, residual, cache, active, attend)
    logits = _logits(cfg, params, _normed_output(cfg, params, residual))
  return logits, new._replace(lengths=cache.lengths + active.astype(jnp.int32))
