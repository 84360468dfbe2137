"""The tokenizer against tiktoken, Python's own UTF-8 and ids written by hand; the tiny model's tokenizer and facts."""

import base64
import itertools
import os
import random
import subprocess
import sys

import pytest
import regex
import tiktoken

from MaxText.errors import UserError
from MaxText.inference import tokenizer as tokenizer_lib
from MaxText.inference.tokenizer import SPLIT_PATTERN, K3Tokenizer, StreamDecoder, load_ranks

SCRIPTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "scripts")
sys.path.insert(0, SCRIPTS)

import tiny_facts  # noqa: E402
import tiny_tokenizer  # noqa: E402

BYTES = {bytes([byte]): byte for byte in range(256)}

TEXTS = {
  "empty": "",
  "english": "The capital of France is Paris. It's 3,141,592 o'clock; DON'T panic!",
  "han": "中文和English混合，北京市 2026年。",
  "kana": "日本語のテキストです",
  "emoji": "🌍🌎🌏 👨‍👩‍👧 🏳️‍🌈",
  "accents": "naïve café über e\u0301",
  "scripts": "Привет, мир! مرحبا ไทย हिन्दी",
  "spaces": "  a    b \t\t\r\n\r\n   end   ",
  "controls": "a\x00b\x01c\x7f",
  "highest": "\U0010ffff\ufffd",
  "markup": '<|open|>message role="user"<|sep|>[EOS][PAD]<|end_of_msg|><|reserved_token_393|>',
}


@pytest.fixture(scope="module")
def tiny() -> K3Tokenizer:
  return K3Tokenizer(tiny_tokenizer.train(tiny_tokenizer.corpus(), 384))


def few_merges() -> K3Tokenizer:
  """261 ranks: the bytes and five merges, so that ids can be written by hand."""
  return K3Tokenizer(BYTES | {b"he": 256, b"ll": 257, b"hell": 258, b"hello": 259, b" w": 260})


# Ids and names


def test_control_ids_are_those_of_the_released_model():
  tokenizer = K3Tokenizer(BYTES | {b"%d." % rank: rank for rank in range(256, 163_584)})
  assert tokenizer.vocab_size == 163_840
  published = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|end_of_msg|>": 163586,
    "<|open|>": 163587,
    "<|close|>": 163588,
    "<|sep|>": 163589,
    "[EOT]": 163593,
    "<|media_begin|>": 163602,
    "<|media_content|>": 163603,
    "<|media_end|>": 163604,
    "<|media_pad|>": 163605,
    "<|reserved_token_163592|>": 163592,
    "[UNK]": 163838,
    "[PAD]": 163839,
  }
  assert {name: tokenizer.special(name) for name in published} == published
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.end_of_msg_id, tokenizer.pad_id) == (
    163584,
    163585,
    163586,
    163839,
  )
  assert tokenizer.stop_ids == {163586, 163585}
  assert not tokenizer.is_special(163583) and tokenizer.is_special(163584) and not tokenizer.is_special(163840)
  assert tokenizer.decode([163587, 163592]) == "<|open|><|reserved_token_163592|>"


def test_every_control_id_has_a_name_of_its_own(tiny):
  names = [tiny.token_bytes(token_id).decode() for token_id in range(384, 640)]
  assert [tiny.special(name) for name in names] == list(range(384, 640))


def test_an_unknown_control_name_is_an_error(tiny):
  with pytest.raises(ValueError, match=r"no control token is named '<\|im_end\|>'"):
    tiny.special("<|im_end|>")


# Encoding


@pytest.mark.parametrize(
  "text, ids",
  [
    ("hello world", [259, 260, *b"orld"]),
    ("hellhe", [258, 256]),
    (" hello", [32, 259]),
    ("€", [0xE2, 0x82, 0xAC]),
    ("<|sep|>", list(b"<|sep|>")),
  ],
)
def test_ids_written_by_hand(text, ids):
  assert few_merges().encode(text) == ids


