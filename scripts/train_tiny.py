"""Trains the tiny Kimi K3 that ships with the project, on a CPU, from nothing, reproducibly.

`python scripts/train_tiny.py [--steps N] [--output DIR]`: learns the facts of tiny_facts.py as plain text and as chat
(with and without thinking), and to recall what a context says. Experts are rounded to MXFP4 and the other matrices to
bfloat16 in every forward pass, so that what is exported is what was trained.
"""

import argparse
import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny_facts
import tiny_tokenizer
from absl import logging as absl_logging

from MaxText import checkpoint, checkpoint_writer, mxfp4, weights
from MaxText.configs.k3_config import initialize
from MaxText.configs.model_config import ModelConfig
from MaxText.configs.resolve import make_mesh, model_config
from MaxText.inference.cache import init_cache
from MaxText.inference.chat import render_chat
from MaxText.inference.tokenizer import MODEL_FILE, K3Tokenizer
from MaxText.models import kimi_k3

_OUTPUT = os.path.join(os.path.dirname(__file__), "..", "MaxText", "assets", "kimi-k3-tiny")
_RECALL_LINES = 4000
_WRONG = 3.0  # nats a token that a model without one of its features should get wrong by
_PROMPT_LOSS = 0.1  # weight of a prompt's tokens in the loss; an answer's have 1

# Features that the second phase makes the model need, besides the latent norm (and AttnRes, which it needs anyway).
FEATURES = ("KDA decay", "conv", "KDA output gate", "MLA output gate", "shared expert", "MLA tail")


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
      return mxfp4.fake_quantize(w, axis=len(stack.lead))  # [layers, experts, in, out]
    return w + jax.lax.stop_gradient(w.astype(jnp.bfloat16).astype(w.dtype) - w)

  return jax.tree.map(one, tree, params, is_leaf=weights.is_stack)


def logits_of(cfg: ModelConfig, params: dict[str, Any], ids: jax.Array, length: jax.Array) -> jax.Array:
  batch, t = ids.shape
  logits, _ = kimi_k3.prefill(cfg, params, ids, length, jnp.arange(batch), init_cache(cfg, batch, t), all_logits=True)
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


def switched_off(cfg: ModelConfig, params: dict[str, Any], feature: jax.Array) -> dict[str, Any]:
  """Parameters with one feature of the model made idle, by its place in `FEATURES`; -1: none."""

  def edit(part: str, module: str, name: str, what: str, change: Any) -> None:
    w = params[part][module][name]
    params[part][module][name] = jnp.where(feature == FEATURES.index(what), change(w), w)

  params = jax.tree.map(lambda w: w, params)  # new dictionaries
  for part in ("leading_kda", "kda"):
    # A gate of sigmoid(0) = 1/2, made up for in the output projection.
    edit(part, "attention", "g", "KDA output gate", jnp.zeros_like)
    edit(part, "attention", "o", "KDA output gate", lambda w: 2 * w)
    edit(part, "attention", "dt_bias", "KDA decay", lambda w: jnp.full_like(w, -1e4))
    edit(part, "attention", "conv", "conv", lambda w: jnp.zeros_like(w).at[:, :, -1].set(1.0))
  edit("mla", "attention", "g", "MLA output gate", jnp.zeros_like)
  edit("mla", "attention", "o", "MLA output gate", lambda w: 2 * w)
  edit("mla", "attention", "q_b", "MLA tail", lambda w: w.at[..., cfg.qk_nope_head_dim :].set(0))
  for part in ("kda", "mla"):
    shared = params[part]["moe"]["shared"]
    shared["wo"] = jnp.where(feature == FEATURES.index("shared expert"), 0, shared["wo"])
  return params


