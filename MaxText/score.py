"""`python MaxText/score.py CONFIG.yml score_tokens=IN.npy score_output=OUT.npz [key=value …]`: logits of given tokens.

This is how to check a port: the same token ids through prefill, through decode steps or in chunks (`score_mode`), as
float32 `logits` [B, T, V] in an .npz, and the perplexity on the terminal.
"""

import os
import sys

# Run as a file, Python puts this folder first on the path; its parent belongs there.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
  sys.path[0] = os.path.dirname(sys.path[0])

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.configs.k3_config import initialize
from MaxText.configs.resolve import describe_implementations
from MaxText.errors import UserError, exit_on_user_error
from MaxText.inference.engine import Engine, load_engine
from MaxText.models import kimi_k3
from MaxText.progress import progress

_DECODE_STEPS = 64  # tokens scored in one dispatch of decode steps


def read_tokens(config: Any) -> np.ndarray:
  """The ids of `score_tokens` as int32 [B, T].

  Raises:
    UserError: no such file, or not ids of this model.
  """
  path = config.score_tokens
  if not path:
    raise UserError("score_tokens is not set: name a .npy file of token ids, int [B, T]")
  try:
    tokens = np.load(path, allow_pickle=False)
  except (OSError, ValueError) as error:
    raise UserError(f"score_tokens={path}: {error}") from error
  if not isinstance(tokens, np.ndarray) or tokens.ndim not in (1, 2) or not np.issubdtype(tokens.dtype, np.integer):
    raise UserError(f"score_tokens={path} must hold one integer array [B, T] or [T]")
  tokens = np.atleast_2d(tokens)
  if not tokens.size:
    raise UserError(f"score_tokens={path} is empty")
  if tokens.min() < 0 or tokens.max() >= config.vocab_size:
    raise UserError(f"score_tokens={path} holds ids outside 0..{config.vocab_size - 1} (vocab_size)")
  if tokens.shape[1] > config.max_target_length:
    raise UserError(
      f"score_tokens={path} is {tokens.shape[1]} tokens long, max_target_length={config.max_target_length}"
    )
  return tokens.astype(np.int32)


def chunks(config: Any, length: int) -> Iterator[tuple[int, int]]:
  """(start, size) of each dispatch for a mode."""
  size = {"prefill": length, "decode": _DECODE_STEPS, "chunked": config.prefill_chunk_size}[config.score_mode]
  for start in range(0, length, size):
    yield start, min(size, length - start)


def score(config: Any, engine: Engine, tokens: np.ndarray) -> np.ndarray:
  """Logits at every position.

  Args:
    tokens: [B, T] int32.

  Returns:
    [B, T, V] float32.
  """
  batch, length = tokens.shape
  cfg = engine.cfg

  @partial(jax.jit, donate_argnums=(2,))
  def prefill(params, ids, cache):
    length = jnp.full(batch, ids.shape[1], jnp.int32)
    return kimi_k3.prefill(cfg, params, ids, length, jnp.arange(batch), cache, all_logits=True)

  @partial(jax.jit, donate_argnums=(2,))
  def decode(params, ids, cache):
    def step(cache, column):
      logits, cache = kimi_k3.decode_step(cfg, params, column, jnp.ones(batch, bool), cache)
      return cache, logits

    cache, logits = jax.lax.scan(step, cache, ids.T)
    return jnp.moveaxis(logits, 0, 1), cache

  run = decode if config.score_mode == "decode" else prefill
  cache = engine.init_cache(batch, length)
  logits = np.empty((batch, length, cfg.vocab_size), np.float32)
  parts = list(chunks(config, length))
  for start, size in progress(parts, len(parts), "scoring"):
    logits[:, start : start + size], cache = run(engine.params, jnp.asarray(tokens[:, start : start + size]), cache)
  return logits


def perplexity(logits: np.ndarray, tokens: np.ndarray) -> float:
  """exp of the mean negative log-likelihood of each token given those before it (float64); nan for one token."""
  if tokens.shape[1] < 2:
    return float("nan")
  x = logits[:, :-1].astype(np.float64)
  x -= x.max(axis=-1, keepdims=True)
  log_z = np.log(np.exp(x).sum(axis=-1))
  chosen = np.take_along_axis(x, tokens[:, 1:, None], axis=-1)[..., 0]
  return float(np.exp(np.mean(log_z - chosen)))


def main(argv: Sequence[str]) -> None:
  config = initialize(argv)
  tokens = read_tokens(config)
  output = config.score_output
  if not output.endswith(".npz"):
    raise UserError(f"score_output={output!r}: name a file that ends in .npz")
  engine = load_engine(config, (), tokens.shape[0], tokens.shape[1])
  print(describe_implementations(engine.cfg), file=sys.stderr)
  started = time.perf_counter()
  logits = score(config, engine, tokens)
  try:
    np.savez(output, logits=logits)
  except OSError as error:
    raise UserError(f"score_output={output}: {error}") from error
  print(f"scored {tokens.size} tokens by {config.score_mode} in {time.perf_counter() - started:.1f} s, wrote {output}")
  print(f"perplexity {perplexity(logits, tokens):.4f}")


if __name__ == "__main__":
  exit_on_user_error(main, sys.argv)
