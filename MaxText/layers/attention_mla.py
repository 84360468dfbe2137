"""Gated NoPE multi-head latent attention: absorbed in decode, expanded block by block in prefill.

Formulas: K3's report. `mla_cache` holds one normed latent and one shared, neither normed nor rotated, tail a token.
B slots, R rows of a chunk, T tokens of each, n tokens that a device holds, W the cache's width, D hidden, H heads, L
latent, N the part of a query that meets the latent, V value dim.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from MaxText.configs.model_config import ModelConfig
from MaxText.layers import mla_cache
from MaxText.layers.linears import linear_weight, matmul
from MaxText.layers.mla_cache import MlaCache
from MaxText.layers.normalizations import LATENT_NORM_EPS, norm_weight, rms_norm
from MaxText.weights import Weight


def weights(cfg: ModelConfig) -> dict[str, Weight]:
  """Declares an MLA layer's weights."""
  d, h = cfg.hidden_size, cfg.mla_num_heads
  query, value = h * (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim), h * cfg.v_head_dim
  declared = {
    "kv_a": linear_weight(d, cfg.kv_lora_rank + cfg.qk_rope_head_dim, "kv_a_proj_with_mqa", ("embed", None)),
    "kv_a_norm": norm_weight(cfg.kv_lora_rank, "kv_a_layernorm"),
    # Per head: the columns that make keys, then those that make values.
    "kv_b": linear_weight(cfg.kv_lora_rank, h * cfg.qk_nope_head_dim + value, "kv_b_proj", (None, "heads")),
    "o": linear_weight(value, d, "o_proj", ("heads", "embed"), "dense"),
  }
  if cfg.q_lora_rank:
    declared["q_a"] = linear_weight(d, cfg.q_lora_rank, "q_a_proj", ("embed", None), "dense")
    declared["q_a_norm"] = norm_weight(cfg.q_lora_rank, "q_a_layernorm")
    declared["q_b"] = linear_weight(cfg.q_lora_rank, query, "q_b_proj", (None, "heads"), "dense")
  else:
    declared["q"] = linear_weight(d, query, "q_proj", ("embed", "heads"), "dense")
  if cfg.mla_output_gate:
    declared["g"] = linear_weight(d, value, "g_proj", ("embed", "heads"), "dense")
  return declared


def _heads(x: jax.Array, size: int) -> jax.Array:
  """[..., H · size] -> [..., H, size]."""
  return x.reshape(*x.shape[:-1], -1, size)


def _query_source(cfg: ModelConfig, w: dict, x: jax.Array) -> jax.Array:
  """[..., D] -> what `_queries` reads: the normed query latent, or x itself."""
  return rms_norm(matmul(x, w["q_a"]), w["q_a_norm"], LATENT_NORM_EPS) if cfg.q_lora_rank else x


def _queries(cfg: ModelConfig, w: dict, source: jax.Array) -> jax.Array:
  """-> [..., H, N + tail]."""
  return _heads(matmul(source, w["q_b" if cfg.q_lora_rank else "q"]), cfg.qk_nope_head_dim + cfg.qk_rope_head_dim)


def _latents(cfg: ModelConfig, w: dict, x: jax.Array) -> jax.Array:
  """[..., D] -> what the cache stores, [..., W]."""
  latent, tail = jnp.split(matmul(x, w["kv_a"]), [cfg.kv_lora_rank], axis=-1)
  return _padded(cfg, jnp.concatenate([rms_norm(latent, w["kv_a_norm"], LATENT_NORM_EPS), tail], axis=-1))


def _padded(cfg: ModelConfig, x: jax.Array) -> jax.Array:
  """Zeros after the last axis, up to the cache's width."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, cfg.mla_cache_width - x.shape[-1])])


def _gated_output(cfg: ModelConfig, w: dict, x: jax.Array, out: jax.Array) -> jax.Array:
  """This device's heads' part of the result: [..., H, V] -> [..., D]. The sigmoid is taken in the stream's dtype (KDA's
  is in float32).
  """
  out = out.reshape(*out.shape[:-2], -1)
  if cfg.mla_output_gate:
    out = out * jax.nn.sigmoid(matmul(x, w["g"]))
  return matmul(out, w["o"])


def _scale(cfg: ModelConfig) -> float:
  """The tail counts: K3's 192^-1/2, not 128^-1/2."""
  return (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim) ** -0.5


