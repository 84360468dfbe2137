"""JetStream's gRPC protocol on the serving core: `Decode` streams tokens, `HealthCheck` says whether the engine lives.

A call goes: key → message → `Request` (every check stands before the core) → ticket → one response for each token whose
text is complete → status. The protocol has no sampling parameters and no finish reason: sampling is the server's
`decode_sampling_*`, and the reason is trailing metadata.

  what is wrong                                    status
  a field's value, bytes that are no message       INVALID_ARGUMENT, names the field
  a field that this server has no use for          UNIMPLEMENTED, names the field
  no key or a wrong one                            UNAUTHENTICATED
  the queue is full                                RESOURCE_EXHAUSTED
  starting, draining, failed                       UNAVAILABLE
  a deadline, the caller's or the server's         DEADLINE_EXCEEDED
  the engine failed under way                      INTERNAL
"""

import asyncio
import hmac
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc import StatusCode

from MaxText.errors import UserError
from MaxText.inference.jetstream.compat import jetstream_pb2, jetstream_pb2_grpc
from MaxText.inference.sampling import Sampling
from MaxText.inference.serving.log import RequestLog
from MaxText.inference.serving.requests import (
  Core,
  Finish,
  InvalidRequest,
  Overloaded,
  Rejected,
  Request,
  Ticket,
  Unavailable,
)
from MaxText.inference.tokenizer import K3Tokenizer, StreamDecoder

_STATUS = {
  InvalidRequest: StatusCode.INVALID_ARGUMENT,
  Overloaded: StatusCode.RESOURCE_EXHAUSTED,
  Unavailable: StatusCode.UNAVAILABLE,
}
_ENDED = {
  "timeout": StatusCode.DEADLINE_EXCEEDED,
  "cancelled": StatusCode.CANCELLED,
  "error": StatusCode.INTERNAL,
}
# Fields of later versions of the protocol, which 0.2.2 knows by number alone. When the client sent it is no question to
# the server; the default of a number isn't sent at all.
_METADATA, _NUM_SAMPLES = 7, 8
_LATER_NAMES = {_NUM_SAMPLES: "num_samples"}


_GREEDY = Sampling()
_KEEPALIVE_MS = 60_000  # silence after which a connection is asked whether it still lives


@dataclass(frozen=True)
class Settings:
  """How the face runs.

  Attributes:
    host, port: where it listens; port 0: any free one.
    api_key: what callers of `Decode` send as `authorization: Bearer …`; None: nobody is asked.
    sampling: of every request, numbers.
    timeout: seconds that a request may take; None: as long as the caller waits.
    max_message_bytes: of a call.
    max_calls: of `Decode`, open at once; further ones get RESOURCE_EXHAUSTED.
  """

  host: str = "127.0.0.1"
  port: int = 0
  api_key: str | None = None
  sampling: Sampling = _GREEDY
  timeout: float | None = None
  max_message_bytes: int = 4 * 2**20
  max_calls: int = 1024

  @classmethod
  def from_config(cls, config: Any, api_key: str | None = None) -> "Settings":
    """The `serve_*` and `decode_sampling_*` keys."""
    return cls(
      config.serve_host,
      config.serve_grpc_port,
      api_key,
      Sampling.from_config(config),
      config.serve_request_seconds or None,
    )


class _Refused(Exception):
  """Ends a call with a status before any work."""

  def __init__(self, code: StatusCode, text: str):
    super().__init__(text)
    self.code = code


def _invalid(text: str) -> _Refused:
  return _Refused(StatusCode.INVALID_ARGUMENT, text)


def _unimplemented(text: str) -> _Refused:
  return _Refused(StatusCode.UNIMPLEMENTED, text)


def _check_fields(message: Any) -> None:
  """Refuses what a message asks for beyond a prompt and a number of tokens.

  `priority` may be set, as JetStream's own clients do; neither their server nor this one looks at it.
  """
  if message.session_cache:
    raise _unimplemented("session_cache is not supported: a recurrent state can't be cut at any token; leave it empty")
  for field in UnknownFieldSet(message):
    if field.field_number == _METADATA or (field.field_number == _NUM_SAMPLES and field.data == 1):
      continue
    name = _LATER_NAMES.get(field.field_number, f"field {field.field_number}")
    raise _unimplemented(f"{name} is not supported: a call gets one sample of one prompt")


