"""Trains the tiny model's tokenizer and writes it in the released form, `tiktoken.model`.

  python scripts/tiny_tokenizer.py OUTPUT_DIRECTORY [RANKS]

The 256 single bytes take the first ranks, so any UTF-8 can be encoded; merges learnt from the facts take the rest.
"""

import argparse
import base64
import json
import os
from collections.abc import Iterable

import tiny_facts
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from MaxText.inference.tokenizer import MODEL_FILE, SPLIT_PATTERN

DEFAULT_RANKS = 384

# Recall lines in the corpus: enough for their few words to become tokens, too few to crowd the facts out.
_RECALL_LINES = 25


def corpus() -> list[str]:
  """The text lines the tiny tokenizer is made for: the facts in both forms, recall lines, the chat markup's words."""
  lines = []
  for fact in tiny_facts.facts() + tiny_facts.recall_examples(seed=0, n=_RECALL_LINES):
    lines += [fact.prompt + fact.answer, fact.question, fact.reply]
    # The words of one exchange's markup, which every chat pays for.
    lines += ['message role="user"', 'message role="assistant"', "think", "response"]
  return lines


def train(text_lines: Iterable[str], n_ranks: int = DEFAULT_RANKS) -> dict[bytes, int]:
  """Learns a byte-level BPE; the same lines give the same ranks.

  Args:
    text_lines: text to learn merges from, cut into pieces as Kimi's tokenizer cuts it; no merge crosses a line.
    n_ranks: how many tokens to make, 256 or more.

  Returns:
    Each token's bytes and its rank: byte b has rank b, then the merges in the order they were learnt. Every merge
    joins two tokens of lower rank.

  Raises:
    ValueError: n_ranks is under 256, or the text is too small for so many merges.
  """
  if n_ranks < 256:
    raise ValueError(f"n_ranks must be at least 256, a rank a byte, got {n_ranks}")
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), behavior="isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  trainer = trainers.BpeTrainer(
    vocab_size=n_ranks,
    min_frequency=1,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
    special_tokens=[],
  )
  tokenizer.train_from_iterator(text_lines, trainer)

  byte_of = _bytes_by_letter()
  ranks = {bytes([byte]): byte for byte in range(256)}
  for left, right in json.loads(tokenizer.to_str())["model"]["merges"]:
    # Two pairs may spell one token; its rank is the first's.
    ranks.setdefault(bytes(byte_of[letter] for letter in left + right), len(ranks))
  if len(ranks) != n_ranks:
    raise ValueError(f"the text gives only {len(ranks)} ranks, {n_ranks} were asked for: give more text or fewer ranks")
  return ranks


def _bytes_by_letter() -> dict[str, int]:
  """Which byte each letter of `tokenizers`' byte-level alphabet stands for.

  That alphabet writes a byte as the Latin-1 character of the same number where this is printable, and the others, in
  order, as the characters from U+0100 on.
  """
  letters = set(pre_tokenizers.ByteLevel.alphabet())
  byte_of = {chr(byte): byte for byte in range(256) if chr(byte) in letters}
  others = [byte for byte in range(256) if chr(byte) not in letters]
  return byte_of | {chr(256 + index): byte for index, byte in enumerate(others)}


def write(path: str | os.PathLike, ranks: dict[bytes, int]) -> None:
  """Writes ranks as a `tiktoken.model` file at `path`: a line a token, base64, a space, the rank, in order of rank."""
  with open(path, "wb") as file:
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
      file.write(base64.b64encode(token) + b" " + str(rank).encode() + b"\n")


def main() -> None:
  """Trains on `corpus()` and writes `tiktoken.model` into the given directory."""
  parser = argparse.ArgumentParser(description="Trains the tiny model's tokenizer and writes tiktoken.model.")
  parser.add_argument("directory", help="an existing directory to write tiktoken.model into")
  parser.add_argument("ranks", nargs="?", type=int, default=DEFAULT_RANKS, help="tokens without the 256 control ids")
  arguments = parser.parse_args()
  if not os.path.isdir(arguments.directory):
    parser.error(f"{arguments.directory} isn't a directory")
  path = os.path.join(arguments.directory, MODEL_FILE)
  try:
    write(path, train(corpus(), arguments.ranks))
  except ValueError as error:
    parser.error(str(error))
  print(f"wrote {path}: {arguments.ranks} ranks")


if __name__ == "__main__":
  main()
