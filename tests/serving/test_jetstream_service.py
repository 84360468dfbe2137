"""JetStream's protocol over a real gRPC channel, with JetStream's own stubs, on a core without a model."""

import asyncio
import json
import os

import grpc
import pytest
from _grpc import Decode, ask, echo, fake_core, refused, serving, text_request, token_request

from MaxText.configs.k3_config import initialize
from MaxText.errors import UserError
from MaxText.inference.jetstream import service
from MaxText.inference.jetstream.compat import jetstream_pb2, jetstream_pb2_grpc
from MaxText.inference.serving.requests import Finish, InvalidRequest, Overloaded, Token, Unavailable
from MaxText.inference.tokenizer import K3Tokenizer

ASSETS = os.path.join(os.path.dirname(__file__), "..", "..", "MaxText", "assets", "kimi-k3-tiny")


@pytest.fixture(scope="module")
def tokenizer():
  return K3Tokenizer.from_directory(ASSETS)


SILENCE = 1000.0  # seconds, for scripts: until the test ends it


def scripted(*items):
  """A core that answers every request with the same items."""
  return fake_core(lambda request: items)


async def until(condition, seconds=5.0):
  async with asyncio.timeout(seconds):
    while not condition():
      await asyncio.sleep(0.005)


def test_text_comes_back_as_text_and_ids(tokenizer):
  text = "Paris, naïve café, 北京, 🦊🦊 and так далее"
  ids = tokenizer.encode(text)
  assert any(
    len(tokenizer.token_bytes(i)) < 3 and tokenizer.token_bytes(i) >= b"\x80" for i in ids
  )  # parts of characters

  async def main():
    core = fake_core()
    async with serving(core, tokenizer) as (stub, _):
      answer, got, responses = await ask(stub, text_request(text, max_tokens=100))
      assert (answer, got) == (text, ids)
      assert 1 < responses < len(ids)  # streamed; the parts of a character come together
      (request,) = core.requests
      assert request.prompt == tuple(ids)  # no BOS
      assert (request.temperature, request.max_tokens, request.timeout) == (0.0, 100, None)
      # Ids are answered with ids alone, one a response.
      assert await ask(stub, token_request(ids, max_tokens=100)) == ("", ids, len(ids))

  asyncio.run(main())


def test_every_response_of_a_stream_is_whole_characters(tokenizer):
  text = "狐🦊é" * 4

  async def main():
    async with serving(fake_core(), tokenizer) as (stub, _):
      pieces = [r.stream_content.samples[0].text async for r in stub.Decode(text_request(text, max_tokens=100))]
      assert "".join(pieces) == text
      assert all(pieces)
      assert "�" not in text + "".join(pieces)

  asyncio.run(main())


def test_a_character_cut_off_at_the_end_is_shown_as_broken(tokenizer):
  ids = tokenizer.encode("ab🦊")
  assert len(ids) > 3

  async def main():
    async with serving(fake_core(), tokenizer) as (stub, _):
      answer, got, _ = await ask(stub, token_request(ids, max_tokens=len(ids) - 1))
      assert (answer, got) == ("", ids[:-1])
      answer, got, _ = await ask(stub, text_request("ab🦊", max_tokens=len(ids) - 1))
      assert answer == tokenizer.decode(ids[:-1])
      assert answer.endswith("�")
      assert got == ids[:-1]

  asyncio.run(main())


def test_the_stop_token_is_not_shown_and_the_reason_is_told(tokenizer):
  core = scripted(Token(70), Token(tokenizer.eos_id), Finish("stop"))

  async def main():
    async with serving(core, tokenizer) as (stub, _):
      call = stub.Decode(text_request("a"))
      ids = [i async for r in call for i in r.stream_content.samples[0].token_ids]
      assert ids == [70]
      trailing = dict(await call.trailing_metadata())
      assert trailing["finish-reason"] == "stop"
      assert trailing["request-id"] == core.requests[0].name

  asyncio.run(main())


def _with_field(number: int, value: int) -> Decode:
  """A request of a later version of the protocol: one more varint field."""
  return Decode.FromString(text_request("a").SerializeToString() + bytes([number << 3, value]))


