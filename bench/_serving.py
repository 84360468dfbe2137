"""A server of the tiny model as a process, and a client of it that costs little: for serve.py and soak.py."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from MaxText.errors import UserError

CONFIG = "kimi-k3-tiny.yml"
MODEL = "kimi-k3-tiny"
SLOTS = 8
_SERVE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "MaxText", "serve.py")
_START_SECONDS = 600  # compiling on a machine that others use


@dataclass(frozen=True)
class Server:
  """Attributes: where it listens for HTTP, and its process's id."""

  host: str
  port: int
  pid: int


@contextlib.contextmanager
def running_server(overrides: list[str]) -> Iterator[Server]:
  """Starts `serve.py` with `SLOTS` slots, waits until it's ready, and ends it with SIGTERM.

  Raises:
    UserError: it doesn't get ready, or doesn't end well; with the last thing it said.
  """
  with tempfile.TemporaryFile("w+") as log:
    faces = ("serve_http_port=0", "serve_grpc_port=-1")
    command = [sys.executable, _SERVE, CONFIG, f"per_device_batch_size={SLOTS}", *faces, *overrides]
    process = subprocess.Popen(command, stderr=log)

    def said() -> str:
      log.seek(0)
      return log.read()

    try:
      end = time.monotonic() + _START_SECONDS
      while not re.search(r"^ready$", text := said(), re.MULTILINE):
        if process.poll() is not None or time.monotonic() > end:
          raise UserError(f"serve.py didn't get ready: {text[-500:]}")
        time.sleep(0.2)
      host, port = re.search(r"OpenAI: http://(\S+):(\d+)/v1", text).groups()
      yield Server(host, int(port), process.pid)
      process.terminate()
      if process.wait(60):
        raise UserError(f"serve.py ended with status {process.returncode}: {said()[-500:]}")
    finally:
      process.kill()
      process.wait()


@dataclass
class Answer:
  """A stream, as it came.

  Attributes:
    status: of HTTP.
    started: when it was asked for; this and other times are `time.perf_counter()`.
    times: when each event came, [DONE] left out.
    events: the events' JSON; of a refusal its body alone.
    done: [DONE] has come.
  """

  status: int
  started: float
  times: list[float]
  events: list[bytes]
  done: bool = False

  def texts(self) -> list[str]:
    return [choice["text"] for event in self.events for choice in json.loads(event)["choices"]]

  @property
  def text(self) -> str:
    return "".join(self.texts())

  @property
  def tokens(self) -> int:
    """As the server counts them: the last event of a stream has the usage."""
    return json.loads(self.events[-1])["usage"]["completion_tokens"]


async def ask(host: str, port: int, fields: dict[str, Any], most_events: int | None = None) -> Answer:
  """Asks for a streamed completion on a connection of its own.

  HTTP/1.0 has no chunks, so that what comes is the events, line by line; nothing is parsed while streams run.

  Args:
    fields: of the body, besides model and stream.
    most_events: events after which the connection is cut; None: it's read to its end.
  """
  body = json.dumps({"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, **fields}).encode()
  head = f"POST /v1/completions HTTP/1.0\r\nhost: {host}\r\ncontent-type: application/json\r\n"
  started = time.perf_counter()
  reader, writer = await asyncio.open_connection(host, port)
  try:
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    answer = Answer(int((await reader.readline()).split()[1]), started, [], [])
    while (await reader.readline()).strip():
      pass  # headers
    if answer.status != 200:
      answer.events.append(await reader.read())
      return answer
    while (line := await reader.readline()) and len(answer.events) != most_events:
      if line == b"data: [DONE]\n":
        answer.done = True
      elif line.startswith(b"data: "):
        answer.times.append(time.perf_counter())
        answer.events.append(line[len(b"data: ") :])
    return answer
  finally:
    writer.close()
