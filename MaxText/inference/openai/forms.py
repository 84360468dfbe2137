"""The forms of the two APIs: pieces of text as answers, whole or chunk by chunk."""

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pydantic import BaseModel

from MaxText.inference.openai.answers import (
  ChatChoice,
  ChatChunk,
  ChatChunkChoice,
  ChatCompletion,
  ChatDelta,
  ChatLogprobs,
  ChatMessage,
  Completion,
  CompletionChoice,
  CompletionLogprobs,
  ContentLogprob,
  TokenLogprob,
  Usage,
)
from MaxText.inference.openai.generation import Event
from MaxText.inference.openai.output import Piece, Reported
from MaxText.inference.tokenizer import K3Tokenizer


class Heading(NamedTuple):
  """What all chunks of an answer have in common.

  Attributes:
    tokenizer: names the tokens whose log-probabilities are reported.
    model: its name.
    id: of the answer.
    created: when, in seconds since 1970.
    logprobs: they are asked for.
  """

  tokenizer: K3Tokenizer
  model: str
  id: str
  created: int
  logprobs: bool

  @classmethod
  def now(cls, tokenizer: K3Tokenizer, model: str, name: str, logprobs: bool) -> "Heading":
    return cls(tokenizer, model, name, int(time.time()), logprobs)

  def common(self) -> dict:
    return {"id": self.id, "created": self.created, "model": self.model}


class Form(Protocol):
  """One API's way to say it."""

  def opening(self, answers: int) -> list[BaseModel]:
    """A stream's chunks before any text."""
    ...

  def chunk(self, event: Event) -> BaseModel:
    """A stream's chunk with something new."""
    ...

  def closing(self, usage: Usage) -> BaseModel:
    """A stream's last chunk, for those who want the usage."""
    ...

  def whole(self, answers: Sequence[tuple[Piece, str]], usage: Usage) -> BaseModel:
    """The whole of what was generated: each answer and its finish reason."""
    ...


class CompletionForm:
  """/v1/completions."""

  def __init__(self, heading: Heading):
    self._heading = heading

  def opening(self, answers: int) -> list[BaseModel]:
    return []

  def chunk(self, event: Event) -> Completion:
    return Completion(**self._heading.common(), choices=[self._choice(event.index, event.piece, event.finish_reason)])

  def closing(self, usage: Usage) -> Completion:
    return Completion(**self._heading.common(), choices=[], usage=usage)

  def whole(self, answers: Sequence[tuple[Piece, str]], usage: Usage) -> Completion:
    choices = [self._choice(i, piece, reason) for i, (piece, reason) in enumerate(answers)]
    return Completion(**self._heading.common(), choices=choices, usage=usage)

  def _choice(self, index: int, piece: Piece, reason: str | None) -> CompletionChoice:
    logprobs = self._logprobs(piece.reported) if self._heading.logprobs else None
    return CompletionChoice(index=index, text=piece.text, logprobs=logprobs, finish_reason=reason)

  def _logprobs(self, reported: Sequence[Reported]) -> CompletionLogprobs:
    return CompletionLogprobs(
      tokens=[self._name(r.token.id) for r in reported],
      token_logprobs=[r.token.logprob for r in reported],
      # The token that was drawn is among them, be it likely or not.
      top_logprobs=[
        {self._name(t): p for t, p in (*r.token.alternatives, (r.token.id, r.token.logprob))} for r in reported
      ],
      text_offset=[r.offset for r in reported],
    )

  def _name(self, token_id: int) -> str:
    """A token's text; where it is a part of a character, its bytes as OpenAI spells them."""
    data = self._heading.tokenizer.token_bytes(token_id)
    try:
      return data.decode("utf-8")
    except UnicodeDecodeError:
      return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatForm:
  """/v1/chat/completions."""

  def __init__(self, heading: Heading):
    self._heading = heading

  def opening(self, answers: int) -> list[BaseModel]:
    return [
      self._chunk(ChatChunkChoice(index=i, delta=ChatDelta(role="assistant", content=""))) for i in range(answers)
    ]

  def chunk(self, event: Event) -> ChatChunk:
    piece = event.piece
    delta = ChatDelta(content=piece.text or None, reasoning_content=piece.reasoning or None)
    logprobs = self._logprobs(piece.reported) if piece.reported else None
    return self._chunk(
      ChatChunkChoice(index=event.index, delta=delta, logprobs=logprobs, finish_reason=event.finish_reason)
    )

  def closing(self, usage: Usage) -> ChatChunk:
    return ChatChunk(**self._heading.common(), choices=[], usage=usage)

  def whole(self, answers: Sequence[tuple[Piece, str]], usage: Usage) -> ChatCompletion:
    choices = [
      ChatChoice(
        index=i,
        message=ChatMessage(content=piece.text, reasoning_content=piece.reasoning or None),
        logprobs=self._logprobs(piece.reported) if self._heading.logprobs else None,
        finish_reason=reason,
      )
      for i, (piece, reason) in enumerate(answers)
    ]
    return ChatCompletion(**self._heading.common(), choices=choices, usage=usage)

  def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
    return ChatChunk(**self._heading.common(), choices=[choice])

  def _logprobs(self, reported: Sequence[Reported]) -> ChatLogprobs:
    return ChatLogprobs(
      content=[
        ContentLogprob(
          **self._token(r.token.id, r.token.logprob),
          top_logprobs=[TokenLogprob(**self._token(*alternative)) for alternative in r.token.alternatives],
        )
        for r in reported
      ]
    )

  def _token(self, token_id: int, logprob: float) -> dict:
    data = self._heading.tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": logprob}
