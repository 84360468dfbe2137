"""The engine: weights on a mesh, and two compiled programs over an explicit state.

prompt ids → `prefill` (chunks) → slots of a `DecodeState` → `generate` (many steps a dispatch) → token ids. Every stage
takes values and returns values; the state is donated to each step.
"""

import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kda_decode import pool_format
from MaxText import checkpoint, distributed, weights
from MaxText.configs.model_config import ModelConfig
from MaxText.configs.resolve import make_mesh, model_config
from MaxText.errors import UserError
from MaxText.inference.cache import DecodeCache, cache_bytes, cache_shapes, cache_specs, init_cache
from MaxText.inference.sampling import Sampling, sample
from MaxText.layers.attention_kda import KdaCache
from MaxText.models import kimi_k3
from MaxText.parallel import DATA

NO_TOKEN = -1  # what `generate` returns for a row that had stopped
ASSETS = os.path.join(os.path.dirname(__file__), "..", "assets")
_V7X_DEVICE_BYTES = int(94.7 * 2**30)  # usable HBM of one of a v7x chip's two devices
_SMALLEST_CHUNK = 16
_BATCHED_TOKENS = 32768  # that are prefilled for all slots at once


class DecodeState(NamedTuple):
  """Everything that changes from step to step. B slots.

  Attributes:
    cache: the model's state.
    tokens: [B] int32, each slot's last token: chosen, not yet seen by the model.
    active: [B] bool, slots that go on.
    remaining: [B] int32, tokens that a slot may still choose.
    keys: [B] PRNG keys of the slots' samplers.
  """

  cache: DecodeCache
  tokens: jax.Array
  active: jax.Array
  remaining: jax.Array
  keys: jax.Array


