"""What `python -m conversion.convert` can be told, as `key=value`."""

import dataclasses
import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from MaxText.converted.manifest import LAYOUTS, SCOPES, WEIGHT_FORMATS, Formats
from MaxText.errors import UserError


@dataclass(frozen=True)
class Options(Formats):
  """Keys of a command line.

  Attributes:
    weight_format: of the routed experts: "block_fp8", "mxfp4" (kept as they are) or "bfloat16".
    scope: "experts", or "all" to put the large dense matrices into block-FP8 as well.
    layout: "maxtext" (`MaxText.converted.layout`) or "hf" (safetensors, DeepSeek's block-FP8 convention).
    max_inexact: how many elements may differ from the source's in conversions that can be exact.
    workers: threads, by default one more than there are cores, as one or the other waits for the disk.
    worker_index, worker_count: which part of the work this machine does; unset, whatever is missing, and the stamp.
    free_source: whether each shard of the source is deleted once nothing needs it any more.
  """

  weight_format: str = "block_fp8"
  scope: str = "experts"
  layout: str = "maxtext"
  max_inexact: int = 0
  workers: int = dataclasses.field(default_factory=lambda: len(os.sched_getaffinity(0)) + 1)
  worker_index: int | None = None
  worker_count: int | None = None
  free_source: bool = False

  def __post_init__(self):
    choices = {"weight_format": WEIGHT_FORMATS, "scope": SCOPES, "layout": LAYOUTS}
    for key, known in choices.items():
      if getattr(self, key) not in known:
        raise UserError(f"{key}={getattr(self, key)} is none of {', '.join(known)}")
    if self.scope == "all" and self.weight_format == "bfloat16":
      raise UserError(
        "weight_format=bfloat16 scope=all would decode the experts and encode what matters more: scope=all puts dense "
        "matrices into block-FP8; ask for scope=experts, or for weight_format=block_fp8"
      )
    if (self.layout, self.weight_format, self.scope) == ("hf", "mxfp4", "all"):
      raise UserError(
        "layout=hf weight_format=mxfp4 scope=all would need two schemes in one quantization_config, which no engine "
        "reads; ask for layout=maxtext, or for one of the two alone"
      )
    for key, least in (("max_inexact", 0), ("workers", 1)):
      if getattr(self, key) < least:
        raise UserError(f"{key}={getattr(self, key)} must be at least {least}")
    if (self.worker_index is None) != (self.worker_count is None):
      raise UserError("worker_index and worker_count go together; without both, the call does what is missing")
    if self.worker_count is not None and not 0 <= self.worker_index < self.worker_count:
      raise UserError(f"worker_index={self.worker_index} must be from 0 to worker_count - 1={self.worker_count - 1}")
    if self.free_source and self.worker_count is not None:
      raise UserError("free_source=true needs one machine alone: a worker doesn't know which shards others still read")

  @property
  def result(self) -> dict[str, str]:
    """What decides the result's bytes."""
    return {"weight_format": self.weight_format, "scope": self.scope, "layout": self.layout}


def parse_keys[T](kind: type[T], pairs: Sequence[str]) -> T:
  """`key=value` texts -> a dataclass whose fields are texts, whole numbers and true or false.

  Raises:
    UserError: an unknown key (with the nearest known one), a doubled one, or a value of the wrong kind.
  """
  known = {field.name: field.type for field in dataclasses.fields(kind)}
  given: dict[str, Any] = {}
  for pair in pairs:
    key, equals, text = pair.partition("=")
    if not equals:
      raise UserError(f"{pair!r} is not key=value")
    if key not in known:
      close = difflib.get_close_matches(key, known, n=1)
      raise UserError(
        f"unknown key {key!r}; " + (f"did you mean {close[0]}?" if close else f"keys: {', '.join(known)}")
      )
    if key in given:
      raise UserError(f"{key} is given twice")
    given[key] = _value(key, known[key], text)
  return kind(**given)


def _value(key: str, kind: Any, text: str) -> Any:
  if kind is bool:
    if text not in ("true", "false"):
      raise UserError(f"{key}={text} must be true or false")
    return text == "true"
  if kind is str:
    return text
  try:
    return int(text)
  except ValueError as error:
    raise UserError(f"{key}={text} must be a whole number") from error