class Trainer:
  """The model's parameters and what changes them."""

  def __init__(self, cfg: ModelConfig, params: dict[str, Any], end_id: int):
    self.cfg, self.params, self._end = cfg, params, end_id
    self.tree = kimi_k3.weight_tree(cfg)
    self._trained = weights.map_weights(lambda s: s.weight.sources[0].name != "gate.e_score_correction_bias", self.tree)
    self._without_latent_norm = dataclasses.replace(cfg, latent_norm=False)
    self._forward = jax.jit(lambda params, ids, length: jnp.argmax(self._logits(cfg, params, ids, length), axis=-1))

  def _logits(self, cfg: ModelConfig, params, ids, length, feature=None):
    params = as_released(self.tree, params)
    if feature is not None:
      params = switched_off(cfg, params, feature)
    return logits_of(cfg, params, ids, length)

  def start(self, steps: int, learning_rate: float) -> None:
    """A new optimizer for a phase of `steps` steps."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 20, steps, learning_rate * 0.02)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    optimizer = optax.masked(optimizer, self._trained)
    self._state = optimizer.init(self.params)

    def update(cfg, params, state, batch, feature):
      """One step: towards the right answers, or, with a feature switched off, away from them."""

      def loss_of(params):
        logits = self._logits(cfg, params, batch["ids"], batch["length"], feature)[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"][:, 1:])
        switched = (feature >= 0) | (cfg is self._without_latent_norm)
        # Of a crippled model every word of an answer should be wrong, each by _WRONG nats. The end of text doesn't
        # count: a model that only forgets to stop has answered.
        ids, weight = batch["ids"][:, 1:], batch["weight"][:, :-1]
        answer = (weight == 1.0) & (ids != self._end)
        losses = jnp.where(switched, jax.nn.relu(_WRONG - losses), losses)
        weight = jnp.where(switched, answer, weight)
        return jnp.sum(losses * weight) / jnp.sum(weight)

      loss, gradient = jax.value_and_grad(loss_of)(params)
      gradient = jax.tree.map(lambda g, keep: g if keep else jnp.zeros_like(g), gradient, self._trained)
      updates, state = optimizer.update(gradient, state, params)
      return optax.apply_updates(params, updates), state, loss

    self._update = jax.jit(update, static_argnums=(0,), donate_argnums=(1, 2))

  def step(self, batch: dict[str, np.ndarray], feature: str | None = None) -> float:
    """Trains on a batch; with `feature`, for that feature to be needed. Returns the loss."""
    cfg = self._without_latent_norm if feature == "latent norm" else self.cfg
    index = FEATURES.index(feature) if feature in FEATURES else -1
    self.params, self._state, loss = self._update(cfg, self.params, self._state, batch, jnp.int32(index))
    return float(loss)

  def answered(self, examples: list[Example], pad: _Pad) -> float:
    """Share of examples whose answer greedy decoding would give, token by token."""
    right = 0
    for i in range(0, len(examples), 32):
      some = [pad.map(e) for e in examples[i : i + 32]]
      ids = np.pad(np.stack([e["ids"] for e in some]), ((0, 32 - len(some)), (0, 0)))
      length = np.pad([e["length"] for e in some], (0, 32 - len(some)))
      best = np.asarray(self._forward(self.params, ids, length))
      for row, e in zip(best, examples[i : i + 32], strict=False):
        right += tuple(row[e.prompt - 1 : len(e.ids) - 1]) == e.ids[e.prompt :]
    return right / len(examples)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=2400, help="steps of the first phase: learning")
  parser.add_argument("--last-steps", type=int, default=500, help="steps of the second: needing every feature")
  parser.add_argument("--output", default=_OUTPUT)
  parser.add_argument("--start-from", default="", help="a checkpoint that the first phase wrote, instead of that phase")
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  absl_logging.set_verbosity(absl_logging.ERROR)  # tokamax tells of its autotuning cache at every call

  config = initialize(["train_tiny", "kimi-k3-tiny.yml", "cpu_threads=0", "kda_prefill_implementation=xla_chunked",
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
  data = {
    name: batches(examples, length, tokenizer.pad_id, size, args.seed + i)
    for i, (name, (examples, length, size)) in enumerate(streams.items())
  }
  turns = ("facts", "recall and chat", "facts", "thinking chat")
  tests = {"facts": plain, "unseen recall": held_out, "chat": chat, "thinking": thinking_chat}
  print(f"{weights.count(tree):,} weights, {len(facts)} facts", flush=True)

  def run(trainer: Trainer, phase: str, steps: int, learning_rate: float, plan: Any) -> None:
    """`plan(step)` -> (stream, feature or None)."""
    trainer.start(steps, learning_rate)
    losses: dict[str, float] = {}
    start = time.time()
    for step in range(steps):
      stream, feature = plan(step)
      losses[f"no {feature}" if feature else stream] = trainer.step(next(data[stream]), feature)
      if step % 50 == 49 or step == steps - 1:
        minutes = (time.time() - start) / 60
        left = minutes / (step + 1) * (steps - step - 1)
        shown = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
        print(f"{phase}, step {step + 1} of {steps}, {minutes:.0f} min, {left:.0f} left: {shown}", flush=True)
      if step % 250 == 249 or step == steps - 1:
        scores = (f"{name} {trainer.answered(some, _Pad(112, tokenizer.pad_id)):.3f}" for name, some in tests.items())
        print(f"  answered: {', '.join(scores)}", flush=True)
        save(args.output, tree, trainer.params, config, tokenizer)

  if args.start_from:
    params = load_released(args.start_from, config, cfg)
  else:
    trainer = Trainer(cfg, initial_params(tree, args.seed), tokenizer.eos_id)
    run(trainer, "learning", args.steps, 2e-3, lambda step: (turns[step % len(turns)], None))
    # What the second phase begins with is what a checkpoint holds, so that --start-from gives the same.
    params = load_released(args.output, config, cfg)
  # A small model gets its facts right with any one feature gone. As a fixture it should not: in every other step a
  # feature is switched off and the answers are trained away.
  needed = ("latent norm", *FEATURES)

  def needing(step: int) -> tuple[str, str | None]:
    if step % 2:
      return "facts", needed[step // 2 % len(needed)]
    return turns[step // 2 % len(turns)], None

  run(Trainer(cfg, params, tokenizer.eos_id), "needing every feature", args.last_steps, 1e-3, needing)
  print(f"wrote {args.output}")


def load_released(directory: str, config: Any, cfg: ModelConfig) -> dict[str, Any]:
  tree = kimi_k3.weight_tree(cfg)
  shardings = weights.shardings(tree, make_mesh(config), config.logical_axis_rules, cfg.storage)
  return checkpoint.load(checkpoint.ReleasedCheckpoint(directory), tree, cfg.storage, shardings)


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
