"""The core on the tiny model: the same tokens as decode.py, alone and in company; faults stay where they are."""

import asyncio
import contextlib
import io

import jax.numpy as jnp
import numpy as np
import pytest
from _cores import FACTS, KEYS, answer, ids, run, tiny_core

from MaxText import decode
from MaxText.inference.serving.compiles import CompileCount
from MaxText.inference.serving.requests import Finish, Request

SAMPLED = dict(temperature=3.0, top_k=100, top_p=0.99)
POISON = 600  # an id of the tiny tokenizer's reserved ones: its embedding is NaN here


@pytest.fixture(scope="module")
def served():
  core, tokenizer = tiny_core("per_device_batch_size=8", "prefill_chunk_size=32", "decode_steps_per_dispatch=16")
  params = core._device.engine.params
  embed = np.array(params["embed"])
  embed[POISON] = np.nan
  params["embed"] = params["embed"].at[:].set(jnp.asarray(embed))
  yield core, tokenizer
  core.stop()


@pytest.fixture(scope="module")
def compiled(served):
  """Counts what is compiled from here on; everything must have been."""
  count = CompileCount().start()
  yield count
  count.stop()


@pytest.fixture(autouse=True)
def nothing_is_compiled(compiled):
  before = compiled.count
  yield
  assert compiled.count == before


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
  """decode.py's text for 64 facts."""
  path = tmp_path_factory.mktemp("facts") / "prompts.txt"
  path.write_text("\n".join(f.prompt for f in FACTS[:64]), encoding="utf-8")
  with contextlib.redirect_stdout(io.StringIO()) as out:
    decode.main(["decode.py", *KEYS, f"prompt_file={path}"])
  texts = [line.split("` -> `")[1].removesuffix("`") for line in out.getvalue().splitlines()]
  assert np.mean([text == f.answer for text, f in zip(texts, FACTS, strict=False)]) > 0.95
  return texts


@pytest.fixture(scope="module")
def alone(served, decoded):
  """Each fact's answer when nobody else is served."""
  core, tokenizer = served

  async def work():
    return [await answer(core, tokenizer.encode(f.prompt), logprobs=3) for f in FACTS[:64]]

  return run(work())


def text(tokenizer, tokens):
  return tokenizer.decode([token for token in tokens if token not in tokenizer.stop_ids])


def test_one_at_a_time_the_text_is_decodes(served, decoded, alone):
  _, tokenizer = served
  assert [text(tokenizer, ids(one)) for one in alone] == decoded
  assert {finish for _, finish in alone} == {Finish("stop")}


def test_64_at_once_on_8_slots_get_the_same_some_cancelled_some_stopped_early(served, alone):
  core, tokenizer = served

  async def cancelled(prompt):
    ticket = core.submit(Request(tuple(prompt), 64 - len(prompt), temperature=9.0, seed=3, logprobs=3))
    seen = []
    async for event in ticket:
      seen.append(event)
      ticket.cancel()
    return seen[:-1], seen[-1]

  async def work():
    jobs = []
    for i, fact in enumerate(FACTS[:64]):
      prompt = tokenizer.encode(fact.prompt)
      if i % 5 == 2:
        jobs.append(cancelled(prompt))
      elif i % 5 == 4:
        jobs.append(answer(core, prompt, logprobs=3, max_tokens=2))
      else:
        jobs.append(answer(core, prompt, logprobs=3))
    return await asyncio.gather(*jobs)

  for i, (got, expected) in enumerate(zip(run(work()), alone, strict=True)):
    if i % 5 == 2:
      assert got[1].reason in ("cancelled", "stop", "length")
      continue
    count = 2 if i % 5 == 4 else len(expected[0])
    assert got[1] == Finish("length" if i % 5 == 4 and len(expected[0]) > 2 else "stop")
    assert ids(got) == ids(expected)[:count]
    # The same programs whoever is there: slots and neighbours change no bit.
    assert got[0] == expected[0][:count]


