"""The core of a server: one thread that owns the device state and carries out what the scheduler decides.

Faces call `submit` and `Ticket.cancel` from their own threads. One lock guards the scheduler and all tickets; it is
never held while the device works.
"""

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from MaxText.inference.sampling import Sampling
from MaxText.inference.serving.device import Device, Part, Start
from MaxText.inference.serving.requests import MAX_LOGPROBS, Finish, InvalidRequest, Request, Token, Unavailable
from MaxText.inference.serving.scheduler import Action, Admit, Decode, Prefill, Scheduler
from MaxText.inference.serving.ticket import Event, Ticket, deliver
from MaxText.inference.steps import FAILED, NO_TOKEN, Chosen


@dataclass(frozen=True)
class Limits:
  """What a server serves.

  Attributes:
    model: name that clients ask for.
    vocab_size: ids of the model.
    max_prompt_length: tokens.
    max_length: tokens of prompt and answer together.
    stop_ids: ids that end every sequence but those that ignore them.
    queue: requests that may wait for a slot.
  """

  model: str
  vocab_size: int
  max_prompt_length: int
  max_length: int
  stop_ids: frozenset[int]
  queue: int


@dataclass(frozen=True)
class Snapshot:
  """Numbers of a moment, for /metrics.

  Attributes:
    waiting: requests without a slot.
    slots, slots_in_use: sequences that are served at a time, and how many are.
    tokens_in, tokens_out: tokens of accepted prompts and of answers since the start.
    finished: requests since the start, by `Finish.reason`.
    cache_bytes: of the decode cache, on all devices together.
  """

  waiting: int
  slots: int
  slots_in_use: int
  tokens_in: int
  tokens_out: int
  finished: dict[str, int]
  cache_bytes: int


