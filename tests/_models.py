"""What the model's tests share: golden checkpoints, jitted entry points, caches full of NaN, a small configuration."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from MaxText import checkpoint, weights
from MaxText.configs.k3_config import initialize
from MaxText.configs.model_config import ModelConfig
from MaxText.configs.resolve import model_config
from MaxText.inference.cache import DecodeCache, cache_shapes
from MaxText.models import kimi_k3

GOLDEN = Path(__file__).parent / "golden"
CONFIGS = {"k3-a": "kimi-k3.yml", "kl-a": "kimi-linear-48b.yml"}
MAX_LENGTH = 192  # positions of the tests' caches: the longest prompt, 130, its 16 greedy tokens, and some to spare


def mesh_of_one() -> Mesh:
  return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))


@functools.cache
def settings(name: str, *overrides: str):
  """A golden checkpoint's configuration, read as score.py reads it."""
  directory = f"hf_config={GOLDEN / name}"
  lengths = (f"max_target_length={MAX_LENGTH}", f"max_prefill_predict_length={MAX_LENGTH}")
  floats = ("dtype=float32", "weight_dtype=float32")
  given = {o.partition("=")[0]: o for o in (directory, *lengths, *floats, *overrides)}
  return initialize(["test", CONFIGS[name], *given.values()])


def load(name: str, cfg: ModelConfig, directory: Path | None = None) -> kimi_k3.Params:
  """A golden checkpoint's weights for `cfg`."""
  tree = kimi_k3.weight_tree(cfg)
  shardings = weights.shardings(tree, mesh_of_one(), settings(name).logical_axis_rules, cfg.storage)
  released = checkpoint.ReleasedCheckpoint(str(directory or GOLDEN / name))
  return checkpoint.load(released, tree, cfg.storage, shardings)


@functools.cache
def golden(name: str) -> tuple[ModelConfig, kimi_k3.Params]:
  """A golden checkpoint in float32, rolled."""
  cfg = model_config(settings(name), "cpu")
  return cfg, load(name, cfg)


@functools.cache
def golden_arrays(name: str) -> dict[str, np.ndarray]:
  with np.load(GOLDEN / name / "goldens.npz") as arrays:
    return dict(arrays)


def golden_text_config(name: str) -> dict:
  config = json.loads((GOLDEN / name / "config.json").read_text())
  return config.get("text_config", config)


def empty_cache(cfg: ModelConfig, slots: int, live: tuple[int, ...] | None = None, max_length: int = MAX_LENGTH):
  """A cache in which everything is NaN that no slot may read: free slots, and all latents, which lie beyond length 0.

  Args:
    live: slots that start a sequence (all by default); only their recurrent state and history are zero.
  """
  return _empty_cache(cfg, slots, tuple(range(slots)) if live is None else tuple(live), max_length)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _empty_cache(cfg, slots, live, max_length):
  def fill(s):
    return jnp.full(s.shape, jnp.nan if jnp.issubdtype(s.dtype, jnp.floating) else 0, s.dtype)

  cache: DecodeCache = jax.tree.map(fill, cache_shapes(cfg, slots, max_length))
  zero = functools.partial(jax.tree.map, lambda a: a.at[:, np.array(live, np.int32)].set(0) if live else a)
  return cache._replace(leading_kda=zero(cache.leading_kda), kda=zero(cache.kda))


def random_params(cfg: ModelConfig, seed: int) -> kimi_k3.Params:
  """Random weights at unit scale, by numpy: compiling JAX's generator would take longer than a test."""
  generator = np.random.default_rng(seed)

  def draw(stack: weights.Stack):
    shape, one = stack.shape, stack.weight.shape
    match stack.weight.sources[0].name:
      case "A_log":
        value = np.log(generator.uniform(1, 16, shape))
      case "dt_bias":
        value = generator.uniform(-6, 0, shape)
      case "q_conv1d":
        value = generator.standard_normal(shape) / 2
      case _ if len(one) == 1:
        value = 1 + 0.1 * generator.standard_normal(shape)
      case _:
        value = generator.standard_normal(shape) / one[0] ** 0.5
    return jnp.asarray(value, stack.dtype(cfg.storage))

  return weights.map_weights(draw, kimi_k3.weight_tree(cfg))


def _prefill_every_slot(cfg, params, tokens, length, cache, all_logits=False):
  """Row i is slot i."""
  return kimi_k3.prefill(cfg, params, tokens, length, jnp.arange(tokens.shape[0]), cache, all_logits)


# One jitted function for all tests of a process, so that a shape is compiled once.
prefill = jax.jit(_prefill_every_slot, static_argnums=(0,), static_argnames=("all_logits",))
decode_step = jax.jit(kimi_k3.decode_step, static_argnums=(0,))


# For programs that run once: half the compile time.
COMPILE_QUICKLY = {"xla_backend_optimization_level": 0}


def fresh_entry_points():
  """(prefill of all logits, decode_step) that are traced anew: for code that a test has changed underneath them."""

  def prefill_all(cfg, *args):
    return _prefill_every_slot(cfg, *args, all_logits=True)

  def step(*args):
    return kimi_k3.decode_step(*args)

  return (jax.jit(f, static_argnums=(0,), compiler_options=COMPILE_QUICKLY) for f in (prefill_all, step))


