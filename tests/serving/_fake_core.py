"""A core without a model, for tests of the faces: it answers every request as a script says."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from MaxText.inference.serving.requests import Finish, InvalidRequest, Overloaded, Request, Token, Unavailable

Script = Callable[[Request], Iterable[Token | Finish | float]]


class FakeTicket:
  """A request on its way; a number in its script is so many seconds of silence."""

  def __init__(self, core: "FakeCore", request: Request):
    self.core, self.request = core, request
    self.cancelled = False
    self._ended = asyncio.Event()
    self._loop = asyncio.get_running_loop()

  async def __aiter__(self) -> AsyncIterator[Token | Finish]:
    last = Finish("length")
    for count, event in enumerate(self.core.script(self.request)):
      if isinstance(event, int | float):
        try:
          await asyncio.wait_for(self._ended.wait(), event)
        except TimeoutError:
          continue
      if self.cancelled or self.core.broken:
        last = Finish("cancelled") if self.cancelled else Finish("error", self.core.broken)
        break
      if isinstance(event, Finish):
        last = event
        break
      if count >= self.request.max_tokens:
        break
      yield event
      await asyncio.sleep(0)
    self.core.running.discard(self)
    yield last

  def cancel(self) -> None:
    if self in self.core.running:
      self.cancelled = True
      self.core.cancelled.append(self.request)
      self.core.running.discard(self)
    self._loop.call_soon_threadsafe(self._ended.set)

  def wake(self) -> None:
    self._loop.call_soon_threadsafe(self._ended.set)


class FakeCore:
  """Implements `requests.Core`. `requests` are all that came, `cancelled` those whose senders gave up."""

  model = "fake"

  def __init__(self, vocab_size: int, max_prompt_length: int = 64, max_length: int = 128, queue: int = 100):
    self.vocab_size, self.max_prompt_length, self.max_length = vocab_size, max_prompt_length, max_length
    self.queue = queue
    self.script: Script = lambda request: [Finish("stop")]
    self.healthy, self.ready = True, True
    self.broken = ""
    self.requests: list[Request] = []
    self.cancelled: list[Request] = []
    self.running: set[FakeTicket] = set()

  def submit(self, request: Request) -> FakeTicket:
    if not self.ready:
      raise Unavailable("the server is shutting down")
    if not request.prompt or not 1 <= request.max_tokens <= self.max_length - len(request.prompt):
      raise InvalidRequest("lengths that a face should have refused")
    if len(self.running) >= self.queue:
      raise Overloaded("the queue is full")
    self.requests.append(request)
    ticket = FakeTicket(self, request)
    self.running.add(ticket)
    return ticket

  def fail(self, message: str) -> None:
    """The engine has failed: every stream ends with an error."""
    self.healthy = self.ready = False
    self.broken = message
    for ticket in list(self.running):
      ticket.wake()
