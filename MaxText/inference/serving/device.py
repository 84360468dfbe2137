"""The device state of a server, and the three operations on it: small host arrays go in, tokens come out."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from MaxText.distributed import fetch, wait_for_all
from MaxText.inference.cache import cache_bytes
from MaxText.inference.engine import Engine
from MaxText.inference.sampling import SAMPLING_DTYPES, Sampling
from MaxText.inference.steps import Chosen
from MaxText.progress import progress


class Start(NamedTuple):
  """How a slot's decoding begins.

  Attributes:
    remaining: tokens that it may choose.
    sampling: numbers.
    reports: whether log-probabilities are asked for.
    ignore_eos: whether it goes on after a stop id.
  """

  remaining: int
  sampling: Sampling
  reports: bool
  ignore_eos: bool


class Part(NamedTuple):
  """Some tokens of a prompt, for a slot; the `first` ones empty it."""

  slot: int
  first: bool
  tokens: Sequence[int]


class Device:
  """Slots of one engine. One thread may use it.

  Attributes:
    engine: its programs and weights.
    slots: how many sequences it holds.
    groups: data groups; slots lie group by group, and a chunk has one row for each.
    chunks: sizes of prefill chunks, smallest first.
    steps: the most decode steps of a dispatch.
    cache_bytes: of the decode cache, on all devices together.
  """

  def __init__(self, engine: Engine, slots: int, max_length: int):
    self.engine, self.slots, self.groups = engine, slots, engine.groups
    self.chunks, self.steps = tuple(engine.chunk_sizes), engine.steps_per_dispatch
    self.cache_bytes = cache_bytes(engine.cfg, slots, max_length)
    self._max_length = max_length
    self._logits = engine.init_logits(slots)
    self._state = engine.idle(engine.init_cache(slots, max_length))

  def compile(self) -> None:
    """Compiles all that will ever run, and runs it once on nothing."""
    self.engine.compile_programs(self.slots, self._max_length, self.groups, self.chunks)
    wait_for_all()
    self._reset(np.full(self.groups, -1, np.int32))
    for size in progress(self.chunks, len(self.chunks), "warming up"):
      self.prefill(size, ())
    self.admit({}, reports=True)
    self.generate(0, (), reports=True)

  def prefill(self, size: int, parts: Sequence[Part]) -> None:
    """One chunk of up to `size` tokens for each of some slots, at most one slot of each data group."""
    tokens, length = np.zeros((self.groups, size), np.int32), np.zeros(self.groups, np.int32)
    slots, new = np.full((2, self.groups), -1, np.int32)
    for part in parts:
      row = part.slot // (self.slots // self.groups)
      tokens[row, : len(part.tokens)], length[row], slots[row] = part.tokens, len(part.tokens), part.slot
      if part.first:
        new[row] = part.slot
    if np.any(new >= 0):
      self._reset(new)
    self._logits, cache = self.engine.prefill_chunk(tokens, length, slots, self._logits, self._state.cache)
    self._state = self._state._replace(cache=cache)

  def _reset(self, slots: np.ndarray) -> None:
    self._state = self._state._replace(cache=self.engine.reset_slots(slots, self._state.cache))

  def admit(self, starts: Mapping[int, Start], reports: bool) -> Chosen:
    """Chooses the first token of slots whose prompts are complete.

    Args:
      starts: by slot.
      reports: whether log-probabilities are wanted on the host.

    Returns:
      [B] …, on the host; without `reports` tokens alone.
    """
    starting, reporting, ignore_eos = np.zeros((3, self.slots), bool)
    remaining = np.zeros(self.slots, np.int32)
    rows = Sampling(
      *(np.full(self.slots, value, dtype) for value, dtype in zip(Sampling(), SAMPLING_DTYPES, strict=True))
    )
    for slot, start in starts.items():
      starting[slot], remaining[slot] = True, start.remaining
      reporting[slot], ignore_eos[slot] = start.reports, start.ignore_eos
      for row, value in zip(rows, start.sampling, strict=True):
        row[slot] = value
    chosen, self._state = self.engine.admit(self._state, self._logits, starting, remaining, rows, reporting, ignore_eos)
    return _fetched(chosen, reports)

  def generate(self, steps: int, stopped: Collection[int], reports: bool) -> Chosen:
    """Up to `steps` decode steps of the slots that are active, `stopped` no longer among them; [steps, B] …"""
    idle = np.zeros(self.slots, bool)
    idle[list(stopped)] = True
    chosen, self._state = self.engine.generate_steps(self._state, steps, idle)
    return _fetched(chosen, reports)

  def stop(self) -> None:
    """Nothing more will be asked for."""


def _fetched(chosen: Chosen, reports: bool) -> Chosen:
  """On the host; log-probabilities only where they are asked for."""
  return Chosen(fetch(chosen.tokens), *(fetch(array) if reports else None for array in chosen[1:]))
