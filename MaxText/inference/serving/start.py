"""From a configuration to a core that serves."""

import os
import time
from collections.abc import Callable
from typing import Any

import jax

from MaxText import distributed
from MaxText.checkpoint import checkpoint_directory
from MaxText.configs.resolve import describe_implementations
from MaxText.errors import UserError
from MaxText.inference.engine import load_engine
from MaxText.inference.serving.core import Limits, ServingCore
from MaxText.inference.serving.device import Device
from MaxText.inference.serving.processes import LeadingDevice, follow
from MaxText.inference.tokenizer import K3Tokenizer
from MaxText.progress import say


def model_name(config: Any) -> str:
  """What clients call the model."""
  return config.serve_model_name or os.path.basename(os.path.normpath(checkpoint_directory(config)))


def start_core(
  config: Any, tokenizer: K3Tokenizer, on_failure: Callable[[BaseException], None] | None = None
) -> ServingCore | None:
  """Loads the engine, compiles all that requests will need, and starts the core.

  Args:
    on_failure: called in the engine's thread when it has failed, once every stream has ended.

  Returns:
    The core. Of several processes the first has it; in the others this returns None once that core has stopped.

  Raises:
    UserError: see `load_engine`; the tokenizer is another model's.
  """
  slots = max(1, int(config.per_device_batch_size * jax.device_count()))
  max_length = config.max_target_length
  started = time.perf_counter()
  engine = load_engine(config, tokenizer.stop_ids, slots, max_length)
  if tokenizer.vocab_size > engine.cfg.vocab_size:
    raise UserError(f"the tokenizer has {tokenizer.vocab_size} ids, the model's vocab_size is {engine.cfg.vocab_size}")
  say(f"{describe_implementations(engine.cfg)}; weights read in {time.perf_counter() - started:.1f} s")
  started = time.perf_counter()
  leads = distributed.several() and distributed.is_first()
  device = (LeadingDevice if leads else Device)(engine, slots, max_length)
  device.compile()
  say(f"{slots} slots of {max_length} tokens; compiled in {time.perf_counter() - started:.1f} s")
  if not distributed.is_first():
    follow(device)
    return None
  limits = Limits(
    model_name(config),
    engine.cfg.vocab_size,
    config.max_prefill_predict_length,
    max_length,
    frozenset(engine.stop_ids),
    config.serve_queue,
  )
  return ServingCore(device, limits, on_failure)
