"""serve.py over a device without a model: it starts at once, or not before a file is there, and fails when told to.

Arguments: seconds that the start takes, then serve.py's own.
"""

import sys
import time

import numpy as np

from MaxText import serve
from MaxText.errors import exit_on_user_error
from MaxText.inference.serving.core import Limits, ServingCore
from MaxText.inference.steps import NO_TOKEN, Chosen

STEP_SECONDS = 0.05
TOKEN = 40
POISON = 41  # a prompt's first token, at which the engine fails
START_SECONDS = float(sys.argv[1])


class Device:
  """Says the same token until it's asked for no more, one every 50 ms."""

  slots, groups, chunks, steps, cache_bytes = 4, 1, (16, 32), 1, 0

  def __init__(self):
    self.left = np.zeros(self.slots, int)

  def prefill(self, size, parts):
    if any(part.tokens[0] == POISON for part in parts):
      raise ValueError("an injected fault")

  def admit(self, starts, reports):
    tokens = np.full(self.slots, NO_TOKEN)
    for slot, start in starts.items():
      self.left[slot], tokens[slot] = start.remaining - 1, TOKEN
    return Chosen(tokens, None, None, None)

  def generate(self, steps, stopped, reports):
    time.sleep(STEP_SECONDS)
    self.left[list(stopped)] = 0
    tokens = np.where(self.left > 0, TOKEN, NO_TOKEN)
    self.left -= self.left > 0
    return Chosen(tokens[None], None, None, None)

  def stop(self):
    pass


def start_core(config, tokenizer, on_failure):
  time.sleep(START_SECONDS)
  limits = Limits("tiny", config.vocab_size, 64, 1024, frozenset(tokenizer.stop_ids), config.serve_queue)
  return ServingCore(Device(), limits, on_failure)


serve.start_core = start_core
exit_on_user_error(serve.main, sys.argv[1:])
