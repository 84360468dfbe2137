"""Decode speed of the tiny model on a CPU: the compiled loop, the same step driven from Python, and transformers.

`python bench/decode_cpu.py [--transformers-python PATH] [--json FILE] [--tokens N] [--repeats R] [key=value …]`

The rows take turns, since a machine's speed drifts, and each reports its median. transformers' KimiLinear lacks K3's
features, so it is compared with a model that lacks them too: same sizes, same random weights (bench/README.md).
"""

import os
import sys

# Run as a file, Python puts this folder first on the path, where kda_decode.py would hide the package of that name.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
  sys.path[0] = os.path.dirname(sys.path[0])

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from MaxText import weights
from MaxText.configs import hf_config
from MaxText.configs.k3_config import initialize
from MaxText.configs.resolve import describe_implementations, make_mesh, model_config
from MaxText.errors import UserError, exit_on_user_error
from MaxText.inference.engine import Engine, load_engine
from MaxText.inference.sampling import Sampling, sample
from MaxText.models import kimi_k3

CONFIG = "kimi-k3-tiny.yml"
BATCHES = (1, 8)
PROMPT_LENGTH = 16
# What the tiny model keeps where the family's older member lacks a feature: KimiLinear's form of every layer.
FAMILY_MODE = (
  "hidden_act=silu",
  "attn_res_block_size=0",
  "kda_gate_lower_bound=null",
  "kda_use_full_rank_gate=false",
  "q_lora_rank=0",
  "mla_use_output_gate=false",
  "routed_expert_hidden_size=0",
  "latent_moe_use_norm=false",
  "weight_format=plain",
  "weight_dtype=float32",  # as transformers holds them
)
NO_PEER = (
  "transformers' row is left out: make an environment with torch 2.13.0 (a CPU build) and transformers 5.24.0 as "
  "bench/README.md says, and pass --transformers-python PATH"
)

# tokens -> (seconds of that many decode steps, ids [B, tokens + 1])
Run = Callable[[int], tuple[float, np.ndarray]]


@dataclass
class Row:
  """One line of the table: a model and loop at one batch size."""

  model: str
  loop: str
  batch: int
  run: Run
  seconds: list[float] = field(default_factory=list)
  ids: np.ndarray | None = None

  def measure(self, tokens: int) -> None:
    seconds, self.ids = self.run(tokens)
    self.seconds.append(seconds)

  def step_ms(self, tokens: int) -> float:
    return statistics.median(self.seconds) / tokens * 1e3

  def rate(self, tokens: int) -> float:
    return self.batch * tokens / statistics.median(self.seconds)


def make_prompts(batch: int, vocab_size: int) -> np.ndarray:
  """[B, PROMPT_LENGTH] ids, the same in every run."""
  return np.random.default_rng(batch).integers(0, vocab_size, (batch, PROMPT_LENGTH))


def compiled_loop(engine: Engine, prompts: np.ndarray, max_length: int) -> Run:
  """`Engine.generate`: many steps in one call of a compiled program."""
  slots = len(prompts)
  engine.compile(slots, max_length, PROMPT_LENGTH)

  def run(tokens):
    logits, cache = engine.prefill(prompts.tolist(), engine.init_cache(slots, max_length))
    state = engine.start(logits, cache, np.full(slots, tokens + 1))
    ids = [np.asarray(state.tokens)[None]]
    jax.block_until_ready(state)
    started = time.perf_counter()
    while np.any(state.active):
      chosen, state = engine.generate(state)
      ids.append(np.asarray(chosen))
    seconds = time.perf_counter() - started
    return seconds, np.concatenate(ids)[: tokens + 1].T

  return run


def python_loop(engine: Engine, prompts: np.ndarray, max_length: int) -> Run:
  """One jitted step and choice a token, its id read by the host before the next."""
  slots = len(prompts)
  active = jnp.ones(slots, bool)

  def step(params, tokens, sampling, cache):
    logits, cache = kimi_k3.decode_step(engine.cfg, params, tokens, active, cache)
    return sample(sampling, logits, cache.lengths), cache

  step = jax.jit(step, donate_argnums=(3,))

  def run(tokens):
    logits, cache = engine.prefill(prompts.tolist(), engine.init_cache(slots, max_length))
    state = engine.start(logits, cache, np.full(slots, tokens + 1))
    last, cache, sampling = state.tokens, state.cache, state.sampling
    ids = [np.asarray(last)]
    jax.block_until_ready(state)
    started = time.perf_counter()
    for _ in range(tokens):
      last, cache = step(engine.params, last, sampling, cache)
      ids.append(np.asarray(last))
    seconds = time.perf_counter() - started
    return seconds, np.stack(ids, axis=1)

  return run


