"""The shipped tiny model: it answers its facts, and each feature of K3 is needed for that."""

import dataclasses
import os
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText import checkpoint, weights
from MaxText.configs.k3_config import initialize
from MaxText.configs.resolve import model_config
from MaxText.inference.cache import init_cache
from MaxText.inference.chat import parse_response, render_chat
from MaxText.inference.engine import Engine, checkpoint_directory, load_engine
from MaxText.inference.steps import NO_TOKEN
from MaxText.inference.tokenizer import K3Tokenizer
from MaxText.models import kimi_k3

ROOT = os.path.join(os.path.dirname(__file__), "..")
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import tiny_facts  # noqa: E402

MAX_LENGTH = 64
FACTS = tiny_facts.facts()


@pytest.fixture(scope="module")
def config():
  return initialize(["test", "kimi-k3-tiny.yml", "decode_steps_per_dispatch=16"])


@pytest.fixture(scope="module")
def tokenizer(config):
  return K3Tokenizer.from_directory(checkpoint_directory(config))


@pytest.fixture(scope="module")
def engine(config, tokenizer) -> Engine:
  return load_engine(config, tokenizer.stop_ids, 8, MAX_LENGTH)


def generate(engine: Engine, prompts: list[list[int]], max_length: int = MAX_LENGTH, slots: int | None = None):
  """Greedy ids after each prompt, without the end id."""
  slots = slots or len(prompts)
  logits, cache = engine.prefill(prompts, engine.init_cache(slots, max_length))
  remaining = np.zeros(slots, np.int32)
  remaining[: len(prompts)] = [max_length - len(p) for p in prompts]
  state = engine.start(logits, cache, remaining)
  rows = [np.asarray(state.tokens)[None]]
  while np.any(state.active):
    tokens, state = engine.generate(state)
    rows.append(np.asarray(tokens))
  columns = np.concatenate(rows).T[: len(prompts)]
  return [[int(t) for t in column if t != NO_TOKEN and t not in engine.stop_ids] for column in columns]


def test_answers_its_facts_alone_and_in_batches_of_eight(engine, tokenizer):
  prompts = [tokenizer.encode(f.prompt) for f in FACTS]
  alone = [tokenizer.decode(generate(engine, [p])[0]) for p in prompts]
  right = np.array([text == f.answer for text, f in zip(alone, FACTS, strict=True)])
  assert len(FACTS) >= 60
  assert right.mean() >= 0.95, [(f.prompt, t) for f, t, r in zip(FACTS, alone, right, strict=True) if not r]
  for i in range(0, len(FACTS), 8):
    ids = generate(engine, prompts[i : i + 8], slots=8)
    assert [tokenizer.decode(x) for x in ids] == alone[i : i + 8]


def test_answers_questions_in_a_chat_with_and_without_thinking(engine, tokenizer):
  for thinking in (False, True):
    prompts = [
      render_chat(tokenizer, [{"role": "user", "content": f.question}], add_generation_prompt=True, thinking=thinking)
      for f in FACTS
    ]
    right = []
    for i in range(0, len(FACTS), 8):
      answers = generate(engine, prompts[i : i + 8], 128, slots=8)
      right += [
        parse_response(tokenizer, ids, thinking).content == f.reply
        for ids, f in zip(answers, FACTS[i : i + 8], strict=True)
      ]
    assert np.mean(right) >= 0.95


def test_weights_held_in_bfloat16_are_those_of_the_checkpoint(engine, tokenizer):
  assert engine.cfg.storage.dtype == jnp.bfloat16
  exact = load_engine(initialize(["test", "kimi-k3-tiny.yml", "weight_dtype=float32"]), tokenizer.stop_ids, 1, 1).params
  jax.tree.map(lambda held, read: np.testing.assert_array_equal(held.astype(read.dtype), read), engine.params, exact)


@pytest.mark.parametrize("storage", [("dtype=bfloat16", "weight_dtype=bfloat16"), ("weight_format=block_fp8",),
                                     ("weight_format=mxfp4",), ("mla_cache_dtype=float8_e4m3fn",)])  # fmt: skip
def test_answers_in_every_format(storage, tokenizer):
  config = initialize(["test", "kimi-k3-tiny.yml", *storage])
  engine = load_engine(config, tokenizer.stop_ids, 8, MAX_LENGTH)
  prompts = [tokenizer.encode(f.prompt) for f in FACTS]
  ids = [x for i in range(0, len(FACTS), 8) for x in generate(engine, prompts[i : i + 8], slots=8)]
  right = [tokenizer.decode(x) == f.answer for x, f in zip(ids, FACTS, strict=True)]
  assert np.mean(right) >= 0.95


# --- Power: each feature switched off, the answers are wrong. -------------------------------------------------------


def _edit(params, **changes):
  """A copy of the parameters with attention weights of every KDA or MLA layer changed: `kda={"g": function}`."""
  new = dict(params)
  for part in params:
    edits = changes.get(part.removeprefix("leading_"), {}) if isinstance(params[part], dict) else {}
    if edits:
      attention = dict(params[part]["attention"])
      attention |= {name: change(attention[name]) for name, change in edits.items()}
      new[part] = params[part] | {"attention": attention}
  return new


def _by_head(cfg, w):
  return w.reshape(*w.shape[:-1], cfg.mla_num_heads, -1)


