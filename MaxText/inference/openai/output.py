"""One answer: the core's tokens in, text and log-probabilities out."""

from collections.abc import Sequence
from typing import NamedTuple

from MaxText.inference.chat import Response, ResponseStream
from MaxText.inference.openai.stops import StopStrings
from MaxText.inference.serving.requests import Token
from MaxText.inference.tokenizer import K3Tokenizer, StreamDecoder


class Reported(NamedTuple):
  """A token whose log-probability is asked for.

  Attributes:
    token: from the core.
    offset: where in the text it begins, in characters.
  """

  token: Token
  offset: int


class Piece(NamedTuple):
  """What a token adds to an answer.

  Attributes:
    reasoning: text of a chat's thoughts.
    text: text of the answer.
    reported: tokens of that text, if log-probabilities are asked for.
  """

  reasoning: str = ""
  text: str = ""
  reported: tuple[Reported, ...] = ()


class Output:
  """An answer's text, taken from its tokens as they come.

  Stop strings and log-probabilities are about the answer alone: neither about a chat's reasoning nor about the markup
  around both.

  Attributes:
    tokens: how many have come.
    stopped: a stop string has come; there is no more to add.
  """

  def __init__(self, tokenizer: K3Tokenizer, stops: Sequence[str], thinking: bool | None, report: bool):
    """Args:
    tokenizer: the model's.
    stops: stop strings.
    thinking: of a chat, as given to `render_chat`; None: the answer isn't a chat's but the text as it comes.
    report: log-probabilities are asked for.
    """
    self.tokens = 0
    self._tokenizer = tokenizer
    self._chat = None if thinking is None else ResponseStream(tokenizer, thinking)
    self._plain = StreamDecoder(tokenizer)
    self._stops = StopStrings(stops)
    self._report = report
    self._waiting: list[Reported] = []  # tokens of text that isn't passed on yet
    self._decoded = 0  # characters of the answer's text so far
    self._passed_on = 0  # of these

  @property
  def stopped(self) -> bool:
    return self._stops.found

  def push(self, token: Token) -> Piece:
    """Takes a token; returns what it adds, often nothing."""
    self.tokens += 1
    if token.id in self._tokenizer.stop_ids:
      return Piece()
    if self._report and self._is_text(token.id):
      self._waiting.append(Reported(token, self._decoded))
    if self._chat is not None:
      return self._pass_on(self._chat.push(token.id))
    return self._pass_on(Response("", self._plain.push(token.id)))

  def flush(self) -> Piece:
    """Ends the answer: returns what was held back."""
    rest = self._pass_on(self._chat.flush() if self._chat is not None else Response("", self._plain.flush()))
    if self.stopped:
      return rest
    reported = rest.reported + tuple(self._waiting)
    return Piece(rest.reasoning, rest.text + self._stops.flush(), reported)

  def _is_text(self, token_id: int) -> bool:
    return self._chat is None or (self._chat.in_content and not self._tokenizer.is_special(token_id))

  def _pass_on(self, new: Response) -> Piece:
    self._decoded += len(new.content)
    text = self._stops.push(new.content)
    self._passed_on += len(text)
    reported = tuple(r for r in self._waiting if r.offset < self._passed_on)
    self._waiting = self._waiting[len(reported) :]
    return Piece(new.reasoning, text, reported)
