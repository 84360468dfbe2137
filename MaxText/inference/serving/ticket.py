"""A request on its way through the core, and what its sender gets of it."""

import asyncio
from collections.abc import AsyncIterator, Callable

from MaxText.inference.serving.requests import Finish, Request, Token
from MaxText.inference.serving.scheduler import Job

Event = Token | Finish


class Ticket(Job):
  """A request that was accepted; see `requests.Ticket`. All but iteration belongs to the core, under its lock.

  Attributes:
    request: what was asked for.
    loop: the event loop that it delivers to.
    tokens: how many were delivered.
    finish: its end; None while it goes on.
    submitted, first_token, ended: `time.monotonic()` of these; None until then.
  """

  def __init__(self, request: Request, loop: asyncio.AbstractEventLoop, now: float, cancel: Callable[["Ticket"], None]):
    super().__init__(len(request.prompt), None if request.timeout is None else now + request.timeout)
    self.request, self.loop = request, loop
    self.tokens = 0
    self.finish: Finish | None = None
    self.submitted = now
    self.first_token: float | None = None
    self.ended: float | None = None
    self._cancel = cancel
    self._events: asyncio.Queue[list[Event]] = asyncio.Queue()

  def cancel(self) -> None:
    """Ends the request: its slot is free at the next step. From any thread; a second time it does nothing."""
    self._cancel(self)

  async def __aiter__(self) -> AsyncIterator[Event]:
    """Tokens as they come, then one `Finish`. For one reader, in the loop where it was submitted."""
    while True:
      for event in await self._events.get():
        yield event
        if isinstance(event, Finish):
          return

  def put(self, events: list[Event]) -> None:
    """Hands over what has come; called in the ticket's loop."""
    self._events.put_nowait(events)


def deliver(events: dict[Ticket, list[Event]]) -> list[Ticket]:
  """Hands events to their tickets, in one call for each event loop; from any thread.

  Returns:
    Tickets whose loop has closed: nobody reads them any more.
  """
  by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, list[Event]]]] = {}
  for ticket, some in events.items():
    by_loop.setdefault(ticket.loop, []).append((ticket, some))

  def put(pairs: list[tuple[Ticket, list[Event]]]) -> None:
    for ticket, some in pairs:
      ticket.put(some)

  lost: list[Ticket] = []
  for loop, pairs in by_loop.items():
    try:
      loop.call_soon_threadsafe(put, pairs)
    except RuntimeError:
      lost += [ticket for ticket, _ in pairs]
  return lost
