"""`python MaxText/serve.py CONFIG.yml [key=value …]`: serves a model by OpenAI's HTTP and by JetStream's gRPC.

One process, one engine, one event loop. Both faces listen from the start: while weights load and programs compile the
server is healthy and not ready. SIGTERM or SIGINT: nothing more is accepted, running streams may finish within
`serve_grace_seconds`, the rest get an error, and the exit status is 0; a second signal ends at once. When the engine
fails, every stream ends with an error and the exit status is 1. Of several processes the first one has the faces.
"""

import os
import sys

# Run as a file, Python puts this folder first on the path; its parent belongs there.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
  sys.path[0] = os.path.dirname(sys.path[0])

import asyncio
import contextlib
import resource
import signal
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from MaxText import distributed
from MaxText.configs.k3_config import initialize
from MaxText.decode import load_tokenizer
from MaxText.errors import UserError, exit_on_user_error
from MaxText.inference.serving.core import ServingCore, Snapshot
from MaxText.inference.serving.metrics import Metrics
from MaxText.inference.serving.requests import Request, Ticket, Unavailable
from MaxText.inference.serving.start import model_name, start_core
from MaxText.inference.tokenizer import K3Tokenizer
from MaxText.progress import say

KEY_VARIABLE = "K3_API_KEY"
_CLOSING_SECONDS = 5  # that the last words of streams may take on their way out
_HANGING_SECONDS = 15  # after which a process that should have ended is ended
_SWITCH_SECONDS = 5e-4  # Python's 5 ms are a decode step: so long the engine's thread would wait for a busy face


class EarlyCore:
  """The core that faces see: until the engine is ready it accepts nothing. See `requests.Core`."""

  def __init__(self, config: Any):
    self.vocab_size = config.vocab_size
    self.max_prompt_length = config.max_prefill_predict_length
    self.max_length = config.max_target_length
    self.model = model_name(config)
    self.running: ServingCore | None = None

  def submit(self, request: Request) -> Ticket:
    if self.running is None:
      raise Unavailable("the server is starting; try again later")
    return self.running.submit(request)

  @property
  def healthy(self) -> bool:
    return self.running is None or self.running.healthy

  @property
  def ready(self) -> bool:
    return self.running is not None and self.running.ready

  def snapshot(self) -> Snapshot | None:
    return None if self.running is None else self.running.snapshot()


def read_key(path: str, variables: Mapping[str, str]) -> str | None:
  """The key that clients need, from a file or the environment; None: nobody needs one.

  Raises:
    UserError: both are given, the file can't be read, or the key is empty or holds other than printable ASCII.
  """
  if path and KEY_VARIABLE in variables:
    raise UserError(f"serve_api_key_file and {KEY_VARIABLE} in the environment are both set; leave one of them out")
  if not path and KEY_VARIABLE not in variables:
    return None
  where, key = KEY_VARIABLE, variables.get(KEY_VARIABLE, "")
  if path:
    where = f"serve_api_key_file={path}"
    try:
      with open(path, encoding="utf-8") as file:
        key = file.read()
    except (OSError, UnicodeDecodeError) as error:
      raise UserError(f"{where}: {error}") from error
  key = key.strip()
  if not key or not (key.isascii() and key.isprintable()):
    raise UserError(f"{where} must hold a key of printable ASCII characters")
  return key


@contextlib.asynccontextmanager
async def http_face(
  config: Any, core: EarlyCore, tokenizer: K3Tokenizer, key: str | None, metrics: Metrics
) -> AsyncIterator[None]:
  """The OpenAI face, listening inside."""
  if config.serve_http_port < 0:
    yield
    return
  from MaxText.inference.openai.app import create_app
  from MaxText.inference.openai.prompts import Face
  from MaxText.inference.openai.server import Server

  face = Face(core, tokenizer, config.enable_thinking, config.serve_log_prompts, config.serve_request_seconds or None)
  server = Server(create_app(face, metrics.registry, key), config.serve_host, config.serve_http_port, _CLOSING_SECONDS)
  say(f"OpenAI: http://{config.serve_host}:{server.port}/v1, model {core.model!r}")
  running = asyncio.create_task(server.run())
  try:
    yield
  finally:
    server.stop()
    await running


