"""MLA's latent cache: where a token's latent lies, and softmax attention over it a block of keys at a time.

Replicated, every device of a tensor group holds a sequence's latents and reads them for its own heads. Striped, token p
lies on device p mod n: in decode each device attends with all heads over its own tokens and the parts are combined; in
prefill a block of keys is gathered for each device's own heads.

B slots, R rows of a chunk, T tokens of each, S positions that a device holds, W the cache's width, H heads.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from MaxText.configs.model_config import ModelConfig

_UNIT = 512  # a long cache's positions on a device are a multiple of this
_DECODE_KEYS = 2048  # that a device reads at a time, at most
_PREFILL_KEYS = 4096  # that a tensor group reads at a time, at most
_PREFILL_QUERIES = 2048  # that meet them at a time: scores are a float32 array of heads × queries × keys
_FP8_MAX = 448.0


class MlaCache(NamedTuple):
  """Decode state of a stack of MLA layers.

  Attributes:
    latent: [N, B, S, W], in `mla_cache_dtype`. Positions from a slot's length on hold anything and are never used.
      Striped over a tensor group of n devices, device d holds S / n positions: its i-th is token i·n + d.
  """

  latent: jax.Array


# Largest score, Σ exp(score − largest), Σ exp(score − largest)·value; all float32.
Softmax = tuple[jax.Array, jax.Array, jax.Array]


def _stripes(cfg: ModelConfig) -> int:
  """Over how many devices a sequence's positions are dealt out."""
  return cfg.parallel.tensor if cfg.parallel.stripes_cache else 1


def _first_position(cfg: ModelConfig) -> jax.Array | int:
  """Which token a device's first position holds."""
  return cfg.parallel.tensor_index() if cfg.parallel.stripes_cache else 0