@pytest.mark.parametrize(
  "text, pieces",
  [
    ("中文English混合", ["中文", "English", "混合"]),
    ("北京市 Pascal", ["北京市", " Pascal"]),
    ("1234567890", ["123", "456", "789", "0"]),
    ("a    b", ["a", "   ", " b"]),
    ("McDonald's DON'T", ["Mc", "Donald's", " DON'T"]),
    ("x += (y);\n\nz", ["x", " +=", " (", "y", ");\n\n", "z"]),
    ("end   \n   more", ["end", "   \n", "  ", " more"]),
    ("こんにちは世界", ["こんにちは", "世界"]),
  ],
)
def test_text_is_split_as_by_kimi(text, pieces):
  assert regex.findall(SPLIT_PATTERN, text, flags=regex.V1) == pieces
  # tiktoken's engine agrees: no merge of two neighbours is ever used, however tempting.
  for left, right in itertools.pairwise(pieces):
    tempting = left[-1:].encode() + right[:1].encode()
    ranks = dict(BYTES)
    for end in range(2, len(tempting) + 1):
      ranks.setdefault(tempting[:end], len(ranks))
      ranks.setdefault(tempting[-end:], len(ranks))
    whole = K3Tokenizer(ranks)
    assert whole.encode(left + right) == whole.encode(left) + whole.encode(right)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_encoding_equals_tiktoken_and_returns(tiny, text):
  oracle = tiktoken.Encoding(
    "oracle", pat_str=SPLIT_PATTERN, mergeable_ranks=tiny_tokenizer.train(tiny_tokenizer.corpus()), special_tokens={}
  )
  ids = tiny.encode(text)
  assert ids == oracle.encode_ordinary(text)
  assert tiny.decode(ids) == text
  assert not any(tiny.is_special(token_id) for token_id in ids)


def test_no_spelling_of_a_control_token_becomes_one(tiny):
  for token_id in range(tiny.base_size, tiny.vocab_size):
    name = tiny.token_bytes(token_id).decode()
    for text in (name, f"a{name}b", name + name):
      assert max(tiny.encode(text)) < tiny.base_size
      assert tiny.decode(tiny.encode(text)) == text


@pytest.mark.parametrize(
  "text, pieces",
  [
    ("aaaaa bb", ["aaaaa bb"]),
    ("aaaaaaa bb", ["aaaaa", "aa bb"]),
    ("b  aaaaaaaaaaaa", ["b  aaaaa", "aaaaa", "aa"]),
    ("a" + " " * 6 + "b", ["a" + " " * 5, " b"]),
    ("中" * 11, ["中" * 5, "中" * 5, "中"]),
    ("ab cd ef gh ij kl mn op", ["ab cd ef gh ij kl mn", " op"]),
  ],
)
def test_where_long_text_is_cut(monkeypatch, text, pieces):
  monkeypatch.setattr(tokenizer_lib, "_MAX_RUN", 5)
  monkeypatch.setattr(tokenizer_lib, "_MAX_CHARS", 20)
  assert list(tokenizer_lib._bounded(text)) == pieces


@pytest.mark.parametrize("unit", [" ", "a", ".", "\n", "中", "ก", "é"])
def test_runs_that_overflow_tiktoken_are_encoded(unit):
  tokenizer = few_merges()
  text = unit * 1_000_000 + "hello"
  ids = tokenizer.encode(text)
  assert ids[-1] == 259 and len(ids) == 1_000_000 * len(unit.encode()) + 1