class Engine:
  """One model on one mesh.

  Attributes:
    cfg: the frozen architecture.
    mesh: MaxText's device mesh.
    params: the weights.
    sampling: how tokens are chosen.
    stop_ids: ids after which a sequence ends.
    row_spec: how an array with one entry a row of the batch lies on the mesh.
    weight_specs: how the weights lie on it.
  """

  def __init__(
    self,
    cfg: ModelConfig,
    mesh: Mesh,
    params: dict[str, Any],
    sampling: Sampling,
    stop_ids: Sequence[int],
    chunk_size: int,
    steps_per_dispatch: int,
  ):
    self.cfg, self.mesh, self.params, self.sampling = cfg, mesh, params, sampling
    self.stop_ids = tuple(sorted(stop_ids))
    self.chunk_size = chunk_size
    self.steps_per_dispatch = steps_per_dispatch
    self.row_spec = rows = P(DATA if cfg.parallel.splits_batch else None)
    self.weight_specs = weight = jax.tree.map(lambda a: a.sharding.spec, params)
    cache = cache_specs(cfg)
    state = DecodeState(cache, rows, rows, rows, rows)
    self._prefill = self.program(
      partial(_prefill_chunk, cfg), (weight, rows, rows, rows, rows, cache), (rows, cache), donate=(4, 5)
    )
    self._start = self.program(partial(_start, sampling, self.stop_ids), (cache, rows, rows, rows), state, donate=(0,))
    self._generate = self.program(
      partial(_generate, cfg, sampling, self.stop_ids, steps_per_dispatch),
      (weight, state),
      (P(None, *rows), state),
      donate=(1,),
    )
    self._compiled: dict[tuple[int, ...], Any] = {}

  def program(self, function: Any, in_specs: Any, out_specs: Any, donate: tuple[int, ...]) -> Any:
    """Jits a step; on several devices as one `shard_map`, with shapes and values of one device's part inside.

    Args:
      in_specs, out_specs: partition specs of its arguments and results; see `row_spec`, `cache_specs`, `weight_specs`.
      donate: arguments that may be overwritten.
    """
    if self.mesh.size > 1:
      function = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    placed_in = weights.formats(self._placed(in_specs))
    return jax.jit(function, in_shardings=placed_in, out_shardings=self._placed(out_specs), donate_argnums=donate)

  def _placed(self, specs: Any) -> Any:
    """Partition specs -> shardings on this mesh; KDA's pools in the layout that their kernel works on in place."""

    def one(node: Any) -> Any:
      if isinstance(node, KdaCache):
        return KdaCache(
          pool_format(5, NamedSharding(self.mesh, node.state)), pool_format(6, NamedSharding(self.mesh, node.conv))
        )
      return NamedSharding(self.mesh, node)

    return jax.tree.map(one, specs, is_leaf=lambda node: isinstance(node, P | KdaCache))

  def abstract_state(self, slots: int, max_length: int) -> DecodeState:
    """Shapes, dtypes and placements of a `DecodeState` of that size: what the programs are compiled with."""
    cache = jax.tree.map(
      lambda array, placed: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed),
      cache_shapes(self.cfg, slots, max_length),
      self._placed(cache_specs(self.cfg)),
    )
    integers, keys = self._rows(slots), self._rows(slots, dtype=jax.eval_shape(jax.random.key, 0).dtype)
    return DecodeState(cache, integers, self._rows(slots, dtype=jnp.bool_), integers, keys)

  def _rows(self, rows: int, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """An abstract array with one entry a row of the batch."""
    return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=NamedSharding(self.mesh, self.row_spec))

  def lower_prefill(self, slots: int, max_length: int, rows: int, chunk: int) -> jax.stages.Lowered:
    """The program that prefills `chunk` tokens of each of `rows` sequences, lowered for a cache of that size."""
    logits = self._rows(slots, self.cfg.vocab_size, dtype=jnp.float32)
    cache = self.abstract_state(slots, max_length).cache
    per_row = self._rows(rows)
    return self._prefill.lower(self.params, self._rows(rows, chunk), per_row, per_row, logits, cache)

  def lower_generate(self, slots: int, max_length: int) -> jax.stages.Lowered:
    """The program of a dispatch of decode steps, lowered for a cache of that size."""
    return self._generate.lower(self.params, self.abstract_state(slots, max_length))

  def compile(self, slots: int, max_length: int, longest: int) -> None:
    """Compiles, without running anything, what prompts of up to `longest` tokens in such a cache need."""
    size, rows = _cache_size(self.abstract_state(slots, max_length).cache), self.prefill_rows(slots, longest)
    for chunk in sorted(set(self.chunk_lengths(longest))):
      self._compiled[(*size, rows, chunk)] = self.lower_prefill(slots, max_length, rows, chunk).compile()
    self._compiled[size] = self.lower_generate(slots, max_length).compile()

  def init_cache(self, slots: int, max_length: int) -> DecodeCache:
    """An empty cache, each device holding its part.

    Raises:
      UserError: slots that the data groups can't share evenly.
    """
    if self.cfg.parallel.splits_batch and slots % self.cfg.parallel.data:
      raise UserError(
        f"{slots} slots can't be split over {self.cfg.parallel.data} data groups (parallel_mode=throughput); "
        "set per_device_batch_size"
      )
    placed = self._placed(cache_specs(self.cfg))
    return jax.jit(partial(init_cache, self.cfg, slots, max_length), out_shardings=placed)()

  def chunk_lengths(self, longest: int) -> list[int]:
    """Sizes of the chunks that a prompt of `longest` tokens is prefilled in: full ones, then a power of two."""
    full, rest = divmod(longest, self.chunk_size)
    last = [min(self.chunk_size, max(_SMALLEST_CHUNK, 1 << (rest - 1).bit_length()))] if rest else []
    return [self.chunk_size] * full + last

  def prefill_rows(self, slots: int, longest: int) -> int:
    """How many sequences are prefilled at a time: all slots where their chunks are small, else one a data group."""
    groups = self.cfg.parallel.data if self.cfg.parallel.splits_batch else 1
    return slots if slots * max(self.chunk_lengths(longest)) <= _BATCHED_TOKENS else groups

  def prefill(self, prompts: Sequence[Sequence[int]], cache: DecodeCache) -> tuple[jax.Array, DecodeCache]:
    """Feeds each prompt to its slot, chunk by chunk.

    Args:
      prompts: ids for the first len(prompts) slots, none empty; further slots stay idle.
      cache: donated.

    Returns:
      (logits after each prompt's last token [B, V] float32, cache).
    """
    slots = cache.lengths.shape[0]
    rows = self.prefill_rows(slots, max(map(len, prompts)))
    logits = self.place_rows(np.zeros((slots, self.cfg.vocab_size)), np.float32)
    # Slots lie group by group, and a data group's rows of a chunk must be for its own slots.
    groups = self.cfg.parallel.data if self.cfg.parallel.splits_batch else 1
    by_wave = np.arange(slots).reshape(groups, -1, rows // groups).swapaxes(0, 1).reshape(-1, rows)
    for wave in by_wave:
      parts = [prompts[slot] if slot < len(prompts) else () for slot in wave]
      if any(parts):
        logits, cache = self._prefill_wave(parts, wave.astype(np.int32), logits, cache)
    return logits, cache

  def _prefill_wave(
    self, prompts: Sequence[Sequence[int]], slots: np.ndarray, logits: jax.Array, cache: DecodeCache
  ) -> tuple[jax.Array, DecodeCache]:
    length = np.array([len(p) for p in prompts], np.int32)
    done = 0
    for chunk in self.chunk_lengths(int(length.max())):
      tokens = np.zeros((len(prompts), chunk), np.int32)
      for row, prompt in enumerate(prompts):
        part = prompt[done : done + chunk]
        tokens[row, : len(part)] = part
      in_chunk = np.clip(length - done, 0, chunk).astype(np.int32)
      program = self._compiled.get((*_cache_size(cache), *tokens.shape), self._prefill)
      placed = map(self.place_rows, (tokens, in_chunk, slots))
      logits, cache = program(self.params, *placed, logits, cache)
      done += chunk
    return logits, cache

  def start(self, logits: jax.Array, cache: DecodeCache, remaining: np.ndarray, seeds: np.ndarray) -> DecodeState:
    """Chooses each slot's first token after its prompt.

    Args:
      logits: [B, V], from `prefill`.
      cache: donated.
      remaining: [B] int32, tokens each slot may choose in all; 0 for an idle slot.
      seeds: [B] int, of the samplers.
    """
    return self._start(cache, logits, self.place_rows(remaining, np.int32), self.place_rows(seeds, np.uint32))

  def place_rows(self, values: Any, dtype: Any = np.int32) -> jax.Array:
    """One entry a row of the batch, from every host -> on the mesh, each device holding the rows that are its own."""
    return distributed.place(np.asarray(values, dtype), NamedSharding(self.mesh, self.row_spec))

  def generate(self, state: DecodeState) -> tuple[jax.Array, DecodeState]:
    """Up to `steps_per_dispatch` steps in one call of a compiled program; it ends early when no slot is active.

    Returns:
      (tokens [steps, B] int32, `NO_TOKEN` where a slot had stopped; state). The state given is donated.
    """
    return self._compiled.get(_cache_size(state.cache), self._generate)(self.params, state)


def _cache_size(cache: DecodeCache) -> tuple[int, int]:
  """(slots, positions)."""
  return cache.lengths.shape[0], cache.mla.latent.shape[2]


def _prefill_chunk(cfg, params, tokens, length, slots, logits, cache):
  # Slots are counted over all data groups; a group sees its own.
  here = cache.lengths.shape[0]
  slots -= cfg.parallel.first_slot(here)
  new, cache = kimi_k3.prefill(cfg, params, tokens, length, slots, cache)
  return logits.at[jnp.where(length > 0, slots, here)].set(new, mode="drop"), cache


def _goes_on(stop_ids, tokens, remaining):
  stopped = jnp.zeros(tokens.shape, bool)
  for stop in stop_ids:
    stopped |= tokens == stop
  return ~stopped & (remaining > 0)


def _start(sampling, stop_ids, cache, logits, remaining, seeds) -> DecodeState:
  keys = jax.vmap(jax.random.key)(seeds)
  tokens = sample(sampling, logits, keys, cache.lengths)
  left = remaining - 1
  return DecodeState(cache, tokens, (remaining > 0) & _goes_on(stop_ids, tokens, left), left, keys)


def _generate(cfg, sampling, stop_ids, steps, params, state: DecodeState) -> tuple[jax.Array, DecodeState]:
  # Whether any slot of any data group goes on: all groups take the same number of steps, since they compute together.
  def go_on(carry):
    i, alive, _, _ = carry
    return (i < steps) & alive

  def step(carry):
    i, _, state, out = carry
    logits, cache = kimi_k3.decode_step(cfg, params, state.tokens, state.active, state.cache)
    tokens = sample(sampling, logits, state.keys, cache.lengths)
    left = state.remaining - state.active
    out = out.at[i].set(jnp.where(state.active, tokens, NO_TOKEN))
    active = state.active & _goes_on(stop_ids, tokens, left)
    state = DecodeState(cache, jnp.where(state.active, tokens, state.tokens), active, left, state.keys)
    return i + 1, cfg.parallel.any_row(active), state, out

  out = jnp.full((steps, state.tokens.shape[0]), NO_TOKEN, jnp.int32)
  alive = cfg.parallel.any_row(state.active)
  _, _, state, out = jax.lax.while_loop(go_on, step, (0, alive, state, out))
  return out, state


def checkpoint_directory(config: Any) -> str:
  """`load_parameters_path` as given, or among the checkpoints that ship with the project.

  Raises:
    UserError: it isn't set.
  """
  path = config.load_parameters_path
  if not path:
    raise UserError("load_parameters_path is not set: name the directory of a checkpoint in the released layout")
  if not os.path.exists(path) and os.path.isdir(os.path.join(ASSETS, path)):
    return os.path.normpath(os.path.join(ASSETS, path))
  return path


def _memory() -> int:
  """Bytes that all devices can still hold; on a CPU, of the host's memory."""
  devices = jax.devices()
  if devices[0].platform == "cpu":
    return psutil.virtual_memory().available
  # Other hosts' devices say nothing of themselves; they are like this host's.
  here = [stats for d in jax.local_devices() if (stats := d.memory_stats())]
  return sum(stats["bytes_limit"] - stats["bytes_in_use"] for stats in here) * jax.process_count()


def _gib(count: int) -> str:
  return f"{count / 2**30:,.1f} GiB"


def check_fits(config: Any, cfg: ModelConfig, slots: int, max_length: int) -> None:
  """Raises `UserError` where weights and state are more than the devices hold: what is needed, what was found."""
  weight_bytes = weights.nbytes(kimi_k3.weight_tree(cfg), cfg.storage)
  state_bytes = cache_bytes(cfg, slots, max_length)
  needed, found = weight_bytes + state_bytes, _memory()
  if needed > found:
    devices = jax.devices()
    raise UserError(
      f"this model needs {weight_bytes:,} bytes ({_gib(weight_bytes)}) of weights ({cfg.storage.dtype}, weight_format="
      f"{cfg.storage.experts}) and {_gib(state_bytes)} of state for {slots} sequence(s) of {max_length} tokens, that "
      "is at least "
      f"{math.ceil(needed / _V7X_DEVICE_BYTES)} TPU v7x devices of {_gib(_V7X_DEVICE_BYTES)}; found {len(devices)} "
      f"{devices[0].device_kind} device(s) with {_gib(found)}"
    )


def load_engine(config: Any, stop_ids: Sequence[int], slots: int, max_length: int) -> Engine:
  """Builds the engine of a configuration: mesh, checks, weights.

  Raises:
    UserError: it doesn't fit, there is no checkpoint, or the checkpoint is not what the configuration describes.
  """
  mesh = make_mesh(config)
  cfg = model_config(config, jax.devices()[0].platform, mesh)
  check_fits(config, cfg, slots, max_length)
  directory = checkpoint_directory(config)
  tree = kimi_k3.weight_tree(cfg)
  shardings = weights.shardings(tree, mesh, config.logical_axis_rules, cfg.storage)
  params = checkpoint.load(checkpoint.ReleasedCheckpoint(directory), tree, cfg.storage, weights.formats(shardings))
  return Engine(
    cfg,
    mesh,
    params,
    Sampling.from_config(config),
    stop_ids,
    config.prefill_chunk_size,
    config.decode_steps_per_dispatch,
  )