def _check_ids(ids: Any, vocab_size: int) -> tuple[int, ...]:
  for index, token in enumerate(ids):
    if not 0 <= token < vocab_size:
      raise _invalid(f"token_content.token_ids[{index}]={token} must lie in 0..{vocab_size - 1}")
  return tuple(ids)


class _Text:
  """Tokens -> responses with text and ids. A character's tokens come together, once it is complete."""

  def __init__(self, tokenizer: K3Tokenizer):
    self._stream, self._ids = StreamDecoder(tokenizer), []

  def push(self, token: int) -> Any | None:
    self._ids.append(token)
    return self._response(self._stream.push(token))

  def flush(self) -> Any | None:
    return self._response(self._stream.flush())

  def _response(self, text: str) -> Any | None:
    if not text:
      return None
    ids, self._ids = self._ids, []
    return _response(text, ids)


class _Ids:
  """Tokens -> responses with ids alone, for callers who sent ids."""

  def push(self, token: int) -> Any | None:
    return _response("", [token])

  def flush(self) -> Any | None:
    return None


def _response(text: str, ids: list[int]) -> Any:
  content = jetstream_pb2.DecodeResponse.StreamContent
  return jetstream_pb2.DecodeResponse(stream_content=content(samples=[content.Sample(text=text, token_ids=ids)]))


class Service(jetstream_pb2_grpc.OrchestratorServicer):
  """JetStream's two methods, for grpc.aio."""

  def __init__(self, core: Core, tokenizer: K3Tokenizer, settings: Settings):
    self._core, self._tokenizer, self._settings = core, tokenizer, settings
    self._open = 0  # calls of Decode

  async def HealthCheck(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
    """Needs no key, for probes."""
    return jetstream_pb2.HealthCheckResponse(is_live=self._core.healthy)

  async def Decode(self, request: Any, context: grpc.aio.ServicerContext) -> None:
    """Answers one call; returning early or being cancelled frees the slot."""
    log = RequestLog("grpc", "Decode")
    context.set_trailing_metadata((("request-id", log.name),))
    code, reason, ticket = StatusCode.CANCELLED, "", None
    self._open += 1
    try:
      try:
        self._check_key(context)
        if self._open > self._settings.max_calls:
          raise Overloaded(f"{self._settings.max_calls} calls are open, as many as this server takes; try again later")
        output, wanted = await self._read(request, context, log.name)
        log.prompt(len(wanted.prompt))
        ticket = self._core.submit(wanted)
      except _Refused as error:
        code, reason = error.code, str(error)
      except Rejected as error:
        code, reason = next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), str(error)
      else:
        code, reason = await self._stream(ticket, output, context, log)
      if code is not StatusCode.OK:
        await context.abort(code, reason, context.trailing_metadata())
    finally:
      self._open -= 1
      if ticket is not None:
        ticket.cancel()
      log.end(code.name, reason)

  def _check_key(self, context: grpc.aio.ServicerContext) -> None:
    if self._settings.api_key is None:
      return
    given = dict(context.invocation_metadata() or ()).get("authorization", "")
    if not hmac.compare_digest(str(given).encode(), f"Bearer {self._settings.api_key}".encode()):
      raise _Refused(StatusCode.UNAUTHENTICATED, "the metadata `authorization: Bearer KEY` is missing or wrong")

  async def _read(self, data: bytes, context: grpc.aio.ServicerContext, name: str) -> tuple[_Text | _Ids, Request]:
    """A call's bytes -> how it is answered, and what the core is asked."""
    try:
      message = jetstream_pb2.DecodeRequest.FromString(data)
    except DecodeError:
      raise _invalid("the message is no DecodeRequest, or a text in it isn't UTF-8") from None
    _check_fields(message)
    kind = message.WhichOneof("content")
    if kind is None:
      raise _invalid("the content is missing: set text_content or token_content")
    if kind == "token_content":
      field, output = "token_content.token_ids", _Ids()
      prompt = _check_ids(message.token_content.token_ids, self._core.vocab_size)
    else:
      field, output = "text_content.text", _Text(self._tokenizer)
      # Megabytes of text would hold everybody's tokens up.
      prompt = tuple(await asyncio.to_thread(self._tokenizer.encode, message.text_content.text))
    if not prompt:
      raise _invalid(f"{field} is empty")
    if len(prompt) > self._core.max_prompt_length:
      raise _invalid(f"{field} has {len(prompt)} tokens, this server takes up to {self._core.max_prompt_length}")
    room = self._core.max_length - len(prompt)
    if not 1 <= message.max_tokens <= room:
      raise _invalid(f"max_tokens={message.max_tokens} must lie in 1..{room} after a prompt of {len(prompt)} tokens")
    waits = [seconds for seconds in (self._settings.timeout, context.time_remaining()) if seconds is not None]
    return output, Request(
      prompt,
      message.max_tokens,
      **self._settings.sampling._asdict(),
      timeout=max(min(waits), 1e-3) if waits else None,
      name=name,
    )

  async def _stream(
    self, ticket: Ticket, output: _Text | _Ids, context: grpc.aio.ServicerContext, log: RequestLog
  ) -> tuple[StatusCode, str]:
    """Sends what the core delivers; returns how it ended."""
    async for item in ticket:
      if isinstance(item, Finish):
        if item.reason == "error" and self._core.healthy and not self._core.ready:
          return StatusCode.UNAVAILABLE, item.message  # the server is going; another one may answer
        if item.reason in _ENDED:
          return _ENDED[item.reason], item.message or item.reason
        if (rest := output.flush()) is not None:
          await context.write(rest)
        context.set_trailing_metadata((("request-id", log.name), ("finish-reason", item.reason)))
        return StatusCode.OK, item.reason
      log.token()
      if item.id not in self._tokenizer.stop_ids and (response := output.push(item.id)) is not None:
        await context.write(response)
    return StatusCode.INTERNAL, "the stream ended without a reason"


