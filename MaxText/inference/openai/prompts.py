"""A checked body → what the core is asked: prompts in ids, lengths, seeds."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from MaxText.errors import UserError
from MaxText.inference.chat import render_chat
from MaxText.inference.openai.errors import ApiError, shown
from MaxText.inference.openai.fields import MAX_CHOICES, ChatRequest, CompletionRequest
from MaxText.inference.openai.generation import Choice
from MaxText.inference.openai.output import Output
from MaxText.inference.serving.requests import Core, Request
from MaxText.inference.tokenizer import K3Tokenizer

CHARS_PER_TOKEN = 16  # more than text has; a text of more characters a token is refused without being encoded
_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


class Face(NamedTuple):
  """What the routes work with.

  Attributes:
    core: what generates.
    tokenizer: the model's.
    thinking: whether a chat thinks where its request doesn't say.
    log_prompts: prompts are written to the log.
    timeout: seconds that a request may take; None: any.
  """

  core: Core
  tokenizer: K3Tokenizer
  thinking: bool = True
  log_prompts: bool = False
  timeout: float | None = None


def check_model(core: Core, name: str) -> None:
  """404 for any model but the one that is served."""
  if name != core.model:
    message = f"there is no model {shown(name)} here, only {core.model!r}"
    raise ApiError(404, message, "model", "model_not_found")


async def completion_choices(face: Face, body: CompletionRequest, name: str) -> list[Choice]:
  """The answers that a completion asks for: of each prompt in turn, n.

  Raises:
    ApiError: a prompt is empty, too long or not the model's, or the answers are too many or too long.
  """
  prompts = body.prompts
  n = body.n or 1
  _check_count(len(prompts) * n)
  _check_chars(face.core, max(len(p) if isinstance(p, str) else 0 for p in prompts), "prompt")

  def encode() -> list[list[int]]:
    return [_checked_ids(face.core, p) if isinstance(p, list) else face.tokenizer.encode(p) for p in prompts]

  choices = []
  for prompt in await _apart(encode, "prompt"):
    # OpenAI's default may be more than there is room for; what a client asks for may not.
    room = _room(face.core, prompt, "prompt")
    length = _length(body.max_tokens, room, min(_COMPLETION_TOKENS, room), "max_tokens")
    requests = _requests(face, body, prompt, length, body.logprobs, name, first=len(choices))
    choices += [Choice(r, Output(face.tokenizer, body.stops, None, body.logprobs is not None)) for r in requests]
  return choices


async def chat_choices(face: Face, body: ChatRequest, name: str) -> list[Choice]:
  """The n answers that a chat asks for; errors as `completion_choices`."""
  _check_count(body.n or 1)
  thinking = face.thinking if body.thinking is None else body.thinking
  messages = [message.rendered() for message in body.messages]
  _check_chars(face.core, sum(len(text) for message in messages for text in message.values()), "messages")

  def encode() -> list[int]:
    return render_chat(face.tokenizer, messages, add_generation_prompt=True, thinking=thinking)

  prompt = await _apart(encode, "messages")
  room = _room(face.core, prompt, "messages")
  field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
  length = _length(body.max_tokens or body.max_completion_tokens, room, room, field)
  logprobs = (body.top_logprobs or 0) if body.logprobs else None
  requests = _requests(face, body, prompt, length, logprobs, name)
  return [Choice(r, Output(face.tokenizer, body.stops, thinking, bool(body.logprobs))) for r in requests]


def _check_count(choices: int) -> None:
  if choices > MAX_CHOICES:
    raise ApiError(400, f"prompts times n are {choices}, a request may have {MAX_CHOICES}", "n", "invalid_value")


def _check_chars(core: Core, chars: int, field: str) -> None:
  most = CHARS_PER_TOKEN * core.max_prompt_length
  if chars > most:
    raise ApiError(
      400, f"{field} has {chars} characters, this server reads up to {most}", field, "context_length_exceeded"
    )


def _checked_ids(core: Core, ids: list[int]) -> list[int]:
  if max(ids) >= core.vocab_size:
    message = f"prompt holds the token id {max(ids)}; the model's are 0..{core.vocab_size - 1}"
    raise ApiError(400, message, "prompt", "invalid_value")
  return ids


async def _apart(encode, field: str):
  """Runs it in a thread: a long text mustn't hold up other requests' tokens."""
  try:
    return await asyncio.to_thread(encode)
  except UserError as error:
    raise ApiError(400, str(error), field, "invalid_value") from None


def _room(core: Core, prompt: Sequence[int], field: str) -> int:
  """How many tokens an answer may have."""
  longest = min(core.max_prompt_length, core.max_length - 1)
  if len(prompt) > longest:
    message = f"{field} has {len(prompt)} tokens, this server takes up to {longest}"
    raise ApiError(400, message, field, "context_length_exceeded")
  return core.max_length - len(prompt)


def _length(asked: int | None, room: int, default: int, field: str) -> int:
  if asked is not None and asked > room:
    message = f"{field}={shown(asked)} is more than the {room} tokens that there is room for after the prompt"
    raise ApiError(400, message, field, "context_length_exceeded")
  return asked or default


def _requests(
  face: Face,
  body: CompletionRequest | ChatRequest,
  prompt: Sequence[int],
  length: int,
  logprobs: int | None,
  name: str,
  first: int = 0,
) -> list[Request]:
  """The n requests of one prompt. With a seed each prompt's answers are what they would be without the others."""
  seeds = [secrets.randbits(32) if body.seed is None else (body.seed + i) % 2**32 for i in range(body.n or 1)]
  temperature = 1.0 if body.temperature is None else body.temperature
  return [
    Request(
      tuple(prompt),
      length,
      temperature=temperature,
      top_k=min(max(body.top_k or 0, 0), face.core.vocab_size),
      top_p=1.0 if body.top_p is None else body.top_p,
      cut_temperature=temperature,
      seed=seed,
      logprobs=logprobs,
      ignore_eos=isinstance(body, CompletionRequest) and bool(body.ignore_eos),
      timeout=face.timeout,
      name=f"{name}/{first + i}",
    )
    for i, seed in enumerate(seeds)
  ]
