"""What the tests of the gRPC face share: a core without a model, and calls with JetStream's own stubs."""

import contextlib

import grpc
from _fake_core import FakeCore, Script

from MaxText.inference.jetstream import service
from MaxText.inference.jetstream.compat import jetstream_pb2, jetstream_pb2_grpc
from MaxText.inference.serving.requests import Request, Token

Decode = jetstream_pb2.DecodeRequest


def fake_core(script: Script | None = None) -> FakeCore:
  """A core that answers as `script` says; by default with the prompt itself."""
  core = FakeCore(608, max_prompt_length=100, max_length=200)
  core.script = script or echo
  return core


def echo(request: Request) -> list[Token]:
  return [Token(token) for token in request.prompt]


@contextlib.asynccontextmanager
async def serving(core, tokenizer, **settings):
  """A face over `core`; yields (a stub of JetStream's, the channel)."""
  server = await service.start(core, tokenizer, service.Settings(**settings))
  try:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
      yield jetstream_pb2_grpc.OrchestratorStub(channel), channel
  finally:
    await server.stop(0)


def text_request(text: str, max_tokens: int = 8, **fields) -> Decode:
  return Decode(text_content=Decode.TextContent(text=text), max_tokens=max_tokens, **fields)


def token_request(ids, max_tokens: int = 8, **fields) -> Decode:
  return Decode(token_content=Decode.TokenContent(token_ids=ids), max_tokens=max_tokens, **fields)


async def ask(stub, request, **options) -> tuple[str, list[int], int]:
  """(text, ids, number of responses) of a call, put together as JetStream's own client does."""
  text, ids, responses = "", [], 0
  async for response in stub.Decode(request, **options):
    (sample,) = response.stream_content.samples
    text += sample.text
    ids += sample.token_ids
    responses += 1
  return text, ids, responses


async def refused(stub, request, **options) -> tuple[str, str]:
  """(status, details) of a call that must not be answered."""
  try:
    answer = await ask(stub, request, **options)
  except grpc.aio.AioRpcError as error:
    return error.code().name, error.details()
  raise AssertionError(f"answered with {answer}")
