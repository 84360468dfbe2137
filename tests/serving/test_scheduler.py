"""Who is served when, without a device: line, slots, chunks, dispatches."""

import pytest

from MaxText.inference.serving.requests import Overloaded
from MaxText.inference.serving.scheduler import Admit, Decode, Job, Prefill, Scheduler

CHUNKS = (16, 32, 64)


def scheduler(slots=2, groups=1, steps=32, queue=4):
  return Scheduler(slots, groups, CHUNKS, steps, queue)


def submitted(room, *lengths):
  jobs = [Job(length) for length in lengths]
  for job in jobs:
    room.submit(job)
  return jobs


def actions(room, count):
  return [room.next() for _ in range(count)]


def seats(*jobs):
  return {job.slot: job for job in jobs}


def parts(action):
  return [(part.job, part.start, part.end) for part in action.parts]


def test_nobody_there_nothing_to_do():
  assert scheduler().next() is None


def test_a_prompt_is_prefilled_in_full_chunks_and_the_smallest_that_holds_the_rest():
  room = scheduler()
  (job,) = submitted(room, 2 * 64 + 20)
  chunks = actions(room, 3)
  assert [(c.size, *parts(c)) for c in chunks] == [
    (64, (job, 0, 64)), (64, (job, 64, 128)), (32, (job, 128, 148))
  ]  # fmt: skip
  assert room.next() == Admit(seats(job))
  assert room.next() == Decode(32, seats(job), frozenset())


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 64, 65, 1000])
def test_chunks_cover_a_prompt_exactly(length):
  room = scheduler()
  (job,) = submitted(room, length)
  covered = 0
  while isinstance(action := room.next(), Prefill):
    ((who, start, end),) = parts(action)
    assert who is job and start == covered and 0 < end - start <= action.size and action.size in CHUNKS
    covered = end
  assert covered == length
  assert action == Admit(seats(job))


def test_first_come_first_served_and_the_slot_of_one_who_leaves_goes_to_the_next():
  room = scheduler(slots=2)
  a, b, c, d = submitted(room, 10, 10, 10, 10)
  room.next()
  assert (a.slot, b.slot, c.slot, d.slot) == (0, 1, None, None)
  assert room.waiting == (c, d)
  room.end(b)
  room.next()
  assert (c.slot, d.slot) == (1, None)
  room.end(a)
  room.next()
  assert d.slot == 0


def test_the_line_is_bounded_beyond_the_free_slots():
  room = scheduler(slots=2, queue=1)
  submitted(room, 10, 10, 10)
  with pytest.raises(Overloaded, match="1 requests are waiting"):
    room.submit(Job(10))
  room.next()
  with pytest.raises(Overloaded):
    room.submit(Job(10))
  room.end(room.waiting[0])
  room.submit(Job(10))


def test_while_someone_decodes_a_chunk_at_most_comes_between_two_dispatches():
  room = scheduler()
  (short,) = submitted(room, 5)
  actions(room, 2)
  assert isinstance(room.next(), Decode)
  (long,) = submitted(room, 1000)
  seen, since = [], 0
  while not isinstance(action := room.next(), Admit):
    if isinstance(action, Prefill):
      since += action.size
      assert since <= CHUNKS[-1]
    else:
      assert action == Decode(4, seats(short), frozenset())
      seen.append(since)
      since = 0
  assert action == Admit(seats(long))
  assert seen == [64] * 15  # 1000 = 15 · 64 + 40; a dispatch after each, and none before the newcomer's first token


def test_several_short_prompts_share_what_may_come_between():
  room = scheduler(slots=6, queue=6)
  (first,) = submitted(room, 5)
  actions(room, 3)
  newcomers = submitted(room, 10, 10, 10, 10, 10)
  done = actions(room, 8)
  assert [type(action) for action in done] == [Prefill, Admit] * 4
  action = room.next()
  assert isinstance(action, Decode) and action.jobs == seats(first, *newcomers[:4]) and action.steps == 4
  assert isinstance(room.next(), Prefill)


def test_those_who_are_prefilled_take_turns():
  room = scheduler(slots=3)
  a, b, c = submitted(room, 130, 70, 20)
  turns = [parts(action)[0][0] if isinstance(action, Prefill) else action for action in actions(room, 7)]
  assert turns[:3] == [a, b, c]
  assert turns[3] == Admit(seats(c))
  # Now someone decodes: a's chunk, decode steps, b's rest.
  assert turns[4] == a
  assert isinstance(turns[5], Decode) and turns[5].steps == 4
  assert turns[6] == b


def test_dispatches_are_short_while_someone_waits_for_a_slot():
  room = scheduler(slots=1)
  a, b = submitted(room, 5, 5)
  actions(room, 2)
  assert room.next() == Decode(4, seats(a), frozenset())
  room.end(b)
  assert room.next() == Decode(32, seats(a), frozenset())


def test_a_slot_that_is_left_stops_at_the_next_dispatch_and_only_if_nobody_has_it():
  room = scheduler(slots=2)
  a, b = submitted(room, 5, 5)
  actions(room, 4)
  room.end(a)
  assert a.slot is None
  # A short dispatch: whoever has left may ask again at once.
  assert room.next() == Decode(4, seats(b), frozenset({0}))
  assert room.next() == Decode(32, seats(b), frozenset())
  room.end(b)
  assert room.next() is None
  (c,) = submitted(room, 5)
  actions(room, 2)
  assert c.slot == 0
  assert room.next() == Decode(4, seats(c), frozenset({1}))


def test_a_slot_taken_over_before_a_dispatch_goes_on():
  room = scheduler(slots=1)
  a, b = submitted(room, 5, 5)
  actions(room, 3)
  room.end(a)
  assert parts(room.next()) == [(b, 0, 5)]
  assert room.next() == Admit(seats(b))
  assert room.next() == Decode(32, seats(b), frozenset())


def test_one_who_leaves_in_the_middle_of_its_prompt_is_forgotten():
  room = scheduler(slots=1)
  a, b = submitted(room, 200, 5)
  room.next()
  room.end(a)
  assert parts(room.next()) == [(b, 0, 5)]


def test_deadlines_of_those_who_wait_and_those_who_run():
  room = scheduler(slots=1)
  jobs = [Job(5, deadline=3.0), Job(5, deadline=2.0), Job(5)]
  for job in jobs:
    room.submit(job)
  room.next()
  assert room.overdue(1.9) == []
  assert room.overdue(2.0) == [jobs[1]]
  assert set(map(id, room.overdue(5.0))) == {id(jobs[0]), id(jobs[1])}


def test_data_groups_are_filled_evenly_and_prefilled_side_by_side():
  room = scheduler(slots=4, groups=2)
  a, b, c, d = submitted(room, 100, 20, 40, 7)
  first = room.next()
  assert [job.slot for job in (a, b, c, d)] == [0, 2, 1, 3]
  assert first.size == 64 and parts(first) == [(a, 0, 64), (b, 0, 20)]
  assert room.next() == Admit(seats(b))
  # c's turn comes before a's second, beside d in the other group.
  second = room.next()
  assert second.size == 64 and parts(second) == [(c, 0, 40), (d, 0, 7)]
