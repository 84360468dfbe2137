"""The core's thread, lock and tickets, over a device that counts: who gets what, also when things go wrong."""

import asyncio
import threading
import time

import numpy as np
import pytest

from MaxText.inference.serving.core import Limits, ServingCore
from MaxText.inference.serving.requests import Finish, InvalidRequest, Overloaded, Request, Unavailable
from MaxText.inference.steps import FAILED, NO_TOKEN, Chosen

VOCABULARY, STOP = 1000, 999
LIMITS = Limits("counter", VOCABULARY, 40, 100, frozenset({STOP}), queue=3)
PATIENCE = 20  # seconds for what takes milliseconds


class Counter:
  """A device that answers a prompt with the numbers after its last token."""

  slots, groups, chunks, steps, cache_bytes = 2, 1, (16, 32), 4, 12345

  def __init__(self):
    self.last = [0] * self.slots
    self.left = [0] * self.slots
    self.may_go_on = threading.Event()
    self.may_go_on.set()
    self.fault = None
    self.generated = []

  def prefill(self, size, parts):
    for part in parts:
      assert 0 < len(part.tokens) <= size
      self.last[part.slot] = part.tokens[-1]

  def _step(self):
    row = [NO_TOKEN] * self.slots
    for slot in range(self.slots):
      if self.left[slot] > 0:
        self.left[slot] -= 1
        self.last[slot] += 1
        row[slot] = self.last[slot]
        if row[slot] in (STOP, 666):
          self.left[slot] = 0
        if row[slot] == 666:
          row[slot] = FAILED
    return row

  def admit(self, starts, reports):
    others, self.left = self.left, [0] * self.slots
    for slot, start in starts.items():
      self.left[slot] = start.remaining
    tokens = self._step()
    for slot in set(range(self.slots)) - set(starts):
      self.left[slot] = others[slot]
    return Chosen(np.array(tokens), None, None, None)

  def generate(self, steps, stopped, reports):
    assert self.may_go_on.wait(PATIENCE)
    if self.fault:
      raise self.fault
    self.generated.append((steps, set(stopped)))
    for slot in stopped:
      self.left[slot] = 0
    return Chosen(np.array([self._step() for _ in range(steps)]), None, None, None)

  def stop(self):
    pass


@pytest.fixture
def device():
  return Counter()


@pytest.fixture
def failures():
  return []


@pytest.fixture
def core(device, failures):
  core = ServingCore(device, LIMITS, failures.append)
  yield core
  device.may_go_on.set()
  core.stop()


def run(work):
  return asyncio.run(asyncio.wait_for(work, PATIENCE))


async def answer(ticket):
  events = [event async for event in ticket]
  return [event.id for event in events[:-1]], events[-1]


async def until(condition):
  end = time.monotonic() + PATIENCE
  while not condition():
    assert time.monotonic() < end
    await asyncio.sleep(0.002)


def test_tokens_then_one_end(core):
  async def work():
    assert await answer(core.submit(Request((1, 2, 3), 5))) == ([4, 5, 6, 7, 8], Finish("length"))
    assert await answer(core.submit(Request((1, 996), 50))) == ([997, 998, 999], Finish("stop"))
    assert await answer(core.submit(Request((50,), 1))) == ([51], Finish("length"))
    assert await answer(core.submit(Request((998,), 1))) == ([999], Finish("stop"))

  run(work())


def test_a_requests_own_stop_ids_end_it_and_free_its_slot_on_the_device(core, device):
  async def work():
    assert await answer(core.submit(Request((1,), 50, stop_ids=frozenset({7})))) == ([2, 3, 4, 5, 6, 7], Finish("stop"))
    assert await answer(core.submit(Request((20,), 20))) == (list(range(21, 41)), Finish("length"))

  run(work())
  assert core.snapshot().slots_in_use == 0


def test_many_at_once_in_few_slots(core):
  async def work():
    async def one(start, count):
      while True:
        try:
          ticket = core.submit(Request((start,), count))
        except Overloaded:
          await asyncio.sleep(0.001)
          continue
        return await answer(ticket)

    asked = [(10 * i, 1 + i % 9) for i in range(50)]
    got = await asyncio.gather(*(one(*a) for a in asked))
    for (start, count), (tokens, finish) in zip(asked, got, strict=True):
      assert tokens == list(range(start + 1, start + 1 + count))
      assert finish == Finish("length")

  run(work())
  seen = core.snapshot()
  assert (seen.waiting, seen.slots_in_use, seen.slots, seen.cache_bytes) == (0, 0, 2, 12345)
  assert seen.finished == {"length": 50}
  assert (seen.tokens_in, seen.tokens_out) == (50, sum(1 + i % 9 for i in range(50)))


