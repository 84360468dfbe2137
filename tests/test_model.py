"""One model, many ways through it: prefill, decode and chunks of any kind give the same logits and the same state.

On the golden K3 checkpoint in float32. The tolerance, 1e-4, is three times what float32 rounding was seen to do to
logits of scale 8 and states of scale 3 when sums are taken in another order; a lost or doubled token, or a history that
is off by one, moves them by far more (the last test here).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from _models import (
  assert_close,
  empty_cache,
  fresh_entry_points,
  furthest,
  golden,
  golden_arrays,
  live_state,
  prefill,
  run_chunked,
  run_decode,
  run_prefill,
)

from MaxText.layers import mla_cache

SAME = 1e-4
LENGTHS = (1, 31, 32, 33, 63, 64, 65, 130)


@pytest.fixture(scope="module")
def model():
  return golden("k3-a")


@pytest.fixture(scope="module")
def tokens():
  return golden_arrays("k3-a")["input_ids_130"].astype(np.int32)


@pytest.fixture(scope="module")
def whole(model, tokens):
  """{n: (logits, cache) of a prefill of exactly n tokens}."""
  return {n: run_prefill(*model, tokens[:, :n]) for n in LENGTHS}


def assert_same_state(cache, expected, slots):
  for slot in slots:
    ours, theirs = live_state(cache, slot), live_state(expected, slot)
    assert ours["length"] == theirs["length"]
    for part, value in theirs.items():
      assert_close(ours[part], value, SAME, f"{part} of slot {slot}")


def test_a_prompt_of_any_length_is_the_start_of_a_longer_one(whole):
  for n in LENGTHS:
    assert_close(whole[n][0], whole[130][0][:, :n], SAME, f"{n} tokens")


def test_decode_steps_equal_prefill(model, tokens, whole):
  cache, logits, done = empty_cache(model[0], 2), [], 0
  for n in LENGTHS:
    more, cache = run_decode(*model, tokens[:, done:n], cache)
    logits, done = [*logits, more], n
    assert_close(np.concatenate(logits, axis=1), whole[n][0], SAME, f"{n} tokens")
    assert_same_state(cache, whole[n][1], (0, 1))


@pytest.mark.parametrize("n", LENGTHS)
def test_chunks_of_16_and_64_equal_prefill(model, tokens, whole, n):
  for size in (16, 64):
    full, rest = divmod(n, size)
    lengths = [size] * full + ([rest] if rest else [])
    logits, cache = run_chunked(*model, tokens[:, :n], size, [lengths, lengths])
    assert_close(logits, whole[n][0], SAME, f"chunks of {size}")
    assert_same_state(cache, whole[n][1], (0, 1))


@pytest.mark.parametrize(
  ("n", "rows"),
  [
    # Lengths beside the convolution's width, 4, and beside tokamax's chunk, 64; the two rows are cut differently.
    (130, ([1, 2, 3, 4, 5, 63, 52], [64, 1, 1, 1, 0, 0, 63])),
    (130, ([63, 1, 64, 2, 0], [0, 0, 64, 64, 2])),
    (65, ([2] * 16 + [33], [1] * 16 + [49])),
  ],
)
def test_uneven_chunks_equal_prefill(model, tokens, whole, n, rows):
  logits, cache = run_chunked(*model, tokens[:, :n], 64, rows)
  assert_close(logits, whole[n][0], SAME, "uneven chunks")
  assert_same_state(cache, whole[n][1], (0, 1))


@pytest.mark.parametrize("lengths", [(1, 130), (130, 65), (33, 64), (63, 31), (3, 2), (0, 32)])
def test_padding_changes_nothing_and_rows_may_differ_in_length(model, tokens, whole, lengths):
  padded = tokens.copy()
  for row, n in enumerate(lengths):
    padded[row, n:] = np.random.default_rng(row).integers(0, 512, 130 - n)
  logits, cache = run_prefill(*model, padded, lengths=lengths)
  for row, n in enumerate(lengths):
    assert_close(logits[row, :n], whole[130][0][row, :n], SAME, f"row {row}")
    if n in LENGTHS:
      ours, theirs = live_state(cache, row), live_state(whole[n][1], row)
      for part, value in theirs.items():
        assert_close(ours[part], value, SAME, f"{part} of row {row}")
    assert int(cache.lengths[row]) == n
    latents = np.asarray(cache.mla.latent[:, row])
    assert np.isnan(latents[:, n:]).all(), "padding is stored nowhere"


def test_last_logits_are_those_of_the_last_valid_token(model, tokens):
  lengths = jnp.asarray([17, 64], jnp.int32)
  every, _ = run_prefill(*model, tokens[:, :64], lengths=lengths)
  last, cache = prefill(*model, jnp.asarray(tokens[:, :64]), lengths, empty_cache(model[0], 2))
  assert last.shape == (2, model[0].vocab_size) and last.dtype == jnp.float32
  assert_close(last, np.stack([every[0, 16], every[1, 63]]), SAME, "last logits")
  np.testing.assert_array_equal(cache.lengths, lengths)


def test_prefill_goes_on_after_decode_and_decode_after_prefill(model, tokens, whole):
  _, cache = run_chunked(*model, tokens[:, :70], 64, [[64, 6], [6, 64]])
  _, cache = run_decode(*model, tokens[:, 70:75], cache)
  np.testing.assert_array_equal(cache.lengths, [75, 75])
  logits, cache = run_chunked(*model, tokens[:, 75:130], 64, [[55], [55]], cache)
  assert_close(logits, whole[130][0][:, 75:], SAME, "prefill after decode")
  assert_same_state(cache, whole[130][1], (0, 1))


@pytest.mark.parametrize(
  "change",
  [
    {"kda_prefill_implementation": "xla_chunked"},
    {"grouped_matmul_implementation": "ragged_dot"},
    {"grouped_matmul_implementation": "dense"},
  ],
)
def test_implementations_agree(model, tokens, whole, change):
  """Over two chunks of padded rows, so that the second starts from a state."""
  cfg = dataclasses.replace(model[0], **change)
  logits, cache = run_chunked(cfg, model[1], tokens[:, :65], 40, [[40, 25, 0], [7, 40, 18]])
  assert_close(logits, whole[65][0], SAME, str(change))
  assert_same_state(cache, whole[65][1], (0, 1))


def test_keys_in_several_blocks_give_the_same(model, tokens, whole, monkeypatch):
  """The cache of K3's own lengths is attended to 512 positions at a time; here, to 64."""
  for name in ("_UNIT", "_DECODE_KEYS", "_PREFILL_KEYS", "_PREFILL_QUERIES"):
    monkeypatch.setattr(mla_cache, name, 64)
  cfg, params = model
  prefill_all, step = fresh_entry_points()
  cache = empty_cache(cfg, 2)
  padded = tokens.copy()
  padded[1, 50:] = 0
  logits, cache = prefill_all(cfg, params, jnp.asarray(padded), jnp.asarray([130, 50], jnp.int32), cache)
  assert_close(logits[0], whole[130][0][0], SAME, "row 0")
  assert_close(logits[1, :50], whole[130][0][1, :50], SAME, "row 1")
  # Row 1 goes on, past the first block's end, while row 0 rests.
  for t in range(50, 70):
    out, cache = step(cfg, params, jnp.asarray(tokens[:, t]), jnp.asarray([False, True]), cache)
    assert_close(out[1], whole[130][0][1, t], SAME, f"token {t}")
  np.testing.assert_array_equal(cache.lengths, [130, 70])


def test_the_tolerance_tells_a_lost_token(model, tokens, whole):
  """A chunk that forgets the convolution's history, and one token that isn't seen."""
  _, cache = run_chunked(*model, tokens[:, :32], 64, [[32], [32]])
  lost = cache._replace(kda=cache.kda._replace(conv=jnp.zeros_like(cache.kda.conv)))
  for broken, rest in ((lost, tokens[:, 32:64]), (cache, tokens[:, 33:65])):
    logits, _ = run_chunked(*model, rest, 64, [[32], [32]], broken)
    assert furthest(logits[:, 8:16], whole[130][0][:, 40:48]) > 10 * SAME
