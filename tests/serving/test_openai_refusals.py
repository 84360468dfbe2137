"""What the OpenAI face refuses: by status, by the field's name, and without hurting the next request."""

import contextlib
import json
import socket
import time

import httpx
import pytest
from _fake_core import FakeCore
from _http_face import serving
from prometheus_client.parser import text_string_to_metric_families

from MaxText.inference.openai import gate
from MaxText.inference.openai.prompts import Face
from MaxText.inference.serving.core import Snapshot
from MaxText.inference.serving.metrics import Metrics
from MaxText.inference.serving.requests import Finish, Token
from MaxText.inference.tokenizer import K3Tokenizer

TINY = "MaxText/assets/kimi-k3-tiny"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"model": "fake", "prompt": "Hi"}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def tokenizer(request):
  return K3Tokenizer.from_directory(request.config.rootpath / TINY)


@pytest.fixture(scope="module")
def core(tokenizer):
  return FakeCore(tokenizer.vocab_size, max_prompt_length=64, max_length=96)


@pytest.fixture(scope="module")
def live(core, tokenizer):
  with serving(Face(core, tokenizer)) as live:
    yield live


@pytest.fixture(autouse=True)
def next_request_is_right(core, live, tokenizer):
  ids = tokenizer.encode("right")
  core.script = lambda request: [*map(Token, ids), Finish("stop")]
  core.healthy, core.ready, core.broken = True, True, ""
  core.requests.clear()
  core.cancelled.clear()
  yield
  core.script = lambda request: [*map(Token, ids), Finish("stop")]
  core.healthy, core.ready, core.broken = True, True, ""
  response = live.post(COMPLETIONS, PROMPT)
  assert (response.status_code, response.json()["choices"][0]["text"]) == (200, "right")
  assert not core.running


def refused(response, status=400, param=None, code=None):
  assert response.status_code == status, response.text
  assert response.headers["content-type"] == "application/json"
  error = response.json()["error"]
  assert set(error) == {"message", "type", "param", "code"}
  assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 600
  assert error["param"] == param
  if code:
    assert error["code"] == code
  return error["message"]


