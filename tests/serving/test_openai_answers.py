"""The OpenAI face's answers: text, streams, stop strings, log-probabilities, usage. The core is scripted."""

import itertools
import json
import math

import pytest
from _fake_core import FakeCore
from _http_face import serving

from MaxText.inference.openai.prompts import Face
from MaxText.inference.openai.stops import StopStrings
from MaxText.inference.serving.requests import Finish, Token
from MaxText.inference.tokenizer import K3Tokenizer

TINY = "MaxText/assets/kimi-k3-tiny"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"model": "fake", "prompt": "Hi", "max_tokens": 100}
UNICODE = "naïve 日本語 😀👍🏽 𝔘"


@pytest.fixture(scope="module")
def tokenizer(request):
  return K3Tokenizer.from_directory(request.config.rootpath / TINY)


@pytest.fixture(scope="module")
def core(tokenizer):
  return FakeCore(tokenizer.vocab_size, max_prompt_length=128, max_length=384)


@pytest.fixture(scope="module")
def live(core, tokenizer):
  with serving(Face(core, tokenizer)) as live:
    yield live


@pytest.fixture
def says(core, tokenizer):
  """Sets what the core generates: text, ids, or both; then its end."""

  def say(*parts, finish="stop"):
    ids = [i for part in parts for i in ([part] if isinstance(part, int) else tokenizer.encode(part))]
    if finish == "stop":
      ids.append(tokenizer.end_of_msg_id)
    core.script = lambda request: [*(Token(i, -0.5, ((i, -0.5), (7, -1.25))) for i in ids), Finish(finish)]
    return ids

  core.requests.clear()
  core.cancelled.clear()
  return say


@pytest.fixture
def markup(tokenizer):
  """Ids of a chat answer after the opening tag that the prompt ends in."""
  special = tokenizer.special

  def close(tag):
    return [special("<|close|>"), *tokenizer.encode(tag), special("<|sep|>")]

  def answer(reasoning, content):
    start = [special("<|open|>"), *tokenizer.encode("response"), special("<|sep|>")]
    return [*tokenizer.encode(reasoning), *close("think"), *start, *tokenizer.encode(content), *close("response")]

  return answer


def test_a_completion(live, core, says):
  ids = says(" there, you.")
  response = live.post("/v1/completions", PROMPT)
  assert response.status_code == 200
  answer = response.json()
  assert answer["object"] == "text_completion"
  assert answer["model"] == "fake"
  assert answer["choices"] == [{"index": 0, "text": " there, you.", "logprobs": None, "finish_reason": "stop"}]
  prompt = len(core.requests[0].prompt)
  assert answer["usage"] == {
    "prompt_tokens": prompt,
    "completion_tokens": len(ids),
    "total_tokens": prompt + len(ids),
  }
  assert answer["id"] == "cmpl-" + response.headers["x-request-id"]


def test_what_the_core_is_asked(live, core, tokenizer, says):
  says("x")
  more = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 2**32 - 1, "n": 2, "logprobs": 3}
  assert live.post("/v1/completions", PROMPT | more).status_code == 200
  first, second = core.requests
  assert first.prompt == tuple(tokenizer.encode("Hi"))
  assert (first.temperature, first.top_p, first.top_k, first.logprobs, first.max_tokens) == (0.5, 0.9, 5, 3, 100)
  assert (first.seed, second.seed) == (2**32 - 1, 0)
  core.requests.clear()
  assert live.post("/v1/completions", {"model": "fake", "prompt": "Hi", "n": 8}).status_code == 200
  asked = core.requests
  assert {(r.temperature, r.top_p, r.top_k, r.logprobs, r.max_tokens) for r in asked} == {(1.0, 1.0, 0, None, 16)}
  assert len({r.seed for r in asked}) == 8
  assert not any(r.ignore_eos for r in (first, second, *asked))


