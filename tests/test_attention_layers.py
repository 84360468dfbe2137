"""The delta rule and the two attention layers against float64 references written from the formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import assert_close, empty_cache, normal, rng, small_config
from jax.experimental.pallas import tpu as pltpu
from tokamax._src.ops.kda.pallas_mosaic_tpu import PallasMosaicTpuKimiDeltaAttention

from MaxText.layers import attention_kda, attention_mla, kda_prefill, mla_cache
from MaxText.layers.attention_kda import KdaCache
from MaxText.layers.mla_cache import MlaCache


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


# The delta rule over a chunk


def delta_rule64(q, k, v, g, beta, state):
  """Token by token; q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H], state [B, H, K, V]."""
  out = np.zeros(v.shape)
  state = state.copy()
  for t in range(q.shape[1]):
    state *= np.exp(g[:, t])[..., None]
    r = v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t])
    state += beta[:, t, :, None, None] * k[:, t, :, :, None] * r[:, :, None]
    out[:, t] = np.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[-1] ** -0.5
  return out, state


def delta_rule_case(seed, batch, t, heads, dim, bound):
  generator = rng(seed)
  q, k = (generator.standard_normal((batch, t, heads, dim)) for _ in range(2))
  q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
  decay = generator.standard_normal((batch, t, heads, dim)) * 2
  a_log, dt_bias = np.log(generator.uniform(1, 16, heads)), generator.uniform(-6, 0, (heads, dim))
  rate = np.exp(a_log)[:, None]
  softplus = np.log1p(np.exp(decay + dt_bias))
  case = {
    "q": q,
    "k": k,
    "v": generator.standard_normal((batch, t, heads, dim)),
    "beta": generator.uniform(0, 1, (batch, t, heads)),
    "state": generator.standard_normal((batch, heads, dim, dim)),
  }
  g = -rate * softplus if bound is None else bound * sigmoid(rate * (decay + dt_bias))
  return case, g, {"decay": decay, "a_log": a_log, "dt_bias": dt_bias}


@pytest.mark.parametrize(
  ("implementation", "bound", "t"),
  [("xla", -5.0, 1), ("xla", -5.0, 65), ("xla", None, 65), ("xla_chunked", -5.0, 64), ("xla_chunked", -5.0, 130)],
)
def test_delta_rule_over_a_chunk_is_the_recurrence(implementation, bound, t):
  # The chunked form multiplies by exp of sums of decays and divides by them again, which costs it two digits.
  check_delta_rule(implementation, bound, t, 32, 2e-5 if implementation == "xla" else 1e-4)


def check_delta_rule(implementation, bound, t, dim, tolerance, dtype=jnp.float32):
  case, g, raw = delta_rule_case(t, 2, t, 2, dim, bound)
  lengths = np.array([t, t // 2])  # the second row is half padding
  valid = np.arange(t) < lengths[:, None]
  as32 = {k: jnp.asarray(v, jnp.float32) for k, v in (case | raw).items()}
  as32["decay"] = as32["decay"].astype(dtype)  # the activations' dtype
  function = jax.jit(
    lambda q, k, v, decay, beta, state, a_log, dt_bias: kda_prefill.delta_rule(
      *(q, k, v, decay, beta, state, jnp.asarray(valid)),
      a_log=a_log,
      dt_bias=dt_bias,
      gate_lower_bound=bound,
      implementation=implementation,
    )
  )
  out, state = function(**as32)
  for row, n in enumerate(lengths):
    one = {k: v[row : row + 1] if k == "state" else v[row : row + 1, :n] for k, v in case.items()}
    expected, expected_state = delta_rule64(g=g[row : row + 1, :n], **one)
    # In bfloat16 the error goes with the size, and read-outs are a tenth of the state's.
    near = tolerance * np.abs(expected).max() if dtype == jnp.bfloat16 else tolerance
    assert_close(out[row : row + 1, :n], expected, near, f"read-outs of row {row}")
    assert_close(state[row : row + 1], expected_state, tolerance, f"state of row {row}")


# In bfloat16 the kernel multiplies rounded inputs: 2^-9 each, and the raw gate's rounding is multiplied by up to
# 16 · 5 on its way to a log decay. Seen: 0.05 in states of up to 3.9.
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-4), (jnp.bfloat16, 2.0**-4)])
def test_delta_rule_of_the_tpu_kernel_is_the_recurrence(dtype, tolerance, monkeypatch):
  """tokamax's Mosaic kernel, interpreted: what `auto` means on a TPU, with this project's padding and raw gates."""
  info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_7X, 1)
  monkeypatch.setenv("PALLAS_INTERPRET", "1")
  monkeypatch.setattr(pltpu, "get_tpu_info", lambda: info)
  monkeypatch.setattr(PallasMosaicTpuKimiDeltaAttention, "supported_on", lambda self, device: True)
  check_delta_rule("mosaic", -5.0, 65, 128, tolerance, dtype)


# KDA and MLA layers whose state is beside NaN


def random_weights(declared, seed):
  leaves, structure = jax.tree.flatten(declared, is_leaf=lambda x: hasattr(x, "sources"))
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  made = jax.jit(lambda keys: [w.init(k, w.shape) for w, k in zip(leaves, keys, strict=True)])(keys)
  return jax.tree.unflatten(structure, made)


def kda64(cfg, w, x):
  """A KDA layer over one sequence [T, D] from nothing; the float64 state and read-out too."""
  w = {k: np.asarray(v, np.float64) for k, v in w.items()}
  t, h, k = x.shape[0], cfg.kda_num_heads, cfg.kda_head_dim
  qkv = (x @ w["qkv"]).reshape(t, h, 3, k).swapaxes(1, 2)
  padded = np.concatenate([np.zeros((3, 3, h, k)), qkv])
  y = sum(w["conv"][:, i] * padded[i : i + t] for i in range(4))
  y = y * sigmoid(y)
  q, key = (y[:, i] / np.sqrt((y[:, i] ** 2).sum(-1, keepdims=True) + 1e-6) for i in (0, 1))
  raw = (x @ w["f_a"] @ w["f_b"]).reshape(t, h, k) + w["dt_bias"]
  rate = np.exp(w["a_log"])[:, None]
  bounded = cfg.kda_gate_lower_bound is not None
  g = cfg.kda_gate_lower_bound * sigmoid(rate * raw) if bounded else -rate * np.log1p(np.exp(raw))
  beta = sigmoid(x @ w["b"])
  batched = (a[None] for a in (q, key, y[:, 2], g, beta))
  o, state = delta_rule64(*batched, np.zeros((1, h, k, k)))
  o = o[0] / np.sqrt((o[0] ** 2).mean(-1, keepdims=True) + 1e-5) * w["o_norm"]
  gate = x @ w["g"] if cfg.kda_full_rank_gate else x @ w["g_a"] @ w["g_b"]
  return (o.reshape(t, h * k) * sigmoid(gate)) @ w["o"], state[0], qkv[-3:]


@pytest.mark.parametrize("changes", [{}, {"kda_gate_lower_bound": None, "kda_full_rank_gate": False}])
def test_kda_layer_prefill_and_decode_are_the_formula(changes):
  cfg = small_config(**changes)
  w = random_weights(attention_kda.weights(cfg), 11)
  x, x64 = normal(rng(12), 2, 20, 64)
  shapes = attention_kda.cache_shapes(cfg, 2, 2)
  cache = KdaCache(*(jnp.full(s.shape, jnp.nan, s.dtype).at[1].set(0) for s in shapes))  # layer 0 isn't ours
  prefill, decode = (jax.jit(f, static_argnums=0) for f in (attention_kda.prefill, attention_kda.decode))
  out, cache = prefill(cfg, w, x[:, :12].reshape(24, 64), jnp.asarray([12, 9]), jnp.arange(2), cache, 1)
  out = out.reshape(2, 12, 64)
  steps = [[], []]
  for t in range(8):
    both = jnp.stack([x[0, 12 + t], x[1, 9 + t]])
    step, cache = decode(cfg, w, both, jnp.arange(2, dtype=jnp.int32), cache, 1)
    for row in range(2):
      steps[row].append(step[row])
  for row, n in enumerate((12, 9)):
    expected, state, history = kda64(cfg, w, x64[row, : n + 8])
    ours = np.concatenate([out[row, :n], np.stack(steps[row])])
    assert_close(ours, expected, 2e-5, f"row {row}")
    assert_close(cache.state[1, row], state, 1e-5, f"state of row {row}")
    assert_close(cache.conv[1, row], history, 1e-5, f"history of row {row}")
  assert np.isnan(cache.state[0]).all()


def mla64(cfg, w, x):
  """An MLA layer over one sequence [T, D], keys and values expanded, one full row of scores a query."""
  w = {k: np.asarray(v, np.float64) for k, v in w.items()}

  def norm(y, weight):
    return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * weight

  heads = cfg.mla_num_heads
  q = norm(x @ w["q_a"], w["q_a_norm"]) @ w["q_b"] if cfg.q_lora_rank else x @ w["q"]
  q = q.reshape(len(x), heads, -1)
  c = x @ w["kv_a"]
  rank = cfg.kv_lora_rank
  latent, tail = norm(c[:, :rank], w["kv_a_norm"]), c[:, rank:]
  kv = (latent @ w["kv_b"]).reshape(len(x), heads, -1)
  out = np.zeros((x.shape[0], cfg.mla_num_heads, 16))
  for t in range(x.shape[0]):
    for h in range(cfg.mla_num_heads):
      keys = np.concatenate([kv[: t + 1, h, :16], tail[: t + 1]], axis=-1)
      s = keys @ q[t, h] * (16 + 8) ** -0.5
      p = np.exp(s - s.max())
      out[t, h] = p / p.sum() @ kv[: t + 1, h, 16:]
  if cfg.mla_output_gate:
    out = out * sigmoid(x @ w["g"]).reshape(out.shape)
  return out.reshape(len(x), -1) @ w["o"]


@pytest.mark.parametrize(
  ("changes", "block"),
  [
    ({}, 512),
    ({}, 8),
    ({"q_lora_rank": 0, "mla_output_gate": False}, 512),
    ({"kv_lora_rank": 128}, 8),  # wide enough for the cache to be padded to lanes
  ],
)
def test_mla_layer_prefill_and_absorbed_decode_are_the_formula(changes, block, monkeypatch):
  """In one block of keys and in many; what lies beyond a row's own tokens is NaN."""
  for name in ("_UNIT", "_DECODE_KEYS", "_PREFILL_KEYS", "_PREFILL_QUERIES"):
    monkeypatch.setattr(mla_cache, name, block)
  cfg = small_config(**changes)
  w = random_weights(attention_mla.weights(cfg), 13)
  x, x64 = normal(rng(14), 2, 30, 64)
  shape = mla_cache.cache_shapes(cfg, 2, 2, 40).latent
  cache = MlaCache(jnp.full(shape.shape, jnp.nan, shape.dtype))
  start, lengths = jnp.zeros(2, jnp.int32), np.array([19, 11])
  # Traced anew for each block size, which is no argument.
  prefill, decode = (jax.jit(lambda *args, f=f: f(cfg, *args)) for f in (attention_mla.prefill, attention_mla.decode))
  out, cache = prefill(w, x[:, :19].reshape(38, 64), start, jnp.asarray(lengths), jnp.arange(2), cache, 1)
  out = out.reshape(2, 19, 64)
  steps = [[], []]
  for t in range(11):
    both = jnp.stack([x[0, 19 + t], x[1, 11 + t]])
    step, cache = decode(w, both, jnp.arange(2), jnp.asarray(lengths + t, jnp.int32), cache, 1)
    for row in range(2):
      steps[row].append(step[row])
  for row, n in enumerate(lengths):
    ours = np.concatenate([out[row, :n], np.stack(steps[row])])
    assert_close(ours, mla64(cfg, w, x64[row, : n + 11]), 1e-5, f"row {row}")
    assert np.isnan(cache.latent[1, row, n + 11 :]).all()
  assert np.isnan(cache.latent[0]).all()


def test_empty_cache_of_the_tests_is_nan_where_nobody_may_read():
  cache = empty_cache(small_config(), 3, live=(1,), max_length=8)
  assert np.isnan(cache.kda.state[:, (0, 2), ...]).all()
  assert not np.asarray(cache.kda.state[:, 1]).any()
  assert np.isnan(cache.mla.latent).all()
