"""Gated NoPE multi-head latent attention: absorbed in decode, expanded block by block in prefill.

Formulas: K3's report. The cache holds one normed latent and one shared, neither normed nor rotated, tail a token.
B rows or slots, T tokens, S positions of the cache, W its width, D hidden, H heads, L latent, R tail, N (in axes:
"nope") the part of a query that meets the latent, V value dim.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from MaxText.configs.model_config import ModelConfig
from MaxText.layers.linears import linear_weight, matmul, output_weight
from MaxText.layers.normalizations import LATENT_NORM_EPS, norm_weight, rms_norm
from MaxText.weights import Weight

_KEY_BLOCK = 512  # positions of the cache that are attended to at a time


class MlaCache(NamedTuple):
  """Decode state of a stack of MLA layers.

  Attributes:
    latent: [N, B, S, W] activation dtype. Positions from a slot's length on hold anything and are never used.
      Striped over a tensor group of n devices, device d holds S / n positions: its i-th is token i·n + d.
  """

  latent: jax.Array


def cache_shapes(cfg: ModelConfig, layers: int, slots: int, max_length: int) -> MlaCache:
  """Shape and dtype of an `MlaCache`; its length is rounded up to whole key blocks on every device."""
  unit = (_KEY_BLOCK if max_length > _KEY_BLOCK else 1) * _stripes(cfg)
  max_length = -(-max_length // unit) * unit
  return MlaCache(jax.ShapeDtypeStruct((layers, slots, max_length, cfg.mla_cache_width), cfg.dtype))


def weights(cfg: ModelConfig) -> dict[str, Weight]:
  """Declares an MLA layer's weights."""
  d, h = cfg.hidden_size, cfg.mla_num_heads
  query = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim
  declared = {
    "kv_a": linear_weight(d, (cfg.kv_lora_rank + cfg.qk_rope_head_dim,), "kv_a_proj_with_mqa", ("embed", None)),
    "kv_a_norm": norm_weight(cfg.kv_lora_rank, "kv_a_layernorm"),
    # Per head: the rows that make keys, then those that make values.
    "kv_b": linear_weight(
      cfg.kv_lora_rank, (h, cfg.qk_nope_head_dim + cfg.v_head_dim), "kv_b_proj", (None, "heads", "kv")
    ),
    "o": output_weight((h, cfg.v_head_dim), d, "o_proj", ("heads", "kv", "embed"), ("block_fp8",)),
  }
  if cfg.q_lora_rank:
    declared["q_a"] = linear_weight(d, (cfg.q_lora_rank,), "q_a_proj", ("embed", None), ("block_fp8",))
    declared["q_a_norm"] = norm_weight(cfg.q_lora_rank, "q_a_layernorm")
    declared["q_b"] = linear_weight(cfg.q_lora_rank, (h, query), "q_b_proj", (None, "heads", "kv"), ("block_fp8",))
  else:
    declared["q"] = linear_weight(d, (h, query), "q_proj", ("embed", "heads", "kv"), ("block_fp8",))
  if cfg.mla_output_gate:
    declared["g"] = linear_weight(d, (h, cfg.v_head_dim), "g_proj", ("embed", "heads", "kv"), ("block_fp8",))
  return declared


def _queries(cfg: ModelConfig, w: dict, x: jax.Array) -> jax.Array:
  """[..., D] -> [..., H, N + R]."""
  if cfg.q_lora_rank:
    return matmul(rms_norm(matmul(x, w["q_a"]), w["q_a_norm"], LATENT_NORM_EPS), w["q_b"])
  return matmul(x, w["q"])


def _latents(cfg: ModelConfig, w: dict, x: jax.Array) -> jax.Array:
  """[..., D] -> what the cache stores, [..., W]."""
  latent, tail = jnp.split(matmul(x, w["kv_a"]), [cfg.kv_lora_rank], axis=-1)
  return _padded(cfg, jnp.concatenate([rms_norm(latent, w["kv_a_norm"], LATENT_NORM_EPS), tail], axis=-1))


