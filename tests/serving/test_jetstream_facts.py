"""The tiny model's facts over gRPC, on the real core: decode.py's text, alone and 64 at once on 8 slots."""

import asyncio
import os
import re
import sys

import grpc
import jax
import pytest
from _grpc import ask, refused, serving, text_request, token_request

from MaxText import decode
from MaxText.configs.k3_config import initialize
from MaxText.inference.jetstream.compat import jetstream_pb2
from MaxText.inference.sampling import Sampling
from MaxText.inference.serving.start import start_core

ROOT = os.path.join(os.path.dirname(__file__), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import tiny_facts  # noqa: E402

pytestmark = pytest.mark.slow

FACTS = tiny_facts.facts()[:60]
PROMPTS = [f.prompt for f in FACTS]
LENGTHS = ("max_target_length=64", "max_prefill_predict_length=32")
LONGEST = 24  # tokens asked for; the answers are shorter


@pytest.fixture(scope="module")
def config():
  chunks = ("prefill_chunk_size=16", "decode_steps_per_dispatch=4")
  return initialize(["test", "kimi-k3-tiny.yml", "per_device_batch_size=8", *LENGTHS, *chunks])


@pytest.fixture(scope="module")
def tokenizer(config):
  return decode.load_tokenizer(config)


@pytest.fixture(scope="module")
def core(config, tokenizer):
  core = start_core(config, tokenizer)
  yield core
  core.stop()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
  """What decode.py prints for each fact."""
  file = tmp_path_factory.mktemp("facts") / "prompts.txt"
  file.write_text("\n".join(PROMPTS), encoding="utf-8")
  with pytest.MonkeyPatch.context() as patch:
    lines = []
    patch.setattr("builtins.print", lambda *a, **k: lines.append(a[0]) if k.get("file") is None else None)
    decode.main(["decode.py", "kimi-k3-tiny.yml", f"prompt_file={file}", *LENGTHS])
  found = [re.fullmatch(r"Input `(.*)` -> `(.*)`", line) for line in lines]
  assert [m[1] for m in found] == PROMPTS
  return [m[2] for m in found]


@pytest.fixture
def compiled():
  """Counts compilations."""
  events = []

  def note(event, duration, **kwargs):
    if event.endswith("backend_compile_duration"):
      events.append(kwargs)

  jax.monitoring.register_event_duration_secs_listener(note)
  yield events
  jax.monitoring.unregister_event_duration_listener(note)


def test_facts_one_at_a_time_and_64_at_once(core, tokenizer, texts, compiled):
  assert sum(t == f.answer for t, f in zip(texts, FACTS, strict=True)) >= 57

  async def main():
    async with serving(core, tokenizer) as (stub, _):
      alone = [(await ask(stub, text_request(p, LONGEST)))[0] for p in PROMPTS]
      assert alone == texts
      at_once = await asyncio.gather(*(ask(stub, text_request(p, LONGEST)) for p in PROMPTS + PROMPTS[:4]))
      assert [text for text, _, _ in at_once] == texts + texts[:4]
      ids = [tokenizer.encode(p) for p in PROMPTS]
      as_ids = await asyncio.gather(*(ask(stub, token_request(i, LONGEST)) for i in ids))
      assert [tokenizer.decode(got) for _, got, _ in as_ids] == texts

  asyncio.run(main())
  assert compiled == []
  assert core.snapshot().slots_in_use == 0


def test_mixed_lengths_cancelled_and_late_ones_change_nothing_for_the_others(core, tokenizer, texts):
  """A third ends early by max_tokens, some are cancelled after their first token, some before, some are overdue."""

  async def main():
    async with serving(core, tokenizer) as (stub, _):

      async def given_up(prompt, reads):
        call = stub.Decode(text_request(prompt, LONGEST))
        for _ in range(reads):
          await call.read()
        call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
          await call.code()
          raise asyncio.CancelledError

      async def cut(prompt, most):
        return (await ask(stub, token_request(tokenizer.encode(prompt), most)))[1]

      async def late(prompt):
        return await refused(stub, text_request(prompt, LONGEST), timeout=0.001)

      whole = [ask(stub, text_request(p, LONGEST)) for p in PROMPTS[::3]]
      short = [cut(p, 1 + i % 4) for i, p in enumerate(PROMPTS[1::3])]
      others = [given_up(p, i % 2) for i, p in enumerate(PROMPTS[2::3])] + [late(p) for p in PROMPTS[:4]]
      mixed = [x for three in zip(whole, short, others[: len(whole)], strict=True) for x in three]
      answers = await asyncio.gather(*mixed, *others[len(whole) :])
      assert [text for text, _, _ in answers[:60:3]] == texts[::3]
      for i, (ids, text) in enumerate(zip(answers[1:60:3], texts[1::3], strict=True)):
        assert len(ids) <= 1 + i % 4
        assert tokenizer.encode(text)[: len(ids)] == ids
      assert all(code == "DEADLINE_EXCEEDED" for code, _ in answers[60:])

      async with asyncio.timeout(5):
        while core.snapshot().slots_in_use or core.snapshot().waiting:
          await asyncio.sleep(0.01)
      again = await asyncio.gather(*(ask(stub, text_request(p, LONGEST)) for p in PROMPTS[:16]))
      assert [text for text, _, _ in again] == texts[:16]

  asyncio.run(main())


def test_jetstreams_traps_kill_nobody(core, tokenizer, texts):
  """What ends JetStream's own server, or makes it answer wrongly."""

  async def main():
    async with serving(core, tokenizer) as (stub, _):
      for request, code in (
        (text_request(PROMPTS[0], 2**31 - 1), "INVALID_ARGUMENT"),
        (token_request([5, 6], 4, session_cache="mine"), "UNIMPLEMENTED"),
        (token_request([], 4), "INVALID_ARGUMENT"),
        (token_request([10**6], 4), "INVALID_ARGUMENT"),
        (text_request("far too long " * 30, 4), "INVALID_ARGUMENT"),
      ):
        assert (await refused(stub, request))[0] == code
        assert (await ask(stub, text_request(PROMPTS[0], LONGEST)))[0] == texts[0]
      assert (await stub.HealthCheck(jetstream_pb2.HealthCheckRequest())).is_live

  asyncio.run(main())


def test_sampling_is_the_servers_and_its_seed_repeats(core, tokenizer):
  async def main():
    prompt = text_request(PROMPTS[0], LONGEST)
    answers = []
    for seed in (1, 1, 2):
      async with serving(core, tokenizer, sampling=Sampling(temperature=5.0, seed=seed)) as (stub, _):
        answers.append((await ask(stub, prompt))[1])
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]

  asyncio.run(main())


def test_an_engine_that_fails_ends_every_stream_with_an_error_at_once(core, tokenizer, monkeypatch):
  """Last in this file: the core doesn't come back from it."""

  async def main():
    async with serving(core, tokenizer) as (stub, _):
      # Twice as many as there are slots, so that some wait in the queue.
      calls = [asyncio.create_task(refused(stub, text_request(p, LONGEST))) for p in PROMPTS[:16]]

      def broken(*args):
        raise RuntimeError("the device is gone")

      monkeypatch.setattr(core._device, "generate", broken)
      async with asyncio.timeout(1):
        ends = await asyncio.gather(*calls)
      assert {code for code, _ in ends} <= {"INTERNAL", "UNAVAILABLE"}  # running or queued; not yet submitted
      assert ("INTERNAL", "the engine has failed") in ends
      assert not (await stub.HealthCheck(jetstream_pb2.HealthCheckRequest())).is_live
      assert (await refused(stub, text_request(PROMPTS[0])))[0] == "UNAVAILABLE"

  asyncio.run(main())