def run_prefill(cfg, params, tokens, cache=None, lengths=None):
  """(logits at every position, cache) of one prefill call; tokens [B, T]."""
  tokens = jnp.asarray(tokens, jnp.int32)
  batch, t = tokens.shape
  cache = empty_cache(cfg, batch) if cache is None else cache
  lengths = jnp.full(batch, t, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
  return prefill(cfg, params, tokens, lengths, cache, all_logits=True)


def run_decode(cfg, params, tokens, cache=None, step=decode_step):
  """(logits at every position, cache), one token at a time; tokens [B, T]."""
  tokens = np.asarray(tokens, np.int32)
  cache = empty_cache(cfg, tokens.shape[0]) if cache is None else cache
  active = jnp.ones(tokens.shape[0], bool)
  logits = []
  for column in tokens.T:
    out, cache = step(cfg, params, jnp.asarray(column), active, cache)
    logits.append(out)
  return np.stack(logits, axis=1), cache


def run_chunked(cfg, params, tokens, size, lengths, cache=None):
  """(logits at every position, cache) by chunks of a fixed padded `size`.

  Args:
    lengths: for each row, how many tokens each chunk takes of it; they add up to T. Rows may be cut differently.
  """
  tokens = np.asarray(tokens, np.int32)
  batch, t = tokens.shape
  cache = empty_cache(cfg, batch) if cache is None else cache
  logits = np.full((batch, t, cfg.vocab_size), np.nan, np.float32)
  done = np.zeros(batch, np.int32)
  for taken in np.stack(lengths, axis=1):
    chunk = np.full((batch, size), cfg.vocab_size - 1, np.int32)  # padding is a token like any other
    for row, n in enumerate(taken):
      chunk[row, :n] = tokens[row, done[row] : done[row] + n]
    out, cache = prefill(cfg, params, chunk, jnp.asarray(taken, jnp.int32), cache, all_logits=True)
    for row, n in enumerate(taken):
      logits[row, done[row] : done[row] + n] = out[row, :n]
    done += taken
  assert (done == t).all(), "a test's chunk lengths don't add up"
  return logits, cache


def greedy(cfg, params, logits, cache, steps):
  """[B, steps] tokens of a greedy continuation, from the logits of the prompt's last token."""
  active = jnp.ones(logits.shape[0], bool)
  tokens = []
  for i in range(steps):
    tokens.append(np.argmax(logits, axis=-1).astype(np.int32))
    if i + 1 < steps:
      logits, cache = decode_step(cfg, params, jnp.asarray(tokens[-1]), active, cache)
  return np.stack(tokens, axis=1)


def assert_close(actual, expected, tolerance, what=""):
  """Every element within `tolerance` of what is expected; NaN is never close."""
  actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
  assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
  error = np.abs(actual - expected)
  bad = ~(error <= tolerance)
  if bad.any():
    worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
    raise AssertionError(
      f"{what}: {bad.sum()} of {bad.size} elements beyond {tolerance}; worst at {tuple(map(int, worst))}: "
      f"{actual[worst]} instead of {expected[worst]}"
    )


def furthest(actual, expected) -> float:
  """The largest difference between two arrays; NaN counts as infinitely far."""
  error = np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64))
  return float(np.max(np.where(np.isnan(error), np.inf, error)))


def live_state(cache: DecodeCache, slot: int) -> dict[str, np.ndarray]:
  """What of a slot counts: recurrent states, conv histories, latents up to its length, the length."""
  n = int(cache.lengths[slot])
  state = {"length": np.asarray(n)}
  for part in ("leading_kda", "kda"):
    kda = getattr(cache, part)
    state |= {f"{part}.state": np.asarray(kda.state[:, slot]), f"{part}.conv": np.asarray(kda.conv[:, slot])}
  for part in ("leading_mla", "mla"):
    state[f"{part}.latent"] = np.asarray(getattr(cache, part).latent[:, slot, :n])
  return state


def small_config(**changes) -> ModelConfig:
  """A model of every feature, as small as it can be: for tests of single layers."""
  # What isn't listed is as in the golden K3.
  config = dataclasses.replace(
    model_config(settings("k3-a"), "cpu"),
    vocab_size=64,
    hidden_size=64,
    layers=(("kda", "dense"), ("kda", "moe"), ("mla", "moe")),
    kda_num_heads=2,
    kda_head_dim=32,
    kda_prefill_implementation="xla",
    kda_decode_implementation="reference",
    mla_num_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    mlp_size=64,
    num_experts=8,
    num_experts_per_token=2,
    num_shared_experts=1,
    moe_intermediate_size=32,
    latent_size=32,
    routed_scaling_factor=1.0,
    grouped_matmul_implementation="loop",
    attn_res_block_size=2,
    matmul_precision="highest",
  )
  return dataclasses.replace(config, **changes)


def rng(seed=0):
  return np.random.default_rng(seed)


def normal(generator, *shape, scale=1.0):
  """float32 values, and the same ones in float64."""
  x = (generator.standard_normal(shape) * scale).astype(np.float32)
  return jnp.asarray(x), x.astype(np.float64)


def assert_same(ours, theirs):
  """Two trees of arrays, structure, dtypes and elements."""
  assert jax.tree.structure(ours) == jax.tree.structure(theirs)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
