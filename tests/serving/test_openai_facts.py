"""serve.py on the tiny model, asked by the openai package: decode.py's text, alone and 64 at once on 8 slots."""

import concurrent.futures
import contextlib
import io
import os
import sys

import openai
import pytest
from _serve_process import Process

from MaxText import decode

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "scripts"))
import tiny_facts

pytestmark = pytest.mark.slow

FACTS = tiny_facts.facts()[:64]
MODEL = "kimi-k3-tiny"
LENGTHS = ("max_target_length=128", "max_prefill_predict_length=64")


@pytest.fixture(scope="module")
def server():
  process = Process(*LENGTHS, "per_device_batch_size=8", "prefill_chunk_size=16", "decode_steps_per_dispatch=8")
  yield process
  process.process.terminate()
  status, said = process.ended()
  assert status == 0, said


@pytest.fixture(scope="module")
def decoded(server, tmp_path_factory):
  """What decode.py prints for each fact; while the server starts."""
  path = tmp_path_factory.mktemp("facts") / "prompts.txt"
  path.write_text("\n".join(f.prompt for f in FACTS), encoding="utf-8")
  with contextlib.redirect_stdout(io.StringIO()) as out:
    decode.main(["decode.py", "kimi-k3-tiny.yml", *LENGTHS, f"prompt_file={path}"])
  texts = [line.split("` -> `")[1].removesuffix("`") for line in out.getvalue().splitlines()]
  assert sum(text == f.answer for text, f in zip(texts, FACTS, strict=True)) >= 60
  return texts


@pytest.fixture(scope="module")
def client(server, decoded):
  server.ready()
  with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
    yield client


def complete(client, prompt, **more):
  return client.completions.create(model=MODEL, prompt=prompt, **({"temperature": 0, "max_tokens": 40} | more))


def streamed(client, prompt, tokens=None, **more):
  """A stream's text; with `tokens` its reader leaves after so many chunks."""
  text = ""
  with complete(client, prompt, stream=True, **more) as stream:
    for count, chunk in enumerate(stream):
      text += chunk.choices[0].text
      if count == tokens:
        break
  return text


def test_facts_one_at_a_time(client, decoded):
  for fact, text in zip(FACTS[:60], decoded, strict=False):
    choice = complete(client, fact.prompt).choices[0]
    assert (choice.text, choice.finish_reason) == (text, "stop")


def test_facts_64_at_once_on_8_slots(client, decoded):
  """A third streams, some of these leave early; some are cut short by a length, some by a stop string."""

  def ask(i):
    prompt = FACTS[i].prompt
    match i % 8:
      case 0 | 1:
        return streamed(client, prompt)
      case 2:
        return streamed(client, prompt, tokens=1)
      case 3:
        return complete(client, prompt, max_tokens=2).choices[0].text
      case 4:
        return complete(client, prompt, stop=[decoded[i][2:4], "never"]).choices[0].text
      case _:
        return complete(client, prompt, logprobs=i % 3).choices[0].text

  with concurrent.futures.ThreadPoolExecutor(64) as pool:
    texts = list(pool.map(ask, range(64)))
  for i, (text, whole) in enumerate(zip(texts, decoded, strict=True)):
    match i % 8:
      case 2 | 3:
        assert whole.startswith(text) and text != whole
      case 4:
        assert text == whole.split(whole[2:4])[0]
      case _:
        assert text == whole
  # The slots of those who left are as good as new.
  assert [c.text for c in complete(client, [f.prompt for f in FACTS[:16]]).choices] == decoded[:16]


def test_chats(client):
  for fact in FACTS[:8]:
    messages = [{"role": "user", "content": fact.question}]
    for thinking in (True, False):
      asked = dict(model=MODEL, messages=messages, temperature=0, max_completion_tokens=60)
      asked["extra_body"] = {"chat_template_kwargs": {"thinking": thinking}}
      answer = client.chat.completions.create(**asked)
      message = answer.choices[0].message
      assert answer.choices[0].finish_reason == "stop"
      assert message.content == fact.reply
      assert bool(getattr(message, "reasoning_content", None)) == thinking
      chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
      assert chunks[-1].usage == answer.usage
      deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
      assert "".join(delta.content or "" for delta in deltas) == message.content
      reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
      assert reasoning == (getattr(message, "reasoning_content", None) or "")


def test_seeds(client):
  def texts(**more):
    return [c.text for c in complete(client, "The", temperature=2, max_tokens=20, **more).choices]

  first = texts(seed=7, n=4)
  assert texts(seed=7, n=4) == first
  assert [texts(seed=seed)[0] for seed in (7, 8, 9, 10)] == first
  assert len({*first, *texts(n=4), *texts(n=4)}) > 4


def test_errors_are_the_package_s_own(client):
  with pytest.raises(openai.BadRequestError, match="tools"):
    client.chat.completions.create(
      model=MODEL,
      messages=[{"role": "user", "content": "x"}],
      tools=[{"type": "function", "function": {"name": "f"}}],
    )
  with pytest.raises(openai.NotFoundError):
    complete(client, "x", extra_body={"model": "other"})
  with pytest.raises(openai.BadRequestError, match="room"):
    complete(client, "x", max_tokens=10**6)
  assert [model.id for model in client.models.list()] == [MODEL]
