"""A long prompt among running streams: what they wait for it, counted in steps and tokens of a trace."""

import asyncio

import pytest
from _cores import FACTS, answer, ids, run, tiny_core

CHUNK, STEPS = 256, 16
LONG = 4000

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served():
  core, tokenizer = tiny_core(
    "per_device_batch_size=4", "max_target_length=4096", "max_prefill_predict_length=4000",
    f"prefill_chunk_size={CHUNK}", f"decode_steps_per_dispatch={STEPS}",
  )  # fmt: skip
  yield core, tokenizer
  core.stop()


def test_4000_tokens_delay_running_streams_by_no_more_than_a_chunk(served):
  core, tokenizer = served
  fact = tokenizer.encode(FACTS[0].prompt)
  # It has to reach back over all chunks but the last: the fact stands at the end.
  prompt = [200 + i % 100 for i in range(LONG - len(fact))] + fact

  async def work():
    alone = await answer(core, prompt, max_tokens=8, logprobs=2)
    core.trace = []
    over = False

    async def streams(first):
      # Hot tokens: few of them stop.
      seed = first
      while not over:
        await answer(core, fact, max_tokens=300, temperature=50.0, seed=seed)
        seed += 3

    running = [asyncio.create_task(streams(i)) for i in range(3)]
    while not any(what[0] == "decode" and len(what[2]) == 3 for what in core.trace):
      await asyncio.sleep(0.01)
    begin = len(core.trace)
    among = await answer(core, prompt, max_tokens=8, logprobs=2)
    trace = core.trace[begin:]
    over = True
    await asyncio.gather(*running)
    return alone, among, trace

  alone, among, trace = run(work())
  assert ids(among) == ids(alone)
  assert among == alone  # to the bit: slots and neighbours don't matter
  since, chunks, waits, between = 0, 0, [], []
  for what, size, slots in [(*event, ())[:3] for event in trace]:
    if what == "prefill":
      if size == CHUNK:
        chunks += 1
        between += waits  # after the last chunk nobody may wait any more
        waits = []
      since += size
      assert since <= CHUNK
    elif what == "decode":
      waits.append((since, size, len(slots)))
      since = 0
  assert chunks >= LONG // CHUNK
  # Decode steps come between all chunks, few at a time.
  between = [steps for since, steps, count in between if since == CHUNK and count >= 2]
  assert len(between) >= LONG // CHUNK - 1
  assert set(between) == {4}
