"""One line of JSON a request, on stderr: counts, times and how it ended; a prompt where asked for, never an answer."""

import json
import sys
import time
import uuid


class RequestLog:
  """What is noted of one request while it runs.

  Attributes:
    name: the request's id, in the log and to its sender.
  """

  def __init__(self, face: str, method: str):
    """Args: the face that took the request ("http", "grpc") and what was asked of it."""
    self.name = uuid.uuid4().hex
    self._face, self._method = face, method
    self._started = time.monotonic()
    self._first: float | None = None
    self._prompt_tokens = self._tokens = 0
    self._shown: dict[str, object] = {}

  def prompt(self, tokens: int) -> None:
    self._prompt_tokens += tokens

  def show_prompt(self, prompt: object) -> None:
    """Has the line hold the prompt itself: for an owner who asks for that with `serve_log_prompts`."""
    self._shown = {"prompt": prompt}

  def token(self) -> None:
    """Notes a generated token as it is delivered."""
    self._tokens += 1
    if self._first is None:
      self._first = time.monotonic() - self._started

  def end(self, status: int | str, reason: str = "") -> None:
    """Writes the line.

    Args:
      status: the protocol's: 200, "OK", 429, "RESOURCE_EXHAUSTED" …
      reason: finish reason, or what was wrong with the request.
    """
    line = {
      "time": round(time.time(), 3),
      "request": self.name,
      "face": self._face,
      "method": self._method,
      "status": status,
      "reason": reason,
      "prompt_tokens": self._prompt_tokens,
      "tokens": self._tokens,
      "first_token_s": None if self._first is None else round(self._first, 4),
      "seconds": round(time.monotonic() - self._started, 4),
      **self._shown,
    }
    print(json.dumps(line), file=sys.stderr, flush=True)