@contextlib.asynccontextmanager
async def grpc_face(config: Any, core: EarlyCore, tokenizer: K3Tokenizer, key: str | None) -> AsyncIterator[None]:
  """The JetStream face, listening inside."""
  if config.serve_grpc_port < 0:
    yield
    return
  from MaxText.inference.jetstream import service

  server = await service.start(core, tokenizer, service.Settings.from_config(config, key))
  say(f"JetStream: grpc://{config.serve_host}:{server.port}")
  try:
    yield
  finally:
    await server.stop(_CLOSING_SECONDS)


class Ending:
  """Waits for what ends the server: a signal, or the engine's failure."""

  def __init__(self):
    self._loop = asyncio.get_running_loop()
    self._event = asyncio.Event()
    self.asked = False  # by a signal
    for number in (signal.SIGTERM, signal.SIGINT):
      self._loop.add_signal_handler(number, self._signalled)

  async def wait(self) -> None:
    await self._event.wait()

  def failed(self, error: BaseException) -> None:
    """From the engine's thread."""
    self._loop.call_soon_threadsafe(self._event.set)

  def _signalled(self) -> None:
    if self.asked:
      end_now(1, "a second signal: ending at once")
    self.asked = True
    self._event.set()


def end_now(status: int, text: str) -> None:
  """Ends this process and its others, whatever their threads do: compiling can't be interrupted."""
  if distributed.several():
    distributed.end(status, text)
  say(text)
  os._exit(status)


def end_if_hanging(status: int) -> None:
  """Ends the process a while later, should it still be there: whatever hangs, nobody has to kill it."""

  def end() -> None:
    say(f"the server didn't end within {_HANGING_SECONDS} s; ending it")
    os._exit(status)

  timer = threading.Timer(_HANGING_SECONDS, end)
  timer.daemon = True
  timer.start()


async def serve(config: Any, tokenizer: K3Tokenizer, key: str | None) -> None:
  """Serves until a signal comes or the engine fails.

  Raises:
    UserError: as `start_core`; an address can't be listened at.
    RuntimeError: the engine has failed; with its cause.
  """
  ending = Ending()
  core = EarlyCore(config)
  metrics = Metrics(core)
  async with http_face(config, core, tokenizer, key, metrics), grpc_face(config, core, tokenizer, key):
    starting = asyncio.create_task(asyncio.to_thread(start_core, config, tokenizer, ending.failed))
    stopped = asyncio.create_task(ending.wait())
    await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
      end_now(0, "stopped while starting")
    running = starting.result()
    running.on_end = metrics.observe
    core.running = running
    say("ready")
    await stopped
    if ending.asked:
      say(f"stopping; running streams may take {config.serve_grace_seconds:g} s")
      await asyncio.to_thread(running.drain, config.serve_grace_seconds)
    end_if_hanging(0 if running.healthy else 1)
  if not running.healthy:
    raise RuntimeError("the engine has failed") from running.failure
  await asyncio.to_thread(running.stop)
  say("stopped")


def _raise_file_limit() -> None:
  """As many open connections as the system lets this process have."""
  _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
  with contextlib.suppress(ValueError, OSError):
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main(argv: Sequence[str]) -> None:
  config = initialize(argv)
  key = read_key(config.serve_api_key_file, os.environ)
  if config.serve_http_port < 0 and config.serve_grpc_port < 0:
    raise UserError("serve_http_port=-1 and serve_grpc_port=-1 leave nobody to serve")
  tokenizer = load_tokenizer(config)
  if not distributed.is_first():
    for number in (signal.SIGTERM, signal.SIGINT):  # which come to all: the first process says when it's over
      signal.signal(number, signal.SIG_IGN)
    start_core(config, tokenizer)
    return
  _raise_file_limit()
  sys.setswitchinterval(_SWITCH_SECONDS)
  asyncio.run(serve(config, tokenizer, key))


if __name__ == "__main__":
  exit_on_user_error(main, sys.argv)
