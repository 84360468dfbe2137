"""What is told of a run apart from its output, on stderr; of several processes the first one speaks."""

import sys
import time
from collections.abc import Iterable, Iterator

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
