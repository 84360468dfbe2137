"""serve.py as a process: how it starts, ends and fails. The device is a fake, the rest is real."""

import contextlib
import json
import signal
import socket
import time

import httpx
import pytest
from _serve_process import Process

from MaxText import serve
from MaxText.errors import UserError

POISON = 41  # see _serve_worker.py
KEY = {"authorization": "Bearer sesame"}
BODY = {"model": "kimi-k3-tiny", "prompt": "Hi", "max_tokens": 900, "stream": True}


@pytest.fixture
def server():
  with contextlib.ExitStack() as stack:

    def start(*argv, start_seconds=0, environment=()):
      lengths = ("max_target_length=1024", "max_prefill_predict_length=64")
      worker = {"program": "_serve_worker.py", "before": (str(start_seconds),), "environment": environment}
      process = Process(*lengths, *argv, **worker)
      stack.callback(process.process.kill)
      return process

    yield start


@contextlib.contextmanager
def stream(process, **more):
  """The lines of a stream that has begun."""
  with httpx.stream("POST", f"{process.url}/v1/completions", json={**BODY, **more}, headers=KEY) as response:
    assert response.status_code == 200
    lines = response.iter_lines()
    next(lines)
    yield lines


def last(lines):
  data = [line.removeprefix("data: ") for line in lines if line]
  return data[-1] if data[-1] == "[DONE]" else json.loads(data[-1])


@pytest.mark.slow
def test_a_term_lets_streams_finish(server):
  process = server("serve_grpc_port=-1", "serve_log_prompts=true", start_seconds=2)
  assert not any("JetStream" in line for line in process.lines)
  assert httpx.get(f"{process.url}/health").status_code == 200
  assert httpx.get(f"{process.url}/ready").status_code == 503
  early = httpx.post(f"{process.url}/v1/completions", json=BODY)
  assert early.status_code == 503
  assert "starting" in early.json()["error"]["message"]
  process.ready()
  assert httpx.get(f"{process.url}/ready").status_code == 200
  with stream(process, max_tokens=40) as lines:
    process.process.send_signal(signal.SIGTERM)
    process.said("stopping")
    assert httpx.get(f"{process.url}/ready").status_code == 503
    assert httpx.get(f"{process.url}/health").status_code == 200
    assert httpx.post(f"{process.url}/v1/completions", json=BODY).status_code == 503
    assert last(lines) == "[DONE]"
  status, said = process.ended()
  assert status == 0, said
  assert "Traceback" not in said
  assert json.loads(process.said('.*"reason": "length".*"prompt".*')[0])["prompt"] == ["Hi"]


@pytest.mark.slow
def test_after_the_grace_period_the_rest_get_an_error(server):
  process = server("serve_grace_seconds=0.3").ready()
  with stream(process) as lines:
    process.process.send_signal(signal.SIGINT)
    error = last(lines)["error"]
  assert (error["message"], error["type"]) == ("the server is shutting down", "server_error")
  status, said = process.ended(20)
  assert status == 0, said
  assert "Traceback" not in said


@pytest.mark.slow
def test_a_second_signal_ends_at_once(server):
  process = server("serve_grace_seconds=1000").ready()
  with stream(process), contextlib.suppress(httpx.HTTPError):
    process.process.send_signal(signal.SIGTERM)
    process.said("stopping")
    process.process.send_signal(signal.SIGTERM)
    assert process.ended(5)[0] == 1


@pytest.mark.slow
def test_a_signal_while_it_starts(server):
  process = server(start_seconds=1000)
  assert httpx.get(f"{process.url}/health").status_code == 200
  process.process.send_signal(signal.SIGTERM)
  assert process.ended(5)[0] == 0


@pytest.mark.slow
def test_a_failing_engine_ends_streams_and_the_process(server):
  process = server(environment={serve.KEY_VARIABLE: "sesame"}).ready()
  with stream(process) as lines:
    started = time.monotonic()
    bad = BODY | {"prompt": [POISON], "stream": False}
    assert httpx.post(f"{process.url}/v1/completions", json=bad).status_code == 401
    poisoned = httpx.post(f"{process.url}/v1/completions", json=bad, headers=KEY)
    assert poisoned.status_code == 503
    assert last(lines)["error"]["message"] == "the engine has failed"
    assert time.monotonic() - started < 1
  status, said = process.ended(20)
  assert status == 1
  assert "an injected fault" in said


@pytest.mark.parametrize("face", ["http", "grpc"])
def test_ports_that_are_taken(face):
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(UserError, match=str(port)):
      serve.main(
        ["serve.py", "kimi-k3-tiny.yml", "serve_http_port=0", "serve_grpc_port=0", f"serve_{face}_port={port}"]
      )


def test_keys(tmp_path):
  file = tmp_path / "key"
  file.write_text("abc\n", encoding="utf-8")
  assert serve.read_key(str(file), {}) == "abc"
  assert serve.read_key("", {serve.KEY_VARIABLE: "xyz"}) == "xyz"
  assert serve.read_key("", {}) is None
  for text in ("", "\n", "schlüssel", "a\nb"):
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="printable"):
      serve.read_key(str(file), {})
  for path, variables, match in (
    (str(file), {serve.KEY_VARIABLE: "x"}, "both"),
    (str(tmp_path / "none"), {}, "No such file"),
    ("", {serve.KEY_VARIABLE: ""}, "printable"),
  ):
    with pytest.raises(UserError, match=match):
      serve.read_key(path, variables)


def test_no_face_at_all():
  with pytest.raises(UserError, match="nobody to serve"):
    serve.main(["serve.py", "kimi-k3-tiny.yml", "serve_http_port=-1", "serve_grpc_port=-1"])
