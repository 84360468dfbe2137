"""Trains the tiny Kimi K3 that ships with the project, on a CPU, from nothing, reproducibly.

`python scripts/train_tiny.py [--steps N] [--output DIR]`: learns the facts of tiny_facts.py as plain text and as chat
(with and without thinking), and to recall what a context says. Experts are rounded to MXFP4 and the other matrices to
bfloat16 in every forward pass, so that what is exported is what was trained.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny_facts
import tiny_tokenizer
from absl import logging as absl_logging

from MaxText import checkpoint_writer, mxfp4, weights
from MaxText.configs.k3_config import initialize
from MaxText.configs.model_config import ModelConfig
from MaxText.configs.resolve import model_config
from MaxText.inference.cache import init_cache
from MaxText.inference.chat import render_chat
from MaxText.inference.tokenizer import MODEL_FILE, K3Tokenizer
from MaxText.models import kimi_k3

_OUTPUT = os.path.join(os.path.dirname(__file__), "..", "MaxText", "assets", "kimi-k3-tiny")
_RECALL_LINES = 4000
_PROMPT_LOSS = 0.1  # weight of a prompt's tokens in the loss; an answer's have 1


class Example(NamedTuple):
  """Token ids, and how many of them are the prompt."""

  ids: tuple[int, ...]
  prompt: int


def plain_example(tokenizer: K3Tokenizer, fact: tiny_facts.Fact) -> Example:
  prompt = tokenizer.encode(fact.prompt)
  return Example((*prompt, *tokenizer.encode(fact.answer), tokenizer.eos_id), len(prompt))


def chat_example(tokenizer: K3Tokenizer, fact: tiny_facts.Fact, thinking: bool) -> Example:
  user = {"role": "user", "content": fact.question}
  assistant = {"role": "assistant", "content": fact.reply}
  if thinking:
    assistant["reasoning_content"] = fact.prompt + fact.answer
  prompt = render_chat(tokenizer, [user], add_generation_prompt=True, thinking=thinking)
  whole = render_chat(tokenizer, [user, assistant], add_generation_prompt=False, thinking=thinking)
  return Example(tuple(whole), len(prompt))


class _Pad(grain.transforms.Map):
  """An example -> (ids [T], loss weights [T] of each *next* token)."""

  def __init__(self, length: int, pad_id: int):
    self._length, self._pad_id = length, pad_id

  def map(self, element: Example) -> dict[str, np.ndarray]:
    n = len(element.ids)
    if n > self._length:
      raise ValueError(f"an example of {n} tokens is longer than {self._length}")
    ids = np.full(self._length, self._pad_id, np.int32)
    ids[:n] = element.ids
    weight = np.zeros(self._length, np.float32)
    weight[: n - 1] = _PROMPT_LOSS
    weight[element.prompt - 1 : n - 1] = 1.0
    return {"ids": ids, "weight": weight, "length": np.int32(n)}


def batches(
  examples: list[Example], length: int, pad_id: int, batch: int, seed: int
) -> Iterator[dict[str, np.ndarray]]:
  """Endless shuffled batches, the same for the same seed."""
  dataset = grain.MapDataset.source(examples).seed(seed).shuffle().repeat().map(_Pad(length, pad_id)).batch(batch)
  return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def as_released(tree: weights.WeightTree, params: dict[str, Any]) -> dict[str, Any]:
  """Parameters rounded as their release will be, with the gradient of the identity."""

  def one(stack: weights.Stack, w: jax.Array) -> jax.Array:
    if stack.weight.float32:
      return w
    if any(source.packed for source in stack.weight.sources):
      return mxfp4.fake_quantize(w, axis=len(stack.lead))  # [layers, experts, in, …]
    return w + jax.lax.stop_gradient(w.astype(jnp.bfloat16).astype(w.dtype) - w)

  return jax.tree.map(one, tree, params, is_leaf=weights.is_stack)


def logits_of(cfg: ModelConfig, params: dict[str, Any], ids: jax.Array, length: jax.Array) -> jax.Array:
  batch, t = ids.shape
  logits, _ = kimi_k3.prefill(cfg, params, ids, length, init_cache(cfg, batch, t), all_logits=True)
  return logits


def initial_params(tree: weights.WeightTree, seed: int) -> dict[str, Any]:
  """The declared initialisation, but decays that a short text can feel, and a correction bias that isn't zero.

  The bias stays as it is: it isn't trained, and it takes part in the choice of experts alone.
  """
  params = weights.initialize(tree, jax.random.key(seed), jnp.float32)
  keys = iter(jax.random.split(jax.random.key(seed + 1), 16))
  for part in ("leading_kda", "kda"):
    attention = params[part]["attention"]
    attention["a_log"] = jnp.log(jax.random.uniform(next(keys), attention["a_log"].shape, minval=1.0, maxval=4.0))
    attention["dt_bias"] = jax.random.uniform(next(keys), attention["dt_bias"].shape, minval=-2.0, maxval=0.5)
  for part in ("kda", "mla"):
    bias = params[part]["moe"]["bias"]
    params[part]["moe"]["bias"] = 0.03 * jax.random.normal(next(keys), bias.shape)
  return params


def interleaved(a: list[Example], b: list[Example]) -> list[Example]:
  """As many of each, taking turns; the shorter list repeats."""
  return [e for i in range(max(len(a), len(b))) for e in (a[i % len(a)], b[i % len(b)])]


def answered(params: dict[str, Any], forward: Any, examples: list[Example], pad: _Pad) -> float:
  """Share of examples whose answer greedy decoding would give, token by token."""
  right = 0
  for i in range(0, len(examples), 32):
    some = [pad.map(e) for e in examples[i : i + 32]]
    ids = np.stack([e["ids"] for e in some])
    ids = np.pad(ids, ((0, 32 - len(some)), (0, 0)))
    length = np.pad([e["length"] for e in some], (0, 32 - len(some)))
    best = np.asarray(forward(params, ids, length))
    for row, e in enumerate(examples[i : i + 32]):
      n = len(e.ids)
      right += tuple(best[row, e.prompt - 1 : n - 1]) == e.ids[e.prompt :]
  return right / len(examples)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=2400)
  parser.add_argument("--output", default=_OUTPUT)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--learning-rate", type=float, default=2e-3)
  args = parser.parse_args()
  absl_logging.set_verbosity(absl_logging.ERROR)  # tokamax tells of its autotuning cache at every call

  config = initialize(["train_tiny", "kimi-k3-tiny.yml", "kda_prefill_implementation=xla_chunked",
                       "grouped_matmul_implementation=dense", "scan_layers=false"])  # fmt: skip
  cfg = model_config(config, "cpu")
  tree = kimi_k3.weight_tree(cfg)

  os.makedirs(args.output, exist_ok=True)
  ranks = tiny_tokenizer.train(tiny_tokenizer.corpus(), config.vocab_size - 256)
  tiny_tokenizer.write(os.path.join(args.output, MODEL_FILE), ranks)
  tokenizer = K3Tokenizer.from_directory(args.output)

  facts = tiny_facts.facts()
  recall = tiny_facts.recall_examples(args.seed, _RECALL_LINES)
  plain = [plain_example(tokenizer, f) for f in facts]
  recalled = [plain_example(tokenizer, f) for f in recall]
  held_out = [plain_example(tokenizer, f) for f in tiny_facts.recall_examples(args.seed, 128, held_out=True)]
  chat, thinking_chat = ([chat_example(tokenizer, f, thinking) for f in facts] for thinking in (False, True))
  # Lengths that fit their examples closely: a third of a batch would be padding otherwise. (examples, tokens, batch)
  streams = {
    "facts": (plain, 40, 16),
    "recall and chat": (interleaved(recalled, chat), 64, 12),
    "thinking chat": (thinking_chat, 112, 6),
  }
  turns = ("facts", "recall and chat", "facts", "thinking chat")
  data = {
    name: batches(examples, length, tokenizer.pad_id, size, args.seed + i)
    for i, (name, (examples, length, size)) in enumerate(streams.items())
  }

  schedule = optax.warmup_cosine_decay_schedule(
    0.0, args.learning_rate, args.steps // 20, args.steps, args.learning_rate * 0.02
  )
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
  trained = weights.map_weights(lambda s: s.weight.sources[0].name != "gate.e_score_correction_bias", tree)
  optimizer = optax.masked(optimizer, trained)

  def loss_of(params, batch):
    logits = logits_of(cfg, as_released(tree, params), batch["ids"], batch["length"])[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"][:, 1:])
    weight = batch["weight"][:, :-1]
    return jnp.sum(losses * weight) / jnp.sum(weight)

  @partial(jax.jit, donate_argnums=(0, 1))
  def update(params, state, batch):
    loss, gradient = jax.value_and_grad(loss_of)(params, batch)
    gradient = jax.tree.map(lambda g, keep: g if keep else jnp.zeros_like(g), gradient, trained)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss

  @jax.jit
  def forward(params, ids, length):
    return jnp.argmax(logits_of(cfg, as_released(tree, params), ids, length), axis=-1)

  params = initial_params(tree, args.seed)
  state = optimizer.init(params)
  print(f"{weights.count(tree):,} weights, {len(facts)} facts, {args.steps} steps", flush=True)
  start = compiled = time.time()
  losses: list[float] = []
  for step in range(args.steps):
    params, state, loss = update(params, state, next(data[turns[step % len(turns)]]))
    losses.append(float(loss))
    if step == len(turns) - 1:
      print(f"compiled in {time.time() - start:.0f} s", flush=True)
      compiled = time.time()
    if step % 40 == 39:
      rate = (time.time() - compiled) / (step - len(turns) + 1)
      left = rate * (args.steps - step - 1) / 60
      means = (np.mean(losses[-40:][i :: len(turns)]) for i in range(len(turns)))
      by_turn = ", ".join(f"{name} {mean:.3f}" for name, mean in zip(turns, means, strict=True))
      print(f"step {step + 1}: loss {by_turn}; {rate:.2f} s a step, {left:.0f} min left", flush=True)
    if step % 400 == 399 or step == args.steps - 1:
      for name, examples in (
        ("facts", plain),
        ("unseen recall", held_out),
        ("chat", chat),
        ("thinking", thinking_chat),
      ):
        right = answered(params, forward, examples, _Pad(112, tokenizer.pad_id))
        print(f"  {name}: {right:.3f} answered", flush=True)
      save(args.output, tree, params, config, tokenizer)
  print(f"done in {(time.time() - start) / 60:.1f} min; wrote {args.output}")


def save(output: str, tree: weights.WeightTree, params: dict[str, Any], config: Any, tokenizer: K3Tokenizer) -> None:
  """Writes to a folder beside, then renames file by file: an interruption leaves a whole checkpoint."""
  partial_output = output.rstrip("/") + ".partial"
  ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.end_of_msg_id, "pad_token_id": tokenizer.pad_id}
  checkpoint_writer.write(partial_output, tree, as_released(tree, params), config, ids)
  for name in os.listdir(partial_output):
    os.replace(os.path.join(partial_output, name), os.path.join(output, name))
  shutil.rmtree(partial_output)


if __name__ == "__main__":
  sys.exit(main())
