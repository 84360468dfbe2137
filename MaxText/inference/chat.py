"""Kimi K3's chat markup ("XTML"): messages to ids, and a reply's ids back to reasoning and content.

An element is `<|open|>TAG key="value"<|sep|>…<|close|>TAG<|sep|>`, a message is an element `message` and the id
`<|end_of_msg|>` after it. Only those four markers are control ids, and only this module places them: tags, attributes
and whatever a person wrote are encoded as plain text, so markup spelt out in a message is just its characters.

Markup is written, and read back, as ids and never as one string: the model was trained on pieces encoded one by one
(a tag; for each attribute its name, `="`, its value, `"`; a text), and joining two pieces first could merge across
their border and give other ids.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from MaxText.errors import UserError
from MaxText.inference.tokenizer import K3Tokenizer, StreamDecoder

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MSG = "<|end_of_msg|>"

# What a message of each role may hold besides `role` and `content`.
_KEYS = {
  "system": ("name", "type"),
  "user": ("name",),
  "assistant": ("name", "reasoning_content"),
  "tool": ("name",),
}
ROLES = tuple(_KEYS)


class Response(NamedTuple):
  """A reply, or what one id added to it.

  Attributes:
    reasoning: the text of the element `think`.
    content: the text of the element `response`: what to show.
  """

  reasoning: str
  content: str


def render_chat(
  tokenizer: K3Tokenizer,
  messages: Sequence[Mapping[str, str | None]],
  add_generation_prompt: bool = True,
  thinking: bool = True,
) -> list[int]:
  """Renders a conversation to the ids the model reads.

  Args:
    tokenizer: the model's tokenizer.
    messages: oldest first; each a dict with `role` (system, user, assistant or tool), `content` (a string) and, if
      wanted, `name` (who speaks; for role tool, needed: the tool), for system `type` (such as "thinking-effort"), for
      assistant `reasoning_content`. An optional key that is None counts as absent.
    add_generation_prompt: end with an open assistant message, for the model to go on with.
    thinking: the model is to think before it answers. Every assistant message then has a `think` element, empty when
      it has no reasoning, and the open message starts in one. Without, reasoning is left out of the conversation, as
      K3 does, and the open message starts in `response`.

  Returns:
    Ids, without a BOS. With messages that end in an assistant's, those of the messages before it with a generation
    prompt are a prefix of them.

  Raises:
    UserError: a message of unknown role, with a missing or unknown key, or a value that isn't a string; or no message.
  """
  if not messages:
    raise UserError("a chat needs at least one message")
  writer = _Writer(tokenizer)
  tool_results = 0
  for index, message in enumerate(messages):
    role = _checked_role(message, index)
    attributes = {"role": role}
    if role == "tool":
      tool_results += 1
      attributes |= {"tool": message["name"], "index": str(tool_results)}
    else:
      attributes |= {key: message[key] for key in ("name", "type") if message.get(key)}
    writer.open("message", attributes)
    if role == "assistant":
      tool_results = 0  # results are numbered by the calls of the assistant message before them
      if thinking:
        reasoning = message.get("reasoning_content") or ""
        writer.element("think", reasoning if reasoning.strip() else "")
      writer.element("response", message["content"])
    else:
      writer.text(message["content"])
    writer.close("message")
    writer.control(END_OF_MSG)
  if add_generation_prompt:
    writer.open("message", {"role": "assistant"})
    writer.open("think" if thinking else "response")
  return writer.ids


def _checked_role(message: Mapping[str, str | None], index: int) -> str:
  """Returns the role of a message that is fit to render; UserError naming its place and what is wrong."""
  where = f"chat message {index}"
  if not isinstance(message, Mapping):
    raise UserError(f"{where} must be a dict with role and content, got {type(message).__name__}")
  role = message.get("role")
  if role not in ROLES:
    raise UserError(f"{where} has role {role!r}; possible roles: {', '.join(ROLES)}")
  for key, value in message.items():
    if key not in ("role", "content", *_KEYS[role]):
      possible = ", ".join(("content", *_KEYS[role]))
      raise UserError(f"{where} has the key {key!r}, which a {role} message can't hold; possible keys: {possible}")
    if not isinstance(value, str) and not (value is None and key in _KEYS[role]):
      raise UserError(f"{where}: {key} must be a string, got {type(value).__name__}")
  if "content" not in message:
    raise UserError(f"{where} has no content")
  if role == "tool" and not message.get("name"):
    raise UserError(f"{where} has role tool and no name: it must name the tool whose result it is")
  return role


class _Writer:
  """Collects ids, each piece of text encoded on its own."""

  def __init__(self, tokenizer: K3Tokenizer):
    self._tokenizer = tokenizer
    self.ids: list[int] = []

  def control(self, name: str) -> None:
    self.ids.append(self._tokenizer.special(name))

  def text(self, text: str) -> None:
    self.ids += self._tokenizer.encode(text)

  def open(self, tag: str, attributes: Mapping[str, str] | None = None) -> None:
    self.control(OPEN)
    self.text(tag)
    for key, value in (attributes or {}).items():
      self.text(f" {key}")
      self.text('="')
      # Escaped, a value can't end its own quotes and add an attribute.
      self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
      self.text('"')
    self.control(SEP)

  def close(self, tag: str) -> None:
    self.control(CLOSE)
    self.text(tag)
    self.control(SEP)

  def element(self, tag: str, text: str) -> None:
    self.open(tag)
    self.text(text)
    self.close(tag)


def parse_response(tokenizer: K3Tokenizer, ids: Iterable[int], thinking: bool = True) -> Response:
  """Splits a generated reply into reasoning and content.

  Args:
    tokenizer: the model's tokenizer.
    ids: what the model generated after `render_chat(…, add_generation_prompt=True)`; up to its first stop id, if it
      has one.
    thinking: as given to `render_chat`: in which element the generation began.

  Returns:
    Both texts, whole and unstripped; see `ResponseStream` for what becomes of malformed markup.

  Raises:
    ValueError: an id is outside the vocabulary.
  """
  stream = ResponseStream(tokenizer, thinking)
  parts = [stream.push(token_id) for token_id in ids]
  parts.append(stream.flush())
  return Response("".join(part.reasoning for part in parts), "".join(part.content for part in parts))


class ResponseStream:
  """Splits a reply as its ids come. The parts, joined, are `parse_response` of all ids.

  Structure is decided by ids, so a reply that spells out a marker in plain characters keeps them as text. Models err:
  text outside `think`, `response` and other elements is content; a closing tag of an element that isn't open, a tag
  without its end and control ids of no meaning here are left out.

  Attributes:
    finished: a stop id has come; ids after it are ignored.
    other: text and markup of elements other than `think` and `response`, such as `tools`, for whoever understands them.
  """

  def __init__(self, tokenizer: K3Tokenizer, thinking: bool = True):
    """Args as `parse_response`."""
    self.finished = False
    self.other = ""
    self._tokenizer = tokenizer
    self._open_id = tokenizer.special(OPEN)
    self._close_id = tokenizer.special(CLOSE)
    self._sep_id = tokenizer.special(SEP)
    self._text = StreamDecoder(tokenizer, skip_special=True)
    self._elements = ["message", "think" if thinking else "response"]  # open ones, outermost first
    self._tag: str | None = None  # the text so far of a tag whose <|sep|> hasn't come yet
    self._tag_closes = False

  def push(self, token_id: int) -> Response:
    """Takes one id; returns what it adds, often nothing. ValueError for an id outside the vocabulary."""
    if self.finished:
      return Response("", "")
    if token_id in self._tokenizer.stop_ids:
      self.finished = True
      return self.flush()
    if token_id in (self._open_id, self._close_id):
      rest = self.flush()
      self._tag = ""
      self._tag_closes = token_id == self._close_id
      return rest
    text = self._text.push(token_id)
    if self._tag is None:
      return self._deliver(text)
    self._tag += text
    if token_id == self._sep_id:
      self._end_tag()
    return Response("", "")

  def flush(self) -> Response:
    """Ends the reply: returns U+FFFD for a character cut short, else nothing."""
    self._tag = None
    return self._deliver(self._text.flush())

  @property
  def in_content(self) -> bool:
    """Whether text that came now would be content."""
    return self._tag is None and not self._in_other() and not self._in_reasoning()

  def _deliver(self, text: str) -> Response:
    if self._in_other():
      self.other += text
      return Response("", "")
    return Response(text, "") if self._in_reasoning() else Response("", text)

  def _in_reasoning(self) -> bool:
    return bool(self._elements) and self._elements[-1] == "think"

  def _in_other(self) -> bool:
    return any(element not in ("message", "think", "response") for element in self._elements)

  def _end_tag(self) -> None:
    tag, self._tag = self._tag, None
    element = tag.split(" ", 1)[0]
    was_other = self._in_other()
    if not self._tag_closes:
      self._elements.append(element)
    elif element in self._elements:
      while self._elements.pop() != element:  # an element takes those still open in it along
        pass
    if was_other or self._in_other():
      self.other += f"{CLOSE if self._tag_closes else OPEN}{tag}{SEP}"
