"""Choosing tokens from logits: every row in its own way, all in one program.

MaxText's strategies are values of five numbers a row (`Sampling.from_config`): top-k first, then top-p over what it has
left. Under which temperature top-p adds up probabilities is a number too: MaxText's cuts come before the temperature,
those of OpenAI's API (as vLLM has it) after it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_COLDEST = 1e-6  # temperatures below it are as good as greedy, and would divide by zero


class Sampling(NamedTuple):
  """How tokens are chosen: [B] arrays, or on the host a number that all rows share.

  Attributes:
    temperature: float32; 0 is the likeliest token.
    top_k: int32, only the k likeliest are drawn from; 0: all.
    top_p: float32, only the likeliest that together reach this probability are drawn from; 1: all.
    seed: uint32, of a row's draws.
    cut_temperature: float32, of the probabilities that `top_p` is about; 1: the model's own.
  """

  temperature: Any = 0.0
  top_k: Any = 0
  top_p: Any = 1.0
  seed: Any = 0
  cut_temperature: Any = 1.0

  @classmethod
  def from_config(cls, config: Any) -> "Sampling":
    """MaxText's `decode_sampling_*` keys: what one strategy doesn't look at, another's key, is left out."""
    strategy = getattr(config.decode_sampling_strategy, "value", config.decode_sampling_strategy)
    return cls(
      0.0 if strategy == "greedy" else config.decode_sampling_temperature,
      config.decode_sampling_top_k if strategy in ("topk", "composite") else 0,
      config.decode_sampling_nucleus_p if strategy in ("nucleus", "composite") else 1.0,
      config.decode_sampling_seed,
    )


SAMPLING_DTYPES = Sampling(jnp.float32, jnp.int32, jnp.float32, jnp.uint32, jnp.float32)


def sample(sampling: Sampling, logits: jax.Array, positions: jax.Array) -> jax.Array:
  """One token a row. What a row draws depends on its seed and position, not on its place or the rows beside it.

  Args:
    sampling: [B] each.
    logits: [B, V] float32.
    positions: [B] int32, tokens before this one; folded into the seed's key, so that every step draws anew.

  Returns:
    [B] int32.
  """
  likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  random = sampling.temperature > 0

  def draw():
    cuts = random & ((sampling.top_k > 0) | (sampling.top_p < 1))
    kept = jax.lax.cond(jnp.any(cuts), lambda: cut(sampling, logits), lambda: logits)

    def noise(seed, position):
      # Named, since a row's draw under JAX's other generators depends on how many rows there are.
      key = jax.random.key(seed, impl="threefry2x32")
      return jax.random.gumbel(jax.random.fold_in(key, position), logits.shape[1:])

    scaled = kept / jnp.maximum(sampling.temperature, _COLDEST)[:, None]
    return jnp.argmax(scaled + jax.vmap(noise)(sampling.seed, positions), axis=-1).astype(jnp.int32)

  return jnp.where(random, jax.lax.cond(jnp.any(random), draw, lambda: likeliest), likeliest)


def cut(sampling: Sampling, logits: jax.Array) -> jax.Array:
  """[B, V] -> the same with −inf for tokens that top-k and top-p leave out; of equals at the edge all stay."""
  vocabulary = logits.shape[-1]
  ordered = jnp.sort(logits, axis=-1, descending=True)
  most = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocabulary), vocabulary)
  allowed = jnp.where(jnp.arange(vocabulary) < most[:, None], ordered, -jnp.inf)
  heat = jnp.maximum(sampling.cut_temperature, _COLDEST)[:, None]
  reached = jnp.cumsum(jax.nn.softmax(allowed / heat, axis=-1), axis=-1)
  enough = jnp.sum(reached < sampling.top_p[:, None], axis=-1)  # the place of the token that reaches top_p
  last = jnp.where(sampling.top_p < 1, jnp.minimum(enough, most - 1), most - 1)
  return jnp.where(logits >= jnp.take_along_axis(ordered, last[:, None], axis=-1), logits, -jnp.inf)


def log_probabilities(logits: jax.Array, tokens: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Under the model's softmax, without temperature and cuts.

  Args:
    logits: [B, V] float32.
    tokens: [B] int32, chosen ones.
    count: of alternatives.

  Returns:
    (log-probability of the chosen tokens [B], ids of the likeliest [B, count], their log-probabilities [B, count]).
  """
  total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1) - total
  values, ids = jax.lax.top_k(logits, count)
  return chosen[:, 0], ids.astype(jnp.int32), values - total
