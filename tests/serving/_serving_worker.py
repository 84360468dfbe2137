"""Run as a program: facts asked of a core all at once, on fake devices or as one of several processes.

`_serving_worker.py OUT.json DEVICES CONFIG.yml key=value…`: the answers' ids and ends, the log-probabilities of the
chosen tokens, how many programs were compiled after the start, and the trace. Of several processes the first writes.
"""

import json
import os
import sys

import jax

if sys.argv[2] != "0":
  jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))

import asyncio

from _cores import FACTS, answer

from MaxText.configs.k3_config import initialize
from MaxText.decode import load_tokenizer
from MaxText.errors import exit_on_user_error
from MaxText.inference.serving.compiles import CompileCount
from MaxText.inference.serving.requests import Request
from MaxText.inference.serving.start import start_core


def main(argv):
  output, _, *rest = argv[1:]
  config = initialize(["worker", *rest])
  tokenizer = load_tokenizer(config)
  core = start_core(config, tokenizer)
  if core is None:
    return
  core.trace = []
  compiled = CompileCount().start()
  prompts = [tokenizer.encode(f.prompt) for f in FACTS[:24]]

  async def cancelled():
    ticket = core.submit(Request(tuple(prompts[0]), core.max_length - len(prompts[0]), temperature=50.0))
    async for _ in ticket:
      ticket.cancel()

  async def work():
    greedy = [answer(core, prompt, logprobs=2) for prompt in prompts]
    hot = [answer(core, prompts[i], temperature=2.0, top_k=50, seed=i, max_tokens=12) for i in range(4)]
    got = await asyncio.gather(*greedy, *hot, *(cancelled() for _ in range(3)))
    return got[: len(prompts) + 4]

  got = asyncio.run(work())
  core.stop()
  results = {
    "ids": [[token.id for token in tokens] for tokens, _ in got],
    "logprobs": [[token.logprob for token in tokens] for tokens, _ in got],
    "ends": [finish.reason for _, finish in got],
    "texts": [tokenizer.decode([t.id for t in tokens if t.id not in tokenizer.stop_ids]) for tokens, _ in got],
    "compiled": compiled.count,
    "trace": core.trace,
    "finished": core.snapshot().finished,
  }
  with open(output, "w", encoding="utf-8") as f:
    json.dump(results, f)


if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"
  exit_on_user_error(main, sys.argv)