class Server:
  """The face, listening. `port` is where."""

  def __init__(self, server: grpc.aio.Server, port: int):
    self._server, self.port = server, port

  async def stop(self, grace: float | None) -> None:
    """Takes no further calls, and ends those that are still open after `grace` seconds."""
    await self._server.stop(grace)


async def start(core: Core, tokenizer: K3Tokenizer, settings: Settings) -> Server:
  """Starts the face in the running event loop.

  Raises:
    UserError: the address can't be listened at.
  """
  server = grpc.aio.server(
    options=(
      ("grpc.so_reuseport", 0),  # or a second server would share the port in silence
      ("grpc.max_receive_message_length", settings.max_message_bytes),
      ("grpc.keepalive_time_ms", _KEEPALIVE_MS),  # or a caller whose machine has vanished would stay for hours
    ),
  )
  service = Service(core, tokenizer, settings)
  # As `add_OrchestratorServicer_to_server` does it, but `Decode` reads its message itself: what grpc says of bytes that
  # are none is INTERNAL and a traceback.
  handlers = {
    "Decode": grpc.unary_stream_rpc_method_handler(
      service.Decode, response_serializer=jetstream_pb2.DecodeResponse.SerializeToString
    ),
    "HealthCheck": grpc.unary_unary_rpc_method_handler(
      service.HealthCheck, response_serializer=jetstream_pb2.HealthCheckResponse.SerializeToString
    ),
  }
  server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("jetstream_proto.Orchestrator", handlers),))
  address = f"[{settings.host}]" if ":" in settings.host else settings.host
  try:
    port = server.add_insecure_port(f"{address}:{settings.port}")
  except RuntimeError as error:
    raise UserError(f"gRPC can't listen at {address}:{settings.port}: {error}") from error
  await server.start()
  return Server(server, port)
