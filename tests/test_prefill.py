"""Prefill at full size works in parts: rows for any slots, tokens and rows of the experts in blocks, keys in tiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import (
  assert_close,
  empty_cache,
  fresh_entry_points,
  golden,
  golden_arrays,
  normal,
  random_params,
  rng,
  small_config,
)

from MaxText.layers import mla_cache, moe
from MaxText.models import kimi_k3
from MaxText.parallel import Parallel

SAME = 1e-4  # as in test_model.py: float32 sums in another order


@pytest.fixture(scope="module")
def model():
  cfg = small_config()
  return cfg, random_params(cfg, 21)


@pytest.fixture(scope="module")
def tokens(model):
  return rng(22).integers(0, model[0].vocab_size, (2, 70)).astype(np.int32)


@pytest.fixture(scope="module")
def whole(model, tokens):
  prefill_all, _ = fresh_entry_points()
  return prefill_all(*model, jnp.asarray(tokens), jnp.full(2, 70, jnp.int32), empty_cache(model[0], 2))


def test_rows_may_be_for_any_slots(model, tokens, whole):
  """Two of five slots, in another order, the first chunk one row at a time; all other slots stay as they were: NaN."""
  cfg, params = model
  prefill = jax.jit(kimi_k3.prefill, static_argnums=0)
  cache = empty_cache(cfg, 5, live=(3, 1))
  for row, slot in ((0, 3), (1, 1)):
    chunk = jnp.asarray(tokens[row : row + 1, :32])
    _, cache = prefill(cfg, params, chunk, jnp.asarray([32]), jnp.asarray([slot]), cache)
  # A row of no tokens may name a slot that isn't there.
  last = np.zeros((3, 40), np.int32)
  last[0, :38], last[2, :38] = tokens[1, 32:], tokens[0, 32:]
  slots = jnp.asarray([1, -1, 3])
  logits, cache = prefill(cfg, params, jnp.asarray(last), jnp.asarray([38, 0, 38]), slots, cache)
  assert_close(logits[0], whole[0][1, -1], SAME, "row 0, slot 1")
  assert_close(logits[2], whole[0][0, -1], SAME, "row 2, slot 3")
  np.testing.assert_array_equal(cache.lengths, [0, 70, 0, 70, 0])
  for slot in (0, 2, 4):
    assert np.isnan(cache.kda.state[:, slot]).all() and np.isnan(cache.mla.latent[:, slot]).all()
  for slot, row in ((3, 0), (1, 1)):
    assert_close(cache.kda.state[:, slot], whole[1].kda.state[:, row], SAME, f"state of slot {slot}")
    assert_close(cache.mla.latent[:, slot, :70], whole[1].mla.latent[:, row, :70], SAME, f"latents of slot {slot}")


@pytest.mark.parametrize("implementation", ["ragged_dot", "pallas_interpret"])
def test_experts_in_blocks_of_tokens_and_rows_give_the_same(implementation, model, tokens, whole, monkeypatch):
  """Blocks that end within a group of rows, and a last one that isn't full."""
  monkeypatch.setattr(moe, "_TOKENS", 48)
  monkeypatch.setattr(moe, "_ROWS", 24)
  monkeypatch.setattr(kimi_k3, "_ATTENDED_TOKENS", 60)
  cfg = dataclasses.replace(model[0], grouped_matmul_implementation=implementation)
  prefill_all, _ = fresh_entry_points()
  logits, _ = prefill_all(cfg, model[1], jnp.asarray(tokens), jnp.asarray([70, 50], jnp.int32), empty_cache(cfg, 2))
  assert_close(logits[0], whole[0][0], SAME, "row 0")
  assert_close(logits[1, :50], whole[0][1, :50], SAME, "row 1")


