"""The pieces of a conversion: what is read, converted and made durable at a time, and noted in the journal as done."""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

from conversion.block_fp8 import Exactness
from conversion.journal import Record
from MaxText.errors import UserError

# What a conversion does to a tensor; the last three can lose something.
PACKED, COPIED, DECODED, WIDENED = "kept packed", "copied", "decoded", "widened"
POWER_OF_TWO, NARROWED = "MXFP4 to block-FP8", "narrowed to bfloat16"
ROUNDED = "floats to block-FP8"  # scales by the largest magnitude: never exact, reported and not refused


@dataclass(frozen=True)
class Piece:
  """One unit of work.

  Attributes:
    id: its name in the journal.
    files: shards of the source that it reads.
    start: (shard, byte) of the first thing it reads.
    nbytes: that it writes.
    memory: bytes that it takes while it is at work, roughly.
    unit: what must stay on one machine; pieces of one unit follow each other.
    work: for the output that made the piece.
  """

  id: str
  files: tuple[str, ...]
  start: tuple[str, int]
  nbytes: int
  memory: int
  unit: str
  work: Any

  @property
  def order(self) -> tuple[Any, ...]:
    """Pieces that need many shards come first, the others in the source's own order: then shards are done early."""
    return (len(self.files) < 3, self.start, self.id)


class Output(Protocol):
  """A layout that a conversion writes.

  Attributes:
    pieces: all there are, in the order in which they are done.
    arrays: `Manifest.arrays`.
  """

  pieces: list[Piece]
  arrays: dict[str, Any]

  def prepare(self, pieces: Sequence[Piece]) -> None:
    """Makes what the pieces are written into, where it isn't there yet."""

  def write(self, piece: Piece) -> list[Record]:
    """Converts one piece; its data is on disk when this returns. Called from several threads."""

  def finish(self) -> None:
    """Checks that all files are whole, and puts them where readers look."""


class Limit:
  """Counts elements that changed where none had to, and refuses to go beyond a number of them."""

  def __init__(self, most: int):
    self._most, self._count, self._lock = most, 0, threading.Lock()

  def add(self, name: str, method: str, exactness: Exactness) -> None:
    """Raises `UserError` when there are too many by now."""
    if method not in (POWER_OF_TWO, NARROWED) or not exactness.inexact_elements:
      return
    with self._lock:
      self._count += exactness.inexact_elements
      if self._count <= self._most:
        return
      before = self._count - exactness.inexact_elements
      self._count = before  # it isn't written
    blocks = f" in {exactness.inexact_blocks:,} of {exactness.blocks:,} blocks" if exactness.blocks else ""
    others = f", after {before:,} in others" if before else ""
    raise UserError(
      f"{name}: {method} would change {exactness.inexact_elements:,} of {exactness.elements:,} elements{blocks} (by up "
      f"to {exactness.largest_absolute_error:.3g}, {exactness.largest_relative_error:.3g} of the value){others}; "
      f"max_inexact={self._most} refuses that, max_inexact={before + exactness.inexact_elements} or more goes on here"
    )

  def count(self, records: Sequence[Record]) -> None:
    """Counts what an earlier run has written, refusing nothing."""
    for record in records:
      if record["method"] in (POWER_OF_TWO, NARROWED):
        self._count += record["exactness"].get("inexact_elements", 0)

  def check(self) -> None:
    """Raises `UserError` where earlier runs, or other workers, have changed more than is allowed now."""
    if self._count > self._most:
      raise UserError(
        f"{self._count:,} elements were changed so far, under a larger max_inexact; max_inexact={self._most} doesn't "
        f"allow that: give max_inexact={self._count} or more"
      )


def record(
  name: str,
  shape: Sequence[int],
  dtype: str,
  nbytes: int,
  sha256: str,
  sources: Sequence[str],
  files: Sequence[str],
  method: str,
  exactness: Exactness | None,
) -> Record:
  """A line of tensors.jsonl.

  Args:
    method: what was done to the tensor; "scales" for those of another one.
    exactness: of which zeros are left out; None for scales.
  """
  return {
    "name": name,
    "shape": list(shape),
    "dtype": dtype,
    "nbytes": nbytes,
    "sha256": sha256,
    "source": list(sources),
    "files": sorted(set(files)),
    "method": method,
    "exactness": None if exactness is None else {k: v for k, v in dataclasses.asdict(exactness).items() if v},
  }


def share(pieces: Sequence[Piece], index: int, count: int) -> list[Piece]:
  """One worker's pieces: a run of whole units, of about the same bytes as every other worker's."""
  total, seen = sum(piece.nbytes for piece in pieces), 0
  worker_of: dict[str, int] = {}
  units: dict[str, int] = {}
  for piece in pieces:
    units[piece.unit] = units.get(piece.unit, 0) + piece.nbytes
  for unit, nbytes in units.items():
    worker_of[unit] = min((2 * seen + nbytes) * count // (2 * total), count - 1)
    seen += nbytes
  return [piece for piece in pieces if worker_of[piece.unit] == index]


def run(
  pieces: Sequence[Piece], write: Callable[[Piece], list[Record]], workers: int, memory: int
) -> Iterator[tuple[Piece, list[Record]]]:
  """Writes pieces in several threads, yielding each as it is done.

  Args:
    memory: bytes that pieces at work may take together; a larger piece works alone.

  Raises:
    Exception: the first that a piece raised; those at work by then are finished and yielded before.
  """
  waiting: dict[Future, Piece] = {}
  failed: BaseException | None = None

  def collect() -> Iterator[tuple[Piece, list[Record]]]:
    nonlocal failed
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    for future in done:
      piece = waiting.pop(future)
      error = future.exception()
      if error is None:
        yield piece, future.result()
      else:
        failed = failed or error

  pool = ThreadPoolExecutor(workers, thread_name_prefix="convert")
  try:
    for piece in pieces:
      while waiting and not failed:
        if len(waiting) < workers and piece.memory + sum(p.memory for p in waiting.values()) <= memory:
          break
        yield from collect()
      if failed:
        break
      waiting[pool.submit(write, piece)] = piece
    while waiting:
      yield from collect()
  finally:
    pool.shutdown(wait=False, cancel_futures=True)
  if failed:
    raise failed
