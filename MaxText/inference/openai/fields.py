"""What a client may ask for: the bodies of both APIs. Whatever isn't named here is refused by its name.

Every optional field may also be null, which is as if it weren't there.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from MaxText.inference.openai.errors import ApiError, shown
from MaxText.inference.serving.requests import MAX_LOGPROBS

MAX_CHOICES = 64  # of one request: prompts times n
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_MESSAGES = 1024

_NO_PREFIX_CACHE = "there is no prefix caching: a recurrent state can't be cut at any token"

# Fields of OpenAI's and vLLM's that ask for something else than an answer as it is served here. For each the values
# that ask for nothing, which are let pass, and what to say of others.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
  "audio": ((), "text only"),
  "best_of": ((), "it must equal n"),
  "cache_salt": ((), _NO_PREFIX_CACHE),
  "echo": ((False,), "the answer holds no prompt"),
  "frequency_penalty": ((0,), "only 0"),
  "function_call": (("none",), "no tools"),
  "functions": (([],), "no tools"),
  "ignore_eos": ((False,), "only where a text is continued, in /v1/completions"),
  "logit_bias": (({},), "only empty"),
  "min_p": ((0,), "only 0"),
  "modalities": ((["text"],), "text only"),
  "parallel_tool_calls": ((), "no tools"),
  "prediction": ((), "leave it out"),
  "presence_penalty": ((0,), "only 0"),
  "prompt_cache_key": ((), _NO_PREFIX_CACHE),
  "prompt_cache_retention": ((), _NO_PREFIX_CACHE),
  "reasoning_effort": ((), 'set chat_template_kwargs={"thinking": true or false}'),
  "repetition_penalty": ((1,), "only 1"),
  "response_format": (({"type": "text"},), "text only"),
  "service_tier": (("auto", "default"), "only auto"),
  "store": ((False,), "nothing is stored"),
  "suffix": (("",), "text is continued, not filled in"),
  "tool_choice": (("none",), "no tools"),
  "tools": (([],), "no tools"),
  "verbosity": ((), "leave it out"),
  "web_search_options": ((), "no tools"),
}

_UNSUPPORTED_IN_MESSAGE: dict[str, tuple[tuple[Any, ...], str]] = {
  "annotations": (([],), "text only"),
  "audio": ((), "text only"),
  "function_call": ((), "no tools"),
  "refusal": ((), "leave it out"),
  "tool_call_id": ((), "no tools"),
  "tool_calls": (([],), "no tools"),
}


def _one_of(expected: str) -> WrapValidator:
  """Has one sentence say what a field of several forms may be; pydantic would complain once for each form."""

  def check(value, handler):
    try:
      return handler(value)
    except ValidationError:
      raise PydanticCustomError("form", "must be {expected}", {"expected": expected}) from None

  return WrapValidator(check)


class _Fields(BaseModel):
  model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
  unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}

  @model_validator(mode="before")
  @classmethod
  def _refuse_others(cls, data: Any) -> Any:
    if not isinstance(data, dict):
      return data
    known = {}
    for name, value in data.items():
      if name in cls.model_fields:
        known[name] = value
        continue
      if name not in cls.unsupported:
        possible = ", ".join(cls.model_fields)
        raise ApiError(400, f"unknown field {shown(name)}; possible: {possible}", name, "unknown_parameter")
      nothing, why = cls.unsupported[name]
      if name == "best_of":
        nothing = (data.get("n") or 1,)
      if value is not None and value not in nothing:
        raise ApiError(400, f"{name}={shown(value)} is not supported: {why}", name, "unsupported_parameter")
    return known


class StreamOptions(_Fields):
  include_usage: bool | None = Field(None, description="Send a last chunk with the usage.")


class TextPart(_Fields):
  type: Literal["text"]
  text: str

  @model_validator(mode="before")
  @classmethod
  def _text_only(cls, data: Any) -> Any:
    kind = data.get("type") if isinstance(data, dict) else None
    if isinstance(kind, str) and kind != "text":
      raise ApiError(
        400, f"content of type {shown(kind)} is not supported: text only", "messages", "unsupported_content"
      )
    return data


class Message(_Fields):
  unsupported = _UNSUPPORTED_IN_MESSAGE
  role: Literal["system", "user", "assistant"]
  content: Annotated[str | list[TextPart], _one_of('a string or a list of {"type": "text", "text": …}')]
  name: str | None = Field(None, description="Who speaks.")
  reasoning_content: str | None = Field(None, description="What the assistant thought; of an assistant alone.")

  def rendered(self) -> dict[str, str]:
    """As `render_chat` takes it."""
    message = self.model_dump(exclude_none=True)
    if not isinstance(self.content, str):
      message["content"] = "".join(part.text for part in self.content)
    return message


class TemplateOptions(_Fields):
  thinking: bool | None = Field(None, description="Think before the answer.")


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
  StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)],
  _one_of(f"a string or a list of up to {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters"),
]
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
_SEVERAL = Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
Prompt = Annotated[
  Text | Annotated[list[Text], _SEVERAL] | Ids | Annotated[list[Ids], _SEVERAL],
  _one_of(
    f"a string, a list of token ids, or a list of up to {MAX_CHOICES} strings or lists of token ids; none of them empty"
  ),
]


class _Request(_Fields):
  unsupported = _UNSUPPORTED
  model: str = Field(description="The model's name, as /v1/models lists it.")
  temperature: float | None = Field(None, ge=0, le=2, description="0: the likeliest token. 1 if left out.")
  top_p: float | None = Field(
    None, gt=0, le=1, description="Only the likeliest tokens that together reach this probability. 1 if left out."
  )
  top_k: int | None = Field(None, ge=-1, description="Only the k likeliest tokens; 0, -1 or left out: all.")
  seed: int | None = Field(
    None, ge=0, lt=2**32, description="Equal requests with equal seeds get equal answers. Left out: one at random."
  )
  n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Answers a prompt; the i-th is drawn with seed + i.")
  stop: Stop | None = Field(None, description="The text ends before the first of these.")
  max_tokens: int | None = Field(None, ge=1, description="Most tokens of an answer.")
  stream: bool | None = Field(None, description="Send the answer as it comes, as server-sent events.")
  stream_options: StreamOptions | None = None
  user: str | None = Field(None, description="Taken and not used.")
  metadata: dict[str, str] | None = Field(None, description="Taken and not used.")

  @model_validator(mode="after")
  def _options_of_a_stream(self):
    if self.stream_options is not None and not self.stream:
      raise ApiError(400, "stream_options goes with stream=true only", "stream_options", "invalid_value")
    return self

  @property
  def stops(self) -> list[str]:
    return [self.stop] if isinstance(self.stop, str) else self.stop or []

  @property
  def wants_usage(self) -> bool:
    """In a stream."""
    return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(_Request):
  """Continues a text."""

  prompt: Prompt
  logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Report each token with so many alternatives.")
  ignore_eos: bool | None = Field(
    None, description="Go on after an end token, for max_tokens in all. As vLLM takes it."
  )

  @property
  def prompts(self) -> list[str] | list[list[int]]:
    """One an answer, or n answers."""
    several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
    return self.prompt if several else [self.prompt]


class ChatRequest(_Request):
  """Answers the last message of a conversation."""

  messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
  max_completion_tokens: int | None = Field(None, ge=1, description="The same as max_tokens.")
  logprobs: bool | None = Field(None, description="Report each token of the content with its log-probability.")
  top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="And so many alternatives.")
  chat_template_kwargs: TemplateOptions | None = Field(None, description="As vLLM takes it.")

  @model_validator(mode="after")
  def _agree(self):
    if self.top_logprobs is not None and not self.logprobs:
      raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs", "invalid_value")
    if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
      raise ApiError(
        400, "max_tokens and max_completion_tokens differ; leave one of them out", "max_tokens", "invalid_value"
      )
    return self

  @property
  def thinking(self) -> bool | None:
    """None: the server's own choice."""
    return self.chat_template_kwargs.thinking if self.chat_template_kwargs else None
