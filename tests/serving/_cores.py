"""What tests of the serving core on the tiny model share."""

import asyncio
import os
import sys

from MaxText.configs.k3_config import initialize
from MaxText.decode import load_tokenizer
from MaxText.inference.serving.requests import Finish, Request
from MaxText.inference.serving.start import start_core

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "scripts"))
import tiny_facts

FACTS = tiny_facts.facts()
MAX_LENGTH = 64
KEYS = ("kimi-k3-tiny.yml", f"max_target_length={MAX_LENGTH}", "max_prefill_predict_length=48")
PATIENCE = 300  # seconds for what takes a few


def tiny_core(*overrides):
  """(core, tokenizer) of a configuration."""
  config = initialize(["test", *KEYS, *overrides])
  tokenizer = load_tokenizer(config)
  return start_core(config, tokenizer), tokenizer


def run(work):
  return asyncio.run(asyncio.wait_for(work, PATIENCE))


async def answer(core, prompt, **asked):
  """(tokens, end) of one request."""
  most = core.max_length - len(prompt)
  events = [event async for event in core.submit(Request(tuple(prompt), **({"max_tokens": most} | asked)))]
  assert isinstance(events[-1], Finish)
  return events[:-1], events[-1]


def ids(answered):
  return [token.id for token in answered[0]]
