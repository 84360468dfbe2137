"""The engine: weights on a mesh, and the compiled programs of steps.py over an explicit state.

prompt ids → `prefill` (chunks) → slots of a `DecodeState` → `generate` (many steps a dispatch) → token ids. Every stage
takes values and returns values; the state is donated to each step.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kda_decode import pool_format
from MaxText import distributed, weights
from MaxText.checkpoint import checkpoint_directory
from MaxText.configs.model_config import ModelConfig
from MaxText.configs.resolve import make_mesh, model_config
from MaxText.converted.loading import load_parameters
from MaxText.errors import UserError
from MaxText.inference import steps
from MaxText.inference.cache import DecodeCache, cache_bytes, cache_shapes, cache_specs, init_cache
from MaxText.inference.sampling import SAMPLING_DTYPES, Sampling
from MaxText.inference.steps import Chosen, DecodeState
from MaxText.layers.attention_kda import KdaCache
from MaxText.models import kimi_k3
from MaxText.parallel import DATA
from MaxText.progress import progress

_V7X_DEVICE_BYTES = int(94.7 * 2**30)  # usable HBM of one of a v7x chip's two devices
_SMALLEST_CHUNK = 16
_BATCHED_TOKENS = 32768  # that are prefilled for all slots at once


class Engine:
  """One model on one mesh.

  Attributes:
    cfg: the frozen architecture.
    mesh: MaxText's device mesh.
    params: the weights.
    sampling: how tokens are chosen where nobody says otherwise.
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
    cache, whole = cache_specs(cfg), P()
    sampling_rows = Sampling(*(rows for _ in Sampling()))
    state = DecodeState(cache, rows, rows, rows, sampling_rows, rows, rows)
    by_step = P(None, *rows)
    self._reset = self.program(partial(steps.reset_slots, cfg), (cache, rows), cache, donate=(0,))
    self._prefill = self.program(
      partial(steps.prefill_chunk, cfg), (weight, rows, rows, rows, rows, cache), (rows, cache), donate=(4, 5)
    )
    self._admit = self.program(
      partial(steps.admit, cfg, self.stop_ids),
      (state, rows, rows, rows, sampling_rows, rows, rows),
      (Chosen(rows, rows, rows, rows), state),
      donate=(0,),
    )
    self._generate = self.program(
      partial(steps.generate, cfg, self.stop_ids, steps_per_dispatch),
      (weight, state, whole, rows),
      (Chosen(by_step, by_step, by_step, by_step), state),
      donate=(1,),
    )
    self._compiled: dict[tuple, Any] = {}

  @property
  def groups(self) -> int:
    """Data groups that the batch is split over; slots lie group by group."""
    return self.cfg.parallel.data if self.cfg.parallel.splits_batch else 1

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
    integers, flags = self._rows(slots), self._rows(slots, dtype=jnp.bool_)
    sampling = Sampling(*(self._rows(slots, dtype=dtype) for dtype in SAMPLING_DTYPES))
    return DecodeState(cache, integers, flags, integers, sampling, flags, flags)

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
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(self.mesh, P()))
    stopped = self._rows(slots, dtype=jnp.bool_)
    return self._generate.lower(self.params, self.abstract_state(slots, max_length), count, stopped)

  def lower_admit(self, slots: int, max_length: int) -> jax.stages.Lowered:
    """The program that chooses first tokens, lowered for a cache of that size."""
    state, flags = self.abstract_state(slots, max_length), self._rows(slots, dtype=jnp.bool_)
    logits = self._rows(slots, self.cfg.vocab_size, dtype=jnp.float32)
    return self._admit.lower(state, logits, flags, state.remaining, state.sampling, flags, flags)

  def compile(self, slots: int, max_length: int, longest: int) -> None:
    """Compiles, without running anything, what prompts of up to `longest` tokens in such a cache need."""
    rows = self.prefill_rows(slots, longest)
    self.compile_programs(slots, max_length, rows, sorted(set(self.chunk_lengths(longest))))

  def compile_programs(self, slots: int, max_length: int, rows: int, chunks: Sequence[int]) -> None:
    """Compiles decoding in such a cache, and prefill of chunks of each of these sizes, for `rows` sequences at once."""
    size = _cache_size(self.abstract_state(slots, max_length).cache)
    programs = {
      ("generate", *size): lambda: self.lower_generate(slots, max_length),
      ("admit", *size): lambda: self.lower_admit(slots, max_length),
    } | {(*size, rows, chunk): partial(self.lower_prefill, slots, max_length, rows, chunk) for chunk in chunks}
    for key, lower in progress(programs.items(), len(programs), "compiling"):
      self._compiled[key] = lower().compile()

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

  def init_logits(self, slots: int) -> jax.Array:
    """Where `prefill_chunk` leaves logits: [slots, V] float32."""
    return self.place_rows(np.zeros((slots, self.cfg.vocab_size)), np.float32)

  def idle(self, cache: DecodeCache) -> DecodeState:
    """A state of this cache in which no slot is active."""
    slots = cache.lengths.shape[0]
    count, flags = partial(self.place_rows, np.zeros(slots)), partial(self.place_rows, np.zeros(slots), np.bool_)
    return DecodeState(cache, count(), flags(), count(), self._place_sampling(Sampling(), slots), flags(), flags())

  def chunk_lengths(self, longest: int) -> list[int]:
    """Sizes of the chunks that `longest` tokens are prefilled in: full ones, then one that holds the rest."""
    full, rest = divmod(longest, self.chunk_size)
    last = [next(size for size in self.chunk_sizes if size >= rest)] if rest else []
    return [self.chunk_size] * full + last

  @property
  def chunk_sizes(self) -> list[int]:
    """All sizes that a chunk can have, smallest first: powers of two, up to the full one, which may be none."""
    sizes, size = [], _SMALLEST_CHUNK
    while size < self.chunk_size:
      sizes.append(size)
      size *= 2
    return [*sizes, self.chunk_size]

  def prefill_rows(self, slots: int, longest: int) -> int:
    """How many sequences are prefilled at a time: all slots where their chunks are small, else one a data group."""
    return slots if slots * max(self.chunk_lengths(longest)) <= _BATCHED_TOKENS else self.groups

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
    logits = self.init_logits(slots)
    # Slots lie group by group, and a data group's rows of a chunk must be for its own slots.
    by_wave = np.arange(slots).reshape(self.groups, -1, rows // self.groups).swapaxes(0, 1).reshape(-1, rows)
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
      logits, cache = self.prefill_chunk(tokens, in_chunk, slots, logits, cache)
      done += chunk
    return logits, cache

  def reset_slots(self, slots: np.ndarray, cache: DecodeCache) -> DecodeCache:
    """Empties slots [R] int32, one row a data group at least; −1 is passed over. The cache given is donated."""
    return self._reset(cache, self.place_rows(slots))

  def prefill_chunk(
    self, tokens: np.ndarray, length: np.ndarray, slots: np.ndarray, logits: jax.Array, cache: DecodeCache
  ) -> tuple[jax.Array, DecodeCache]:
    """Feeds one chunk to some slots; see `kimi_k3.prefill`.

    Args:
      tokens: [R, T] int32. A data group's share of the R rows is for its own slots.
      length, slots: [R] int32.
      logits: [B, V] float32, donated like the cache; the slots' rows are replaced.
    """
    program = self._compiled.get((*_cache_size(cache), *tokens.shape), self._prefill)
    return program(self.params, *map(self.place_rows, (tokens, length, slots)), logits, cache)

  def start(
    self, logits: jax.Array, cache: DecodeCache, remaining: np.ndarray, sampling: Sampling | None = None
  ) -> DecodeState:
    """Chooses each slot's first token after its prompt.

    Args:
      logits: [B, V], from `prefill`.
      cache: donated.
      remaining: [B] int, tokens each slot may choose in all; 0 for an idle slot.
      sampling: numbers, or [B] each; None: the engine's.
    """
    remaining = np.asarray(remaining)
    sampling = self.sampling if sampling is None else sampling
    nobody = np.zeros(len(remaining), bool)
    _, state = self.admit(self.idle(cache), logits, remaining > 0, remaining, sampling, nobody, nobody)
    return state

  def admit(
    self,
    state: DecodeState,
    logits: jax.Array,
    starting: np.ndarray,
    remaining: np.ndarray,
    sampling: Sampling,
    reports: np.ndarray,
    ignore_eos: np.ndarray,
  ) -> tuple[Chosen, DecodeState]:
    """Chooses the first token of the slots `starting`; see `steps.admit`. The state given is donated."""
    flags = partial(self.place_rows, dtype=np.bool_)
    sampling = self._place_sampling(sampling, len(starting))
    program = self._compiled.get(("admit", *_cache_size(state.cache)), self._admit)
    remaining = self.place_rows(remaining)
    return program(state, logits, flags(starting), remaining, sampling, flags(reports), flags(ignore_eos))

  def _place_sampling(self, sampling: Sampling, slots: int) -> Sampling:
    return Sampling(
      *(
        self.place_rows(np.broadcast_to(value, slots), dtype)
        for value, dtype in zip(sampling, SAMPLING_DTYPES, strict=True)
      )
    )

  def place_rows(self, values: Any, dtype: Any = np.int32) -> jax.Array:
    """One entry a row of the batch, from every host -> on the mesh, each device holding the rows that are its own."""
    return distributed.place(np.asarray(values, dtype), NamedSharding(self.mesh, self.row_spec))

  def generate(self, state: DecodeState) -> tuple[jax.Array, DecodeState]:
    """Up to `steps_per_dispatch` steps in one call of a compiled program; it ends early when a slot does.

    Returns:
      (tokens [steps, B] int32, `NO_TOKEN` where a slot had stopped or `FAILED`; state). The state given is donated.
    """
    chosen, state = self.generate_steps(state, self.steps_per_dispatch, np.zeros(state.tokens.shape, bool))
    return chosen.tokens, state

  def generate_steps(self, state: DecodeState, count: int, stopped: np.ndarray) -> tuple[Chosen, DecodeState]:
    """Up to `count` ≤ `steps_per_dispatch` steps, after slots `stopped` [B] bool have been made idle.

    Returns:
      ([steps_per_dispatch, B] …, state).
    """
    program = self._compiled.get(("generate", *_cache_size(state.cache)), self._generate)
    placed = distributed.place(np.asarray(count, np.int32), NamedSharding(self.mesh, P()))
    return program(self.params, state, placed, self.place_rows(stopped, np.bool_))


def _cache_size(cache: DecodeCache) -> tuple[int, int]:
  """(slots, positions)."""
  return cache.lengths.shape[0], cache.mla.latent.shape[2]


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
  tree = kimi_k3.weight_tree(cfg)
  shardings = weights.shardings(tree, mesh, config.logical_axis_rules, cfg.storage)
  params = load_parameters(checkpoint_directory(config), cfg, tree, weights.formats(shardings))
  return Engine(
    cfg,
    mesh,
    params,
    Sampling.from_config(config),
    stop_ids,
    config.prefill_chunk_size,
    config.decode_steps_per_dispatch,
  )
