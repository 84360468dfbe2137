"""Who is served when: a room without devices, threads and clocks.

A job waits in line for a slot, is prefilled in chunks, is admitted (its first token is chosen), decodes, and ends. The
scheduler is asked for one action after the other (`next`); its owner carries each out and tells it who came and who is
done. Between two dispatches of decode steps at most one chunk's worth of tokens is prefilled, so that whoever decodes
waits no longer than that for a newcomer's prompt; those who are being prefilled take turns.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from MaxText.inference.serving.requests import Overloaded

_SHORT_DISPATCH = 4  # decode steps while someone waits for a slot or for the rest of a prompt, or is likely to come


@dataclass(eq=False)
class Job:
  """A request on its way.

  Attributes:
    length: tokens of its prompt.
    deadline: when it ends if it hasn't; None: never.
    slot: where it lies; None while it waits and when it's over.
    prefilled: tokens of the prompt that were given to the device.
  """

  length: int
  deadline: float | None = None
  slot: int | None = None
  prefilled: int = 0


class Part(NamedTuple):
  """Tokens `start` to `end` of the prompt of a job, for its slot."""

  slot: int
  job: Job
  start: int
  end: int


@dataclass(frozen=True)
class Prefill:
  """Feed a chunk of `size` tokens a row; the parts are of different data groups. A part that starts at 0 empties its
  slot first.
  """

  size: int
  parts: tuple[Part, ...]


@dataclass(frozen=True)
class Admit:
  """Choose the first token of jobs, by slot, whose prompts are complete."""

  jobs: dict[int, Job]


@dataclass(frozen=True)
class Decode:
  """Take up to `steps` steps with `jobs`, by slot; slots `stopped` were left by jobs that may go on on the device."""

  steps: int
  jobs: dict[int, Job]
  stopped: frozenset[int]


Action = Prefill | Admit | Decode  # with slots of their own: a job may leave before its action is carried out


class Scheduler:
  """Jobs in line and in slots.

  Args:
    slots: how many jobs are served at a time.
    groups: data groups; slots lie group by group, and a chunk has one row for each.
    chunks: sizes of prefill chunks, smallest first.
    steps: decode steps of a full dispatch.
    queue: jobs that may wait.
  """

  def __init__(self, slots: int, groups: int, chunks: tuple[int, ...], steps: int, queue: int):
    self._groups, self._chunks, self._steps, self._queue = groups, chunks, steps, queue
    self._slots_of_group = slots // groups
    self._free = list(range(slots))
    self._waiting: deque[Job] = deque()
    self._prefilling: deque[Job] = deque()  # in the order of their turns
    self._prefilled: list[Job] = []
    self._decoding: list[Job] = []
    self._stopped: set[int] = set()
    self._allowance = chunks[-1]  # tokens that may be prefilled before the next decode steps

  @property
  def waiting(self) -> tuple[Job, ...]:
    """Jobs without a slot, first come first."""
    return tuple(self._waiting)

  @property
  def in_slots(self) -> tuple[Job, ...]:
    """Jobs that hold a slot."""
    return (*self._prefilling, *self._prefilled, *self._decoding)

  def submit(self, job: Job) -> None:
    """Puts a job in line.

    Raises:
      Overloaded: the line is full.
    """
    # Those for whom a slot is free don't wait, but get it when the next action is asked for.
    if len(self._waiting) - len(self._free) >= self._queue:
      raise Overloaded(f"{self._queue} requests are waiting already; try again later")
    self._waiting.append(job)

  def end(self, job: Job) -> None:
    """Takes a job out, wherever it is: it's done, nobody wants it, or its time is over. Its slot is free at once."""
    if job.slot is None:
      self._waiting.remove(job)
      return
    for jobs in (self._prefilling, self._prefilled, self._decoding):
      if job in jobs:
        jobs.remove(job)
    self._stopped.add(job.slot)
    self._free.append(job.slot)
    job.slot = None

  def overdue(self, now: float) -> list[Job]:
    """Jobs whose deadline has passed."""
    return [job for job in (*self._waiting, *self.in_slots) if job.deadline is not None and job.deadline <= now]

  def next(self) -> Action | None:
    """What to do now; None: nothing, until someone comes."""
    self._seat()
    if self._prefilled:
      return self._admit()
    if self._prefilling and (chunk := self._chunk()):
      return chunk
    if self._decoding:
      return self._decode()
    return None

  def _seat(self) -> None:
    """Gives free slots to those who wait, in the data group with most of them."""
    while self._waiting and self._free:
      free_in_group = [0] * self._groups
      for slot in self._free:
        free_in_group[self._group(slot)] += 1
      slot = min(self._free, key=lambda slot: (-free_in_group[self._group(slot)], slot))
      self._free.remove(slot)
      job = self._waiting.popleft()
      job.slot = slot
      self._prefilling.append(job)

  def _group(self, slot: int) -> int:
    return slot // self._slots_of_group

  def _admit(self) -> Admit:
    jobs, self._prefilled = self._prefilled, []
    self._decoding += jobs
    self._stopped -= {job.slot for job in jobs}
    return Admit(_by_slot(jobs))

  def _chunk(self) -> Prefill | None:
    """The next chunk, of the job whose turn it is in each data group; None where decode steps come first."""
    turns: dict[int, Job] = {}
    for job in self._prefilling:
      turns.setdefault(self._group(job.slot), job)
    longest = max(job.length - job.prefilled for job in turns.values())
    size = next((size for size in self._chunks if size >= longest), self._chunks[-1])
    if self._decoding:
      if size > self._allowance:
        return None
      self._allowance -= size
    parts = []
    for job in turns.values():
      start, job.prefilled = job.prefilled, min(job.length, job.prefilled + size)
      parts.append(Part(job.slot, job, start, job.prefilled))
      self._prefilling.remove(job)
      (self._prefilled if job.prefilled == job.length else self._prefilling).append(job)
    return Prefill(size, tuple(parts))

  def _decode(self) -> Decode:
    self._allowance = self._chunks[-1]
    stopped, self._stopped = frozenset(self._stopped), set()
    # Whoever has his answer often asks again at once, and could have the slot that was left.
    someone_waits = self._waiting or self._prefilling or stopped
    steps = min(_SHORT_DISPATCH, self._steps) if someone_waits else self._steps
    return Decode(steps, _by_slot(self._decoding), stopped)


def _by_slot(jobs: list[Job]) -> dict[int, Job]:
  return {job.slot: job for job in jobs}