def _padded(cfg: ModelConfig, x: jax.Array) -> jax.Array:
  """Zeros after the last axis, up to the cache's width."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, cfg.mla_cache_width - x.shape[-1])])


def _gated_output(cfg: ModelConfig, w: dict, x: jax.Array, out: jax.Array) -> jax.Array:
  """[..., H, V] -> [..., D]. This gate's sigmoid is taken in the stream's dtype (KDA's is in float32)."""
  if cfg.mla_output_gate:
    out = out * jax.nn.sigmoid(matmul(x, w["g"]))
  return cfg.parallel.sum_tensor(matmul(out, w["o"], in_dims=2))


def _scale(cfg: ModelConfig) -> float:
  """The tail counts: K3's 192^-1/2, not 128^-1/2."""
  return (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim) ** -0.5


def _stripes(cfg: ModelConfig) -> int:
  """Over how many devices a sequence's positions are dealt out."""
  return cfg.parallel.tensor if cfg.parallel.stripes_cache else 1


def _store(
  cfg: ModelConfig, latent: jax.Array, layer: jax.Array | int, positions: jax.Array, valid: jax.Array, new: jax.Array
) -> jax.Array:
  """Writes latents to their places in the cache, as far as they are this device's.

  Args:
    latent: [N, B, S, W].
    positions, valid: [B, T] int32 and bool; what isn't valid isn't stored.
    new: [B, T, W].
  """
  stripes = _stripes(cfg)
  if stripes > 1:
    valid &= positions % stripes == cfg.parallel.tensor_index()
  # What isn't to be stored gets an index out of range, where the scatter drops it.
  index = jnp.where(valid, positions // stripes, latent.shape[2])
  return latent.at[layer, jnp.arange(len(index))[:, None], index].set(new, mode="drop")


# A block of the cache [B, n, W] -> scaled scores [B, H, T, n] float32, and the function that turns weights of that
# shape into their weighted sum of values, float32.
BlockScores = Callable[[jax.Array], tuple[jax.Array, Callable[[jax.Array], jax.Array]]]


def _online_softmax(
  cfg: ModelConfig,
  latent: jax.Array,
  layer: jax.Array | int,
  query_positions: jax.Array,
  out_shape: tuple[int, ...],
  scores: BlockScores,
  gather: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Softmax attention over the cache, a block of positions at a time, so that no full row of scores ever exists.

  Args:
    latent: [N, B, S, W], the stack's cache, this device's part of it.
    query_positions: [B, T] int32; a query sees cache positions up to and including its own.
    out_shape: [B, H, T, V].
    scores: see `BlockScores`.
    gather: of a striped cache, read all devices' parts of a block (for own heads), or this device's alone (for all
      heads, to be combined).

  Returns:
    (largest score [B, H, T, 1], Σ exp(score − largest) [B, H, T, 1], Σ exp(score − largest)·value [B, H, T, V]), all
    float32.
  """
  _, batch, length, width = latent.shape
  stripes = _stripes(cfg)
  block = min(_KEY_BLOCK // (stripes if gather else 1), length)
  if length % block:
    raise ValueError(f"a device's {length} positions of an MLA cache must be a multiple of {block}")

  def read(j):
    keys = jax.lax.dynamic_slice(latent, (layer, 0, j * block, 0), (1, batch, block, width))[0]
    if gather and stripes > 1:
      keys = cfg.parallel.gather_tensor(keys[:, :, None], axis=2).reshape(batch, block * stripes, width)
      return keys, j * block * stripes + jnp.arange(block * stripes)
    first = cfg.parallel.tensor_index() if stripes > 1 else 0
    return keys, (j * block + jnp.arange(block)) * stripes + first

  def step(j, carry):
    running_max, total, acc = carry
    keys, positions = read(j)
    # What lies beyond a row's own tokens may be another sequence's, or NaN: it is replaced, not only masked out of
    # the scores, since 0 · NaN is NaN.
    filled = positions <= jnp.max(query_positions, axis=1, keepdims=True)
    s, weigh = scores(jnp.where(filled[..., None], keys, 0))
    s = jnp.where((positions <= query_positions[:, :, None])[:, None], s, -jnp.inf)
    new_max = jnp.maximum(running_max, jnp.max(s, axis=-1, keepdims=True))
    p = jnp.exp(s - new_max)
    correction = jnp.exp(running_max - new_max)
    return new_max, total * correction + jnp.sum(p, axis=-1, keepdims=True), acc * correction + weigh(p)

  start = jnp.full((*out_shape[:3], 1), -1e30, jnp.float32)
  carry = (start, jnp.zeros_like(start), jnp.zeros(out_shape, jnp.float32))
  if length == block:
    return step(0, carry)
  return jax.lax.fori_loop(0, jnp.max(query_positions) // (block * stripes) + 1, step, carry)


def _normalize(total: jax.Array, acc: jax.Array) -> jax.Array:
  """The softmax's quotient; zero for a query that sees nothing."""
  return jnp.where(total > 0, acc / jnp.where(total > 0, total, 1), 0)


def prefill(
  cfg: ModelConfig,
  w: dict,
  x: jax.Array,
  start: jax.Array,
  length: jax.Array,
  cache: MlaCache,
  layer: jax.Array | int,
) -> tuple[jax.Array, MlaCache]:
  """A chunk of tokens for every slot; keys and values are expanded from the latents, block by block.

  Args:
    x: [B, T, D], normed input; B is the cache's number of slots.
    start: [B] int32, tokens of each slot before this chunk.
    length: [B] int32, valid tokens of the chunk; those after it are padding and aren't stored.
    cache: the stack's cache; `layer` is this layer's place in it.

  Returns:
    (out [B, T, D], cache).
  """
  batch, t, _ = x.shape
  nope = cfg.qk_nope_head_dim
  offsets = jnp.arange(t)
  positions = start[:, None] + offsets
  latent = _store(cfg, cache.latent, layer, positions, offsets < length[:, None], _latents(cfg, w, x))

  q = _queries(cfg, w, x)

  def scores(keys):
    kv = matmul(keys[..., : cfg.kv_lora_rank], w["kv_b"])
    k, v = kv[..., :nope], kv[..., nope:]
    tails = keys[..., cfg.kv_lora_rank : cfg.kv_lora_rank + cfg.qk_rope_head_dim]
    s = jnp.einsum("bthn,bshn->bhts", q[..., :nope], k, preferred_element_type=jnp.float32)
    s += jnp.einsum("bthr,bsr->bhts", q[..., nope:], tails, preferred_element_type=jnp.float32)
    return s * _scale(cfg), lambda p: jnp.einsum(
      "bhts,bshv->bhtv", p.astype(v.dtype), v, preferred_element_type=jnp.float32
    )

  # Padding queries look no further than the last valid token, so that they read nothing that isn't there.
  seen = jnp.minimum(positions, (start + length - 1)[:, None])
  out_shape = (batch, q.shape[2], t, cfg.v_head_dim)
  _, total, acc = _online_softmax(cfg, latent, layer, seen, out_shape, scores, gather=True)
  out = jnp.moveaxis(_normalize(total, acc), 1, 2).astype(x.dtype)
  return _gated_output(cfg, w, x, checkpoint_name(out, "mla_read_out")), MlaCache(latent)


def decode(
  cfg: ModelConfig, w: dict, x: jax.Array, slots: jax.Array, lengths: jax.Array, cache: MlaCache, layer: jax.Array | int
) -> tuple[jax.Array, MlaCache]:
  """One token a slot, absorbed: queries are carried into the latent space, so that the cache is read as it is.

  Args:
    x: [B, D], normed input; row i is slot i.
    slots: [B] int32, i for a live row, -1 for an idle one (nothing is stored for it).
    lengths: [B] int32, tokens of each slot before this one.
    cache: the stack's cache; `layer` is this layer's place in it.

  Returns:
    (out [B, D], cache).
  """
  batch = x.shape[0]
  nope, rank = cfg.qk_nope_head_dim, cfg.kv_lora_rank
  new = _latents(cfg, w, x)[:, None]
  latent = _store(cfg, cache.latent, layer, lengths[:, None], (slots >= 0)[:, None], new)

  q = _queries(cfg, w, x)
  kv_b = w["kv_b"].astype(x.dtype)
  q_latent = jnp.einsum("bhn,lhn->bhl", q[..., :nope], kv_b[..., :nope], preferred_element_type=jnp.float32)
  q = _padded(cfg, jnp.concatenate([q_latent.astype(x.dtype), q[..., nope:]], axis=-1))
  striped = cfg.parallel.stripes_cache
  if striped:
    # Every device attends with all heads over its own positions.
    q = cfg.parallel.gather_tensor(q, axis=1)

  def scores(keys):
    s = jnp.einsum("bhw,bsw->bhs", q, keys, preferred_element_type=jnp.float32)
    return s[:, :, None] * _scale(cfg), lambda p: jnp.einsum(
      "bhts,bsl->bhtl", p.astype(keys.dtype), keys[..., :rank], preferred_element_type=jnp.float32
    )

  seen = jnp.where(slots >= 0, lengths, -1)[:, None]
  parts = _online_softmax(cfg, latent, layer, seen, (batch, q.shape[1], 1, rank), scores, gather=False)
  read = cfg.parallel.combine_softmax(*parts) if striped else _normalize(*parts[1:])
  read = read[:, :, 0].astype(x.dtype)
  out = jnp.einsum("bhl,lhv->bhv", read, kv_b[..., nope:], preferred_element_type=jnp.float32).astype(x.dtype)
  return _gated_output(cfg, w, x, out), MlaCache(latent)