def prefill(
  cfg: ModelConfig,
  w: dict,
  x: jax.Array,
  start: jax.Array,
  length: jax.Array,
  slots: jax.Array,
  cache: MlaCache,
  layer: jax.Array | int,
) -> tuple[jax.Array, MlaCache]:
  """A chunk of tokens for some slots; keys and values are expanded from the latents, block by block.

  Args:
    x: [n, D], normed input: this device's part of the R·T tokens, row by row.
    start: [R] int32, tokens of each row's slot before this chunk.
    length: [R] int32, valid tokens of each row of the chunk; those after it are padding and aren't stored.
    slots: [R] int32, each row's slot; one that the cache doesn't have stores nothing.
    cache: the stack's cache; `layer` is this layer's place in it.

  Returns:
    (out [n, D], cache).
  """
  rows, nope = len(length), cfg.qk_nope_head_dim
  # Made of a device's own tokens, before the group's are gathered: both are narrow, and their weights are whole.
  latents, source = _latents(cfg, w, x), _query_source(cfg, w, x)
  x = cfg.parallel.gather_tokens(x)
  if cfg.q_lora_rank:
    gathered = cfg.parallel.gather_tokens(jnp.concatenate([latents, source], axis=-1))
    latents, source = jnp.split(gathered, [cfg.mla_cache_width], axis=-1)
  else:
    latents, source = cfg.parallel.gather_tokens(latents), x

  def by_row(a):
    return a.reshape(rows, -1, *a.shape[1:])

  latent = mla_cache.store_chunk(cfg, cache.latent, layer, slots, start, length, by_row(latents))

  def expand(keys):
    kv = _heads(matmul(keys[:, : cfg.kv_lora_rank], w["kv_b"]), nope + cfg.v_head_dim)
    tail = keys[:, None, cfg.kv_lora_rank : cfg.kv_lora_rank + cfg.qk_rope_head_dim]
    tails = jnp.broadcast_to(tail, (*kv.shape[:2], cfg.qk_rope_head_dim))
    return jnp.concatenate([kv[..., :nope], tails], axis=-1), kv[..., nope:]

  q = by_row(_queries(cfg, w, source))
  # Padding queries look no further than the last valid token, so that they read nothing that isn't there.
  seen = jnp.minimum(start[:, None] + jnp.arange(q.shape[1]), (start + length - 1)[:, None])
  out = mla_cache.attend_chunk(cfg, q, latent, layer, slots, seen, _scale(cfg), expand, cfg.v_head_dim)
  out = checkpoint_name(out.astype(x.dtype), "mla_read_out").reshape(len(x), -1, cfg.v_head_dim)
  return cfg.parallel.sum_tokens(_gated_output(cfg, w, x, out)), MlaCache(latent)


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
  nope, rank = cfg.qk_nope_head_dim, cfg.kv_lora_rank
  latent = mla_cache.store_token(cfg, cache.latent, layer, lengths, slots >= 0, _latents(cfg, w, x))

  q = _queries(cfg, w, _query_source(cfg, w, x))
  kv_b = _heads(w["kv_b"].astype(x.dtype), nope + cfg.v_head_dim)
  q_latent = jnp.einsum("bhn,lhn->bhl", q[..., :nope], kv_b[..., :nope], preferred_element_type=jnp.float32)
  q = _padded(cfg, jnp.concatenate([q_latent.astype(x.dtype), q[..., nope:]], axis=-1))
  striped = cfg.parallel.stripes_cache
  if striped:
    # Every device attends with all heads over its own positions.
    q = cfg.parallel.gather_tensor(q, axis=1)
  seen = jnp.where(slots >= 0, lengths, -1)
  softmax = mla_cache.attend_tokens(cfg, q, latent, layer, seen, _scale(cfg), rank)
  read = (cfg.parallel.combine_softmax(*softmax) if striped else mla_cache.quotient(softmax)).astype(x.dtype)
  out = jnp.einsum("bhl,lhv->bhv", read, kv_b[..., nope:], preferred_element_type=jnp.float32).astype(x.dtype)
  return cfg.parallel.sum_tensor(_gated_output(cfg, w, x, out)), MlaCache(latent)
