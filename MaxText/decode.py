"""`python MaxText/decode.py CONFIG.yml prompt="…" [key=value …]`: decodes as MaxText's decode.py does, with Kimi K3.

Text goes to stdout as it comes, then MaxText's closing line a prompt; what is told of the run goes to stderr. Started
as several processes (docs/many_devices.md) each decodes its part, and the first one prints.
"""

import os
import sys

# Run as a file, Python puts this folder first on the path; its parent belongs there.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
  sys.path[0] = os.path.dirname(sys.path[0])

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from MaxText.configs.k3_config import initialize
from MaxText.configs.resolve import describe_implementations, model_config
from MaxText.distributed import fetch, wait_for_all
from MaxText.errors import UserError, exit_on_user_error
from MaxText.inference.chat import ResponseStream, render_chat
from MaxText.inference.engine import Engine, check_fits, checkpoint_directory, load_engine
from MaxText.inference.steps import FAILED, NO_TOKEN
from MaxText.inference.tokenizer import K3Tokenizer, StreamDecoder
from MaxText.progress import say


def load_tokenizer(config: Any) -> K3Tokenizer:
  """`tokenizer_path` as given, or beside the weights."""
  path = config.tokenizer_path or ""
  if not os.path.exists(path):
    path = os.path.join(checkpoint_directory(config), path)
  if os.path.isdir(path):
    return K3Tokenizer.from_directory(path)
  return K3Tokenizer.from_file(path)


def read_prompts(config: Any) -> list[str]:
  """The prompts of `prompt_file`, one a line, or the one of `prompt`.

  Raises:
    UserError: both or neither are given, or the file can't be read.
  """
  if config.prompt and config.prompt_file:
    raise UserError("prompt and prompt_file are both set; leave one of them out")
  if config.prompt:
    return [config.prompt]
  if not config.prompt_file:
    raise UserError('no prompt: give prompt="…" or prompt_file=FILE (one prompt a line)')
  try:
    with open(config.prompt_file, encoding="utf-8") as f:
      prompts = [line.rstrip("\n") for line in f]
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f"prompt_file={config.prompt_file}: {error}") from error
  prompts = [p for p in prompts if p.strip()]
  if not prompts:
    raise UserError(f"prompt_file={config.prompt_file} holds no prompt")
  return prompts


def encode_prompt(config: Any, tokenizer: K3Tokenizer, prompt: str) -> list[int]:
  """A prompt's ids, in the chat template where `use_chat_template` asks for it.

  Raises:
    UserError: it is longer than `max_prefill_predict_length`.
  """
  if config.use_chat_template:
    messages = [{"role": "user", "content": prompt}]
    if config.system_prompt:
      messages.insert(0, {"role": "system", "content": config.system_prompt})
    ids = render_chat(tokenizer, messages, add_generation_prompt=True, thinking=config.enable_thinking)
  else:
    ids = tokenizer.encode(prompt)
  limit = config.max_prefill_predict_length
  if len(ids) > limit:
    start = prompt if len(prompt) <= 40 else prompt[:40] + "…"
    raise UserError(f"the prompt {start!r} is {len(ids)} tokens long, max_prefill_predict_length={limit}")
  return ids


class Output:
  """One sequence's text, taken from its tokens as they come."""

  def __init__(self, config: Any, tokenizer: K3Tokenizer):
    self.text = ""
    self.tokens = 0
    self._stops = tokenizer.stop_ids
    self._thinking = config.use_chat_template and config.enable_thinking
    self._in_reasoning = False
    self._stream: ResponseStream | StreamDecoder = (
      ResponseStream(tokenizer, config.enable_thinking) if config.use_chat_template else StreamDecoder(tokenizer)
    )

  def push(self, token: int) -> str:
    """Takes a token; returns what there is to show of it."""
    self.tokens += 1
    return "" if token in self._stops else self._take(self._stream.push(token))

  def flush(self) -> str:
    """Returns what was held back, at the end."""
    return self._take(self._stream.flush())

  def _take(self, piece: Any) -> str:
    if isinstance(piece, str):
      self.text += piece
      return piece
    shown = ""
    if piece.reasoning:
      shown += piece.reasoning if self._in_reasoning else f"<think>{piece.reasoning}"
      self._in_reasoning = True
    if piece.content:
      shown += f"</think>\n{piece.content}" if self._in_reasoning else piece.content
      self._in_reasoning = False
    self.text += piece.content or ""
    return shown


