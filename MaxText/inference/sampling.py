"""Choosing tokens from logits: MaxText's strategies, with a key for each row."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from maxtext.inference import inference_utils


@dataclass(frozen=True)
class Sampling:
  """MaxText's `decode_sampling_*` keys, frozen."""

  strategy: str = "greedy"
  top_k: int = 0
  nucleus_p: float = -1.0
  temperature: float = 1.0

  @classmethod
  def from_config(cls, config: Any) -> "Sampling":
    strategy = config.decode_sampling_strategy
    return cls(
      getattr(strategy, "value", strategy),
      config.decode_sampling_top_k,
      config.decode_sampling_nucleus_p,
      config.decode_sampling_temperature,
    )


def sample(sampling: Sampling, logits: jax.Array, keys: jax.Array, positions: jax.Array) -> jax.Array:
  """One token a row.

  Args:
    logits: [B, V] float32.
    keys: [B] PRNG keys, one a sequence: what a sequence draws doesn't depend on its slot or its neighbours.
    positions: [B] int32, tokens before this one; folded into the key, so that every step draws anew.

  Returns:
    [B] int32.
  """
  if sampling.strategy == "greedy":
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)

  def one(row, key, position):
    return inference_utils.sampling(
      row,
      jax.random.fold_in(key, position),
      sampling.strategy,
      sampling.top_k,
      sampling.nucleus_p,
      sampling.temperature,
    )

  return jax.vmap(one)(logits, keys, positions).astype(jnp.int32)