def test_ignore_eos_goes_on_where_others_end(served, alone):
  core, tokenizer = served
  prompts = [tokenizer.encode(f.prompt) for f in FACTS[:12]]

  async def work():
    # Beside some that end at the same tokens, and in slots that these leave.
    asked = [answer(core, p, logprobs=3, ignore_eos=i % 3 == 0, max_tokens=16) for i, p in enumerate(prompts)]
    return await asyncio.gather(*asked)

  for i, (got, expected) in enumerate(zip(run(work()), alone, strict=False)):
    assert len(expected[0]) < 16
    assert got[0][: len(expected[0])] == expected[0]
    assert (len(got[0]), got[1]) == ((16, Finish("length")) if i % 3 == 0 else (len(expected[0]), Finish("stop")))


def test_a_slot_left_by_a_cancelled_neighbour_changes_nothing(served):
  core, tokenizer = served
  prompt = tokenizer.encode(FACTS[0].prompt)

  async def cancelled():
    # A long prompt and hot tokens, then gone.
    ticket = core.submit(Request(tuple(range(200, 240)), 20, temperature=50.0, seed=9))
    async for _ in ticket:
      ticket.cancel()

  async def work():
    first = await answer(core, prompt, logprobs=20)
    await asyncio.gather(*(cancelled() for _ in range(24)))
    again = await asyncio.gather(*(answer(core, prompt, logprobs=20) for _ in range(16)))
    assert all(one == first for one in again)

  run(work())


def test_equal_seeds_get_equal_tokens_in_any_slot_and_company(served):
  core, tokenizer = served
  prompt = tokenizer.encode("The")

  async def work():
    alone = [await answer(core, prompt, seed=seed, max_tokens=20, **SAMPLED) for seed in range(6)]
    assert len({tuple(ids(one)) for one in alone}) == 6
    for order in (range(6), reversed(range(6))):
      order = list(order)
      others = [answer(core, tokenizer.encode(f.prompt)) for f in FACTS[:7]]
      mine = [answer(core, prompt, seed=seed, max_tokens=20, **SAMPLED) for seed in order]
      mixed = [job for pair in zip(others, mine, strict=False) for job in pair]
      got = (await asyncio.gather(*mixed, others[6]))[1:12:2]
      assert [ids(one) for one in got] == [ids(alone[seed]) for seed in order]

  run(work())


def test_log_probabilities_are_those_of_decodes_model(served, alone):
  core, _ = served
  for tokens, _ in alone[:8]:
    for token in tokens:
      # Greedy: the chosen token is the first alternative.
      assert token.alternatives[0] == (token.id, token.logprob)
      values = [value for _, value in token.alternatives]
      assert values == sorted(values, reverse=True) and sum(np.exp(values)) <= 1 + 1e-5

  async def work():
    prompt = FACTS[3].prompt
    tokens, _ = await answer(core, served[1].encode(prompt), logprobs=0)
    assert [token.alternatives for token in tokens] == [()] * len(tokens)
    assert [token.logprob for token in tokens] == [token.logprob for token in alone[3][0]]

  run(work())


def test_logits_that_arent_finite_end_that_request_alone(served, alone):
  core, tokenizer = served
  prompts = [tokenizer.encode(f.prompt) for f in FACTS[:21]]

  async def work():
    bad = [answer(core, [*prompts[i], POISON, 5], max_tokens=9, logprobs=3) for i in range(4)]
    good = [answer(core, prompt, logprobs=3) for prompt in prompts]
    return await asyncio.gather(*bad, *good)

  got = run(work())
  for tokens, finish in got[:4]:
    assert tokens == [] and finish.reason == "error" and "not finite" in finish.message
  # Neighbours, and those who came into the slots after.
  assert got[4:] == alone[:21]
  assert core.healthy


def test_own_stop_ids_end_a_request(served, alone):
  core, tokenizer = served
  expected = ids(alone[0])

  async def work():
    tokens, finish = await answer(core, tokenizer.encode(FACTS[0].prompt), stop_ids=frozenset({expected[1]}))
    assert [token.id for token in tokens] == expected[:2] and finish == Finish("stop")

  run(work())