def random_engine(config: Any) -> Engine:
  """An engine with random weights."""
  mesh = make_mesh(config)
  cfg = model_config(config, "cpu", mesh)
  tree = kimi_k3.weight_tree(cfg)
  params = jax.device_put(
    weights.initialize(tree, jax.random.key(0), cfg.storage.dtype),
    weights.shardings(tree, mesh, config.logical_axis_rules, cfg.storage),
  )
  return Engine(cfg, mesh, params, Sampling(), (), config.prefill_chunk_size, config.decode_steps_per_dispatch)


def write_for_transformers(directory: str, config: Any, engine: Engine) -> None:
  """An engine's weights in Kimi-Linear's released layout, unpacked, in float32."""
  tensors = {}
  stacks = jax.tree.leaves(kimi_k3.weight_tree(engine.cfg), is_leaf=weights.is_stack)
  for stack, values in zip(stacks, jax.tree.leaves(engine.params), strict=True):
    for prefix, value in zip(stack.prefixes, np.asarray(values).reshape(-1, *stack.weight.shape), strict=True):
      for source, tensor in zip(stack.weight.sources, stack.weight.to_release(value), strict=True):
        if source.name == "A_log":  # without K3's padding
          tensor = tensor[: engine.cfg.kda_num_heads].reshape(1, 1, -1, 1)
        else:
          tensor = tensor.reshape(source.shape)
        tensors[f"{prefix}{source.name}{source.suffix}"] = np.ascontiguousarray(tensor, np.float32)
  save_file(tensors, os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})
  fields = hf_config.write(config.get_keys())
  # Features that are off: transformers' class doesn't know them, or wants a null.
  fields = {k: v for k, v in fields.items() if v is not None and (v != 0 or v is False)}
  fields |= {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
  fields |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
  with open(os.path.join(directory, "config.json"), "w", encoding="utf-8") as f:
    json.dump(fields, f)


class Peer:
  """transformers in its own process, which sleeps while the others run."""

  def __init__(self, python: str, directory: str):
    helper = os.path.join(os.path.dirname(os.path.abspath(__file__)), "transformers_decode.py")
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    try:
      self._process = subprocess.Popen(
        [python, helper, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
      )
    except OSError as error:
      raise UserError(f"--transformers-python {python}: {error.strerror}") from error
    self.versions = self._answer()
    self.paths: dict[int, str] = {}

  def _answer(self) -> dict[str, Any]:
    line = self._process.stdout.readline()
    if not line:
      raise UserError(
        "the environment of --transformers-python failed (see above); bench/README.md says how to make it"
      )
    return json.loads(line)

  def loop(self, prompts: np.ndarray) -> Run:
    def run(tokens):
      request = {"prompts": prompts.tolist(), "tokens": tokens}
      self._process.stdin.write(json.dumps(request) + "\n")
      self._process.stdin.flush()
      answer = self._answer()
      self.paths[len(prompts)] = answer["path"]
      return answer["seconds"], np.array(answer["tokens"])

    return run

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait()


def say(line: str) -> None:
  """Tells of the run's progress, apart from the table."""
  print(line, file=sys.stderr, flush=True)


def cpu_name() -> str:
  try:
    with open("/proc/cpuinfo", encoding="utf-8") as f:
      return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
  except (OSError, StopIteration):
    return "unknown CPU"


def print_table(rows: Sequence[Row], tokens: int) -> None:
  """The rows as a Markdown table."""
  print("| model | loop | batch | tokens/s | ms a step | fastest … slowest |")
  print("| --- | --- | ---: | ---: | ---: | ---: |")
  for row in rows:
    low, high = (s / tokens * 1e3 for s in (min(row.seconds), max(row.seconds)))
    print(
      f"| {row.model} | {row.loop} | {row.batch} | {row.rate(tokens):,.0f} | {row.step_ms(tokens):.2f} | "
      f"{low:.2f} … {high:.2f} |"
    )


def same_tokens(ours: np.ndarray, theirs: np.ndarray) -> str:
  """How far two greedy runs agree."""
  rows = [int(np.argmin(np.append(a == b, False))) for a, b in zip(ours, theirs, strict=True)]
  return f"{min(rows)} of {ours.shape[1]}"


def build_rows(args: argparse.Namespace, directory: str) -> tuple[list[Row], Peer | None]:
  """Compiles everything there is to measure."""
  config = initialize(["decode_cpu.py", CONFIG, *args.overrides])
  max_length = config.max_target_length
  if PROMPT_LENGTH + args.tokens + 1 > max_length:
    raise UserError(f"--tokens {args.tokens} and a prompt of {PROMPT_LENGTH} exceed max_target_length={max_length}")
  family_config = initialize(["decode_cpu.py", CONFIG, *args.overrides, *FAMILY_MODE])
  engine, family = load_engine(config, (), max(BATCHES), max_length), random_engine(family_config)
  say(f"{describe_implementations(engine.cfg)}; {config.decode_steps_per_dispatch} steps a dispatch")
  peer = None
  if args.transformers_python:
    write_for_transformers(directory, family_config, family)
    peer = Peer(args.transformers_python, directory)
  rows = []
  for batch in BATCHES:
    prompts = make_prompts(batch, engine.cfg.vocab_size)
    started = time.perf_counter()
    rows.append(Row("K3, tiny", "compiled, many steps a call", batch, compiled_loop(engine, prompts, max_length)))
    rows.append(Row("K3, tiny", "jitted step, driven from Python", batch, python_loop(engine, prompts, max_length)))
    rows.append(
      Row("Kimi-Linear, same sizes", "compiled, many steps a call", batch, compiled_loop(family, prompts, max_length))
    )
    say(f"batch {batch}: compiled in {time.perf_counter() - started:.0f} s")
    if peer:
      rows.append(Row("Kimi-Linear, same sizes", "transformers", batch, peer.loop(prompts)))
  return rows, peer


def report(rows: Sequence[Row], peer: Peer | None, args: argparse.Namespace, load: float) -> None:
  """Prints the table and the ratios, and writes them to `--json`."""
  tokens = args.tokens
  found = {(row.model, row.loop, row.batch): row for row in rows}
  machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "load_before": load, "jax": jax.__version__}
  if peer:
    machine |= peer.versions
  print(", ".join(f"{k}: {v}" for k, v in machine.items()))
  print(f"{PROMPT_LENGTH} prompt tokens, {tokens} decode steps, float32, greedy; median of {args.repeats}\n")
  print_table(rows, tokens)
  print()
  ratios = {}
  for batch in BATCHES:
    ours = found["K3, tiny", "compiled, many steps a call", batch]
    stepped = found["K3, tiny", "jitted step, driven from Python", batch]
    ratios[f"compiled / driven from Python, batch {batch}"] = ours.rate(tokens) / stepped.rate(tokens)
    if peer:
      family = found["Kimi-Linear, same sizes", "compiled, many steps a call", batch]
      theirs = found["Kimi-Linear, same sizes", "transformers", batch]
      ratios[f"Kimi-Linear: ours / transformers, batch {batch}"] = family.rate(tokens) / theirs.rate(tokens)
      print(f"transformers at batch {batch}: {peer.paths[batch]}; ", end="")
      print(f"greedy tokens equal to ours: {same_tokens(family.ids, theirs.ids)}")
  for name, ratio in ratios.items():
    print(f"{name}: {ratio:.1f}×")
  if args.json:
    table = [
      {"model": r.model, "loop": r.loop, "batch": r.batch, "tokens_per_s": r.rate(tokens), "seconds": r.seconds}
      for r in rows
    ]
    with open(args.json, "w", encoding="utf-8") as f:
      json.dump({"machine": machine, "steps": tokens, "rows": table, "ratios": ratios}, f, indent=2)
      f.write("\n")


def main(argv: Sequence[str]) -> None:
  parser = argparse.ArgumentParser(prog="bench/decode_cpu.py", description=__doc__.split("\n", 1)[0])
  parser.add_argument("--transformers-python", metavar="PATH", help="python of an environment with KimiLinear")
  parser.add_argument("--json", metavar="FILE", help="also write the figures there")
  parser.add_argument("--tokens", type=int, default=128, metavar="N", help="decode steps of a measurement")
  parser.add_argument("--repeats", type=int, default=7, metavar="R", help="measurements of each row")
  parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"keys of {CONFIG}")
  args = parser.parse_args(argv[1:])
  if args.tokens < 1 or args.repeats < 1:
    raise UserError("--tokens and --repeats must be at least 1")
  load = os.getloadavg()[0]
  if load > 0.5:
    say(f"other work is running here (load {load:.1f} on {os.cpu_count()} cores): the figures are provisional")
  if not args.transformers_python:
    say(NO_PEER)
  with tempfile.TemporaryDirectory() as directory:
    rows, peer = build_rows(args, directory)
    for row in rows:  # warm-up
      row.run(min(args.tokens, 32))
    for i in range(args.repeats):
      for row in rows:
        row.measure(args.tokens)
      say(f"round {i + 1} of {args.repeats}")
    report(rows, peer, args, load)
    if peer:
      peer.close()


if __name__ == "__main__":
  exit_on_user_error(main, sys.argv)
