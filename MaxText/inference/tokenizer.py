"""Kimi K3's tokenizer: byte-level BPE from `tiktoken.model`, with 256 control ids above it.

Text becomes ids by `encode`, which knows no control ids at all: whatever a user types stays plain text. Control ids
are placed by the chat template alone, through `special`. Ids become text by `decode`, or piece by piece, as a model
emits them, by `StreamDecoder`.
"""

import base64
import binascii
import codecs
import os
import re
from collections.abc import Iterable, Iterator

import tiktoken

from MaxText.errors import UserError

MODEL_FILE = "tiktoken.model"

# How text is cut into pieces before any merge. Every Kimi tokenizer (Kimi-Linear, K2, K3) is trained with this
# expression, `pat_str` of the released tokenizer: ids are only right with it. In the order tried: a run of Han; a
# word, with up to one leading sign and an English ending, whose capitals come first; the same for words in capitals;
# up to three digits; signs with their line ends; line ends; spaces but the last before a word; other spaces.
_WORD_HEAD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_WORD_TAIL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SIGN = r"[^\r\n\p{L}\p{N}]?"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
  (
    r"[\p{Han}]+",
    _SIGN + _WORD_HEAD + "*" + _WORD_TAIL + "+" + _ENDING,
    _SIGN + _WORD_HEAD + "+" + _WORD_TAIL + "*" + _ENDING,
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
  )
)

# tiktoken's regex engine overflows its stack on a run of some 10^6 spaces (a Rust panic), so long text is cut before it
# gets there. The released tokenizer cuts at these two lengths; a cut can change ids, so ours are the same two.
_MAX_CHARS = 400_000
_MAX_RUN = 25_000
_RUN = re.compile(r"\s+|\S+")

NUM_SPECIAL = 256

# Names by offset from the first id above the ranks. The other offsets hold reserved ids.
_SPECIAL_NAMES = {
  0: "[BOS]",
  1: "[EOS]",
  2: "<|end_of_msg|>",
  3: "<|open|>",
  4: "<|close|>",
  5: "<|sep|>",
  6: "[start_header_id]",
  7: "[end_header_id]",
  9: "[EOT]",
  18: "<|media_begin|>",
  19: "<|media_content|>",
  20: "<|media_end|>",
  21: "<|media_pad|>",
  65: "<osagent_mode>",
  254: "[UNK]",
  255: "[PAD]",
}


def load_ranks(path: str | os.PathLike) -> dict[bytes, int]:
  """Reads a `tiktoken.model` file: a line a token, its bytes in base64, a space, its rank.

  Args:
    path: the file.

  Returns:
    Each token's bytes and its rank, in the order of the file.

  Raises:
    UserError: there is no such file, it is empty, a line isn't of that form, a token or a rank appears twice, the ranks
      aren't 0, 1, 2, … without a gap, or one of the 256 single bytes is missing. The message names the file and line.
  """
  path = os.fspath(path)
  if not os.path.isfile(path):
    raise UserError(f"no tokenizer file at {path}")
  with open(path, "rb") as file:
    lines = file.read().split(b"\n")
  if lines[-1] == b"":  # the last line's own line end
    lines.pop()
  if not lines:
    raise UserError(f"{path} is empty: expected one base64 token and its rank a line")

  ranks: dict[bytes, int] = {}
  line_of_rank: dict[int, int] = {}
  for number, line in enumerate(lines, start=1):
    where = f"{path}, line {number}"
    token, rank = _parse_line(line.removesuffix(b"\r"), where)
    if token in ranks:
      raise UserError(f"{where}: token {token!r} was already given on line {line_of_rank[ranks[token]]}")
    if rank in line_of_rank:
      raise UserError(f"{where}: rank {rank} was already given on line {line_of_rank[rank]}")
    ranks[token] = rank
    line_of_rank[rank] = number

  # No rank twice, so the ranks are 0 … n−1 exactly when none is n or more.
  if max(line_of_rank) >= len(ranks):
    missing = next(rank for rank in range(len(ranks)) if rank not in line_of_rank)
    after = min(rank for rank in line_of_rank if rank > missing)
    raise UserError(f"{path}, line {line_of_rank[after]}: rank {after} is given, but no line gives rank {missing}")
  for byte in range(256):
    if bytes([byte]) not in ranks:
      raise UserError(f"{path}: none of its {len(lines)} lines gives the single byte 0x{byte:02x}")
  return ranks


def _parse_line(line: bytes, where: str) -> tuple[bytes, int]:
  fields = line.split(b" ")
  if len(fields) != 2:
    raise UserError(f"{where}: expected a base64 token, one space and a rank, got {line[:80]!r}")
  encoded, rank = fields
  try:
    token = base64.b64decode(encoded, validate=True)
  except binascii.Error as error:
    raise UserError(f"{where}: {encoded[:80]!r} isn't base64 ({error})") from None
  if not token:
    raise UserError(f"{where}: the token is empty")
  if not rank.isdigit() or len(rank) > 9:
    raise UserError(f"{where}: the rank {rank[:80]!r} isn't a whole number")
  return token, int(rank)


