"""Slots of the decode cache: independent of one another, of what was there before, and of what free ones hold."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import assert_close, decode_step, empty_cache, live_state, prefill, random_params, small_config

from MaxText.configs.k3_config import initialize
from MaxText.configs.resolve import model_config
from MaxText.inference import cache as cache_functions
from MaxText.inference.cache import cache_bytes, cache_shapes, init_cache
from MaxText.models import kimi_k3

LENGTH = 48
# Where sums are taken in another order, and so nothing is equal to the bit. Changing the embedding of this random model
# by a part in 1e7 moves its logits, of scale 3, by up to 1e-3: read-outs near zero are normalised. A slot that sees the
# state of another moves them by units.
SAME = 5e-3

insert, read_slot, reset = (
  jax.jit(f) for f in (cache_functions.insert, cache_functions.read_slot, cache_functions.reset)
)


@pytest.fixture(scope="module")
def model():
  """A random model of every feature whose loops go round more than once."""
  kda, mla = ("kda", "moe"), ("mla", "moe")
  cfg = small_config(layers=(("kda", "dense"), kda, mla, kda, kda, mla), attn_res_block_size=2)
  return cfg, random_params(cfg, 1)


def prompt(seed, n):
  return np.random.default_rng(seed).integers(0, 64, n).astype(np.int32)


def bits(array):
  """Compares NaN by NaN."""
  array = np.asarray(array)
  return array.view(np.uint32) if array.dtype == np.float32 else array


def assert_same_bits(ours, theirs, what=""):
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_array_equal(bits(a), bits(b), err_msg=what)


def only(slots, live):
  return jnp.asarray([slot in live for slot in range(slots)])


def prefilled(model, tokens, max_length=LENGTH):
  """A prefill cache of one slot, and the last logits; padded to one shape."""
  padded = np.zeros((1, 24), np.int32)
  padded[0, : len(tokens)] = tokens
  length = jnp.asarray([len(tokens)], jnp.int32)
  return prefill(*model, padded, length, empty_cache(model[0], 1, max_length=max_length))


def decoded(model, cache, slot, tokens):
  """(logits of one slot at each of the tokens, cache); all other slots idle."""
  slots, out = cache.lengths.shape[0], []
  for token in tokens:
    column = jnp.full(slots, int(token), jnp.int32)
    logits, cache = decode_step(*model, column, only(slots, {slot}), cache)
    out.append(np.asarray(logits[slot]))
  return np.stack(out), cache


# Slots one after another


@pytest.mark.parametrize("length_a", [24, 3])
def test_b_after_a_equals_b_on_a_cold_cache_inserted(model, length_a):
  runs = []
  for before in (None, prompt(1, length_a)):
    cache = empty_cache(model[0], 3, live=(), max_length=LENGTH)
    if before is not None:
      cache = insert(prefilled(model, before)[1], 0, cache, 1)
      _, cache = decoded(model, cache, 1, prompt(2, 5))
    first, source = prefilled(model, prompt(3, 11))
    cache = insert(source, 0, cache, 1)
    logits, cache = decoded(model, cache, 1, prompt(4, 6))
    runs.append((first, logits, live_state(cache, 1)))
  assert_same_bits(*runs)


def test_b_after_a_equals_b_on_a_cold_cache_reset_and_prefilled_in_place(model):
  runs = []
  for before in (None, prompt(1, 20)):
    cache = empty_cache(model[0], 3, live=(), max_length=LENGTH)
    for tokens in (before, prompt(3, 11)):
      if tokens is None:
        continue
      cache = reset(cache, 1)
      padded = np.zeros((3, 24), np.int32)
      padded[1, : len(tokens)] = tokens
      length = jnp.asarray([0, len(tokens), 0], jnp.int32)
      logits, cache = prefill(*model, padded, length, cache, all_logits=True)
    steps, cache = decoded(model, cache, 1, prompt(4, 6))
    runs.append((np.asarray(logits[1, :11]), steps, live_state(cache, 1)))
  assert not np.isnan(runs[0][0]).any()
  assert_same_bits(*runs)


# Slots beside one another


def three_of_four(model, free, tokens):
  """Slots 0, 1 and 3 hold prompts of different lengths and take eight steps; slot 2 holds `free`."""
  cache = empty_cache(model[0], 4, live=(), max_length=LENGTH)
  cache = insert(free, 0, cache, 2)
  for slot, n in ((0, 5), (1, 24), (3, 1)):
    cache = insert(prefilled(model, prompt(10 + slot, n))[1], 0, cache, slot)
  start, out = cache, []
  for t in range(8):
    logits, cache = decode_step(*model, jnp.asarray(tokens[:, t]), only(4, {0, 1, 3}), cache)
    out.append(np.asarray(logits)[[0, 1, 3]])
  return start, np.stack(out), cache


@pytest.fixture(scope="module")
def free_slots(model):
  nan = empty_cache(model[0], 1, live=(), max_length=LENGTH)
  used = prefilled(model, prompt(20, 17))[1]
  infinite = jax.tree.map(lambda a: jnp.full_like(a, jnp.inf) if a.dtype == jnp.float32 else a, used)
  return {
    "nan": nan,
    "nan of some length": nan._replace(lengths=jnp.asarray([30], jnp.int32)),
    "zero": init_cache(model[0], 1, LENGTH),
    "an old sequence": used,
    "infinite": infinite,
  }


def test_what_a_free_slot_holds_touches_nobody_and_stays(model, free_slots):
  tokens = np.stack([prompt(30 + slot, 8) for slot in range(4)])
  expected = None
  for what, free in free_slots.items():
    start, logits, cache = three_of_four(model, free, tokens)
    assert np.isfinite(logits).all(), what
    assert_same_bits(read_slot(cache, 2), read_slot(start, 2), f"{what} stays")
    states = [live_state(cache, slot) for slot in (0, 1, 3)]
    assert all(np.isfinite(v).all() for state in states for v in state.values()), what
    expected = expected or (logits, states)
    assert_same_bits((logits, states), expected, what)


def test_each_of_three_live_slots_is_as_if_it_were_alone(model, free_slots):
  tokens = np.stack([prompt(30 + slot, 8) for slot in range(4)])
  start, logits, cache = three_of_four(model, free_slots["nan"], tokens)
  for i, slot in enumerate((0, 1, 3)):
    alone, alone_cache = decoded(model, read_slot(start, slot), 0, tokens[slot])
    assert_close(logits[:, i], alone, SAME, f"slot {slot}")
    ours, theirs = live_state(cache, slot), live_state(alone_cache, 0)
    for part, value in theirs.items():
      assert_close(ours[part], value, SAME, f"{part} of slot {slot}")


def test_a_nan_filled_free_slot_touches_nobody_in_prefill(model, free_slots):
  runs = []
  for what in ("nan", "zero", "nan of some length"):
    cache = insert(free_slots[what], 0, empty_cache(model[0], 3, live=(0, 1), max_length=LENGTH), 2)
    padded = np.stack([prompt(50 + slot, 24) for slot in range(3)])
    logits, new = prefill(*model, padded, jnp.asarray([24, 9, 0], jnp.int32), cache, all_logits=True)
    assert_same_bits(read_slot(new, 2), read_slot(cache, 2), f"{what} stays")
    assert np.isfinite(logits[0]).all() and np.isfinite(logits[1, :9]).all()
    runs.append((np.asarray(logits[0]), np.asarray(logits[1, :9]), live_state(new, 0), live_state(new, 1)))
  assert_same_bits(runs[0], runs[1])
  assert_same_bits(runs[0], runs[2])


@pytest.mark.parametrize("implementation", ["ragged_dot", "dense"])
def test_a_nan_filled_free_slot_touches_nobody_whatever_multiplies_the_experts(model, free_slots, implementation):
  cfg = dataclasses.replace(model[0], grouped_matmul_implementation=implementation)
  model = cfg, model[1]
  cache = insert(free_slots["nan"], 0, empty_cache(cfg, 3, live=(0, 1), max_length=LENGTH), 2)
  padded = np.stack([prompt(50 + slot, 24) for slot in range(3)])
  logits, cache = prefill(*model, padded, jnp.asarray([24, 9, 0], jnp.int32), cache, all_logits=True)
  assert np.isfinite(logits[0]).all() and np.isfinite(logits[1, :9]).all()
  if implementation == "ragged_dot":
    logits, cache = decode_step(*model, jnp.asarray([1, 2, 3], jnp.int32), only(3, {0, 1}), cache)
    assert np.isfinite(logits[:2]).all()
  assert np.isnan(cache.kda.state[:, 2]).all() and np.isfinite(cache.kda.state[:, :2]).all()


def test_idle_rows_keep_every_bit_in_decode_and_prefill(model):
  cache = init_cache(model[0], 3, LENGTH)
  for slot in range(3):
    cache = insert(prefilled(model, prompt(60 + slot, 6 + slot))[1], 0, cache, slot)
  _, decode_cache = decode_step(*model, jnp.asarray(prompt(70, 3)), only(3, {1}), cache)
  padded = np.stack([prompt(80 + slot, 24) for slot in range(3)])
  _, prefill_cache = prefill(*model, padded, jnp.asarray([0, 5, 0], jnp.int32), cache, all_logits=True)
  for new, moved in ((decode_cache, 1), (prefill_cache, 5)):
    for slot in (0, 2):
      assert_same_bits(read_slot(new, slot), read_slot(cache, slot), f"slot {slot}")
    np.testing.assert_array_equal(new.lengths, [6, 7 + moved, 8])
    assert (bits(new.kda.state[:, 1]) != bits(cache.kda.state[:, 1])).mean() > 0.9
  # Nobody active: nothing moves at all.
  _, none = decode_step(*model, jnp.asarray(prompt(70, 3)), only(3, set()), cache)
  assert_same_bits(none, cache)


# Functions of the cache


def random_cache(cfg, slots, max_length, seed):
  def fill(i, s):
    generator = np.random.default_rng([seed, i])
    if s.dtype == jnp.int32:
      return jnp.asarray(generator.integers(1, max_length, s.shape), jnp.int32)
    return jnp.asarray(generator.standard_normal(s.shape), s.dtype)

  leaves, structure = jax.tree.flatten(cache_shapes(cfg, slots, max_length))
  return jax.tree.unflatten(structure, [fill(i, s) for i, s in enumerate(leaves)])


def slot_of(cache, slot):
  """Everything of one slot, by plain numpy indexing."""
  layers = [np.asarray(a)[:, slot] for a in jax.tree.leaves(cache._replace(lengths=None))]
  return [*layers, np.asarray(cache.lengths)[slot]]


@pytest.mark.parametrize("traced", [False, True])
def test_insert_moves_one_row_into_one_slot_and_nothing_else(model, traced):
  source, cache = random_cache(model[0], 3, LENGTH, 0), random_cache(model[0], 4, LENGTH, 1)
  put, get = (insert, read_slot) if traced else (cache_functions.insert, cache_functions.read_slot)
  new = put(source, 2, cache, 1)
  assert_same_bits(slot_of(new, 1), slot_of(source, 2))
  for slot in (0, 2, 3):
    assert_same_bits(slot_of(new, slot), slot_of(cache, slot), f"slot {slot}")
  read = get(new, 1)
  assert read.lengths.shape == (1,)
  assert_same_bits(slot_of(read, 0), slot_of(source, 2))


@pytest.mark.parametrize("traced", [False, True])
def test_reset_empties_one_slot_and_nothing_else(model, traced):
  cache = random_cache(model[0], 3, LENGTH, 2)
  new = (reset if traced else cache_functions.reset)(cache, 1)
  for part in (new.kda, new.leading_kda):
    for array in part:
      assert not np.asarray(array)[:, 1].any()
  np.testing.assert_array_equal(new.lengths, np.asarray(cache.lengths) * [1, 0, 1])
  for slot in (0, 2):
    assert_same_bits(slot_of(new, slot), slot_of(cache, slot))


def test_reset_clears_nan(model):
  cache = reset(empty_cache(model[0], 2, live=(), max_length=LENGTH), 0)
  assert not np.asarray(cache.kda.state[:, 0]).any() and np.isnan(cache.kda.state[:, 1]).all()


def test_a_prefix_of_a_shorter_cache_goes_on_in_a_longer_one(model):
  runs = []
  for max_length in (24, LENGTH):
    first, source = prefilled(model, prompt(90, 24), max_length)
    cache = insert(source, 0, empty_cache(model[0], 3, live=(), max_length=LENGTH), 1)
    logits, cache = decoded(model, cache, 1, prompt(91, 8))
    runs.append((first, logits, live_state(cache, 1)))
  # Attention over 24 or 48 positions sums in another order.
  for short, long in zip(jax.tree.leaves(runs[0]), jax.tree.leaves(runs[1]), strict=True):
    assert_close(short, long, SAME, "shorter prefill cache")


def test_a_prefix_of_a_longer_cache_is_refused(model):
  with pytest.raises(ValueError, match=r"48 positions.*24"):
    insert(init_cache(model[0], 1, 48), 0, init_cache(model[0], 2, 24), 0)


def test_the_empty_cache_is_zero_and_of_the_declared_shapes(model):
  cache = init_cache(model[0], 3, LENGTH)
  assert not any(np.asarray(a).any() for a in jax.tree.leaves(cache))
  assert cache_bytes(model[0], 3, LENGTH) == sum(a.nbytes for a in jax.tree.leaves(cache))


def test_k3s_cache_has_the_bytes_of_its_formula():
  """Kimi K3: 96·128·128·4 B of state a KDA layer, three taps of history, 576 values a token and MLA layer.

  The 576 are held as 640, a multiple of a TPU's 128 lanes.
  """
  cfg = model_config(initialize(["test", "kimi-k3.yml"]), "cpu")
  state, history = 69 * 96 * 128 * 128 * 4, 69 * 3 * 3 * 96 * 128 * 2
  assert cache_bytes(cfg, 1, 1024) == state + history + 1024 * 24 * 640 * 2 + 4
  assert cache_bytes(cfg, 8, 512) == 8 * (state + history + 512 * 24 * 640 * 2 + 4)


# Donation


def test_a_decode_step_updates_a_donated_cache_in_place(model):
  cfg, params = model
  step = jax.jit(functools.partial(kimi_k3.decode_step, cfg), donate_argnums=(3,))
  cache = init_cache(cfg, 3, LENGTH)
  arguments = (params, jnp.zeros(3, jnp.int32), jnp.ones(3, bool))
  step = step.lower(*arguments, cache).compile()
  # In the compiled program every byte of the cache that comes out lies where it came in.
  assert step.memory_analysis().alias_size_in_bytes >= cache_bytes(cfg, 3, LENGTH)
  expected, _ = decode_step(cfg, *arguments, cache)
  where = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(cache) if a.size]
  logits, new = step(*arguments, cache)
  jax.block_until_ready(new)
  assert all(a.is_deleted() for a in jax.tree.leaves(cache) if a.size)
  assert where == [a.unsafe_buffer_pointer() for a in jax.tree.leaves(new) if a.size]
  assert_close(logits, expected, SAME, "donation changes no result")
