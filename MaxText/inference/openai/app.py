"""The routes of the OpenAI-compatible server."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel

from MaxText.inference.openai import errors
from MaxText.inference.openai.answers import ChatCompletion, Completion, Model, ModelList, Usage
from MaxText.inference.openai.fields import ChatRequest, CompletionRequest
from MaxText.inference.openai.forms import ChatForm, CompletionForm, Form, Heading
from MaxText.inference.openai.gate import Gate
from MaxText.inference.openai.generation import Choice, Generation
from MaxText.inference.openai.output import Piece
from MaxText.inference.openai.prompts import CHARS_PER_TOKEN, Face, chat_choices, check_model, completion_choices

_BODY_BYTES = 2**20  # for all of a body but its prompt

_REFUSED = {
  code: {"model": errors.ErrorAnswer, "description": description}
  for code, description in {
    400: "A field's value is wrong, or asks for what isn't supported; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body didn't come in time.",
    413: "The body is too large.",
    429: "The queue is full; try again later.",
    500: "The generation failed.",
    503: "The server is starting, shutting down, or has failed.",
    504: "The generation took longer than the server allows.",
  }.items()
}
_SOME_REFUSED = {code: _REFUSED[code] for code in (401, 404, 429)}
_STREAM = {200: {"content": {"text/event-stream": {}}}}


def create_app(face: Face, registry: CollectorRegistry, key: str | None = None) -> Gate:
  """The whole face as an ASGI app.

  Args:
    face: what the routes work with.
    registry: what /metrics shows.
    key: what clients of /v1 have to know; None: nothing.
  """
  app = FastAPI(
    title="Kimi K3 in MaxText",
    description="OpenAI-compatible completions and chats. What isn't supported is refused by name, never ignored.",
    version="1",
    redoc_url=None,
  )
  errors.install(app)
  _add_generation(app, face)
  _add_models(app, face)
  _add_probes(app, face, registry)
  schemas = app.openapi()["components"]["schemas"]  # FastAPI keeps it
  for body in (CompletionRequest, ChatRequest):
    schemas[body.__name__]["properties"]["model"]["enum"] = [face.core.model]
  return Gate(app, key, _BODY_BYTES + CHARS_PER_TOKEN * face.core.max_prompt_length)


def _add_generation(app: FastAPI, face: Face) -> None:
  @app.post("/v1/completions", response_model=Completion, responses=_REFUSED | _STREAM)
  async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continues texts. Control tokens spelt out in a text are ordinary characters."""
    return await _answer(face, request, body, completion_choices, CompletionForm, "cmpl")

  @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=_REFUSED | _STREAM)
  async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answers the last message of a conversation."""
    return await _answer(face, request, body, chat_choices, ChatForm, "chatcmpl")


def _add_models(app: FastAPI, face: Face) -> None:
  core = face.core
  model = Model(id=core.model, created=int(time.time()), owned_by="local", max_model_len=core.max_length)

  @app.get("/v1/models", responses=_SOME_REFUSED)
  async def models() -> ModelList:
    """The one model that is served."""
    return ModelList(data=[model])

  @app.get("/v1/models/{name:path}", responses=_SOME_REFUSED)
  async def one_model(name: str) -> Model:
    """What is known of a model."""
    check_model(core, name)
    return model


def _add_probes(app: FastAPI, face: Face, registry: CollectorRegistry) -> None:
  @app.get("/health", responses={503: {"description": "The engine has failed; the process is about to exit."}})
  async def health() -> Response:
    """Whether the engine works. Also while it compiles, and while it drains."""
    return _state(face.core.healthy, "healthy")

  @app.get("/ready", responses={503: {"description": "Starting, draining or failed."}})
  async def ready() -> Response:
    """Whether requests are taken."""
    return _state(face.core.ready, "ready")

  @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
  def metrics() -> Response:
    """For Prometheus."""
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _state(good: bool, what: str) -> JSONResponse:
  return JSONResponse({what: good}, 200 if good else 503)


async def _answer(
  face: Face,
  request: Request,
  body: CompletionRequest | ChatRequest,
  read: Callable[[Face, Any, str], Awaitable[list[Choice]]],
  form: Callable[[Heading], Form],
  prefix: str,
) -> Response:
  """Generates what a checked body asks for, and sends it in one API's form."""
  check_model(face.core, body.model)
  log = request.state.log
  choices = await read(face, body, log.name)
  prompts = [choice.request.prompt for choice in choices[:: body.n or 1]]
  for prompt in prompts:
    log.prompt(len(prompt))
  if face.log_prompts:
    log.show_prompt([face.tokenizer.decode(prompt) for prompt in prompts])

  def usage() -> Usage:
    before, after = sum(map(len, prompts)), sum(choice.output.tokens for choice in choices)
    return Usage(prompt_tokens=before, completion_tokens=after, total_tokens=before + after)

  # `logprobs` is a number in one API, where 0 asks for them as well, and a truth in the other.
  logprobs = body.logprobs is not None and body.logprobs is not False
  heading = Heading.now(face.tokenizer, face.core.model, f"{prefix}-{log.name}", logprobs)
  generation = request.state.generation = Generation(face.core, choices, log)
  try:
    if body.stream:
      events = _events(generation, form(heading), len(choices), usage if body.wants_usage else None, request)
      return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
    pieces: list[list[Piece]] = [[] for _ in choices]
    reasons = [""] * len(choices)
    async for event in generation.events():
      pieces[event.index].append(event.piece)
      reasons[event.index] = event.finish_reason or ""
    answer = form(heading).whole(list(zip(map(_joined, pieces), reasons, strict=True)), usage())
    return Response(answer.model_dump_json(), media_type="application/json")
  finally:
    request.state.reason = ",".join(generation.reasons)


def _joined(pieces: list[Piece]) -> Piece:
  return Piece(
    "".join(p.reasoning for p in pieces),
    "".join(p.text for p in pieces),
    tuple(reported for p in pieces for reported in p.reported),
  )


async def _events(
  generation: Generation, form: Form, answers: int, usage: Callable[[], Usage] | None, request: Request
) -> AsyncIterator[str]:
  """A stream's server-sent events. One that fails ends with an error in place of [DONE]."""
  try:
    for chunk in form.opening(answers):
      yield _event(chunk)
    async for event in generation.events():
      if event.piece != Piece() or event.finish_reason:
        yield _event(form.chunk(event))
    if usage is not None:
      yield _event(form.closing(usage()))
    yield "data: [DONE]\n\n"
  except errors.ApiError as error:
    yield f"data: {error.body()}\n\n"
  finally:
    request.state.reason = ",".join(generation.reasons)


def _event(chunk: BaseModel) -> str:
  return f"data: {chunk.model_dump_json()}\n\n"
