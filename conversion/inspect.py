"""`python -m conversion.inspect SRC [key=value …]`: is a released checkpoint whole? Headers alone, no tensor is read.

Every tensor that the model of SRC/config.json needs must be there once, with its shape and dtype; sizes must add up;
and nothing may be there that the model has no place for, but the vision tower. The first thing wrong is told in one
line, with exit status 2.
"""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from conversion.headers import HeaderCheckpoint, read_json, shown
from MaxText.checkpoint import check_is_safetensors
from MaxText.configs.k3_config import initialize
from MaxText.configs.model_config import ModelConfig
from MaxText.configs.resolve import model_config
from MaxText.errors import UserError, exit_on_user_error
from MaxText.models import kimi_k3
from MaxText.weights import WeightTree, is_stack

CONFIG = "config.json"
_VISION = "vision (not read)"


@dataclass
class Tally:
  """Tensors of one kind: how many, their bytes, and how many of each dtype."""

  tensors: int = 0
  nbytes: int = 0
  dtypes: Counter[str] = field(default_factory=Counter)

  def add(self, dtype: str, nbytes: int) -> None:
    self.tensors += 1
    self.nbytes += nbytes
    self.dtypes[dtype] += 1


@dataclass
class Summary:
  """What a whole checkpoint consists of.

  Attributes:
    kinds: tallies by what the tensors serve.
    narrowed: tensors that K3 stores as float32 and this checkpoint as something narrower.
  """

  kinds: dict[str, Tally] = field(default_factory=dict)
  narrowed: list[str] = field(default_factory=list)

  @property
  def total(self) -> Tally:
    every = Tally()
    for kind in self.kinds.values():
      every.tensors += kind.tensors
      every.nbytes += kind.nbytes
      every.dtypes += kind.dtypes
    return every

  def add(self, kind: str, dtype: str, nbytes: int) -> None:
    self.kinds.setdefault(kind, Tally()).add(dtype, nbytes)


def read_model(directory: str, overrides: Sequence[str] = ()) -> ModelConfig:
  """The model that a checkpoint's own config.json describes.

  Args:
    overrides: `key=value` of `K3Config`, as on a command line.

  Raises:
    UserError: no config.json, or one that describes no model of the family; see `check_is_safetensors` too.
  """
  if not os.path.isdir(directory):
    raise UserError(f"{directory} is not a directory")
  check_is_safetensors(directory)  # before config.json is missed, which a conversion writes almost last
  read_json(directory, CONFIG)  # in what follows JSON is taken as it comes: keys twice, any depth, any size
  path = os.path.join(directory, CONFIG)
  return model_config(initialize(["inspect", "kimi-k3.yml", f"hf_config={path}", *overrides]), "cpu")


def _kind(path: tuple[Any, ...]) -> str:
  """Of a place in `kimi_k3.weight_tree`."""
  keys = [part.key for part in path]
  if keys[0] in ("embed", "lm_head"):
    return "embedding and head"
  names = {
    "experts": "routed experts",
    "moe": "router, latent, shared experts",
    "mlp": "dense MLP",
    "attention": f"attention, {keys[0].removeprefix('leading_').upper()}",
  }
  return names.get(keys[1] if len(keys) > 1 else "", "norms and AttnRes")


def check(checkpoint: HeaderCheckpoint, tree: WeightTree) -> Summary:
  """Compares a checkpoint's headers with a model's declarations.

  Raises:
    UserError: naming the first tensor that is missing, doubled, mis-shaped, of another dtype or unknown.
  """
  summary, used = Summary(), set()
  for path, stack in jax.tree.leaves_with_path(tree, is_leaf=is_stack):
    kind = _kind(path)
    for prefix in stack.prefixes:
      for source in stack.weight.sources:
        for name in checkpoint.tensors_of(prefix, source):
          tensor = checkpoint.tensor(name)
          used.add(name)
          summary.add(kind, tensor.dtype, tensor.nbytes)
          if stack.weight.float32 and tensor.dtype != "F32":
            summary.narrowed.append(name)
  unknown = sorted(checkpoint.names - used)
  if unknown:
    more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
    raise UserError(
      f"{os.path.join(checkpoint.directory, checkpoint.tensor(unknown[0]).file)} holds {shown(unknown[0])}{more}, "
      f"which the model of {CONFIG} has no place for"
    )
  for tensor in checkpoint.vision():
    summary.add(_VISION, tensor.dtype, tensor.nbytes)
  return summary


def inspect(directory: str, overrides: Sequence[str] = ()) -> tuple[HeaderCheckpoint, Summary]:
  """Reads a checkpoint's headers and compares them with the model of its config.json.

  Raises:
    UserError: see `inspect_model`.
  """
  return inspect_model(directory, overrides)[1:]


def inspect_model(
  directory: str, overrides: Sequence[str] = (), twins: str | None = None
) -> tuple[ModelConfig, HeaderCheckpoint, Summary]:
  """As `inspect`, with the model.

  Args:
    overrides: see `read_model`.
    twins: see `HeaderCheckpoint`.

  Raises:
    UserError: see `read_model`, `HeaderCheckpoint` and `check`.
  """
  cfg = read_model(directory, overrides)
  checkpoint = HeaderCheckpoint(directory, twins)
  experts = cfg.num_experts * (cfg.num_layers - cfg.num_leading_layers)
  if experts > len(checkpoint.tensors):  # declarations of an absurd number would fill the memory
    raise UserError(
      f"{os.path.join(directory, CONFIG)} asks for {experts:,} experts, its shards hold {len(checkpoint.tensors):,} "
      "tensors"
    )
  return cfg, checkpoint, check(checkpoint, kimi_k3.weight_tree(cfg))


def describe(checkpoint: HeaderCheckpoint, summary: Summary) -> str:
  """The report, as lines for a person."""
  total, shards = summary.total, checkpoint.shards
  lines = [
    f"{checkpoint.directory} is whole: {total.tensors:,} tensors in {len(shards)} shard{'s' * (len(shards) != 1)}, "
    f"{total.nbytes:,} bytes ({total.nbytes / 1e9:,.2f} GB)"
  ]
  for kind, tally in sorted(summary.kinds.items(), key=lambda item: -item[1].nbytes):
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in sorted(tally.dtypes.items()))
    lines.append(f"  {kind:<31}{tally.tensors:>8,} tensors {tally.nbytes:>18,} bytes  {dtypes}")
  if summary.narrowed:
    lines.append(
      f"  {len(summary.narrowed):,} tensors that K3 stores as F32 are narrower here, such as {summary.narrowed[0]}"
    )
  stray = sorted(
    file for file in os.listdir(checkpoint.directory) if file.endswith(".safetensors") and file not in shards
  )
  if stray:
    lines.append(f"  not in the index, and not looked at: {', '.join(map(shown, stray))}")
  return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
  if len(argv) < 2 or "=" in argv[1]:
    raise UserError("usage: python -m conversion.inspect SRC [key=value …]")
  print(describe(*inspect(argv[1], argv[2:])))


if __name__ == "__main__":
  exit_on_user_error(main, sys.argv)