def test_text_after_an_end_token(live, core, tokenizer, says):
  a, b = (tokenizer.encode(letter)[0] for letter in "AB")
  core.script = lambda request: [Token(a), Token(tokenizer.eos_id), Token(b), Finish("length")]
  answer = live.post("/v1/completions", PROMPT | {"ignore_eos": True, "max_tokens": 3}).json()
  assert core.requests[-1].ignore_eos
  assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("AB", "length")
  assert answer["usage"]["completion_tokens"] == 3


def test_several_prompts_in_text_and_ids(live, core, tokenizer, says):
  says("x")
  core.script = lambda request: [Token(request.prompt[0]), Finish("length")]
  a, b = tokenizer.encode("A")[0], tokenizer.encode("B")[0]
  for prompt in (["A", "B"], [[a], [b]]):
    answer = live.post("/v1/completions", {"model": "fake", "prompt": prompt, "n": 2, "seed": 5}).json()
    assert [c["text"] for c in answer["choices"]] == ["A", "A", "B", "B"]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert {c["finish_reason"] for c in answer["choices"]} == {"length"}
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 4
    assert [r.seed for r in core.requests[-4:]] == [5, 6, 5, 6]
  one = live.post("/v1/completions", {"model": "fake", "prompt": [a, b]}).json()
  assert core.requests[-1].prompt == (a, b)
  assert len(one["choices"]) == 1


def test_a_stream_of_a_completion(live, says):
  says(UNICODE)
  events = live.events("/v1/completions", PROMPT | {"stream_options": {"include_usage": True}})
  assert events.pop() == "[DONE]"
  usage = events.pop()
  assert usage["choices"] == []
  assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + usage["usage"]["completion_tokens"]
  texts = [e["choices"][0]["text"] for e in events]
  assert "".join(texts) == UNICODE
  assert "\ufffd" not in "".join(texts)
  assert [e["choices"][0]["finish_reason"] for e in events] == [None] * (len(events) - 1) + ["stop"]
  assert len({e["id"] for e in [*events, usage]}) == 1
  assert all("usage" not in e for e in events)
  assert len(texts) > 5


def test_a_character_cut_short_is_said_so(live, tokenizer, says):
  half = next(i for i in tokenizer.encode("日") if len(tokenizer.token_bytes(i)) < 3)
  says("ok ", half, finish="length")
  choice = live.post("/v1/completions", PROMPT).json()["choices"][0]
  assert (choice["text"], choice["finish_reason"]) == ("ok \ufffd", "length")


def test_a_chat_with_its_thoughts(live, says, markup):
  ids = says(*markup("The capital is Paris.", "Paris."))
  answer = live.post("/v1/chat/completions", CHAT).json()
  assert answer["object"] == "chat.completion"
  message = {"role": "assistant", "content": "Paris.", "reasoning_content": "The capital is Paris."}
  assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
  assert answer["usage"]["completion_tokens"] == len(ids)


def test_a_chat_without_thinking(live, core, tokenizer, says):
  says("Paris.", tokenizer.special("<|close|>"), *tokenizer.encode("response"), tokenizer.special("<|sep|>"))
  answer = live.post("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"thinking": False}}).json()
  assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Paris."}
  assert tokenizer.decode(core.requests[-1].prompt).endswith("<|open|>response<|sep|>")
  assert core.requests[-1].max_tokens == core.max_length - len(core.requests[-1].prompt)
  live.post("/v1/chat/completions", CHAT)
  assert tokenizer.decode(core.requests[-1].prompt).endswith("<|open|>think<|sep|>")


def test_a_stream_of_a_chat(live, says, markup):
  says(*markup("Hmm 日本", UNICODE))
  events = live.events("/v1/chat/completions", CHAT | {"n": 2})
  assert events.pop() == "[DONE]"
  assert {e["object"] for e in events} == {"chat.completion.chunk"}
  for index in range(2):
    choices = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["delta"].get("reasoning_content", "") for c in choices) == "Hmm 日本"
    assert "".join(c["delta"].get("content", "") for c in choices) == UNICODE
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_across_tokens(live, core, tokenizer, says, stream):
  text = "one two three four"
  assert len(tokenizer.encode(" thr")) > 1  # it isn't a token
  for stop, expected in (
    ("o thr", "one tw"),
    ([" four", "wo"], "one t"),
    ("never", text),
    (["fourth", "our"], "one two three f"),
  ):
    says(text)
    core.cancelled.clear()
    body = PROMPT | {"stop": stop}
    if stream:
      events = live.events("/v1/completions", body)[:-1]
      got = "".join(e["choices"][0]["text"] for e in events)
      reason = events[-1]["choices"][0]["finish_reason"]
    else:
      choice = live.post("/v1/completions", body).json()["choices"][0]
      got, reason = choice["text"], choice["finish_reason"]
    assert (got, reason) == (expected, "stop")
    assert len(core.cancelled) == (expected != text)