UNSUPPORTED = {
  "tools": [{"type": "function"}],
  "tool_choice": "auto",
  "parallel_tool_calls": True,
  "functions": [{}],
  "function_call": "auto",
  "response_format": {"type": "json_object"},
  "logit_bias": {"1": 5},
  "presence_penalty": 0.1,
  "frequency_penalty": -1,
  "repetition_penalty": 1.1,
  "best_of": 2,
  "suffix": "end",
  "echo": True,
  "store": True,
  "modalities": ["audio"],
  "prompt_cache_key": "k",
  "cache_salt": "s",
  "reasoning_effort": "low",
  "min_p": 0.1,
  "service_tier": "priority",
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_unsupported_fields_are_refused_by_name(live, core, field):
  for path, body in ((CHATS, CHAT), (COMPLETIONS, PROMPT)):
    message = refused(live.post(path, body | {field: UNSUPPORTED[field]}), 400, field, "unsupported_parameter")
    assert field in message
  assert core.requests == []


def test_a_chat_ends_where_it_ends(live, core):
  message = refused(live.post(CHATS, CHAT | {"ignore_eos": True}), 400, "ignore_eos", "unsupported_parameter")
  assert "/v1/completions" in message
  assert core.requests == []


def test_values_that_ask_for_nothing_are_let_pass(live):
  nothing = {
    "tools": [], "tool_choice": "none", "parallel_tool_calls": None, "response_format": {"type": "text"},
    "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "best_of": 2, "n": 2, "suffix": None,
    "store": False, "service_tier": "auto", "user": "u", "metadata": {"a": "b"}, "seed": None, "stop": None,
    "temperature": None, "stream_options": None, "ignore_eos": False,
  }  # fmt: skip
  for path, body in ((CHATS, CHAT), (COMPLETIONS, PROMPT)):
    assert live.post(path, body | nothing).status_code == 200


VALUES = [
  ("max_tokens", -1), ("max_tokens", 0), ("max_tokens", 10**9), ("max_tokens", 10**400), ("max_tokens", "5"),
  ("max_tokens", 1.5), ("n", 0), ("n", 10**6), ("n", True), ("temperature", -0.1), ("temperature", 2.1),
  ("temperature", "hot"), ("temperature", [1]), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("seed", -1),
  ("seed", 2**32), ("seed", 0.5), ("stop", ["x"] * 10**4), ("stop", ""), ("stop", ["a", ""]), ("stop", "x" * 257),
  ("stop", [1]), ("stream", "yes"), ("stream", 1), ("user", 5), ("metadata", ["a"]), ("model", None), ("model", 5),
  ("stream_options", {"include_usage": True}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), VALUES, ids=lambda v: str(v)[:20])
def test_values_out_of_range(live, core, field, value):
  for path, body in ((CHATS, CHAT), (COMPLETIONS, PROMPT)):
    refused(live.post(path, body | {field: value}), 400, field)
  assert core.requests == []


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(live, value):
  body = json.dumps(PROMPT | {"temperature": 0}).replace("0", value)
  response = live.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
  refused(response, 400, "temperature")


@pytest.mark.parametrize(
  ("prompt", "code"),
  [
    ("", None), ([], None), ([""], None), ([[]], None), (["a"] * 65, None), ([-1], None), ([608], None),
    ([10**30], None), (["a", 5], None), (None, None), ({}, None), ([True], None), ([1.0], None), ([[1], "a"], None),
    ("x" * 1025, "context_length_exceeded"), ([5] * 65, "context_length_exceeded"),
    ("日" * 60, "context_length_exceeded"), (["a", "b " * 65], "context_length_exceeded"),
  ],
)  # fmt: skip
def test_prompts(live, core, prompt, code):
  refused(live.post(COMPLETIONS, PROMPT | {"prompt": prompt}), 400, "prompt", code)
  assert core.requests == []


def test_several_prompts_times_n_are_counted(live):
  refused(live.post(COMPLETIONS, PROMPT | {"prompt": ["a"] * 33, "n": 2}), 400, "n")


@pytest.mark.parametrize(
  ("messages", "param"),
  [
    ([], "messages"),
    ("Hi", "messages"),
    ([{"role": "user", "content": "x"}] * 1025, "messages"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "tool", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": "x", "colour": "red"}], "colour"),
    ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "tool_calls"),
    ([{"role": "user", "content": "x", "reasoning_content": "y"}], "messages"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
    ([{"role": "user", "content": "x" * 1025}], "messages"),
    ([{"role": "user", "content": "日" * 60}], "messages"),
  ],
)
def test_messages(live, core, messages, param):
  refused(live.post(CHATS, CHAT | {"messages": messages}), 400, param)
  assert core.requests == []


def test_an_image_is_named(live):
  messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
  assert "image_url" in refused(live.post(CHATS, CHAT | {"messages": messages}), 400, "messages", "unsupported_content")


def test_fields_that_contradict_each_other(live):
  refused(live.post(CHATS, CHAT | {"top_logprobs": 2}), 400, "top_logprobs")
  refused(live.post(CHATS, CHAT | {"logprobs": True, "top_logprobs": 21}), 400, "top_logprobs")
  refused(live.post(CHATS, CHAT | {"logprobs": 5}), 400, "logprobs")
  refused(live.post(COMPLETIONS, PROMPT | {"logprobs": True}), 400, "logprobs")
  refused(live.post(COMPLETIONS, PROMPT | {"logprobs": 21}), 400, "logprobs")
  refused(live.post(CHATS, CHAT | {"max_tokens": 2, "max_completion_tokens": 3}), 400, "max_tokens")
  refused(live.post(CHATS, CHAT | {"max_completion_tokens": 10**6}), 400, "max_completion_tokens")
  refused(live.post(CHATS, CHAT | {"chat_template_kwargs": {"enable_thinking": True}}), 400, "enable_thinking")
  refused(live.post(CHATS, CHAT | {"prompt": "x"}), 400, "prompt", "unknown_parameter")
  refused(live.post(COMPLETIONS, PROMPT | {"messages": []}), 400, "messages", "unknown_parameter")
  refused(live.post(COMPLETIONS, {"model": "fake"}), 400, "prompt", "missing_parameter")


def test_another_model(live):
  for path, body in ((CHATS, CHAT), (COMPLETIONS, PROMPT)):
    refused(live.post(path, body | {"model": "gpt"}), 404, "model", "model_not_found")
    refused(live.post(path, body | {"model": "m" * 10**5}), 404, "model", "model_not_found")


def test_long_names_are_cut(live):
  name = "x" * 10**5
  refused(live.post(COMPLETIONS, PROMPT | {name: 1}), 400, name[:80], "unknown_parameter")
  refused(live.post(COMPLETIONS, PROMPT | {"metadata": {name: 1}}), 400, "metadata." + name[:71])


BODIES = {
  "nothing": b"",
  "no JSON": b"{",
  "invalid UTF-8": b'{"model": "fake", "prompt": "\xff\xfe"}',
  "half a character": b'{"model": "fake", "prompt": "\\ud800"}',
  "half a character as model": b'{"model": "\\ud800", "prompt": "x"}',
  "half a character as field": b'{"\\ud800": 1, "model": "fake", "prompt": "x"}',
  "half a character as stop": b'{"model": "fake", "prompt": "x", "stop": ["\\udfff"]}',
  "NUL": b"\0",
  "a list": b"[1]",
  "a string": b'"x"',
  "a number of many digits": b'{"model": "fake", "prompt": "x", "n": 1' + b"0" * 5000 + b"}",
  **{f"a list {depth} deep": b"[" * depth + b"]" * depth for depth in (100, 900, 1100, 10**5)},
  **{f"metadata {depth} deep": b'{"model":"fake","prompt":"","metadata":' + b'{"":' * depth + b"1" + b"}" * (depth + 1)
     for depth in (20, 900, 10**4)},
  **{f"an unknown field {depth} deep": b'{"model":"fake","prompt":"x","y":' + b"[" * depth + b"]" * depth + b"}"
     for depth in (20, 900, 10**5)},
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_bodies_that_are_no_request(live, core, path, name):
  response = live.client.post(path, content=BODIES[name], headers={"content-type": "application/json"})
  error = response.json()["error"]
  refused(response, response.status_code, error["param"])
  assert response.status_code in (400, 404)
  assert core.requests == []


def test_content_type_and_routes(live):
  refused(live.client.post(COMPLETIONS, content=json.dumps(PROMPT), headers={"content-type": "text/plain"}), 400)
  refused(live.client.get(COMPLETIONS), 405)
  refused(live.client.get("/v1/embeddings"), 404)
  refused(live.client.get("/nothing"), 404)


def test_large_bodies_are_refused_while_they_come(live):
  limit = 2**20 + 16 * 64
  whole = b" " * (limit + 1)
  refused(live.client.post(COMPLETIONS, content=whole, headers={"content-type": "application/json"}), 413)

  sent = 0

  def chunks():
    nonlocal sent
    for _ in range(1000):
      sent += 2**16
      yield b" " * 2**16

  # The server hangs up on a sender who goes on: it may see that before the answer.
  with contextlib.suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
    refused(live.client.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"}), 413)
  assert sent < 1000 * 2**16
  fits = json.dumps(PROMPT).encode().ljust(limit)
  response = live.client.post(COMPLETIONS, content=fits, headers={"content-type": "application/json"})
  assert response.status_code == 200


def test_a_key(core, tokenizer):
  with serving(Face(core, tokenizer), key="sesame") as live:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}, {"authorization": "Bearer é"}):
      encoded = {name: value.encode() for name, value in headers.items()}
      for response in (
        live.client.post(COMPLETIONS, content=b"x" * 10, headers=encoded),
        live.client.get("/v1/models", headers=encoded),
      ):
        refused(response, 401, None, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert live.post(COMPLETIONS, PROMPT, headers={"authorization": "Bearer sesame"}).status_code == 200
    for path in ("/health", "/ready", "/metrics", "/openapi.json"):
      assert live.client.get(path).status_code == 200


def test_a_full_queue_and_a_server_on_its_way_out(live, core, monkeypatch):
  monkeypatch.setattr(core, "queue", 2)
  response = live.post(COMPLETIONS, PROMPT | {"n": 3})
  refused(response, 429, None, "queue_full")
  assert response.headers["retry-after"]
  assert len(core.cancelled) == 2  # the two that had a place
  core.ready = False
  refused(live.post(COMPLETIONS, PROMPT), 503)
  assert (live.client.get("/ready").status_code, live.client.get("/health").status_code) == (503, 200)
  core.healthy = False
  assert live.client.get("/health").status_code == 503


def test_too_many_at_once(live, core, tokenizer, monkeypatch):
  monkeypatch.setattr(gate, "MAX_OPEN", 1)
  core.script = lambda request: [Token(5), 30.0, Finish("stop")]
  with contextlib.ExitStack() as stack:

    def begins():
      stream = live.client.stream("POST", COMPLETIONS, json=PROMPT | {"stream": True})
      return stack.enter_context(stream).status_code == 200

    wait_for(begins)  # the request of an earlier test may still be on its way out
    refused(live.post(COMPLETIONS, PROMPT), 429)
    assert live.client.get("/health").status_code == 200
  wait_for(lambda: core.cancelled)


def wait_for(condition, seconds=5):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
def test_clients_that_go_away(live, core, stream, tokens):
  core.script = lambda request: [*[Token(5)] * tokens, 30.0, Finish("stop")]
  body = json.dumps(PROMPT | {"stream": stream, "n": 2}).encode()
  head = (
    f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
  )
  with socket.create_connection(("127.0.0.1", live.port)) as connection:
    connection.sendall(head.encode() + body)
    wait_for(lambda: len(core.running) == 2)
    if stream and tokens:
      assert connection.recv(10)
  wait_for(lambda: len(core.cancelled) == 2)


def test_many_connections_in_turn(live):
  for _ in range(10_000):
    socket.create_connection(("127.0.0.1", live.port)).close()
  for _ in range(20):
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
      connection.sendall(b"\0\xff not HTTP\r\n\r\n")
      assert b"400" in connection.recv(100)


def test_a_slow_reader_holds_nobody_up(live, core):
  core.script = lambda request: [Token(5)] * 80
  long = PROMPT | {"max_tokens": 90, "stream": True, "n": 64, "logprobs": 20}
  with live.client.stream("POST", COMPLETIONS, json=long) as response:
    assert response.status_code == 200  # and not a byte of its body is read
    for _ in range(3):
      assert live.post(COMPLETIONS, PROMPT).status_code == 200


def test_a_failing_engine_ends_streams_at_once(live, core):
  core.script = lambda request: [Token(5), 30.0, Finish("stop")]
  with live.client.stream("POST", COMPLETIONS, json=PROMPT | {"stream": True}) as response:
    lines = response.iter_lines()
    next(lines)
    started = time.monotonic()
    core.fail("the engine has failed")
    rest = [line for line in lines if line]
  assert time.monotonic() - started < 1
  assert json.loads(rest[-1].removeprefix("data: "))["error"]["message"] == "the engine has failed"
  assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == "server_error"


def test_metrics(core, tokenizer):
  class Source:
    def snapshot(self):
      return Snapshot(3, 8, 5, 100, 200, {"stop": 7, "error": 1}, 12345)

  class Ended:
    tokens, submitted, first_token, ended = 11, 1.0, 1.5, 2.5

  metrics = Metrics(Source())
  metrics.observe(Ended)
  with serving(Face(core, tokenizer), registry=metrics.registry) as live:
    response = live.client.get("/metrics")
  assert response.headers["content-type"].startswith("text/plain")
  samples = {
    (s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(response.text) for s in f.samples
  }
  expected = {
    ("k3_requests_waiting",): 3, ("k3_slots",): 8, ("k3_slots_in_use",): 5, ("k3_prompt_tokens_total",): 100,
    ("k3_generated_tokens_total",): 200, ("k3_requests_finished_total", "stop"): 7, ("k3_cache_bytes",): 12345,
    ("k3_requests_finished_total", "error"): 1, ("k3_time_to_first_token_seconds_sum",): 0.5,
    ("k3_time_per_output_token_seconds_sum",): 0.1, ("k3_time_per_output_token_seconds_count",): 1,
  }  # fmt: skip
  assert {name: samples.get(name) for name in expected} == pytest.approx(expected)
