"""Progress of long work: a bar on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Iterable, Iterator

from tqdm import tqdm

_LOG_SECONDS = 15.0


def progress[T](items: Iterable[T], total: int, what: str) -> Iterator[T]:
  """Yields `items`, showing how many of `total` are done on stderr. Work of a moment shows nothing in a log."""
  if sys.stderr.isatty():
    yield from tqdm(items, total=total, desc=what, leave=False, delay=0.5)
    return
  last = time.monotonic()
  for done, item in enumerate(items):
    if time.monotonic() - last > _LOG_SECONDS:
      last = time.monotonic()
      print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)
    yield item