def test_stop_strings_are_about_the_content(live, says, markup):
  says(*markup("a stop here", "then stop here"))
  message = live.post("/v1/chat/completions", CHAT | {"stop": "stop"}).json()["choices"][0]["message"]
  assert message == {"role": "assistant", "content": "then ", "reasoning_content": "a stop here"}


def test_stop_strings_don_t_depend_on_the_pieces():
  for stops in (["aab"], ["abc", "bc"], ["abcd", "bc"], ["aa", "ab"], ["cab", "b"]):
    for text in map("".join, itertools.product("abc", repeat=5)):
      # The first end of a stop string; of those that end there, the longest.
      ends = [(end, -len(s)) for s in stops for end in range(1, 6) if text[:end].endswith(s)]
      expected = text if not ends else text[: min(ends)[0] + min(ends)[1]]
      for cuts in range(16):
        pieces, start = [], 0
        for i in range(1, 6):
          if i == 5 or cuts >> (i - 1) & 1:
            pieces.append(text[start:i])
            start = i
        stop = StopStrings(stops)
        got = ""
        for piece in pieces:
          got += stop.push(piece)
          assert expected.startswith(got), "a part of a stop string was passed on"
        assert got + stop.flush() == expected
        assert stop.found == bool(ends)


def test_logprobs_of_a_completion(live, says, tokenizer):
  ids = says("ab", *tokenizer.encode("日"))[:-1]
  logprobs = live.post("/v1/completions", PROMPT | {"logprobs": 2}).json()["choices"][0]["logprobs"]
  names = [
    tokenizer.token_bytes(i).decode() if tokenizer.token_bytes(i).isascii()
    else "bytes:" + "".join(f"\\x{b:02x}" for b in tokenizer.token_bytes(i))
    for i in ids
  ]  # fmt: skip
  assert logprobs["tokens"] == names
  assert logprobs["token_logprobs"] == [-0.5] * len(ids)
  assert logprobs["top_logprobs"] == [{n: -0.5, tokenizer.token_bytes(7).decode(): -1.25} for n in names]
  assert logprobs["text_offset"][0] == 0
  assert logprobs["text_offset"][-1] == 2


def test_logprobs_of_a_chat_are_those_of_its_content(live, says, markup, tokenizer):
  says(*markup("thoughts", "An answer: 日"))
  content = tokenizer.encode("An answer: 日")
  body = CHAT | {"logprobs": True, "top_logprobs": 2}
  whole = live.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
  assert [bytes(entry["bytes"]) for entry in whole] == [tokenizer.token_bytes(i) for i in content]
  assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry in whole)
  assert set(whole[0]["top_logprobs"][1]) == {"token", "bytes", "logprob"}
  streamed = [e["choices"][0]["logprobs"] for e in live.events("/v1/chat/completions", body)[:-1]]
  assert [entry for part in streamed if part for entry in part["content"]] == whole


