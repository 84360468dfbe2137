"""The peer of decode_cpu.py: transformers' KimiLinear in an environment of its own (bench/README.md).

`python transformers_decode.py DIRECTORY` loads a checkpoint and answers requests, one JSON object a line on stdin, one
on stdout. A request is {"prompts": [[id, …], …], "tokens": N}, prompts of equal length; the answer is {"seconds": time
of N decode steps after the prompt and the first token, "tokens": [[id, …], …], "path": how they were computed}.
Of the paths that transformers offers on a CPU, each batch size uses the one that was fastest here.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from transformers import KimiLinearForCausalLM
from transformers.generation.streamers import BaseStreamer

_ATTENTION = ("sdpa", "eager")
_EXPERTS = ("eager", "batched_mm", "grouped_mm")
_TRIAL_TOKENS = 16
_TRIALS = 2

Loop = Callable[[Any, torch.Tensor, int], tuple[float, torch.Tensor]]


class _Clock(BaseStreamer):
  """Notes when `generate` hands out the prompt and each token."""

  def __init__(self):
    self.times: list[float] = []

  def put(self, value: torch.Tensor) -> None:
    self.times.append(time.perf_counter())

  def end(self) -> None:
    pass


def generate(model: Any, prompts: torch.Tensor, tokens: int) -> tuple[float, torch.Tensor]:
  """transformers' own loop. Returns (seconds of `tokens` steps, ids [B, tokens + 1])."""
  clock = _Clock()
  ids = model.generate(
    prompts,
    attention_mask=torch.ones_like(prompts),
    do_sample=False,
    min_new_tokens=tokens + 1,
    max_new_tokens=tokens + 1,
    streamer=clock,
  )
  return clock.times[-1] - clock.times[1], ids[:, prompts.shape[1] :]


def step_by_step(model: Any, prompts: torch.Tensor, tokens: int) -> tuple[float, torch.Tensor]:
  """The bare loop: one call of the model a token. Returns as `generate`."""
  out = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
  cache, last = out.cache, out.logits[:, -1:].argmax(-1)
  ids = [last]
  started = time.perf_counter()
  for _ in range(tokens):
    last = model(input_ids=last, cache=cache, use_cache=True).logits.argmax(-1)
    ids.append(last)
  return time.perf_counter() - started, torch.cat(ids, dim=1)


_LOOPS: dict[str, Loop] = {"own loop": step_by_step, "generate": generate}


def _paths() -> Iterator[tuple[str, str, str, int]]:
  """(loop, attention, experts, threads) of every path."""
  threads = sorted({1, os.cpu_count() or 1})
  yield from itertools.product(_LOOPS, _ATTENTION, _EXPERTS, threads)


def _choose(model: Any, attention: str, experts: str, threads: int) -> None:
  model.set_attn_implementation(attention)
  model.set_experts_implementation(experts)
  torch.set_num_threads(threads)


def fastest_path(model: Any, prompts: torch.Tensor) -> tuple[str, str, str, int]:
  """Tries every path on these prompts, each warmed up first."""
  best = {}
  for path in _paths():
    loop, *options = path
    _choose(model, *options)
    _LOOPS[loop](model, prompts, 2)
    best[path] = min(_LOOPS[loop](model, prompts, _TRIAL_TOKENS)[0] for _ in range(_TRIALS))
  return min(best, key=best.__getitem__)


def main(directory: str) -> None:
  # Answers alone go to stdout.
  answers, sys.stdout = sys.stdout, sys.stderr
  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  model = KimiLinearForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
  versions = {"torch": torch.__version__, "transformers": transformers.__version__}
  print(json.dumps(versions), file=answers, flush=True)
  chosen: dict[int, tuple[str, str, str, int]] = {}
  with torch.inference_mode():
    for line in sys.stdin:
      request = json.loads(line)
      prompts = torch.tensor(request["prompts"])
      batch = len(prompts)
      if batch not in chosen:
        chosen[batch] = fastest_path(model, prompts)
      loop, attention, experts, threads = chosen[batch]
      _choose(model, attention, experts, threads)
      seconds, ids = _LOOPS[loop](model, prompts, request["tokens"])
      path = f"{loop}, {attention} attention, {experts} experts, {threads} thread{'s' if threads > 1 else ''}"
      print(json.dumps({"seconds": seconds, "tokens": ids.tolist(), "path": path}), file=answers, flush=True)


if __name__ == "__main__":
  main(sys.argv[1])