class K3Tokenizer:
  """Text to ids and back, by Kimi K3's rules.

  n ranks give the ids 0 … n−1 (163,584 in the released model); the 256 ids above are control ids, most of them
  reserved. Nothing is ever put before a text: K3 uses no BOS.

  Attributes:
    base_size: n, the number of ranks; the first control id.
    vocab_size: n + 256.
    bos_id, eos_id, end_of_msg_id, pad_id: control ids by role. `eos_id` is [EOS]; a chat message ends in
      `end_of_msg_id`.
    stop_ids: the ids that end generation, either of them: {end_of_msg_id, eos_id}.
  """

  def __init__(self, ranks: dict[bytes, int], name: str = "kimi-k3"):
    """Makes a tokenizer of ranks already read and checked.

    Args:
      ranks: each token's bytes and its rank; ranks 0 … n−1, all 256 single bytes among the tokens.
      name: a name for tiktoken's messages.
    """
    self.base_size = len(ranks)
    self.vocab_size = self.base_size + NUM_SPECIAL
    self._special_names = tuple(
      _SPECIAL_NAMES.get(offset, f"<|reserved_token_{self.base_size + offset}|>") for offset in range(NUM_SPECIAL)
    )
    self._special_ids = {special: self.base_size + offset for offset, special in enumerate(self._special_names)}
    self._tokens = sorted(ranks, key=ranks.__getitem__)
    self._encoding = tiktoken.Encoding(
      name, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=self._special_ids
    )
    self.bos_id = self.special("[BOS]")
    self.eos_id = self.special("[EOS]")
    self.end_of_msg_id = self.special("<|end_of_msg|>")
    self.pad_id = self.special("[PAD]")
    self.stop_ids = frozenset((self.end_of_msg_id, self.eos_id))

  @classmethod
  def from_file(cls, path: str | os.PathLike) -> "K3Tokenizer":
    """Reads a `tiktoken.model` file; UserError as `load_ranks` says."""
    return cls(load_ranks(path))

  @classmethod
  def from_directory(cls, path: str | os.PathLike) -> "K3Tokenizer":
    """Reads the `tiktoken.model` of a checkpoint's directory; errors as `from_file`."""
    return cls.from_file(os.path.join(os.fspath(path), MODEL_FILE))

  def special(self, name: str) -> int:
    """The control id of that name, such as `<|sep|>`; ValueError when there is none."""
    if name not in self._special_ids:
      raise ValueError(f"no control token is named {name!r}")
    return self._special_ids[name]

  def is_special(self, token_id: int) -> bool:
    """Whether the id is one of the 256 control ids."""
    return self.base_size <= token_id < self.vocab_size

  def token_bytes(self, token_id: int) -> bytes:
    """The bytes of one id: a token's own, or a control token's name. ValueError for an id outside the vocabulary."""
    if 0 <= token_id < self.base_size:
      return self._tokens[token_id]
    if self.is_special(token_id):
      return self._special_names[token_id - self.base_size].encode("ascii")
    raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")

  def encode(self, text: str) -> list[int]:
    """Encodes text of any length as plain text: control tokens spelt out in it stay ordinary characters.

    Args:
      text: any Unicode text.

    Returns:
      Ids below `base_size`, those of the released tokenizer. As there, a text over 400,000 characters is cut every
      400,000, and a run of over 25,000 characters of spaces, or of non-spaces, every 25,000.

    Raises:
      UserError: `text` holds a lone surrogate, which no UTF-8 can carry.
      ValueError: `text` isn't a string.
    """
    if not isinstance(text, str):
      raise ValueError(f"text to encode must be a string, got {type(text).__name__}")
    try:
      text.encode("utf-8")  # tiktoken would put U+FFFD in the text and say nothing
    except UnicodeEncodeError as error:
      bad = text[error.start]
      raise UserError(f"text to encode isn't valid Unicode: lone surrogate {bad!r} at index {error.start}") from None
    ids: list[int] = []
    for piece in _bounded(text):
      ids += self._encoding.encode_ordinary(piece)
    return ids

  def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
    """Decodes ids to text, nothing put between them.

    Args:
      ids: ids of the vocabulary.
      skip_special: leave control ids out; by default each appears by its name.

    Returns:
      The text. Bytes that aren't UTF-8 become U+FFFD. No character reaches across a control id, so the flag decides
      about the names alone.

    Raises:
      ValueError: an id is outside the vocabulary.
    """
    stream = StreamDecoder(self, skip_special)
    pieces = [stream.push(token_id) for token_id in ids]
    return "".join(pieces) + stream.flush()


class StreamDecoder:
  """Decodes ids as they come. The pieces, joined, are `K3Tokenizer.decode` of all ids, wherever one stops to look.

  A character's bytes may be spread over several ids; they are held back until the character is complete, or certainly
  broken: then they become U+FFFD.
  """

  def __init__(self, tokenizer: K3Tokenizer, skip_special: bool = False):
    """Args as `K3Tokenizer.decode`."""
    self._tokenizer = tokenizer
    self._skip_special = skip_special
    self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

  def push(self, token_id: int) -> str:
    """Takes one id; returns what text it completes, often "". ValueError for an id outside the vocabulary."""
    data = self._tokenizer.token_bytes(token_id)
    if not self._tokenizer.is_special(token_id):
      return self._utf8.decode(data)
    broken = self.flush()
    return broken if self._skip_special else broken + data.decode("ascii")

  def flush(self) -> str:
    """Ends the text: returns U+FFFD for bytes still held, else "". The next push starts a new text."""
    rest = self._utf8.decode(b"", final=True)
    self._utf8.reset()
    return rest


def _bounded(text: str) -> Iterator[str]:
  """Cuts text into pieces that tiktoken's regex can take, where the released tokenizer cuts it."""
  for start in range(0, len(text), _MAX_CHARS):
    chunk = text[start : start + _MAX_CHARS]
    if len(chunk) <= _MAX_RUN:
      yield chunk
      continue
    begin = 0
    for run in _RUN.finditer(chunk):
      for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
        yield chunk[begin:cut]
        begin = cut
    yield chunk[begin:]
