"""What the tests of the gRPC face share: a core without a model, and calls with JetStream's own stubs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc

from MaxText.inference.jetstream import service
from MaxText.inference.jetstream.compat import jetstream_pb2, jetstream_pb2_grpc
from MaxText.inference.serving.requests import Finish, InvalidRequest, Request, Token

Decode = jetstream_pb2.DecodeRequest


class FakeTicket:
  """Delivers what a script says; counts being cancelled."""

  def __init__(self, script: AsyncIterator[Token | Finish]):
    self._script = script
    self.cancelled = 0

  def __aiter__(self):
    return self._script

  def cancel(self):
    self.cancelled += 1


class FakeCore:
  """A core whose answers are scripts. By default each request gets its own prompt back, then ends by "length"."""

  def __init__(self, vocab_size: int = 608, script: Callable[[Request], AsyncIterator] | None = None):
    self.vocab_size, self.max_prompt_length, self.max_length, self.model = vocab_size, 100, 200, "fake"
    self.healthy = self.ready = True
    self.script = script or self.echo
    self.refuse: Exception | None = None
    self.requests: list[Request] = []
    self.tickets: list[FakeTicket] = []

  @staticmethod
  async def echo(request: Request):
    for token in request.prompt[: request.max_tokens]:
      await asyncio.sleep(0)
      yield Token(token)
    yield Finish("length")

  def submit(self, request: Request) -> FakeTicket:
    if self.refuse:
      raise self.refuse
    if not request.prompt or len(request.prompt) + request.max_tokens > self.max_length:
      raise InvalidRequest("the fake core was given what the face should have refused")
    self.requests.append(request)
    self.tickets.append(FakeTicket(self.script(request)))
    return self.tickets[-1]


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
