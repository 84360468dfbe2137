"""What is sent, in OpenAI's form."""

from typing import Any, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length"]


def _sparse() -> Any:
  """A field that is left out of the JSON where it holds nothing."""
  return Field(None, exclude_if=lambda value: value is None)


class Usage(BaseModel):
  prompt_tokens: int
  completion_tokens: int
  total_tokens: int


class CompletionLogprobs(BaseModel):
  tokens: list[str]
  token_logprobs: list[float]
  top_logprobs: list[dict[str, float]]
  text_offset: list[int]


class CompletionChoice(BaseModel):
  index: int
  text: str
  logprobs: CompletionLogprobs | None = None
  finish_reason: FinishReason | None = None  # None in a stream that goes on


class Completion(BaseModel):
  """The answer of /v1/completions; in a stream, each of its chunks."""

  id: str
  object: Literal["text_completion"] = "text_completion"
  created: int
  model: str
  choices: list[CompletionChoice]
  usage: Usage | None = _sparse()


class TokenLogprob(BaseModel):
  token: str
  bytes: list[int]
  logprob: float


class ContentLogprob(TokenLogprob):
  top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
  """Of the content alone: neither of the reasoning nor of the markup around both."""

  content: list[ContentLogprob]


class ChatMessage(BaseModel):
  role: Literal["assistant"] = "assistant"
  content: str
  reasoning_content: str | None = _sparse()


class ChatChoice(BaseModel):
  index: int
  message: ChatMessage
  logprobs: ChatLogprobs | None = None
  finish_reason: FinishReason


class ChatCompletion(BaseModel):
  """The answer of /v1/chat/completions."""

  id: str
  object: Literal["chat.completion"] = "chat.completion"
  created: int
  model: str
  choices: list[ChatChoice]
  usage: Usage


class ChatDelta(BaseModel):
  role: Literal["assistant"] | None = _sparse()
  content: str | None = _sparse()
  reasoning_content: str | None = _sparse()


class ChatChunkChoice(BaseModel):
  index: int
  delta: ChatDelta
  logprobs: ChatLogprobs | None = None
  finish_reason: FinishReason | None = None


class ChatChunk(BaseModel):
  """What is new, in a stream of /v1/chat/completions."""

  id: str
  object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
  created: int
  model: str
  choices: list[ChatChunkChoice]
  usage: Usage | None = _sparse()


class Model(BaseModel):
  id: str
  object: Literal["model"] = "model"
  created: int
  owned_by: str
  max_model_len: int


class ModelList(BaseModel):
  object: Literal["list"] = "list"
  data: list[Model]
