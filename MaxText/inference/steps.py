"""What the engine compiles: functions of an explicit state, on one device's part of it.

A slot's life: `reset_slots` → `prefill_chunk` once or more → `admit` → `generate` until it ends. Between these, what a
slot holds moves nobody else.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from MaxText.configs.model_config import ModelConfig
from MaxText.inference.cache import DecodeCache, reset
from MaxText.inference.sampling import Sampling, log_probabilities, sample
from MaxText.inference.serving.requests import MAX_LOGPROBS
from MaxText.models import kimi_k3

NO_TOKEN = -1  # for a row that had stopped
FAILED = -2  # for a row whose logits weren't finite: it has stopped


class DecodeState(NamedTuple):
  """Everything that changes from step to step. B slots.

  Attributes:
    cache: the model's state.
    tokens: [B] int32, each slot's last token: chosen, not yet seen by the model.
    active: [B] bool, slots that go on.
    remaining: [B] int32, tokens that a slot may still choose.
    sampling: [B] each, how a slot's tokens are chosen.
    reports: [B] bool, slots whose tokens' log-probabilities are asked for.
    ignore_eos: [B] bool, slots that go on after a stop id, until nothing remains.
  """

  cache: DecodeCache
  tokens: jax.Array
  active: jax.Array
  remaining: jax.Array
  sampling: Sampling
  reports: jax.Array
  ignore_eos: jax.Array


class Chosen(NamedTuple):
  """Tokens as they are chosen; A = `alternatives(cfg)`.

  Attributes:
    tokens: [..., B] int32, `NO_TOKEN` or `FAILED` where there is none.
    logprobs: [..., B] float32, of the tokens; like what follows 0 unless some slot reports.
    top_ids, top_logprobs: [..., B, A] int32 and float32, the likeliest tokens, likeliest first.
  """

  tokens: jax.Array
  logprobs: jax.Array
  top_ids: jax.Array
  top_logprobs: jax.Array


def alternatives(cfg: ModelConfig) -> int:
  """How many of the likeliest tokens are reported."""
  return min(MAX_LOGPROBS, cfg.vocab_size)


def reset_slots(cfg: ModelConfig, cache: DecodeCache, slots: jax.Array) -> DecodeCache:
  """Empties slots [R]; one that isn't there is passed over."""
  here = cache.lengths.shape[0]
  slots -= cfg.parallel.first_slot(here)
  return reset(cache, jnp.where((slots >= 0) & (slots < here), slots, here))


def prefill_chunk(
  cfg: ModelConfig,
  params: dict[str, Any],
  tokens: jax.Array,
  length: jax.Array,
  slots: jax.Array,
  logits: jax.Array,
  cache: DecodeCache,
) -> tuple[jax.Array, DecodeCache]:
  """A chunk [R, T] for slots [R], as `kimi_k3.prefill` takes it; their rows of `logits` [B, V] become the new ones."""
  # Slots are counted over all data groups; a group sees its own.
  here = cache.lengths.shape[0]
  slots -= cfg.parallel.first_slot(here)
  new, cache = kimi_k3.prefill(cfg, params, tokens, length, slots, cache)
  return logits.at[jnp.where(length > 0, slots, here)].set(new, mode="drop"), cache


def admit(
  cfg: ModelConfig,
  stop_ids: tuple[int, ...],
  state: DecodeState,
  logits: jax.Array,
  starting: jax.Array,
  remaining: jax.Array,
  sampling: Sampling,
  reports: jax.Array,
  ignore_eos: jax.Array,
) -> tuple[Chosen, DecodeState]:
  """Chooses the first token of the slots `starting` [B] bool, which then are active; others stay as they are.

  Args:
    logits: [B, V] float32, after each prompt.
    remaining, sampling, reports, ignore_eos: [B] each, of the starting slots.
  """
  new = state._replace(remaining=remaining, sampling=sampling, reports=reports, ignore_eos=ignore_eos)
  state = jax.tree.map(
    lambda new, old: jnp.where(starting, new, old), new._replace(cache=()), state._replace(cache=())
  )._replace(cache=state.cache)
  return _choose(cfg, stop_ids, state, starting, logits)


def generate(
  cfg: ModelConfig,
  stop_ids: tuple[int, ...],
  most: int,
  params: dict[str, Any],
  state: DecodeState,
  steps: jax.Array,
  stopped: jax.Array,
) -> tuple[Chosen, DecodeState]:
  """Decode steps of all active slots, until one of them ends: someone may be waiting for its slot.

  Args:
    most: the most steps.
    steps: int32, how many of them.
    stopped: [B] bool, slots that don't go on.

  Returns:
    ([most, B] …, state).
  """

  state = state._replace(active=state.active & ~stopped)
  began = state.active

  # All data groups take the same number of steps, since they compute together.
  def go_on(carry):
    i, all_active, _, _ = carry
    return (i < steps) & all_active

  def step(carry):
    i, _, state, out = carry
    logits, cache = kimi_k3.decode_step(cfg, params, state.tokens, state.active, state.cache)
    chosen, state = _choose(cfg, stop_ids, state._replace(cache=cache), state.active, logits)
    out = jax.tree.map(lambda rows, row: rows.at[i].set(row), out, chosen)
    return i + 1, ~cfg.parallel.any_row(began & ~state.active), state, out

  slots, count = len(state.tokens), alternatives(cfg)
  out = Chosen(
    jnp.full((most, slots), NO_TOKEN, jnp.int32),
    jnp.zeros((most, slots), jnp.float32),
    jnp.zeros((most, slots, count), jnp.int32),
    jnp.zeros((most, slots, count), jnp.float32),
  )
  some = cfg.parallel.any_row(began)
  _, _, state, out = jax.lax.while_loop(go_on, step, (jnp.int32(0), some, state, out))
  return out, state


def _choose(
  cfg: ModelConfig, stop_ids: tuple[int, ...], state: DecodeState, rows: jax.Array, logits: jax.Array
) -> tuple[Chosen, DecodeState]:
  """The next token of slots `rows` [B] bool from logits [B, V], and the state after it."""
  sound = jnp.all(jnp.isfinite(logits), axis=-1)
  good = rows & sound
  # What other rows ask for costs nothing.
  sampling = state.sampling._replace(temperature=jnp.where(good, state.sampling.temperature, 0))
  tokens = sample(sampling, logits, state.cache.lengths)

  def nothing():
    shape = len(tokens), alternatives(cfg)
    return jnp.zeros(len(tokens), jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

  report = jax.lax.cond(
    jnp.any(good & state.reports), lambda: log_probabilities(logits, tokens, alternatives(cfg)), nothing
  )
  chosen = Chosen(jnp.where(good, tokens, jnp.where(rows, FAILED, NO_TOKEN)), *report)

  left = state.remaining - rows
  ends = left <= 0
  for stop in stop_ids:
    ends |= (tokens == stop) & ~state.ignore_eos
  return chosen, state._replace(
    tokens=jnp.where(rows, chosen.tokens, state.tokens),
    active=jnp.where(rows, good & ~ends, state.active),
    remaining=left,
  )