@pytest.mark.parametrize("implementation", ["loop", "pallas_interpret"])
def test_padding_goes_to_no_expert(implementation):
  """Experts whose weights are NaN, chosen by padding alone."""
  generator = rng(23)
  cfg = small_config(num_experts=8, num_experts_per_token=2, grouped_matmul_implementation=implementation)
  d, latent, f = cfg.hidden_size, cfg.latent_size, cfg.moe_intermediate_size
  w = {
    "router": jnp.zeros((d, 8)).at[0].set(jnp.arange(8.0)).at[1].set(-jnp.arange(8.0)),
    "bias": jnp.zeros(8),
    "down": normal(generator, d, latent)[0],
    "up": normal(generator, latent, d)[0],
    "norm": jnp.ones(latent),
    "shared": {"wi_0": jnp.zeros((d, f)), "wi_1": jnp.zeros((d, f)), "wo": jnp.zeros((f, d))},
  }
  experts = {"wi": normal(generator, 1, 8, latent, 2 * f)[0], "wo": normal(generator, 1, 8, f, latent)[0]}
  experts = {k: v.at[:, 4:].set(jnp.nan) for k, v in experts.items()}
  x = normal(generator, 12, d)[0].at[:, :2].set(0)
  valid = jnp.arange(12) % 3 != 0
  x = x.at[:, 0].set(jnp.where(valid, 0, 2)).at[:, 1].set(jnp.where(valid, 2, 0))  # low experts, or high ones
  out = moe.moe(cfg, w, experts, x, valid, 0)
  assert np.isfinite(out[np.asarray(valid)]).all()
  assert np.isnan(moe.moe(cfg, w, experts, x, jnp.ones(12, bool), 0)[0]).all()  # the test can see it


@pytest.mark.parametrize("stripes", [1, 4])
@pytest.mark.parametrize(("start", "length"), [(0, 16), (5, 11), (13, 3), (20, 9), (31, 1)])
def test_a_chunk_is_stored_where_its_tokens_belong(stripes, start, length, monkeypatch):
  """Any start, any length, a chunk that reaches beyond the cache's end; what isn't the chunk's stays as it was."""
  cfg = dataclasses.replace(small_config(), parallel=Parallel(tensor=stripes, mla_cache="striped"))
  positions, width = 32, 4
  new = np.arange(16 * width, dtype=np.float32).reshape(1, 16, width) + 1
  expected = np.full((positions, width), -1.0)
  expected[start : start + length] = new[0, :length]
  for device in range(stripes):
    monkeypatch.setattr(Parallel, "tensor_index", lambda self, device=device: device)
    latent = jnp.full((2, 3, positions // stripes, width), -1.0)
    as_rows = (jnp.asarray([a]) for a in (2, start, length))
    out = mla_cache.store_chunk(cfg, latent, 1, *as_rows, jnp.asarray(new))
    np.testing.assert_array_equal(out[1, 2], expected[device::stripes])
    assert (np.asarray(out[0]) == -1).all() and (np.asarray(out[1, :2]) == -1).all()


def test_latents_in_eight_bits_are_the_nearest_ones_and_never_nan():
  latent = jnp.zeros((1, 1, 4, 3), jnp.float8_e4m3fn)
  new = np.array([[[1.0, -1e6, 0.3], [448.0, 449.0, 2.0**-9], [0.0, 1e30, -17.0], [5.0, 6.5, 7.0]]], np.float32)
  out = mla_cache.store_chunk(small_config(), latent, 0, *(jnp.asarray([a]) for a in (0, 0, 4)), jnp.asarray(new))
  expected = [[1, -448, 0.3125], [448, 448, 2.0**-9], [0, 448, -16], [5, 6.5, 7]]
  np.testing.assert_array_equal(np.asarray(out[0, 0], np.float32), expected)


def test_latents_in_eight_bits_move_logits_a_little():
  """On a golden checkpoint: more than float32's order of sums, less than the streams themselves in bfloat16 would."""
  cfg, params = golden("k3-a")
  ids = jnp.asarray(golden_arrays("k3-a")["trace_input_ids"][None])
  run = jax.jit(kimi_k3.prefill, static_argnums=(0,), static_argnames=("all_logits",))
  logits = []
  for dtype in (jnp.float32, jnp.float8_e4m3fn):
    eight = dataclasses.replace(cfg, mla_cache_dtype=jnp.dtype(dtype))
    length = jnp.asarray([ids.shape[1]])
    logits.append(run(eight, params, ids, length, jnp.zeros(1, jnp.int32), empty_cache(eight, 1), all_logits=True)[0])
  error = float(np.std(logits[1] - logits[0]) / np.std(logits[0]))
  assert 1e-4 < error < 2.0**-4  # e4m3 rounds a value by up to 2^-4 of it