def test_a_failed_row_ends_that_request_alone(core):
  async def work():
    bad, good = core.submit(Request((663,), 30)), core.submit(Request((100,), 30))
    tokens, finish = await answer(bad)
    assert tokens == [664, 665] and finish.reason == "error" and "not finite" in finish.message
    assert await answer(good) == (list(range(101, 131)), Finish("length"))
    assert core.healthy

  run(work())


def test_a_cancelled_request_makes_way_for_the_next(core, device):
  async def work():
    device.may_go_on.clear()
    tickets = [core.submit(Request((i,), 90)) for i in (0, 200, 400)]
    await until(lambda: tickets[1].tokens == 1)
    tickets[0].cancel()
    tickets[0].cancel()
    assert (await answer(tickets[0]))[1] == Finish("cancelled")
    device.may_go_on.set()
    assert await answer(tickets[2]) == (list(range(401, 491)), Finish("length"))
    assert await answer(tickets[1]) == (list(range(201, 291)), Finish("length"))
    assert tickets[2].first_token < tickets[1].ended  # it didn't wait for the other
    tickets[1].cancel()

  run(work())
  assert core.snapshot().finished == {"cancelled": 1, "length": 2}


def test_a_cancelled_request_takes_no_further_step_on_the_device(core, device):
  async def work():
    device.may_go_on.clear()
    tickets = [core.submit(Request((i,), 90)) for i in (0, 200)]
    await until(lambda: tickets[1].tokens == 1)
    tickets[0].cancel()
    device.may_go_on.set()
    assert (await answer(tickets[1]))[1] == Finish("length")
    assert (await answer(tickets[0]))[0] == [1]

  run(work())
  assert [stopped for _, stopped in device.generated[:3]] == [set(), {0}, set()]
  assert device.last[0] == 5  # the dispatch that ran when it was cancelled, and none after


def test_one_who_waits_can_be_cancelled_and_times_out(core, device):
  async def work():
    device.may_go_on.clear()
    running = [core.submit(Request((i,), 20)) for i in (0, 100)]
    await until(lambda: running[1].tokens == 1)
    waiting = core.submit(Request((5,), 5)), core.submit(Request((5,), 5, timeout=0.05))
    waiting[0].cancel()
    assert await answer(waiting[0]) == ([], Finish("cancelled"))
    await asyncio.sleep(0.1)
    device.may_go_on.set()
    tokens, finish = await answer(waiting[1])
    assert tokens == [] and finish.reason == "timeout" and "0.05 s" in finish.message
    for ticket in running:
      assert (await answer(ticket))[1] == Finish("length")

  run(work())


def test_a_running_request_times_out(core, device):
  async def work():
    device.may_go_on.clear()
    late, other = core.submit(Request((0,), 90, timeout=0.05)), core.submit(Request((100,), 50))
    await asyncio.sleep(0.1)
    device.may_go_on.set()
    tokens, finish = await answer(late)
    assert finish.reason == "timeout" and len(tokens) < 10
    assert await answer(other) == (list(range(101, 151)), Finish("length"))

  run(work())


def test_the_line_is_bounded(core, device):
  async def work():
    device.may_go_on.clear()
    tickets = [core.submit(Request((i,), 3)) for i in range(5)]
    with pytest.raises(Overloaded):
      core.submit(Request((9,), 3))
    device.may_go_on.set()
    for i, ticket in enumerate(tickets):
      assert (await answer(ticket))[0] == [i + 1, i + 2, i + 3]

  run(work())


