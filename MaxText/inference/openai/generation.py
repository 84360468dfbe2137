"""The answers of one HTTP request while the core works on them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from MaxText.inference.openai.errors import failed
from MaxText.inference.openai.output import Output, Piece
from MaxText.inference.serving.log import RequestLog
from MaxText.inference.serving.requests import Core, Finish, Rejected, Request, Ticket


class Choice(NamedTuple):
  """One answer that is asked for."""

  request: Request
  output: Output


class Event(NamedTuple):
  """Something new of an answer.

  Attributes:
    index: of the answer.
    piece: what is new.
    finish_reason: "stop" or "length" if it is the answer's last.
  """

  index: int
  piece: Piece
  finish_reason: str | None = None


class Generation:
  """Answers being generated. Leaving `events` early, by whatever way, gives their slots back.

  Attributes:
    reasons: why those answers ended that have ended.
  """

  def __init__(self, core: Core, choices: Sequence[Choice], log: RequestLog):
    """Hands all of them to the core, or none.

    Raises:
      Rejected: the core refuses one.
    """
    self._core = core
    self._choices = choices
    self._log = log
    self.reasons: list[str] = []
    self._tickets: list[Ticket] = []
    try:
      for choice in choices:
        self._tickets.append(core.submit(choice.request))
    except Rejected:
      self.cancel()
      raise

  def cancel(self) -> None:
    """Ends all of them."""
    for ticket in self._tickets:
      ticket.cancel()

  async def events(self) -> AsyncIterator[Event]:
    """What is new, of all answers as it comes; each answer's events in order, and one of them its last.

    Raises:
      ApiError: one ended without an answer; the others are given up.
    """
    queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
    tasks = [asyncio.create_task(self._follow(i, queue)) for i in range(len(self._choices))]
    running = len(tasks)
    try:
      while running:
        event = await queue.get()
        if isinstance(event, Exception):
          raise event
        running -= event.finish_reason is not None
        yield event
    finally:
      self.cancel()
      for task in tasks:
        task.cancel()

  async def _follow(self, index: int, queue: asyncio.Queue) -> None:
    output, ticket = self._choices[index].output, self._tickets[index]
    try:
      async for event in ticket:
        if isinstance(event, Finish):
          queue.put_nowait(self._last(index, event))
          return
        piece = output.push(event)
        self._log.token()
        if output.stopped:
          ticket.cancel()
          self.reasons.append("stop")
          queue.put_nowait(Event(index, piece, "stop"))
          return
        queue.put_nowait(Event(index, piece))
    except Exception as error:
      queue.put_nowait(error)

  def _last(self, index: int, finish: Finish) -> Event:
    self.reasons.append(finish.reason)
    if finish.reason not in ("stop", "length"):
      raise failed(finish.reason, finish.message, serving=self._core.ready)
    return Event(index, self._choices[index].output.flush(), finish.reason)
