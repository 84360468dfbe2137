"""Run as a program: logits and greedy tokens of a model on a mesh of fake CPU devices, into an .npz.

`_mesh_worker.py OUT.npz DEVICES CONFIG.yml key=value…`: prompts of different lengths in one batch, prefilled in chunks
and then decoded greedily; last, logits of a common continuation show what each slot's state has become.
"""

import os
import sys

import jax

jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))

import numpy as np  # noqa: E402

from MaxText.configs.k3_config import initialize  # noqa: E402
from MaxText.errors import exit_on_user_error  # noqa: E402
from MaxText.inference.engine import load_engine  # noqa: E402

LENGTHS = (37, 5, 64, 18)
STEPS = 6


def main(argv):
  output, _, *rest = argv[1:]
  config = initialize(["worker", *rest])
  slots, max_length = len(LENGTHS), 96
  engine = load_engine(config, (), slots, max_length)
  # Of a few seeds the first under which no router decision is nearly a tie: there another order of float32 sums picks
  # another expert, rightly, and one sequence's logits differ by 1e-2.
  rng = np.random.default_rng(1)
  prompts = [list(rng.integers(0, config.vocab_size, n)) for n in LENGTHS]
  logits, cache = engine.prefill(prompts, engine.init_cache(slots, max_length))
  prefilled = np.asarray(logits)
  state = engine.start(logits, cache, np.full(slots, STEPS + 1))
  tokens = [np.asarray(state.tokens)]
  while np.any(state.active):
    out, state = engine.generate(state)
    tokens.extend(row for row in np.asarray(out) if row.max() >= 0)
  # The state after decoding, seen through one more prefill: what every slot's past makes of the same continuation.
  continuation = [[7, 8, 9]] * slots
  after, _ = engine.prefill(continuation, state.cache)
  np.savez(output, prefill=prefilled, tokens=np.stack(tokens), after=np.asarray(after))


if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"
  exit_on_user_error(main, sys.argv)