def cache_shapes(cfg: ModelConfig, layers: int, slots: int, max_length: int) -> MlaCache:
  """Shape and dtype of an `MlaCache`; a long one's length is rounded up to whole units on every device."""
  unit = (_UNIT if max_length > _UNIT else 1) * _stripes(cfg)
  max_length = -(-max_length // unit) * unit
  return MlaCache(jax.ShapeDtypeStruct((layers, slots, max_length, cfg.mla_cache_width), cfg.mla_cache_dtype))


def _stored(latent: jax.Array, new: jax.Array) -> jax.Array:
  """Latents as the cache holds them. e4m3 has no infinity: what is too large would become NaN."""
  if latent.dtype == jnp.float8_e4m3fn:
    new = jnp.clip(new, -_FP8_MAX, _FP8_MAX)
  return new.astype(latent.dtype)


def store_token(
  cfg: ModelConfig, latent: jax.Array, layer: jax.Array | int, positions: jax.Array, valid: jax.Array, new: jax.Array
) -> jax.Array:
  """Writes one latent a slot, as far as they are this device's.

  Args:
    latent: [N, B, S, W].
    positions, valid: [B] int32 and bool; what isn't valid isn't stored.
    new: [B, W].
  """
  stripes = _stripes(cfg)
  valid &= positions % stripes == _first_position(cfg)
  # What isn't to be stored gets an index out of range, where the scatter drops it.
  index = jnp.where(valid, positions // stripes, latent.shape[2])
  return latent.at[layer, jnp.arange(len(index)), index].set(_stored(latent, new), mode="drop")


def store_chunk(
  cfg: ModelConfig,
  latent: jax.Array,
  layer: jax.Array | int,
  slots: jax.Array,
  start: jax.Array,
  length: jax.Array,
  new: jax.Array,
) -> jax.Array:
  """Writes a chunk's latents, as far as they are this device's.

  Args:
    latent: [N, B, S, W].
    slots, start, length: [R] int32: each row's slot (out of range: nothing is stored), its tokens before the chunk and
      in it.
    new: [R, T, W]; T a multiple of the stripes.
  """
  stripes, capacity = _stripes(cfg), latent.shape[2]
  count, width = new.shape[1] // stripes, new.shape[2]
  kept = min(count, capacity)  # tokens beyond the whole cache are padding
  index = jnp.arange(kept)

  def row(r, latent):
    # A device's tokens of a chunk are every `stripes`-th, and lie side by side in its part of the cache.
    first = (_first_position(cfg) - start[r]) % stripes
    own = jax.lax.dynamic_index_in_dim(new[r].reshape(count, stripes, width), first, 1, keepdims=False)[:kept]
    valid = (first + index * stripes < length[r]) & (slots[r] >= 0) & (slots[r] < latent.shape[1])
    place = (start[r] + first) // stripes
    # Padding may reach beyond the cache, where a slice would be moved back: the values are moved forward with it.
    begin = jnp.minimum(place, capacity - kept)
    shift = place - begin
    own, valid = jnp.roll(own, shift, axis=0), jnp.roll(valid, shift) & (index >= shift)
    where = (layer, slots[r], begin, 0)
    old = jax.lax.dynamic_slice(latent, where, (1, 1, kept, width))
    return jax.lax.dynamic_update_slice(latent, jnp.where(valid[:, None], _stored(latent, own), old), where)

  return row(0, latent) if len(slots) == 1 else jax.lax.fori_loop(0, len(slots), row, latent)


def _nothing(shape: tuple[int, ...]) -> Softmax:
  """The softmax over no keys, for queries [...] and values of `shape` [..., V]."""
  return jnp.full((*shape[:-1], 1), -1e30, jnp.float32), jnp.zeros((*shape[:-1], 1), jnp.float32), jnp.zeros(shape)


def _fold(softmax: Softmax, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> Softmax:
  """Adds a block of keys.

  Args:
    scores: [..., n] float32, −inf where a query doesn't see the key.
    weigh: weights of that shape -> their sum over the block's values [..., V] float32.
  """
  largest, total, acc = softmax
  new_largest = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
  p = jnp.exp(scores - new_largest)
  correction = jnp.exp(largest - new_largest)
  return new_largest, total * correction + jnp.sum(p, axis=-1, keepdims=True), acc * correction + weigh(p)


def quotient(softmax: Softmax) -> jax.Array:
  """[..., V]; zero for a query that sees nothing."""
  _, total, acc = softmax
  return jnp.where(total > 0, acc / jnp.where(total > 0, total, 1), 0)


def _block(length: int, most: int) -> int:
  """Positions read at a time: all, or the largest number up to `most` that the two have in common."""
  return length if length <= most else math.gcd(length, most)


def attend_tokens(
  cfg: ModelConfig, q: jax.Array, latent: jax.Array, layer: jax.Array | int, seen: jax.Array, scale: float, values: int
) -> Softmax:
  """One query a slot over this device's part of its latents, absorbed: keys and values are the latents themselves.

  A cache longer than a block is read slot by slot, each as far as it is filled.

  Args:
    q: [B, H, W].
    seen: [B] int32, the last position that a slot's query sees; -1 for an idle slot.
    scale: of the scores.
    values: how many of the W features are values.

  Returns:
    ([B, H, 1], [B, H, 1], [B, H, values]).
  """
  _, slots, length, width = latent.shape
  stripes, first = _stripes(cfg), _first_position(cfg)
  block = _block(length, _DECODE_KEYS)

  def fold(softmax, keys, positions, q, seen):
    """keys [..., n, W], positions [n], q [..., H, W], seen [...]."""
    visible = positions <= seen[..., None]
    # What lies beyond a slot's own tokens may be another sequence's, or NaN: it is replaced, not only masked out of
    # the scores, since 0 · NaN is NaN.
    keys = jnp.where(visible[..., None], keys, 0).astype(q.dtype)
    scores = jnp.einsum("...hw,...sw->...hs", q, keys, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(visible[..., None, :], scores, -jnp.inf)

    def weigh(p):
      return jnp.einsum(
        "...hs,...sv->...hv", p.astype(keys.dtype), keys[..., :values], preferred_element_type=jnp.float32
      )

    return _fold(softmax, scores, weigh)

  if block == length:
    keys = jax.lax.dynamic_index_in_dim(latent, layer, 0, keepdims=False)
    return fold(_nothing((*q.shape[:2], values)), keys, jnp.arange(length) * stripes + first, q, seen)

  def slot(b, parts):
    def step(j, softmax):
      keys = jax.lax.dynamic_slice(latent, (layer, b, j * block, 0), (1, 1, block, width))[0, 0]
      return fold(softmax, keys, (j * block + jnp.arange(block)) * stripes + first, q[b], seen[b])

    filled = (seen[b] - first) // stripes + 1  # of this device's positions
    part = jax.lax.fori_loop(0, -(-filled // block), step, _nothing((q.shape[1], values)))
    return jax.tree.map(lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, b, 0), parts, part)

  return jax.lax.fori_loop(0, slots, slot, _nothing((*q.shape[:2], values)))


# A block of latents [n, W] -> keys [n, H, K] and values [n, H, V] of this device's heads.
Expand = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def attend_chunk(
  cfg: ModelConfig,
  q: jax.Array,
  latent: jax.Array,
  layer: jax.Array | int,
  slots: jax.Array,
  seen: jax.Array,
  scale: float,
  expand: Expand,
  values: int,
) -> jax.Array:
  """A chunk's queries over their slots' latents, keys and values expanded block by block; no row of scores is whole.

  Args:
    q: [R, T, H, K], of this device's heads.
    slots: [R] int32.
    seen: [R, T] int32, the last position that a query sees.
    scale: of the scores.
    values: V.

  Returns:
    [R, T, H, V] float32.
  """
  _, _, length, width = latent.shape
  _, t, heads, _ = q.shape
  stripes = _stripes(cfg)
  block = _block(length, max(1, _PREFILL_KEYS // stripes))
  tile = min(t, _PREFILL_QUERIES)
  tiles = -(-t // tile)
  padding = tiles * tile - t

  def row(arguments):
    q, slot, seen = arguments
    last = jnp.max(seen)
    q = jnp.pad(q, ((0, padding), (0, 0), (0, 0))).reshape(tiles, tile, heads, -1)
    seen = jnp.pad(seen, (0, padding), constant_values=-1).reshape(tiles, tile)

    def step(j, softmax):
      keys = jax.lax.dynamic_slice(latent, (layer, slot, j * block, 0), (1, 1, block, width))[0, 0]
      if stripes > 1:
        keys = cfg.parallel.gather_tensor(keys[:, None], axis=1).reshape(block * stripes, width)
      positions = j * block * stripes + jnp.arange(block * stripes)
      # As in `attend_tokens`: what isn't the row's own is replaced.
      k, v = expand(jnp.where((positions <= last)[:, None], keys, 0).astype(q.dtype))

      def one(i, softmax):
        queries, bound = q[i], seen[i]
        scores = jnp.einsum("thk,shk->hts", queries, k, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(positions <= bound[:, None], scores, -jnp.inf)

        def weigh(p):
          return jnp.einsum("hts,shv->htv", p.astype(v.dtype), v, preferred_element_type=jnp.float32)

        part = _fold(jax.tree.map(lambda a: a[i], softmax), scores, weigh)
        return jax.tree.map(lambda all_, new: jax.lax.dynamic_update_index_in_dim(all_, new, i, 0), softmax, part)

      return one(0, softmax) if tiles == 1 else jax.lax.fori_loop(0, tiles, one, softmax)

    start = _nothing((tiles, heads, tile, values))
    softmax = step(0, start) if block == length else jax.lax.fori_loop(0, last // (block * stripes) + 1, step, start)
    return jnp.moveaxis(quotient(softmax), 1, 2).reshape(tiles * tile, heads, values)[:t]

  return jax.lax.map(row, (q, slots, seen))
