"""What a face hands to the core and gets back: requests in, tokens out, in token ids. Text belongs to the faces.

A face checks what its protocol can express and answers with its own errors; `Core.submit` checks again what would hurt
the engine, whoever asks, and raises one of the errors below before any work is done.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

MAX_LOGPROBS = 20  # alternatives of a token, OpenAI's limit; every step computes as many for those who ask


class Rejected(Exception):
  """A request that won't be served; nothing was done for it. The message is one line for its sender."""


class InvalidRequest(Rejected):
  """It can never be served: too long, empty, ids that the model lacks, numbers out of range (400, INVALID_ARGUMENT)."""


class Overloaded(Rejected):
  """The queue is full; later it may be served (429, RESOURCE_EXHAUSTED)."""


class Unavailable(Rejected):
  """The server is starting, draining or has failed (503, UNAVAILABLE)."""


@dataclass(frozen=True)
class Request:
  """One sequence to generate.

  Attributes:
    prompt: token ids, not empty; len(prompt) + max_tokens may not exceed the cache's length.
    max_tokens: most tokens to generate, at least 1.
    temperature: 0 is greedy.
    top_k: only the k likeliest tokens are drawn from; 0: all.
    top_p: only the likeliest tokens that together reach this probability are drawn from; 1: all.
    cut_temperature: of the probabilities that `top_p` is about; 1: the model's own.
    seed: of this request's draws, 0 to 2^32 − 1. Equal requests with equal seeds get equal tokens, beside any others.
    logprobs: how many alternatives each token is reported with; None: no log-probabilities at all.
    stop_ids: ids that end the sequence, besides the engine's own. The token that stops is reported.
    ignore_eos: the engine's own stop ids end it not: it goes on for max_tokens.
    timeout: seconds from `submit` after which it ends with reason "timeout"; None: no limit.
    name: what the log calls it.
  """

  prompt: tuple[int, ...]
  max_tokens: int
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  cut_temperature: float = 1.0
  seed: int = 0
  logprobs: int | None = None
  stop_ids: frozenset[int] = frozenset()
  ignore_eos: bool = False
  timeout: float | None = None
  name: str = ""


class Token(NamedTuple):
  """One generated token.

  Attributes:
    id: of the token; the one that stopped a sequence is the last.
    logprob: natural log of its probability under the model's softmax (temperature and cuts left out); 0.0 unless asked.
    alternatives: (id, logprob) of the likeliest tokens, likeliest first, as many as were asked for.
  """

  id: int
  logprob: float = 0.0
  alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Finish:
  """The end of a sequence, exactly one for each request.

  Attributes:
    reason: "stop" (a stop id), "length" (max_tokens), "cancelled", "timeout" or "error".
    message: what went wrong, for "error" and "timeout".
  """

  reason: str
  message: str = ""


class Ticket(Protocol):
  """A request that was accepted."""

  def __aiter__(self) -> AsyncIterator[Token | Finish]:
    """Tokens as they come, then one `Finish`. For one reader, in an event loop; a slow one holds nobody up."""
    ...

  def cancel(self) -> None:
    """Ends the request: its slot is free at the next step. From any thread; a second time it does nothing."""
    ...


class Core(Protocol):
  """The part of the core that faces use."""

  vocab_size: int
  max_prompt_length: int  # tokens
  max_length: int  # tokens of prompt and answer together
  model: str  # name that clients ask for

  def submit(self, request: Request) -> Ticket:
    """Queues a request; from any thread.

    The ticket delivers to the event loop that is running where `submit` is called.

    Raises:
      InvalidRequest, Overloaded, Unavailable: see there.
    """
    ...

  @property
  def healthy(self) -> bool:
    """False once the engine has failed: every stream has ended with an error, and the process is about to exit."""
    ...

  @property
  def ready(self) -> bool:
    """True while requests are accepted: everything is compiled, and the server isn't draining."""
    ...
