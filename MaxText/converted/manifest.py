"""The stamp on a finished conversion: DIR/manifest.json, written last of all. Without it nobody reads the directory.

DIR/tensors.jsonl has a line for each tensor that was written (name, shape, dtype, sha256, source files, exactness); the
manifest holds that file's own sha256, so that one short file vouches for everything.
"""

import json
import os
from dataclasses import dataclass, field, fields
from typing import Any

from MaxText.errors import UserError

MANIFEST = "manifest.json"
TENSORS = "tensors.jsonl"
WORK = ".conversion"  # folder of a conversion's notes on itself, gone when it is finished
FORMAT = "kimi-k3-maxtext"
VERSION = 1
WEIGHT_FORMATS = ("block_fp8", "mxfp4", "bfloat16")
SCOPES = ("experts", "all")
LAYOUTS = ("maxtext", "hf")


class Formats:
  """What a conversion's `weight_format` and `scope` mean to the model that reads it; see `Storage`."""

  weight_format: str
  scope: str

  @property
  def experts(self) -> str:
    """`weight_format` key that holds the experts as they are stored."""
    return "plain" if self.weight_format == "bfloat16" else self.weight_format

  @property
  def dense(self) -> str:
    """`dense_weight_format` key that holds other large matrices as they are stored."""
    return "block_fp8" if self.scope == "all" else "plain"


@dataclass(frozen=True)
class Manifest(Formats):
  """What a converted checkpoint says of itself.

  Attributes:
    layout: "maxtext" (see `layout`) or "hf" (safetensors, DeepSeek's block-FP8 convention).
    weight_format: of the routed experts, one of `WEIGHT_FORMATS`.
    scope: "experts", or "all" where the large dense matrices are in block-FP8 too.
    tensors: how many lines `tensors.jsonl` has.
    tensors_sha256: hex digest of that file.
    nbytes: of all tensors.
    exactness: what was done -> number of tensors and sums of what was lost, as `conversion.block_fp8.Exactness`.
    source: what it was made of: path and sha256 of its config.json and its index.
    tool: versions of this project and of what wrote the files.
    arrays: `layout.arrays_of` what was written; empty in layout "hf".
  """

  layout: str
  weight_format: str
  scope: str
  tensors: int
  tensors_sha256: str
  nbytes: int
  exactness: dict[str, Any]
  source: dict[str, Any]
  tool: dict[str, str]
  arrays: dict[str, Any] = field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION} | {f.name: getattr(self, f.name) for f in fields(self)}


def is_converted(directory: str) -> bool:
  """Whether the directory is the work of the converter, finished or not."""
  return any(os.path.lexists(os.path.join(directory, name)) for name in (MANIFEST, WORK))


def read_manifest(directory: str) -> Manifest:
  """The manifest of a finished conversion.

  Raises:
    UserError: the conversion hasn't finished, or the manifest isn't one that this version reads.
  """
  path = os.path.join(directory, MANIFEST)
  if not os.path.exists(path):
    raise UserError(f"{directory} is a conversion that hasn't finished: run the same conversion.convert again")
  try:
    with open(path, encoding="utf-8") as f:
      read = json.load(f)
    if read.get("format") != FORMAT or read.get("version") != VERSION:
      raise UserError(
        f"{path} is of format {read.get('format')!r}, version {read.get('version')!r}; this reads {VERSION}"
      )
    manifest = Manifest(**{f.name: read[f.name] for f in fields(Manifest)})
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    raise UserError(f"{path} is not a manifest of conversion.convert: {error!r}") from error
  choices = ((manifest.layout, LAYOUTS), (manifest.weight_format, WEIGHT_FORMATS), (manifest.scope, SCOPES))
  for value, known in choices:
    if value not in known:
      raise UserError(f"{path} names {value!r}, which is none of {', '.join(known)}")
  if not isinstance(manifest.arrays, dict) or not all(isinstance(array, dict) for array in manifest.arrays.values()):
    raise UserError(f"{path}: arrays must give each array's dtype and shapes by its name")
  return manifest
