"""Decode state as one value: init, insert, reset and read-out are functions of it.

Slots are rows of every array. A slot's content matters only up to its length; a free slot may hold anything, NaN too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from MaxText.configs.model_config import ModelConfig
from MaxText.layers import attention_kda, mla_cache
from MaxText.layers.attention_kda import KdaCache
from MaxText.layers.mla_cache import MlaCache
from MaxText.parallel import DATA, TENSOR


class DecodeCache(NamedTuple):
  """The state of all slots between two steps. N layers of a stack, S slots.

  The layers before the repeating pattern have stacks of their own: a stack used both inside and outside a loop would
  be copied at the loop's edge.

  Attributes:
    leading_kda, kda: recurrent state [N, S, H, K, V] float32 and conv history [N, S, W-1, 3, H, K].
    leading_mla, mla: latents [N, S, positions, width]; see `MlaCache`.
    lengths: [S] int32, tokens seen by each slot.
  """

  leading_kda: KdaCache
  kda: KdaCache
  leading_mla: MlaCache
  mla: MlaCache
  lengths: jax.Array


def cache_shapes(cfg: ModelConfig, slots: int, max_length: int) -> DecodeCache:
  """Shapes and dtypes of a `DecodeCache`: what the planner compiles with, and what `init_cache` fills."""
  kda = [attention_kda.cache_shapes(cfg, len(cfg.layer_ids("kda", leading)), slots) for leading in (True, False)]
  mla = [
    mla_cache.cache_shapes(cfg, len(cfg.layer_ids("mla", leading)), slots, max_length) for leading in (True, False)
  ]
  return DecodeCache(*kda, *mla, jax.ShapeDtypeStruct((slots,), jnp.int32))


def cache_specs(cfg: ModelConfig) -> DecodeCache:
  """How a cache lies on the mesh: KDA state by heads, latents whole or striped, slots by the batch's mode."""
  batch = DATA if cfg.parallel.splits_batch else None
  kda = KdaCache(P(None, batch, TENSOR), P(None, batch, None, None, TENSOR))
  mla = MlaCache(P(None, batch, TENSOR if cfg.parallel.stripes_cache else None))
  return DecodeCache(kda, kda, mla, mla, P(batch))


def init_cache(cfg: ModelConfig, slots: int, max_length: int) -> DecodeCache:
  """An empty cache of `slots` slots for up to `max_length` tokens each."""
  return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), cache_shapes(cfg, slots, max_length))


def cache_bytes(cfg: ModelConfig, slots: int, max_length: int) -> int:
  """Bytes of a cache of that size."""
  return sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(cache_shapes(cfg, slots, max_length)))


def reset(cache: DecodeCache, slot: jax.Array | int) -> DecodeCache:
  """Empties one slot: its recurrent state and conv history are zero, its length 0.

  Latents stay: beyond its length no slot reads them.
  """
  return cache._replace(
    leading_kda=jax.tree.map(lambda a: a.at[:, slot].set(0), cache.leading_kda),
    kda=jax.tree.map(lambda a: a.at[:, slot].set(0), cache.kda),
    lengths=cache.lengths.at[slot].set(0),
  )


def read_slot(cache: DecodeCache, slot: jax.Array | int) -> DecodeCache:
  """One slot as a cache of one slot."""
  layers = jax.tree.map(
    lambda a: jax.lax.dynamic_slice_in_dim(a, slot, 1, axis=1), cache._replace(lengths=cache.lengths[None])
  )
  return layers._replace(lengths=layers.lengths[0])


def insert(source: DecodeCache, row: jax.Array | int, cache: DecodeCache, slot: jax.Array | int) -> DecodeCache:
  """Puts row `row` of `source` into slot `slot` of `cache`; nothing of what the slot held before remains in use.

  The source's latents may be shorter than the cache's (a prefix of a shorter prefill cache), not longer.

  Raises:
    ValueError: the source holds more positions than the cache.
  """
  ours, theirs = cache.mla.latent.shape[2], source.mla.latent.shape[2]
  if theirs > ours:
    raise ValueError(f"a prefix of {theirs} positions doesn't fit a cache of {ours}")

  def put(new, old):
    one = jax.lax.dynamic_slice_in_dim(new, row, 1, axis=1)
    return jax.lax.dynamic_update_slice(old, one.astype(old.dtype), (0, slot) + (0,) * (old.ndim - 2))

  layers = jax.tree.map(put, source._replace(lengths=source.lengths[None]), cache._replace(lengths=cache.lengths[None]))
  return layers._replace(lengths=layers.lengths[0])
