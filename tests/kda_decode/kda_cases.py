"""Inputs for the tests, and the comparison that they share."""

import jax.numpy as jnp
import numpy as np

LAYERS, LAYER = 2, 1
WIDTH = 4
OPTIONS = dict(gate_lower_bound=-5.0, norm_eps=1e-5)


def make_inputs(
  batch, heads, key_dim=128, dtype=jnp.float32, state_dtype=jnp.float32, seed=0, idle=True, gates="spread"
):
  """Arguments of `kda_decode` as numpy arrays, without its options.

  Rows take slots in a random order, and about every fifth row is idle. The pools are NaN outside the live slots of
  layer `LAYER`.

  Args:
    gates: "spread" (any decay), "saturated" (g reaches −5 and 0 exactly), "near_zero" (decays close to one), or
      "mixed", these three in turn by row.
  """
  rng = np.random.default_rng(seed)
  normal = lambda *shape, scale=1.0: (rng.standard_normal(shape) * scale).astype(np.float32)
  num_slots = batch + 3
  slots = rng.permutation(num_slots)[:batch].astype(np.int32)
  if idle and batch > 1:
    slots[rng.permutation(batch)[: max(1, batch // 5)]] = -1
  live = slots[slots >= 0]
  state = np.full((LAYERS, num_slots, heads, key_dim, key_dim), np.nan, np.float32)
  state[LAYER, live] = normal(len(live), heads, key_dim, key_dim, scale=0.3)
  conv_state = np.full((LAYERS, num_slots, WIDTH - 1, 3, heads, key_dim), np.nan, np.float32)
  conv_state[LAYER, live] = normal(len(live), WIDTH - 1, 3, heads, key_dim)
  decays = {
    "spread": normal(batch, heads, key_dim, scale=2.0),
    "saturated": np.where(rng.random((batch, heads, key_dim)) < 0.5, -300, 300).astype(np.float32),
    "near_zero": normal(batch, heads, key_dim) - 12,
  }
  decays["mixed"] = np.choose(np.arange(batch)[:, None, None] % 3, list(decays.values()))
  decay = decays[gates]
  cast = lambda x, d: np.array(jnp.asarray(x, d))
  acts = dict(
      q=normal(batch, heads, key_dim), k=normal(batch, heads, key_dim), v=normal(batch, heads, key_dim), decay=decay,
      beta=normal(batch, heads), gate=normal(batch, heads, key_dim), conv_state=conv_state,
  )  # fmt: skip
  return dict(
    **{name: cast(x, dtype) for name, x in acts.items()},
    state=cast(state, state_dtype),
    layer=np.int32(LAYER),
    slots=slots,
    conv_weight=normal(3, WIDTH, heads, key_dim, scale=0.5),
    a_log=normal(heads, scale=0.3),
    dt_bias=normal(heads, key_dim, scale=0.5),
    o_norm=1 + normal(key_dim, scale=0.1),
  )


def tiny_keys(inputs, scale=1e-3):
  """The inputs with q and k, and their history, scaled down to where the epsilon of their norm decides."""
  inputs = dict(inputs, q=inputs["q"] * scale, k=inputs["k"] * scale, conv_state=inputs["conv_state"].copy())
  inputs["conv_state"][:, :, :, :2] *= scale
  return {name: np.asarray(x, np.float32) if x.dtype == np.float64 else x for name, x in inputs.items()}


def relative_error(got, want) -> float:
  """The largest ‖got − want‖ / ‖want‖ over vectors (the last axis) or states (the last two, of rank 5).

  Entries that are NaN in `want` must be NaN in `got` and otherwise don't count.
  """
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
  axes = (-2, -1) if want.ndim == 5 else (-1,)
  norm = lambda x: np.sqrt(np.sum(np.nan_to_num(x) ** 2, axis=axes))
  size = norm(want)
  assert np.all(norm(got)[size == 0] == 0)
  return float(np.max(norm(got - want) / np.where(size == 0, 1, size), initial=0))


def assert_untouched(before, after, slots):
  """The pool is the same bit for bit in every layer and slot that no row had."""
  idle = np.ones(before.shape[:2], bool)
  idle[LAYER, slots[slots >= 0]] = False
  bits = lambda x: np.ascontiguousarray(np.asarray(x)[idle]).view(np.uint8)
  np.testing.assert_array_equal(bits(before), bits(after))
