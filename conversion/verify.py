"""`python -m conversion.verify SRC DST [sample=N seed=S workers=W]`: is a conversion what its manifest and source say?

DST is read again. Each tensor's digest is compared with tensors.jsonl, and that file's with the manifest. Then both
sides are decoded, each in its own way, and compared element by element in the release's orientation: formats that can
be exact must agree in every bit, the sign of a zero too; others must differ where and by what was recorded. A mismatch
is one line that names tensor and element, with exit status 1; bad input has status 2.
"""

import dataclasses
import hashlib
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from conversion import pieces
from conversion.headers import HeaderCheckpoint, read_index
from conversion.inspect import inspect_model, read_model
from conversion.journal import Record
from conversion.options import parse_keys
from conversion.pieces import Piece
from conversion.readback import HfResult, MaxTextResult, Mismatch, Result
from conversion.source import Reader
from MaxText.checkpoint import INDEX
from MaxText.configs.model_config import ModelConfig
from MaxText.converted.manifest import MANIFEST, TENSORS, Manifest, is_converted, read_manifest
from MaxText.errors import UserError, exit_on_user_error
from MaxText.progress import progress_bytes

_MEMORY = 2_000_000_000  # bytes that are at work at a time, unless one weight alone needs more


@dataclass(frozen=True)
class VerifyOptions:
  """Keys of a command line.

  Attributes:
    sample: how many weights to verify, chosen at random; 0 for all.
    seed: of the choice.
    workers: threads.
  """

  sample: int = 0
  seed: int = 0
  workers: int = dataclasses.field(default_factory=lambda: len(os.sched_getaffinity(0)))

  def __post_init__(self):
    for key, least in (("sample", 0), ("seed", 0), ("workers", 1)):
      if getattr(self, key) < least:
        raise UserError(f"{key}={getattr(self, key)} must be at least {least}")


def verify(source: str, directory: str, options: VerifyOptions) -> str:
  """Verifies a conversion.

  Returns:
    A line for a person.

  Raises:
    Mismatch: a tensor isn't what it should be.
    UserError: input that can't be used.
  """
  if not is_converted(directory):
    raise UserError(f"DST={directory} holds no {MANIFEST}: it isn't a conversion's")
  manifest = read_manifest(directory)
  records = _records(directory, manifest)
  cfg, checkpoint = _source(source, manifest)
  reader = None if checkpoint is None else Reader(checkpoint)
  result: Result
  if manifest.layout == "maxtext":
    result = MaxTextResult(reader, cfg, directory, manifest)
  else:
    result = HfResult(reader, Reader(HeaderCheckpoint(directory)))
  missing, more = sorted(result.names - records.keys()), sorted(records.keys() - result.names)
  if missing or more:
    name, lacks, has = (missing[0], TENSORS, directory) if missing else (more[0], directory, TENSORS)
    raise Mismatch(f"{lacks} lacks {name}, which {has} has")
  units = result.units
  if options.sample:
    units = random.Random(options.seed).sample(units, min(options.sample, len(units)))
    units.sort(key=lambda unit: unit.id)
  total = sum(unit.nbytes for unit in units)
  elements = inexact = tensors = 0

  def one(unit: Piece) -> list[tuple[int, int, int]]:
    return [result.check(unit, records)]

  running = pieces.run(units, one, options.workers, _MEMORY)
  for _, (found,) in progress_bytes(running, lambda item: item[0].nbytes, 0, total, "verifying"):
    tensors, elements, inexact = tensors + found[0], elements + found[1], inexact + found[2]
  what = f"{tensors:,} of {manifest.tensors:,} tensors" + (f" (seed {options.seed})" if options.sample else "")
  if reader is None:
    return (
      f"{directory}: digests of {what} are right; nothing was compared with {source}, whose shards are gone in part or "
      "whole"
    )
  return (
    f"{directory}: digests of {what} are right, and {elements:,} elements decode to the source's: {inexact:,} of them "
    "inexact, as recorded"
  )


def _records(directory: str, manifest: Manifest) -> dict[str, Record]:
  """Lines of tensors.jsonl by name."""
  path = os.path.join(directory, TENSORS)
  try:
    with open(path, "rb") as f:
      raw = f.read()
  except OSError as error:
    raise UserError(f"{path}: {error.strerror}") from error
  if hashlib.sha256(raw).hexdigest() != manifest.tensors_sha256:
    raise Mismatch(f"{path} isn't the file that {MANIFEST} has the digest of")
  return {record["name"]: record for record in map(json.loads, raw.splitlines())}


def _source(source: str, manifest: Manifest) -> tuple[ModelConfig, HeaderCheckpoint | None]:
  """The source's model and headers; None for those where shards are missing.

  Raises:
    UserError: it isn't there, is broken, or isn't what DST was made of.
  """
  if not os.path.isdir(source):
    raise UserError(f"SRC={source} is not a directory")
  for key, file in (("config_sha256", "config.json"), ("index_sha256", INDEX)):
    wanted, path = manifest.source.get(key), os.path.join(source, file)
    if wanted is None:
      continue
    try:
      with open(path, "rb") as f:
        found = hashlib.sha256(f.read()).hexdigest()
    except OSError as error:
      raise UserError(f"{path}: {error.strerror}") from error
    if found != wanted:
      raise UserError(f"{path} isn't the one that the conversion was made of; give its own source")
  if os.path.exists(os.path.join(source, INDEX)):
    where, _ = read_index(source)
    if not all(os.path.lexists(os.path.join(source, file)) for file in set(where.values())):
      return read_model(source), None
  return inspect_model(source)[:2]


def main(argv: Sequence[str]) -> None:
  if len(argv) < 3 or "=" in argv[1] or "=" in argv[2]:
    raise UserError("usage: python -m conversion.verify SRC DST [sample=N seed=S workers=W]")
  try:
    print(verify(argv[1], argv[2], parse_keys(VerifyOptions, argv[3:])))
  except Mismatch as error:
    print(f"mismatch: {error}", file=sys.stderr, flush=True)
    sys.exit(1)


if __name__ == "__main__":
  exit_on_user_error(main, sys.argv)
