"""What is told of a run apart from its output, on stderr; of several processes the first one speaks."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator

from tqdm import tqdm

from MaxText import distributed

_LOG_SECONDS = 15.0


def say(line: str) -> None:
  """Tells something of the run."""
  if distributed.is_first():
    print(line, file=sys.stderr, flush=True)


def progress[T](items: Iterable[T], total: int, what: str) -> Iterator[T]:
  """Yields `items`, showing how many of `total` are done. Work of a moment shows nothing in a log."""
  if not distributed.is_first():
    yield from items
    return
  if sys.stderr.isatty():
    yield from tqdm(items, total=total, desc=what, leave=False, delay=0.5)
    return
  last = time.monotonic()
  for done, item in enumerate(items):
    if time.monotonic() - last > _LOG_SECONDS:
      last = time.monotonic()
      say(f"{what}: {done} of {total}")
    yield item


def progress_bytes[T](items: Iterable[T], size: Callable[[T], int], done: int, total: int, what: str) -> Iterator[T]:
  """As `progress`, in bytes: how many, how many a second, and how long it takes yet.

  Args:
    size: of an item, in bytes; it counts as done once the next one is asked for.
    done: bytes that an earlier run did.
    total: with those.
  """
  if not distributed.is_first():
    yield from items
    return
  if sys.stderr.isatty():
    with tqdm(total=total, initial=done, desc=what, unit="B", unit_scale=True, leave=False, delay=0.5) as bar:
      for item in items:
        yield item
        bar.update(size(item))
    return
  started = last = time.monotonic()
  now = done
  for item in items:
    yield item
    now += size(item)
    if time.monotonic() - last > _LOG_SECONDS:
      last = time.monotonic()
      rate = (now - done) / (last - started)
      left = tqdm.format_interval((total - now) / rate)
      say(f"{what}: {now / 1e9:,.1f} of {total / 1e9:,.1f} GB, {rate / 1e9:.2f} GB/s, {left} left")