BAD = {
  "empty": (Request((), 5), "empty"),
  "too long": (Request((1,) * 41, 5), "41 tokens long; the most is 40"),
  "no tokens": (Request((1,), 0), "max_tokens=0"),
  "negative": (Request((1,), -3), "max_tokens=-3"),
  "too many tokens": (Request((1,), 100), "100 tokens"),
  "huge": (Request((1,), 10**30), "tokens"),
  "id beyond": (Request((1, VOCABULARY), 5), "outside 0..999"),
  "id below": (Request((-1,), 5), "outside 0..999"),
  "stop id beyond": (Request((1,), 5, stop_ids=frozenset({10**9})), "outside 0..999"),
  "temperature": (Request((1,), 5, temperature=-0.1), "temperature=-0.1"),
  "nan": (Request((1,), 5, temperature=float("nan")), "temperature=nan"),
  "infinite": (Request((1,), 5, temperature=float("inf")), "temperature=inf"),
  "top_k": (Request((1,), 5, top_k=-1), "top_k=-1"),
  "top_p": (Request((1,), 5, top_p=1.1), "top_p=1.1"),
  "seed": (Request((1,), 5, seed=2**32), "seed=4294967296"),
  "logprobs": (Request((1,), 5, logprobs=21), "logprobs=21 must be 0 to 20"),
  "timeout": (Request((1,), 5, timeout=0.0), "timeout=0.0"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_can_never_be_served_is_refused_before_any_work(case, core, device):
  request, culprit = BAD[case]

  async def work():
    with pytest.raises(InvalidRequest, match=culprit):
      core.submit(request)
    assert core.snapshot().tokens_in == 0
    assert await answer(core.submit(Request((1,), 2))) == ([2, 3], Finish("length"))

  run(work())


def test_an_engine_that_fails_ends_every_stream_at_once(core, device, failures):
  async def work():
    device.may_go_on.clear()
    tickets = [core.submit(Request((i,), 30)) for i in range(5)]
    await until(lambda: tickets[1].tokens == 1)
    device.fault = RuntimeError("a device is gone")
    started = time.monotonic()
    device.may_go_on.set()
    ends = [(await answer(ticket))[1] for ticket in tickets]
    assert time.monotonic() - started < 1
    assert ends == [Finish("error", "the engine has failed")] * 5
    assert not core.healthy and not core.ready
    with pytest.raises(Unavailable, match="failed"):
      core.submit(Request((1,), 5))

  run(work())
  assert failures == [device.fault] and core.failure is device.fault


def test_draining_lets_running_streams_finish_and_refuses_the_rest(core, device):
  async def work():
    device.may_go_on.clear()
    tickets = [core.submit(Request((i,), 9)) for i in (0, 100, 200)]
    await until(lambda: tickets[1].tokens == 1)
    assert core.ready
    draining = asyncio.create_task(asyncio.to_thread(core.drain, PATIENCE))
    await until(lambda: not core.ready)
    assert core.healthy
    with pytest.raises(Unavailable, match="shutting down"):
      core.submit(Request((1,), 5))
    assert await answer(tickets[2]) == ([], Finish("error", "the server is shutting down"))
    assert not draining.done()
    device.may_go_on.set()
    await draining
    for ticket in tickets[:2]:
      assert (await answer(ticket))[1] == Finish("length")

  run(work())


def test_after_the_grace_period_running_streams_get_an_error(core, device):
  async def work():
    device.may_go_on.clear()
    ticket = core.submit(Request((0,), 90))
    await until(lambda: ticket.tokens == 1)
    await asyncio.to_thread(core.drain, 0.05)
    assert await answer(ticket) == ([1], Finish("error", "the server is shutting down"))

  run(work())


def test_a_reader_that_is_slow_or_gone_holds_nobody_up(core):
  lost = []

  async def leaves():
    lost.append(core.submit(Request((0,), 90)))

  run(leaves())  # its loop closes

  async def work():
    slow = core.submit(Request((100,), 50))
    assert (await answer(core.submit(Request((200,), 60))))[1] == Finish("length")
    await asyncio.sleep(0.05)
    assert await answer(slow) == (list(range(101, 151)), Finish("length"))
    await until(lambda: lost[0].finish is not None)

  run(work())
  assert core.snapshot().slots_in_use == 0


def test_times_of_a_request_are_kept(core):
  async def work():
    ticket = core.submit(Request((1,), 30))
    assert ticket.first_token is ticket.ended is None or ticket.first_token
    await answer(ticket)
    assert ticket.submitted <= ticket.first_token <= ticket.ended <= time.monotonic()

  run(work())