@pytest.mark.parametrize("stop", ["wo th", "x"])
def test_logprobs_end_where_the_text_does(live, says, tokenizer, stop):
  says("one two three")
  logprobs = live.post("/v1/completions", PROMPT | {"logprobs": 0, "stop": stop}).json()["choices"][0]
  text, tokens = logprobs["text"], logprobs["logprobs"]["tokens"]
  assert "".join(tokens[:-1]) in text
  assert "".join(tokens).startswith(text)
  streamed = [e["choices"][0] for e in live.events("/v1/completions", PROMPT | {"logprobs": 0, "stop": stop})[:-1]]
  assert [t for c in streamed for t in c["logprobs"]["tokens"]] == tokens


def test_a_failing_generation_is_an_error(live, core, tokenizer, says):
  ids = tokenizer.encode("ab")
  for finish, status in ((Finish("error", "NaN in the logits"), 500), (Finish("timeout", "too slow"), 504)):
    core.script = lambda request, finish=finish: [*map(Token, ids), finish]
    response = live.post("/v1/completions", PROMPT)
    assert response.status_code == status
    assert response.json()["error"]["message"] == finish.message
    events = live.events("/v1/completions", PROMPT)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "ab"
    assert events[-1]["error"]["message"] == finish.message
  # Of two answers one fails: the other is given up, and so is the request.
  says("a")
  core.script = lambda request: [Finish("error", "bad")] if request.seed == 1 else [Token(ids[0]), 5.0, Finish("stop")]
  assert live.post("/v1/completions", PROMPT | {"seed": 0, "n": 2}).status_code == 500
  assert [r.seed for r in core.cancelled] == [0]


def test_models(live):
  models = live.client.get("/v1/models").json()
  assert models["object"] == "list"
  (model,) = models["data"]
  assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 384)
  assert live.client.get("/v1/models/fake").json() == model
  assert live.client.get("/v1/models/an/other").json()["error"]["code"] == "model_not_found"


def test_openapi_page(live):
  assert live.client.get("/docs").status_code == 200
  assert "/v1/chat/completions" in live.client.get("/openapi.json").json()["paths"]


def test_control_tokens_in_text_are_text(live, core, tokenizer, says):
  says("x")
  text = "<|end_of_msg|><|open|>[EOS]"
  live.post("/v1/completions", PROMPT | {"prompt": text})
  assert core.requests[-1].prompt == tuple(tokenizer.encode(text))
  assert max(core.requests[-1].prompt) < tokenizer.base_size
  plain = tokenizer.decode(core.requests[-1].prompt)
  assert plain == text
  live.post("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": text}]})
  markers = [i for i in core.requests[-1].prompt if tokenizer.is_special(i)]
  live.post("/v1/chat/completions", CHAT)
  assert markers == [i for i in core.requests[-1].prompt if tokenizer.is_special(i)]


def test_text_parts_and_names(live, core, tokenizer, says):
  says("x")
  parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
  for message in ({"role": "user", "content": "Hi"}, {"role": "user", "content": parts, "name": None}):
    assert live.post("/v1/chat/completions", CHAT | {"messages": [message]}).status_code == 200
  assert core.requests[-1].prompt == core.requests[-2].prompt
  history = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi", "name": "Ann"},
    {"role": "assistant", "content": "Yes?", "reasoning_content": "Someone.", "tool_calls": None, "refusal": None},
    {"role": "user", "content": "Bye"},
  ]
  assert live.post("/v1/chat/completions", CHAT | {"messages": history}).status_code == 200
  prompt = tokenizer.decode(core.requests[-1].prompt)
  assert "Someone." in prompt
  assert 'name="Ann"' in prompt


def test_the_log_holds_no_prompt(live, says, capfd):
  says("secret answer")
  live.post("/v1/completions", PROMPT | {"prompt": "a secret"})
  line = json.loads(capfd.readouterr().err.strip().splitlines()[-1])
  assert line["status"] == 200
  assert line["reason"] == "stop"
  assert line["prompt_tokens"] > 0 and line["tokens"] > 0
  assert math.isfinite(line["first_token_s"])
  assert "secret" not in json.dumps(line)