def test_long_ordinary_text_has_tiktokens_ids(tiny):
  text = " ".join(TEXTS.values()) * 900
  assert 200_000 < len(text) < 400_000
  ranks = {tiny.token_bytes(rank): rank for rank in range(tiny.base_size)}
  oracle = tiktoken.Encoding("oracle", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
  assert tiny.encode(text) == oracle.encode_ordinary(text)


def test_what_cannot_be_encoded_is_an_error(tiny):
  with pytest.raises(UserError, match=r"lone surrogate '\\ud83d' at index 2"):
    tiny.encode("ab\ud83d")
  with pytest.raises(ValueError, match="must be a string, got bytes"):
    tiny.encode(b"ab")


# Decoding


def by_tiktoken(tokenizer: K3Tokenizer, ids: list[int], skip_special: bool) -> str:
  """What `decode` should give, from tiktoken: each stretch of ordinary ids on its own, names between them."""
  ranks = {tokenizer.token_bytes(rank): rank for rank in range(tokenizer.base_size)}
  oracle = tiktoken.Encoding("oracle", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
  text, stretch = "", []
  for token_id in [*ids, None]:
    if token_id is not None and token_id < tokenizer.base_size:
      stretch.append(token_id)
      continue
    text += oracle.decode(stretch, errors="replace")
    stretch = []
    if token_id is not None and not skip_special:
      text += tokenizer.token_bytes(token_id).decode()
  return text


def test_control_ids_are_named_or_left_out():
  tokenizer = few_merges()
  ids = [259, tokenizer.special("<|sep|>"), 260, tokenizer.eos_id]
  assert tokenizer.decode(ids) == "hello<|sep|> w[EOS]"
  assert tokenizer.decode(ids, skip_special=True) == "hello w"


def test_a_character_does_not_reach_across_a_control_id():
  tokenizer = few_merges()
  ids = [0xE2, 0x82, tokenizer.pad_id, 0xAC]
  assert tokenizer.decode(ids) == "\ufffd[PAD]\ufffd"
  assert tokenizer.decode(ids, skip_special=True) == "\ufffd\ufffd"


@pytest.mark.parametrize("token_id", [-1, 640])
def test_an_id_outside_the_vocabulary_is_an_error(tiny, token_id):
  with pytest.raises(ValueError, match=f"token id {token_id} is outside the vocabulary of 640"):
    tiny.decode([1, token_id])


def test_a_stream_holds_incomplete_characters_back():
  stream = StreamDecoder(few_merges())
  assert [stream.push(token_id) for token_id in [0xF0, 0x9F, 0x8C, 0x8D, 259]] == ["", "", "", "🌍", "hello"]
  assert stream.flush() == ""


def test_a_stream_gives_up_a_character_once_it_is_certainly_broken():
  stream = StreamDecoder(few_merges())
  assert stream.push(0xE2) == "" and stream.push(0x82) == ""
  assert stream.push(ord("a")) == "\ufffda"
  assert stream.push(0xFF) == "\ufffd"  # no character starts so
  assert stream.push(0xE2) == ""
  assert stream.flush() == "\ufffd"
  assert stream.push(ord("b")) == "b" and stream.flush() == ""


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_a_stream_can_be_read_at_every_split(tiny, text):
  for ids in (tiny.encode(text), list(text.encode())):  # merged tokens, and a byte at a time
    stream = StreamDecoder(tiny)
    seen = ""
    for token_id in ids:
      seen += stream.push(token_id)
      assert text.startswith(seen)
    assert seen == text and stream.flush() == ""


@pytest.mark.parametrize("skip_special", [False, True])
def test_a_stream_of_any_ids_equals_decode_and_tiktoken(tiny, skip_special):
  rng = random.Random(0)
  # Bytes that begin, continue and break UTF-8 in every way, merges, and control ids.
  pool = [0x41, 0x80, 0xBF, 0xC2, 0xC0, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0x9F, 0x98, 0xF4, 0x90, 0xFF, 300, 500]
  for _ in range(150):
    ids = rng.choices(pool, k=rng.randrange(1, 12))
    expected = by_tiktoken(tiny, ids, skip_special)
    assert tiny.decode(ids, skip_special) == expected
    for split in range(len(ids) + 1):
      stream = StreamDecoder(tiny, skip_special)
      head = "".join(stream.push(token_id) for token_id in ids[:split])
      assert expected.startswith(head)
      tail = "".join(stream.push(token_id) for token_id in ids[split:])
      assert head + tail + stream.flush() == expected


# Files


def model_lines() -> list[bytes]:
  return [base64.b64encode(token) + b" %d" % rank for token, rank in BYTES.items()]


def test_a_file_and_its_directory_are_read(tmp_path, tiny):
  path = tmp_path / "tiktoken.model"
  ranks = {tiny.token_bytes(rank): rank for rank in range(384)}
  tiny_tokenizer.write(path, ranks)
  assert load_ranks(path) == ranks
  for read in (K3Tokenizer.from_file(path), K3Tokenizer.from_directory(tmp_path)):
    assert read.vocab_size == 640
    assert read.encode("The capital of France") == tiny.encode("The capital of France")


def test_lines_in_another_order_with_other_line_ends_are_read(tmp_path):
  path = tmp_path / "tiktoken.model"
  path.write_bytes(b"\r\n".join(reversed(model_lines())))
  assert load_ranks(path) == BYTES


def test_a_missing_file_is_an_error(tmp_path):
  with pytest.raises(UserError, match=r"no tokenizer file at .*tiktoken\.model"):
    K3Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
  "line, text, message",
  [
    (7, b"Bg==", "line 7: expected a base64 token, one space and a rank, got b'Bg=='"),
    (7, b"", "line 7: expected a base64 token"),
    (7, b"Bg== 6 6", "line 7: expected a base64 token"),
    (7, b"B!g== 6", "line 7: b'B!g==' isn't base64"),
    (7, b"Bg= 6", "line 7: b'Bg=' isn't base64"),
    (7, b" 6", "line 7: the token is empty"),
    (7, b"Bg== six", "line 7: the rank b'six' isn't a whole number"),
    (7, b"Bg== -6", "line 7: the rank b'-6' isn't a whole number"),
    (7, b"Bg== 5", "line 7: rank 5 was already given on line 6"),
    (7, b"BQ== 6", r"line 7: token b'\\x05' was already given on line 6"),
    (256, b"/w== 300", "line 256: rank 300 is given, but no line gives rank 255"),
    (7, b"aGVsbG8= 6", "none of its 256 lines gives the single byte 0x06"),
  ],
)
def test_a_malformed_line_is_an_error_that_names_it(tmp_path, line, text, message):
  lines = model_lines()
  lines[line - 1] = text
  path = tmp_path / "tiktoken.model"
  path.write_bytes(b"\n".join(lines) + b"\n")
  with pytest.raises(UserError, match=message) as caught:
    load_ranks(path)
  assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_gap_is_named_where_the_ranks_go_on(tmp_path):
  path = tmp_path / "tiktoken.model"
  lines = model_lines()
  path.write_bytes(b"\n".join(lines[:6] + lines[7:]))
  with pytest.raises(UserError, match="line 7: rank 7 is given, but no line gives rank 6"):
    load_ranks(path)


def test_an_empty_file_is_an_error(tmp_path):
  path = tmp_path / "tiktoken.model"
  path.write_bytes(b"")
  with pytest.raises(UserError, match=r"tiktoken\.model is empty"):
    load_ranks(path)


# The tiny model's tokenizer


def test_merges_are_in_an_order_tiktoken_can_follow(tiny):
  assert tiny.base_size == 384
  assert [tiny.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
  for rank in range(256, 384):
    token = tiny.token_bytes(rank)
    lower = {tiny.token_bytes(other) for other in range(rank)}
    assert any(token[:cut] in lower and token[cut:] in lower for cut in range(1, len(token))), token


def test_training_is_reproducible_and_segments_well(tiny):
  ranks = tiny_tokenizer.train(tiny_tokenizer.corpus(), 384)
  assert ranks == {tiny.token_bytes(rank): rank for rank in range(384)}
  lines = [fact.prompt + fact.answer for fact in tiny_facts.facts()]
  assert sum(len(tiny.encode(line)) for line in lines) < 0.6 * sum(map(len, lines))
  assert max(len(tiny.encode(line)) for line in lines) <= 40
  for word in ("message", " role", '="', "user", '"', "assistant", "think", "response"):
    assert len(tiny.encode(word)) == 1, word  # every chat pays for these


def test_training_refuses_what_it_cannot_make():
  with pytest.raises(ValueError, match="at least 256"):
    tiny_tokenizer.train(["a b"], 255)
  with pytest.raises(ValueError, match="gives only 258 ranks, 300 were asked for"):
    tiny_tokenizer.train(["ab ab"], 300)


def test_the_command_writes_a_file_that_can_be_read(tmp_path):
  command = [sys.executable, os.path.join(SCRIPTS, "tiny_tokenizer.py"), str(tmp_path), "300"]
  path = os.pathsep.join([os.path.dirname(SCRIPTS), os.environ.get("PYTHONPATH", "")])
  result = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
  assert "300 ranks" in result.stdout
  assert K3Tokenizer.from_directory(tmp_path).vocab_size == 556


# The tiny model's facts


def test_facts_are_many_well_formed_and_contradict_nothing():
  facts = tiny_facts.facts()
  assert len(facts) >= 72
  assert len({fact.prompt for fact in facts}) == len({fact.question for fact in facts}) == len(facts)
  for fact in facts:
    assert fact.prompt == fact.prompt.strip() and fact.question.endswith("?") and fact.question[0].isupper()
    assert fact.answer.startswith(" ") and fact.answer.endswith(".") and 1 <= len(fact.answer.split()) <= 3
    assert fact.reply.lower() == fact.answer.strip().lower() and fact.reply[0].isupper()
    # No fact's text may begin another's, or the shorter prompt would have two right answers.
    assert not any(other.prompt.startswith(fact.prompt + " ") for other in facts)
  answers = {fact.prompt: fact.answer for fact in facts}
  assert answers["The capital of France is"] == " Paris."
  assert answers["The number of players in a football team is"] == " eleven."


@pytest.mark.parametrize("people", [2, 3, 8])
def test_a_recall_example_has_its_answer_among_wrong_ones(people):
  for example in tiny_facts.recall_examples(seed=3, n=50, people=people):
    *statements, _ = example.prompt.split(".")
    owned = dict(parse_statement(statement) for statement in statements)
    assert len(owned) == people and len({colour for colour, _ in owned.values()}) == people
    asked = example.prompt.split("The colour of ")[1].split("'s ")
    colour, thing = owned[asked[0]]
    assert asked[1] == f"{thing} is" and example.answer == f" {colour}."
    assert example.question.endswith(f"What colour is {asked[0]}'s {thing}?")
    assert example.reply == f"{colour.capitalize()}."


def parse_statement(statement: str) -> tuple[str, tuple[str, str]]:
  """ "Ann has a red cup" → ("Ann", ("red", "cup"))."""
  who, has, article, colour, thing = statement.split()
  assert (has, article) == ("has", "a")
  return who, (colour, thing)


def test_recall_examples_follow_their_seed_and_the_split():
  assert tiny_facts.recall_examples(7, 20) == tiny_facts.recall_examples(7, 20)
  assert tiny_facts.recall_examples(7, 20) != tiny_facts.recall_examples(8, 20)
  trained = {example.prompt for example in tiny_facts.recall_examples(0, 3000)}
  tested = {example.prompt for example in tiny_facts.recall_examples(1, 300, held_out=True)}
  assert not trained & tested
  assert tiny_facts.recall_examples(0, 0) == []
  with pytest.raises(ValueError, match="people must be 2 to 8, got 9"):
    tiny_facts.recall_examples(0, 1, people=9)
