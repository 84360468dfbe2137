"""Shows that a long piece of work goes on: one line that counts seconds on a terminal, a line now and then in a log."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

_TERMINAL_SECONDS, _LOG_SECONDS = 1.0, 15.0


@contextlib.contextmanager
def ticking(what: str) -> Iterator[None]:
  """Tells on stderr how long the block has been running. Work of a moment shows nothing in a log."""
  terminal = sys.stderr.isatty()
  started, ended = time.monotonic(), threading.Event()

  def tell() -> None:
    while not ended.wait(_TERMINAL_SECONDS if terminal else _LOG_SECONDS):
      seconds = time.monotonic() - started
      line, end = (f"\r{what}: {seconds:.0f} s ", "") if terminal else (f"{what}: {seconds:.0f} s so far", "\n")
      print(line, end=end, file=sys.stderr, flush=True)

  thread = threading.Thread(target=tell, daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()
    if terminal:
      print(f"\r{' ' * (len(what) + 12)}\r", end="", file=sys.stderr, flush=True)
