"""serve.py as a process of its own, for tests."""

import os
import re
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(__file__)
PATIENCE = 240  # seconds for what takes a few


class Process:
  """A server, its addresses and what it says on stderr."""

  def __init__(self, *argv, program="../../MaxText/serve.py", before=(), environment=()):
    """Args:
    argv: key=value of the tiny model's configuration.
    program: from this folder.
    before: its arguments before the configuration.
    environment: variables.
    """
    command = [sys.executable, os.path.join(HERE, program), *before, "kimi-k3-tiny.yml"]
    self.process = subprocess.Popen(
      [*command, "serve_http_port=0", "serve_grpc_port=0", *argv],
      stderr=subprocess.PIPE,
      text=True,
      env={**os.environ, **dict(environment)},
    )
    self.lines: list[str] = []
    self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
    self._reader.start()

  def said(self, pattern):
    """Waits for a line; returns the match."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
      for line in list(self.lines):
        if match := re.search(pattern, line):
          return match
      if self.process.poll() is not None and not self._reader.is_alive():
        break
      time.sleep(0.02)
    raise AssertionError(f"{pattern!r} wasn't said: {self.lines}")

  @property
  def url(self):
    return self.said(r"OpenAI: (http://\S+)/v1")[1]

  def ready(self):
    self.said("^ready$")
    return self

  def ended(self, seconds=PATIENCE):
    """(exit status, all that was said)."""
    status = self.process.wait(seconds)
    self._reader.join(PATIENCE)
    return status, "".join(self.lines)