@contextlib.contextmanager
def profiled(config: Any) -> Iterator[None]:
  """Runs MaxText's profiler around a block where the `profiler` key asks for one."""
  if not config.profiler:
    yield
    return
  with contextlib.redirect_stdout(sys.stderr):  # on import it says which cloud packages it does without
    from maxtext.common.profiler import Profiler

  profiler = Profiler(config)
  profiler.activate(optional_postfix="trace")
  yield
  profiler.deactivate()
  profiler.post_process()
  say(f"profile written to {profiler.output_path}")


def rate(tokens: int, seconds: float) -> str:
  return f"{tokens} tokens in {seconds:.3f} s, {tokens / max(seconds, 1e-9):,.1f} tokens/s"


def decode(config: Any, engine: Engine, prompts: list[list[int]], outputs: list[Output], slots: int) -> None:
  """Prefills all prompts as one batch and generates until each has ended; a single prompt's text is streamed."""
  max_length = config.max_target_length
  remaining = np.zeros(slots, np.int32)
  remaining[: len(prompts)] = [max_length - len(p) for p in prompts]

  started = time.perf_counter()
  engine.compile(slots, max_length, max(map(len, prompts)))
  wait_for_all()
  say(f"compiled in {time.perf_counter() - started:.1f} s")

  alone = len(prompts) == 1

  def show(tokens):
    for token, output in zip(tokens[: len(outputs)], outputs, strict=True):
      if token == FAILED:
        raise UserError("the model's logits are not finite; look for values that aren't in its checkpoint")
      if token != NO_TOKEN:
        piece = output.push(int(token))
        if alone:
          print(piece, end="", flush=True)

  with profiled(config):
    started = time.perf_counter()
    logits, cache = engine.prefill(prompts, engine.init_cache(slots, max_length))
    state = engine.start(logits, cache, remaining)
    show(fetch(state.tokens))
    prefilled = time.perf_counter()
    while np.any(fetch(state.active)):
      tokens, state = engine.generate(state)
      for row in fetch(tokens):
        show(row)
    ended = time.perf_counter()
  for output in outputs:
    piece = output.flush()
    if alone:
      print(piece, flush=True)
  say(f"prefill: {rate(sum(map(len, prompts)), prefilled - started)}")
  say(f"decode: {rate(sum(o.tokens for o in outputs) - len(prompts), ended - prefilled)}")


def main(argv: Sequence[str]) -> None:
  config = initialize(argv)
  slots = max(1, int(config.per_device_batch_size * jax.device_count()))
  # What can't fit is said before anything else is asked for.
  check_fits(config, model_config(config, jax.devices()[0].platform), slots, config.max_target_length)
  texts = read_prompts(config)
  slots = max(slots, len(texts))
  tokenizer = load_tokenizer(config)
  prompts = [encode_prompt(config, tokenizer, text) for text in texts]
  started = time.perf_counter()
  engine = load_engine(config, tokenizer.stop_ids, slots, config.max_target_length)
  if tokenizer.vocab_size > engine.cfg.vocab_size:
    raise UserError(f"the tokenizer has {tokenizer.vocab_size} ids, the model's vocab_size is {engine.cfg.vocab_size}")
  say(f"{describe_implementations(engine.cfg)}; weights read in {time.perf_counter() - started:.1f} s")

  outputs = [Output(config, tokenizer) for _ in texts]
  decode(config, engine, prompts, outputs, slots)
  for text, output in zip(texts, outputs, strict=True):
    print(f"Input `{text}` -> `{output.text}`", flush=True)
  expected = config.autoregressive_decode_assert
  if expected and not outputs[0].text.startswith(expected):
    raise UserError(f"autoregressive_decode_assert={expected!r}, but the text is {outputs[0].text!r}")


if __name__ == "__main__":
  exit_on_user_error(main, sys.argv)