def _without_attn_res(cfg, params):
  plain = {
    k: {n: {} if n.endswith("_res") else x for n, x in v.items()} if k in ("leading_kda", "kda", "mla") else v
    for k, v in params.items()
  }
  return dataclasses.replace(cfg, attn_res_block_size=0), plain | {"output_res": {}}


SWITCHED_OFF = {
  "AttnRes": _without_attn_res,
  # A bound of almost nothing: the state never decays.
  "KDA decay": lambda cfg, p: (dataclasses.replace(cfg, kda_gate_lower_bound=-1e-12), p),
  "conv": lambda cfg, p: (cfg, _edit(p, kda={"conv": lambda w: jnp.zeros_like(w).at[:, :, -1].set(1.0)})),
  # sigmoid(0) = 1/2, made up for in the output projection: a gate of one.
  "KDA output gate": lambda cfg, p: (cfg, _edit(p, kda={"g": jnp.zeros_like, "o": lambda w: 2 * w})),
  "MLA output gate": lambda cfg, p: (dataclasses.replace(cfg, mla_output_gate=False), p),
  "latent norm": lambda cfg, p: (dataclasses.replace(cfg, latent_norm=False), p),
  "shared expert": lambda cfg, p: (dataclasses.replace(cfg, num_shared_experts=0), p),
  "MLA tail": lambda cfg, p: (
    cfg,
    _edit(p, mla={"q_b": lambda w: _by_head(cfg, w).at[..., cfg.qk_nope_head_dim :].set(0).reshape(w.shape)}),
  ),
}


def _share_answered(cfg, params, tokenizer) -> float:
  """Share of facts whose answer is the likeliest continuation at each of its tokens."""
  rows = [(tokenizer.encode(f.prompt), tokenizer.encode(f.answer)) for f in FACTS]
  ids = np.zeros((len(rows), MAX_LENGTH), np.int32)
  for row, (prompt, answer) in zip(ids, rows, strict=True):
    row[: len(prompt) + len(answer)] = prompt + answer
  length = jnp.array([len(p) + len(a) for p, a in rows], jnp.int32)
  run = jax.jit(partial(kimi_k3.prefill, cfg, all_logits=True))
  logits, _ = run(params, ids, length, jnp.arange(len(rows)), init_cache(cfg, len(rows), MAX_LENGTH))
  best = np.asarray(jnp.argmax(logits, axis=-1))
  right = [list(b[len(p) - 1 : len(p) + len(a) - 1]) == a for b, (p, a) in zip(best, rows, strict=True)]
  return float(np.mean(right))


def test_nothing_switched_off_answers(engine, tokenizer):
  assert _share_answered(engine.cfg, engine.params, tokenizer) >= 0.95


@pytest.mark.parametrize("feature", SWITCHED_OFF)
def test_a_feature_switched_off_makes_the_answers_wrong(feature, engine, tokenizer):
  cfg, params = SWITCHED_OFF[feature](engine.cfg, engine.params)
  assert _share_answered(cfg, params, tokenizer) < 0.5


# --- The checkpoint itself. -----------------------------------------------------------------------------------------


def test_the_checkpoint_is_small_and_in_the_released_layout(config):
  directory = checkpoint_directory(config)
  assert sum(e.stat().st_size for e in os.scandir(directory)) <= 10e6
  released = checkpoint.ReleasedCheckpoint(directory)
  from_release = initialize(["test", "kimi-k3.yml", f"hf_config={directory}"])
  cfg = model_config(from_release, "cpu")
  released.check(kimi_k3.weight_tree(cfg))
  ours = model_config(config, "cpu")
  running = {key: getattr(ours, key) for key in ("dtype", "storage", "rolled", "mla_cache_dtype")}
  assert dataclasses.replace(cfg, **running) == ours
  assert cfg.num_layers >= 13
  assert cfg.num_experts >= 16
  assert cfg.num_experts_per_token == 4
  assert all(size % 128 == 0 for size in (cfg.hidden_size, cfg.latent_size, cfg.moe_intermediate_size, cfg.mlp_size))
  assert len({n for n in released.names if n.endswith("weight_packed")}) == 12 * 16 * 3
  assert weights.count(kimi_k3.weight_tree(cfg)) > 11e6


def test_a_dispatch_ends_when_a_sequence_does_and_the_rest_go_on(engine, tokenizer):
  prompts = [tokenizer.encode(f.prompt) for f in FACTS[:2]]
  rest = [generate(engine, [prompt], slots=8)[0] for prompt in prompts]
  logits, cache = engine.prefill(prompts, engine.init_cache(8, MAX_LENGTH))
  most = [3, MAX_LENGTH - len(prompts[1])]  # tokens that each may choose
  state = engine.start(logits, cache, np.array(most + [0] * 6))
  first = np.asarray(state.tokens)
  tokens, state = engine.generate(state)
  assert np.flatnonzero(state.active).tolist() == [1]
  assert np.all(np.asarray(tokens)[2:] == NO_TOKEN)
  ids = np.concatenate([first[None], np.asarray(tokens)[:2]]).T[:2].tolist()
  assert ids == [rest[0][:3], rest[1][:3]]
  tokens, state = engine.generate(state)
  after = [t for t in np.asarray(tokens)[:, 1].tolist() if t != NO_TOKEN and t not in engine.stop_ids]
  assert ids[1] + after == rest[1]
