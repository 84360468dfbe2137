"""A server of several processes: the first one decides and tells the others each operation before it does it itself.

All then run the same programs in the same order. Words go through JAX's key-value store, not through a collective: an
idle server waits for its next request for hours, and collectives give up on those who wait.
"""

import json
from collections.abc import Collection, Mapping, Sequence

from MaxText.distributed import hear, tell
from MaxText.inference.engine import Engine
from MaxText.inference.sampling import Sampling
from MaxText.inference.serving.device import Device, Part, Start
from MaxText.inference.steps import Chosen


class LeadingDevice(Device):
  """The first process's part of a device."""

  def __init__(self, engine: Engine, slots: int, max_length: int):
    super().__init__(engine, slots, max_length)
    self._told: int | None = None  # words so far; None until the others listen

  def compile(self) -> None:
    super().compile()
    self._told = 0

  def prefill(self, size: int, parts: Sequence[Part]) -> None:
    self._tell("prefill", size, parts)
    super().prefill(size, parts)

  def admit(self, starts: Mapping[int, Start], reports: bool) -> Chosen:
    self._tell("admit", list(starts.items()), reports)
    return super().admit(starts, reports)

  def generate(self, steps: int, stopped: Collection[int], reports: bool) -> Chosen:
    self._tell("generate", steps, list(stopped), reports)
    return super().generate(steps, stopped, reports)

  def stop(self) -> None:
    self._tell("stop")
    super().stop()

  def _tell(self, *words) -> None:
    if self._told is not None:  # what is run while compiling, everybody runs
      tell(self._told, json.dumps(words))
      self._told += 1


def follow(device: Device) -> None:
  """Does what the first process tells, until it stops."""
  heard = 0
  while True:
    match json.loads(hear(heard)):
      case ["prefill", size, parts]:
        device.prefill(size, [Part(*part) for part in parts])
      case ["admit", starts, reports]:
        device.admit({slot: Start(left, Sampling(*how), *flags) for slot, (left, how, *flags) in starts}, reports)
      case ["generate", steps, stopped, reports]:
        device.generate(steps, stopped, reports)
      case ["stop"]:
        device.stop()
        return
    heard += 1