INVALID, UNIMPLEMENTED = "INVALID_ARGUMENT", "UNIMPLEMENTED"
REFUSALS = {
  "no content": (Decode(max_tokens=5), INVALID, "text_content or token_content"),
  "empty text": (text_request(""), INVALID, "text_content.text is empty"),
  "no ids": (token_request([]), INVALID, "token_content.token_ids is empty"),
  "an id too large": (token_request([1, 608]), INVALID, "token_content.token_ids[1]=608"),
  "an id below zero": (token_request([-1]), INVALID, "token_content.token_ids[0]=-1"),
  "the largest id": (token_request([2**31 - 1]), INVALID, "token_ids[0]=2147483647"),
  "too many ids": (token_request([1] * 101), INVALID, "has 101 tokens, this server takes up to 100"),
  "too long a text": (text_request("x y " * 3000), INVALID, "this server takes up to 100"),
  "max_tokens left out": (text_request("a", 0), INVALID, "max_tokens=0 must lie in 1..199"),
  "max_tokens below zero": (text_request("a", -1), INVALID, "max_tokens=-1"),
  "the least max_tokens": (text_request("a", -(2**31)), INVALID, "max_tokens=-2147483648"),
  "the largest max_tokens": (text_request("a", 2**31 - 1), INVALID, "max_tokens=2147483647 must lie in 1..199"),
  "max_tokens beyond the cache": (token_request([1] * 100, 101), INVALID, "max_tokens=101 must lie in 1..100"),
  "session_cache": (text_request("a", session_cache="x"), UNIMPLEMENTED, "session_cache"),
  "session_cache with ids": (token_request([1], session_cache="x"), UNIMPLEMENTED, "session_cache"),
  "two samples": (_with_field(8, 2), UNIMPLEMENTED, "num_samples"),
  "a field of no version": (_with_field(9, 1), UNIMPLEMENTED, "field 9"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_field_and_the_next_request_is_right(case, tokenizer):
  request, code, words = REFUSALS[case]

  async def main():
    core = fake_core()
    async with serving(core, tokenizer) as (stub, _):
      got, details = await refused(stub, request)
      assert got == code
      assert words in details
      assert "\n" not in details
      assert core.requests == []
      assert (await ask(stub, text_request("next")))[0] == "next"
      assert (await stub.HealthCheck(jetstream_pb2.HealthCheckRequest())).is_live

  asyncio.run(main())


def test_what_clients_of_either_version_send_without_meaning_anything_is_taken(tokenizer):
  async def main():
    async with serving(fake_core(), tokenizer) as (stub, _):
      assert (await ask(stub, text_request("ab", priority=1)))[0] == "ab"
      assert (await ask(stub, _with_field(8, 1)))[0] == "a"  # num_samples=1
      metadata = Decode.FromString(text_request("ab").SerializeToString() + bytes([7 << 3 | 2, 5, 13, 0, 0, 128, 63]))
      assert (await ask(stub, metadata))[0] == "ab"

  asyncio.run(main())


NO_MESSAGES = {
  "garbage": b"\xff\xff\xff",
  "text that isn't UTF-8": b"\x2a\x04\x0a\x02\xff\xfe\x20\x05",
  "a length beyond the end": b"\x2a\xff\xff\xff\x7f",
  "a group that never ends": b"\x2b" * 200,
  "nothing": b"",
}


@pytest.mark.parametrize("data", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_bytes_that_are_no_message_are_an_invalid_argument(data, tokenizer, capfd):
  async def main():
    core = fake_core()
    async with serving(core, tokenizer) as (stub, channel):
      call = channel.unary_stream("/jetstream_proto.Orchestrator/Decode")(data)
      with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in call:
          pass
      assert error.value.code().name == INVALID
      assert core.requests == []
      assert (await ask(stub, text_request("next")))[0] == "next"

  asyncio.run(main())
  assert "Traceback" not in capfd.readouterr().err


def test_a_message_over_the_limit_and_a_method_that_does_not_exist(tokenizer):
  async def main():
    async with serving(fake_core(), tokenizer, max_message_bytes=1000) as (stub, channel):
      assert (await refused(stub, text_request("x" * 2000)))[0] == "RESOURCE_EXHAUSTED"
      with pytest.raises(grpc.aio.AioRpcError) as error:
        await channel.unary_unary("/jetstream_proto.Orchestrator/Nothing")(b"")
      assert error.value.code().name == "UNIMPLEMENTED"
      assert (await ask(stub, text_request("next")))[0] == "next"

  asyncio.run(main())


@pytest.mark.parametrize(
  ("error", "code"),
  [(InvalidRequest("no"), INVALID), (Overloaded("full"), "RESOURCE_EXHAUSTED"), (Unavailable("later"), "UNAVAILABLE")],
)
def test_what_the_core_refuses(error, code, tokenizer, monkeypatch):
  def refuse(request):
    raise error

  async def main():
    core = fake_core()
    monkeypatch.setattr(core, "submit", refuse)
    async with serving(core, tokenizer) as (stub, _):
      assert await refused(stub, text_request("a")) == (code, str(error))

  asyncio.run(main())


@pytest.mark.parametrize(
  ("finish", "code", "words"),
  [
    (Finish("error", "the engine failed"), "INTERNAL", "the engine failed"),
    (Finish("timeout", "took too long"), "DEADLINE_EXCEEDED", "took too long"),
    (Finish("cancelled"), "CANCELLED", "cancelled"),
  ],
)
def test_an_end_under_way_is_a_status(finish, code, words, tokenizer):
  async def main():
    async with serving(scripted(Token(70), finish), tokenizer) as (stub, _):
      assert await refused(stub, text_request("a")) == (code, words)

  asyncio.run(main())


def test_a_stream_ended_by_a_shutdown_may_be_tried_elsewhere(tokenizer):
  async def main():
    core = scripted(Token(70), Finish("error", "the server is shutting down"))
    core.ready = False
    async with serving(core, tokenizer) as (stub, _):
      assert await refused(stub, text_request("a")) == ("UNAVAILABLE", "the server is shutting down")

  asyncio.run(main())


def test_health_follows_the_engine_and_asks_for_no_key(tokenizer):
  async def main():
    core = fake_core()
    async with serving(core, tokenizer, api_key="secret") as (stub, _):
      assert (await stub.HealthCheck(jetstream_pb2.HealthCheckRequest())).is_live
      core.healthy = False
      assert not (await stub.HealthCheck(jetstream_pb2.HealthCheckRequest())).is_live

  asyncio.run(main())


def test_settings_from_the_keys(tokenizer):
  keys = ("serve_host=::1", "serve_grpc_port=0", "serve_request_seconds=7", "decode_sampling_strategy=topk",
          "decode_sampling_top_k=4", "decode_sampling_temperature=0.5", "decode_sampling_seed=3")  # fmt: skip
  settings = service.Settings.from_config(initialize(["test", "kimi-k3-tiny.yml", *keys]), "secret")

  async def main():
    core = fake_core()
    server = await service.start(core, tokenizer, settings)
    async with grpc.aio.insecure_channel(f"[::1]:{server.port}") as channel:
      stub = jetstream_pb2_grpc.OrchestratorStub(channel)
      await ask(stub, text_request("a"), metadata=(("authorization", "Bearer secret"),))
    await server.stop(0)
    return core.requests[0]

  request = asyncio.run(main())
  assert (request.temperature, request.top_k, request.top_p, request.seed, request.timeout) == (0.5, 4, 1.0, 3, 7.0)
  defaults = service.Settings.from_config(initialize(["test", "kimi-k3-tiny.yml"]))
  assert (defaults.host, defaults.port, defaults.api_key, defaults.timeout) == ("127.0.0.1", 9000, None, None)
  assert defaults.sampling.temperature == 0


def test_the_key(tokenizer):
  async def main():
    core = fake_core()
    async with serving(core, tokenizer, api_key="secret") as (stub, _):
      for metadata in (
        (),
        (("authorization", "Bearer wrong"),),
        (("authorization", "secret"),),
        (("authorization", ""),),
      ):
        code, details = await refused(stub, text_request("a"), metadata=metadata)
        assert code == "UNAUTHENTICATED"
        assert "secret" not in details
      assert core.requests == []
      assert (await ask(stub, text_request("ab"), metadata=(("authorization", "Bearer secret"),)))[0] == "ab"

  asyncio.run(main())


def test_a_cancelled_call_frees_its_slot(tokenizer):
  async def main():
    core = scripted(Token(70), SILENCE)
    async with serving(core, tokenizer) as (stub, _):
      call = stub.Decode(text_request("a"))
      assert (await call.read()).stream_content.samples[0].token_ids == [70]
      assert core.cancelled == []
      call.cancel()
      await until(lambda: core.cancelled)

  asyncio.run(main())


def test_a_connection_that_is_dropped_frees_its_slot(tokenizer):
  async def main():
    core = scripted(Token(70), SILENCE)
    server = await service.start(core, tokenizer, service.Settings())
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
    call = jetstream_pb2_grpc.OrchestratorStub(channel).Decode(text_request("a"))
    await call.read()
    await channel.close()
    await until(lambda: core.cancelled)
    await server.stop(0)

  asyncio.run(main())


def test_the_callers_deadline_reaches_the_core_and_ends_the_call(tokenizer):
  async def main():
    core = scripted(Token(70), SILENCE)
    async with serving(core, tokenizer, timeout=100.0) as (stub, _):
      assert (await refused(stub, text_request("a"), timeout=0.3))[0] == "DEADLINE_EXCEEDED"
      assert 0 < core.requests[0].timeout <= 0.3
      await until(lambda: core.cancelled)
      core.script = echo
      await ask(stub, text_request("a"))
      assert core.requests[1].timeout == 100.0

  asyncio.run(main())


def test_many_calls_at_once_each_get_their_own(tokenizer):
  async def main():
    async with serving(fake_core(), tokenizer) as (stub, _):
      texts = [f"prompt number {i} {'🦊' * (i % 3)}" for i in range(64)]
      answers = await asyncio.gather(*(ask(stub, text_request(t, max_tokens=60)) for t in texts))
      assert [a for a, _, _ in answers] == texts

  asyncio.run(main())


def test_a_slow_reader_holds_nobody_up(tokenizer):
  """One call isn't read; others on the same connection are answered meanwhile."""

  async def main():
    core = fake_core(lambda request: [Token(70)] * request.max_tokens)
    core.max_length = 10**6
    async with serving(core, tokenizer) as (stub, _):
      slow = stub.Decode(text_request("a", 20_000))
      await slow.read()
      for _ in range(5):
        async with asyncio.timeout(2):
          assert (await ask(stub, text_request("a", 3)))[1] == [70] * 3
      slow.cancel()

  asyncio.run(main())


def test_calls_beyond_the_limit_are_refused(tokenizer):
  async def main():
    core = scripted(Token(70), SILENCE)
    async with serving(core, tokenizer, max_calls=2) as (stub, _):
      calls = [stub.Decode(text_request("a")) for _ in range(2)]
      for call in calls:
        await call.read()
      assert (await refused(stub, text_request("a")))[0] == "RESOURCE_EXHAUSTED"
      assert (await stub.HealthCheck(jetstream_pb2.HealthCheckRequest())).is_live  # a full server isn't a dead one
      for call in calls:
        call.cancel()
      await until(lambda: len(core.cancelled) == 2)
      core.script = echo
      assert (await ask(stub, text_request("ab")))[0] == "ab"

  asyncio.run(main())


def test_stopping_waits_for_open_calls_and_ends_the_others(tokenizer):
  async def main():
    core = scripted(Token(70), SILENCE)
    server = await service.start(core, tokenizer, service.Settings())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
      stub = jetstream_pb2_grpc.OrchestratorStub(channel)
      call = stub.Decode(text_request("a"))
      await call.read()
      stopping = asyncio.create_task(server.stop(0.3))
      await asyncio.sleep(0.05)
      assert not stopping.done()
      await stopping
      assert core.cancelled

  asyncio.run(main())


def test_a_port_that_is_taken_is_one_line(tokenizer):
  async def main():
    server = await service.start(fake_core(), tokenizer, service.Settings())
    with pytest.raises(UserError, match=f"can't listen at 127.0.0.1:{server.port}"):
      await service.start(fake_core(), tokenizer, service.Settings(port=server.port))
    await server.stop(0)

  asyncio.run(main())


def test_one_line_of_log_a_request_without_its_text(tokenizer, capsys):
  async def main():
    core = fake_core()
    async with serving(core, tokenizer) as (stub, _):
      await ask(stub, text_request("secret words", max_tokens=3))
      await refused(stub, text_request("secret words", max_tokens=0))
      return core.requests[0].name

  name = asyncio.run(main())
  text = capsys.readouterr().err
  assert "secret" not in text
  good, bad = map(json.loads, text.splitlines())
  assert (good["request"], good["face"], good["status"], good["reason"]) == (name, "grpc", "OK", "length")
  assert (good["prompt_tokens"], good["tokens"]) == (len(tokenizer.encode("secret words")), 3)
  assert (bad["status"], bad["tokens"]) == ("INVALID_ARGUMENT", 0)