class ServingCore:
  """See `requests.Core`, which it is.

  Args:
    device: compiled; from now on this core's own.
    on_failure: called in the engine's thread when it has failed, once every stream has ended.

  Attributes:
    failure: what ended the engine; None while all is well.
    trace: where each action is noted, if it is set to a list: ("prefill", size, slots), ("admit", slots) and
      ("decode", steps, slots).
    on_end: called with each ticket that has ended, if it is set; under the lock.
  """

  def __init__(self, device: Device, limits: Limits, on_failure: Callable[[BaseException], None] | None = None):
    self.model, self.vocab_size = limits.model, limits.vocab_size
    self.max_prompt_length, self.max_length = limits.max_prompt_length, limits.max_length
    self.failure: BaseException | None = None
    self.trace: list[tuple] | None = None
    self.on_end: Callable[[Ticket], None] | None = None
    self._device, self._stop_ids, self._on_failure = device, limits.stop_ids, on_failure
    self._scheduler = Scheduler(device.slots, device.groups, device.chunks, device.steps, limits.queue)
    self._tickets: set[Ticket] = set()  # of all that haven't ended
    self._finished: Counter[str] = Counter()
    self._tokens_in = self._tokens_out = 0
    self._accepting, self._stopping = True, False
    self._changed = threading.Condition()  # the lock; told when there may be something to do, or nothing any more
    self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
    self._thread.start()

  # --- For faces, from any thread ---

  @property
  def healthy(self) -> bool:
    return self.failure is None

  @property
  def ready(self) -> bool:
    return self._accepting and self.healthy

  def submit(self, request: Request) -> Ticket:
    """See `requests.Core.submit`."""
    loop = asyncio.get_running_loop()
    self._check(request)
    with self._changed:
      if not self.healthy:
        raise Unavailable("the engine has failed")
      if not self._accepting:
        raise Unavailable("the server is shutting down")
      ticket = Ticket(request, loop, time.monotonic(), self._cancel)
      self._scheduler.submit(ticket)
      self._tickets.add(ticket)
      self._tokens_in += len(request.prompt)
      self._changed.notify_all()
    return ticket

  def snapshot(self) -> Snapshot:
    """What there is to measure now."""
    with self._changed:
      return Snapshot(
        len(self._scheduler.waiting),
        self._device.slots,
        len(self._scheduler.in_slots),
        self._tokens_in,
        self._tokens_out,
        dict(self._finished),
        self._device.cache_bytes,
      )

  def drain(self, grace: float) -> None:
    """Accepts nothing more and ends those who wait for a slot; returns when the others have ended, at the latest after
    `grace` seconds, when they get an error. Blocks: an event loop calls it in a thread.
    """
    leaving = Finish("error", "the server is shutting down")
    with self._changed:
      self._accepting = False
      self._end_all(self._scheduler.waiting, leaving)
      self._changed.wait_for(lambda: not self._tickets, grace)
      self._end_all(self._tickets, leaving)

  def stop(self) -> None:
    """Ends all that is left and the engine's thread."""
    self.drain(0)
    with self._changed:
      self._stopping = True
      self._changed.notify_all()
    self._thread.join()

  def _cancel(self, ticket: Ticket) -> None:
    with self._changed:
      self._end_all([ticket], Finish("cancelled"))

  def _check(self, request: Request) -> None:
    """Raises `InvalidRequest` for what can never be served."""
    prompt, most = request.prompt, self.vocab_size
    if not prompt:
      raise InvalidRequest("the prompt is empty")
    if len(prompt) > self.max_prompt_length:
      raise InvalidRequest(f"the prompt is {len(prompt)} tokens long; the most is {self.max_prompt_length}")
    if request.max_tokens < 1:
      raise InvalidRequest(f"max_tokens={request.max_tokens} must be at least 1")
    if len(prompt) + request.max_tokens > self.max_length:
      raise InvalidRequest(
        f"a prompt of {len(prompt)} tokens and max_tokens={request.max_tokens} are more than the {self.max_length} "
        "tokens that a sequence can have"
      )
    if not all(0 <= token < most for token in (*prompt, *request.stop_ids)):
      raise InvalidRequest(f"the prompt or stop ids hold ids outside 0..{most - 1}")
    for what, value, fine, possible in (
      ("temperature", request.temperature, 0 <= request.temperature < math.inf, "0 or more"),
      ("cut_temperature", request.cut_temperature, 0 <= request.cut_temperature < math.inf, "0 or more"),
      ("top_k", request.top_k, 0 <= request.top_k < 2**31, "0 (all) to 2^31 − 1"),
      ("top_p", request.top_p, 0 <= request.top_p <= 1, "0 to 1"),
      ("seed", request.seed, 0 <= request.seed < 2**32, "0 to 2^32 − 1"),
      ("logprobs", request.logprobs, 0 <= (request.logprobs or 0) <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
      ("timeout", request.timeout, request.timeout is None or 0 < request.timeout < math.inf, "positive"),
    ):
      if not fine:
        raise InvalidRequest(f"{what}={value} must be {possible}")

  # --- Under the lock ---

  def _end(self, ticket: Ticket, finish: Finish) -> None:
    ticket.finish, ticket.ended = finish, time.monotonic()
    self._scheduler.end(ticket)
    self._tickets.remove(ticket)
    self._finished[finish.reason] += 1
    if self.on_end:
      self.on_end(ticket)
    self._changed.notify_all()

  def _end_all(self, tickets: Iterable[Ticket], finish: Finish) -> None:
    """Ends those that haven't ended, and tells their readers."""
    events: dict[Ticket, list[Event]] = {}
    for ticket in [ticket for ticket in tickets if ticket.finish is None]:
      self._end(ticket, finish)
      events[ticket] = [finish]
    deliver(events)  # to readers that have gone there is nothing more to do

  # --- The engine's thread ---

  def _run(self) -> None:
    try:
      while (action := self._next()) is not None:
        self._carry_out(action)
      self._device.stop()
    except BaseException as error:
      with self._changed:
        self.failure = error
        self._end_all(self._tickets, Finish("error", "the engine has failed"))
      if self._on_failure:
        self._on_failure(error)

  def _next(self) -> Action | None:
    """Waits until there is something to do; None: stop."""
    with self._changed:
      while not self._stopping:
        for ticket in self._scheduler.overdue(time.monotonic()):
          self._end_all([ticket], Finish("timeout", f"not done after {ticket.request.timeout:g} s"))
        if action := self._scheduler.next():
          return action
        self._changed.wait()
      return None

  def _carry_out(self, action: Action) -> None:
    match action:
      case Prefill(size, parts):
        self._note("prefill", size, tuple(part.slot for part in parts))
        self._device.prefill(
          size, [Part(part.slot, not part.start, part.job.request.prompt[part.start : part.end]) for part in parts]
        )
      case Admit(tickets):
        self._note("admit", tuple(tickets))
        starts = {slot: _start(ticket.request) for slot, ticket in tickets.items()}
        chosen = self._device.admit(starts, _report(tickets))
        self._take(tickets, Chosen(*(array if array is None else array[None] for array in chosen)))
      case Decode(steps, tickets, stopped):
        self._note("decode", steps, tuple(tickets))
        self._take(tickets, self._device.generate(steps, stopped, _report(tickets)))

  def _note(self, *what: Any) -> None:
    if self.trace is not None:
      self.trace.append(what)

  def _take(self, tickets: dict[int, Ticket], chosen: Chosen) -> None:
    """Hands out the tokens [steps, B] of some slots; whoever has ended meanwhile gets none."""
    with self._changed:
      events = {ticket: self._events(slot, ticket, chosen) for slot, ticket in tickets.items() if ticket.finish is None}
      self._end_all(deliver(events), Finish("cancelled"))

  def _events(self, slot: int, ticket: Ticket, chosen: Chosen) -> list[Event]:
    """A slot's new tokens, and its end if it has come."""
    events: list[Event] = []
    request = ticket.request
    for step, token in enumerate(chosen.tokens[:, slot].tolist()):
      finish = None
      if token == NO_TOKEN:
        break
      if token == FAILED:
        finish = Finish("error", "the model's logits for this request are not finite")
      else:
        events.append(_token(token, chosen, step, slot, request.logprobs))
        ticket.tokens += 1
        self._tokens_out += 1
        ticket.first_token = ticket.first_token or time.monotonic()
        if token in request.stop_ids or (token in self._stop_ids and not request.ignore_eos):
          finish = Finish("stop")
        elif ticket.tokens == request.max_tokens:
          finish = Finish("length")
      if finish:
        self._end(ticket, finish)
        events.append(finish)
        break
    return events


def _start(request: Request) -> Start:
  sampling = Sampling(request.temperature, request.top_k, request.top_p, request.seed, request.cut_temperature)
  return Start(request.max_tokens, sampling, request.logprobs is not None, request.ignore_eos)


def _report(tickets: dict[int, Ticket]) -> bool:
  return any(ticket.request.logprobs is not None for ticket in tickets.values())


def _token(token: int, chosen: Chosen, step: int, slot: int, logprobs: int | None) -> Token:
  if logprobs is None:
    return Token(token)
  ids, values = (array[step, slot, :logprobs].tolist() for array in (chosen.top_ids, chosen.top_logprobs))
  return Token(token, float(chosen.logprobs[step, slot]), tuple(zip(ids, values, strict=True)))
