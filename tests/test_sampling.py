"""Tokens are drawn as MaxText's own functions draw them, each row in its own way; log-probabilities by the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from maxtext.inference import inference_utils

from MaxText.configs.k3_config import initialize
from MaxText.inference import sampling as ours
from MaxText.inference.sampling import SAMPLING_DTYPES, Sampling, log_probabilities

V = 50
# Cuts as MaxText names them: strategy, top_k, top_p.
STRATEGIES = {
  "weighted": (0, 1.0),
  "topk": (7, 1.0),
  "nucleus": (0, 0.8),
  "composite": (9, 0.7),
}

sample, cut = jax.jit(ours.sample), jax.jit(ours.cut)


def logits(rows, seed=0):
  return np.random.default_rng(seed).normal(size=(rows, V)).astype(np.float32) * 2


def rows(count, **values):
  given = Sampling(**values)
  arrays = zip(given, SAMPLING_DTYPES, strict=True)
  return Sampling(*(jnp.asarray(np.broadcast_to(value, count), dtype) for value, dtype in arrays))


def maxtext(row, key, strategy, temperature):
  top_k, top_p = STRATEGIES[strategy]
  return inference_utils.sampling(row, key, strategy, top_k, top_p, temperature)


def kept(strategy, x):
  """The set that MaxText draws from: temperature so high that it is nearly uniform, and 3,000 draws of at most 50."""
  keys = jax.random.split(jax.random.key(5), 3000)
  drawn = jax.vmap(lambda key: maxtext(x, key, strategy, 1e3))(keys)
  return set(np.asarray(drawn).tolist())


@pytest.mark.parametrize("strategy", ["weighted", "nucleus"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_draws_are_maxtexts_own_under_the_same_key(strategy, temperature):
  x = logits(64)
  top_k, top_p = STRATEGIES[strategy]
  seeds, positions = np.arange(64), np.arange(64) * 3
  sampling = rows(64, temperature=temperature, top_k=top_k, top_p=top_p, seed=seeds)
  expected = [
    maxtext(x[i], jax.random.fold_in(jax.random.key(int(seeds[i])), int(positions[i])), strategy, temperature)
    for i in range(64)
  ]
  np.testing.assert_array_equal(sample(sampling, x, positions), np.array(expected))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cuts_keep_exactly_what_maxtext_draws_from(strategy):
  top_k, top_p = STRATEGIES[strategy]
  for x in logits(4, seed=1):
    left = np.asarray(cut(rows(1, top_k=top_k, top_p=top_p), x[None]))[0]
    assert set(np.flatnonzero(np.isfinite(left)).tolist()) == kept(strategy, jnp.asarray(x))
    np.testing.assert_array_equal(left[np.isfinite(left)], x[np.isfinite(left)])


@pytest.mark.parametrize("strategy", ["topk", "composite"])
def test_frequencies_are_those_of_the_formula_and_of_maxtext(strategy):
  draws, temperature = 20_000, 1.5
  top_k, top_p = STRATEGIES[strategy]
  x = logits(1, seed=2)[0]
  # Cut first, then temperature, in float64.
  p = np.exp(x.astype(np.float64))
  order = np.argsort(-p)[: top_k or V]
  share = p[order] / p[order].sum()
  order = order[: np.searchsorted(np.cumsum(share), top_p) + 1] if top_p < 1 else order
  expected = np.zeros(V)
  expected[order] = p[order] ** (1 / temperature)
  expected /= expected.sum()
  sampling = rows(draws, temperature=temperature, top_k=top_k, top_p=top_p, seed=np.arange(draws))
  drawn = sample(sampling, jnp.broadcast_to(x, (draws, V)), jnp.zeros(draws, jnp.int32))
  theirs = jax.vmap(lambda key: maxtext(x, key, strategy, temperature))(jax.random.split(jax.random.key(0), draws))
  for some in (drawn, theirs):
    seen = np.bincount(some, minlength=V) / draws
    # Five standard deviations of a share: 250 comparisons by chance pass in all but one of some 10^4 runs.
    assert np.all(np.abs(seen - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws))


def test_a_cut_after_the_temperature_is_over_scaled_probabilities():
  x, temperature, top_k, top_p = logits(64, seed=6), 0.6, 20, 0.75
  left = np.asarray(cut(rows(64, top_k=top_k, top_p=top_p, cut_temperature=temperature), x))
  # In float64: scaled, the k likeliest, then those of them that together reach top_p.
  for row, mine in zip(x.astype(np.float64) / temperature, left, strict=True):
    order = np.argsort(-row)[:top_k]
    share = np.exp(row[order] - row[order].max())
    share /= share.sum()
    expected = order[: np.searchsorted(np.cumsum(share), top_p) + 1]
    assert set(np.flatnonzero(np.isfinite(mine)).tolist()) == set(expected.tolist())


def test_a_row_draws_the_same_in_any_place_and_company():
  x = logits(6, seed=3)
  sampling = Sampling(
    jnp.array([0.0, 1.0, 2.0, 1.0, 0.7, 3.0]),
    jnp.array([0, 0, 5, 0, 3, 0]),
    jnp.array([1.0, 1.0, 1.0, 0.5, 0.9, 1.0]),
    jnp.array([1, 2, 3, 4, 5, 2**32 - 1], jnp.uint32),
    jnp.array([1.0, 1.0, 1.0, 2.0, 0.7, 1.0]),
  )
  positions = jnp.arange(6)
  together = np.asarray(sample(sampling, x, positions))
  order = np.array([3, 5, 0, 4, 2, 1])
  shuffled = sample(jax.tree.map(lambda a: a[order], sampling), x[order], positions[order])
  np.testing.assert_array_equal(shuffled, together[order])
  for i in range(6):
    one = slice(i, i + 1)
    assert sample(jax.tree.map(lambda a: a[one], sampling), x[one], positions[one])[0] == together[i]
  assert together[0] == np.argmax(x[0])


def test_extremes_are_the_likeliest_token_or_all():
  x = logits(200, seed=4)
  best = np.argmax(x, axis=-1)
  for greedy in ({"temperature": 0.0}, {"temperature": 1e-30}, {"temperature": 5.0, "top_k": 1},
                 {"temperature": 5.0, "top_p": 0.0}):  # fmt: skip
    np.testing.assert_array_equal(sample(rows(200, **greedy), x, jnp.zeros(200, jnp.int32)), best)
  for whole in ({}, {"top_k": V}, {"top_k": 2**31 - 1}, {"top_p": 1.0}):
    np.testing.assert_array_equal(cut(rows(200, **whole), x), x)


def test_log_probabilities_are_the_formulas():
  x = logits(5, seed=6)
  tokens = np.array([0, 3, 9, 30, 49])
  exact = x.astype(np.float64) - np.log(np.exp(x.astype(np.float64)).sum(-1, keepdims=True))
  chosen, ids, values = log_probabilities(x, tokens, 8)
  order = np.argsort(-exact, axis=-1)[:, :8]
  np.testing.assert_array_equal(ids, order)
  # float32 logits of up to 8 and a sum of 50: some units in the last place.
  np.testing.assert_allclose(chosen, exact[np.arange(5), tokens], atol=2e-6)
  np.testing.assert_allclose(values, np.take_along_axis(exact, order, -1), atol=2e-6)


@pytest.mark.parametrize(
  ("keys", "expected"),
  [
    ((), (0.0, 0, 1.0)),
    (("decode_sampling_strategy=weighted", "decode_sampling_top_k=5"), (2.0, 0, 1.0)),
    (("decode_sampling_strategy=topk", "decode_sampling_top_k=5"), (2.0, 5, 1.0)),
    (("decode_sampling_strategy=nucleus", "decode_sampling_nucleus_p=0.9"), (2.0, 0, 0.9)),
    (("decode_sampling_strategy=composite", "decode_sampling_top_k=5", "decode_sampling_nucleus_p=0.9"),
     (2.0, 5, 0.9)),
  ],
)  # fmt: skip
def test_maxtexts_keys_become_numbers(keys, expected):
  config = initialize(["test", "kimi-k3-tiny.yml", "decode_sampling_temperature=2.0", "decode_sampling_seed=7", *keys])
  assert Sampling.from_config(config) == (*expected, 7, 1.0)
