"""`python MaxText/score.py CONFIG.yml score_tokens=IN.npy score_output=OUT.npz [key=value …]`: logits of given tokens.

This is how to check a port: the same token ids through prefill, through decode steps or in chunks (`score_mode`), as
float32 `logits` [B, T, V] in an .npz, and the perplexity on the terminal. It runs on any mesh and in any number of
processes (docs/many_devices.md), of which the first writes and prints.
"""

import os
import sys

# Run as a file, Python puts this folder first on the path; its parent belongs there.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
  sys.path[0] = os.path.dirname(sys.path[0])

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.configs.k3_config import initialize
from MaxText.configs.resolve import describe_implementations
from MaxText.distributed import fetch, is_first, wait_for_all
from MaxText.errors import UserError, exit_on_user_error
from MaxText.inference.cache import cache_specs
from MaxText.inference.engine import Engine, load_engine
from MaxText.models import kimi_k3
from MaxText.progress import progress, say

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
  groups = cfg.parallel.data if cfg.parallel.splits_batch else 1
  padded = np.pad(tokens, ((0, -batch % groups), (0, 0)))  # every data group scores as many rows

  def prefill(params, ids, cache):
    rows, count = ids.shape
    lengths = jnp.full(rows, count, jnp.int32)
    return kimi_k3.prefill(cfg, params, ids, lengths, jnp.arange(rows), cache, all_logits=True)

  def decode(params, ids, cache):
    def step(cache, column):
      logits, cache = kimi_k3.decode_step(cfg, params, column, jnp.ones(column.shape, bool), cache)
      return cache, logits

    cache, logits = jax.lax.scan(step, cache, ids.T)
    return jnp.moveaxis(logits, 0, 1), cache

  specs = cache_specs(cfg)
  run = engine.program(
    decode if config.score_mode == "decode" else prefill,
    (engine.weight_specs, engine.row_spec, specs),
    (engine.row_spec, specs),
    donate=(2,),
  )
  cache = engine.init_cache(len(padded), length)
  parts = [(start, engine.place_rows(padded[:, start : start + size])) for start, size in chunks(config, length)]
  sizes = {ids.shape: ids for _, ids in parts}
  compiled = {shape: run.lower(engine.params, ids, cache).compile() for shape, ids in sizes.items()}
  wait_for_all()
  logits = np.empty((batch, length, cfg.vocab_size), np.float32)
  for start, ids in progress(parts, len(parts), "scoring"):
    part, cache = compiled[ids.shape](engine.params, ids, cache)
    logits[:, start : start + ids.shape[1]] = fetch(part)[:batch]
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
  say(describe_implementations(engine.cfg))
  started = time.perf_counter()
  logits = score(config, engine, tokens)
  if not is_first():
    return
  try:
    np.savez(output, logits=logits)
  except OSError as error:
    raise UserError(f"score_output={output}: {error}") from error
  print(f"scored {tokens.size} tokens by {config.score_mode} in {time.perf_counter() - started:.1f} s, wrote {output}")
  print(f"perplexity {perplexity(logits, tokens):.4f}")


if __name__ == "__main__":
  exit_on_user_error(main, sys.argv)
