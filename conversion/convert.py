"""`python -m conversion.convert SRC DST [key=value …]`: a released checkpoint in another format, resumably.

Keys and their defaults: `conversion.options.Options`. Killed at any moment and run again, it goes on, and the result
has the same bytes. DST is unusable until the last step stamps it.
"""

import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import jax

from conversion import journal, pieces, report
from conversion.hf_output import HfOutput
from conversion.inspect import inspect_model
from conversion.journal import Journal
from conversion.maxtext_output import MaxTextOutput
from conversion.memory import keep_freed_memory
from conversion.options import Options, parse_keys
from conversion.pieces import Limit, Output, Piece
from conversion.source import Reader, identity, keep_headers
from conversion.stamp import stamp
from MaxText.configs.model_config import ModelConfig
from MaxText.converted.manifest import MANIFEST, WORK, Manifest, is_converted, read_manifest
from MaxText.errors import UserError, exit_on_user_error
from MaxText.progress import progress_bytes, say

_USAGE = "usage: python -m conversion.convert SRC DST [weight_format=… scope=… layout=… max_inexact=… workers=… …]"
# What pieces at work may take together, however many workers there are: three files of K3's experts, or one of its
# largest dense matrices.
_LEAST_MEMORY = 1_600_000_000
_WORKER_MEMORY = 600_000_000
_TWINS = "headers"  # folder of stand-ins for shards that free_source deletes


class _Terminated(BaseException):
  """SIGTERM came."""


def convert(source: str, directory: str, options: Options) -> Manifest | None:
  """Converts a checkpoint, or goes on with it.

  Args:
    source: SRC, a checkpoint in the released layout.
    directory: DST.

  Returns:
    The manifest; None from a worker, which doesn't stamp.

  Raises:
    UserError: input, options or a disk that can't be used; what was done until then is kept.
  """
  _check_places(source, directory)
  work = os.path.join(directory, WORK)
  twins = os.path.join(work, _TWINS)
  if os.path.exists(os.path.join(directory, MANIFEST)):
    return _finished(source, directory, options)
  cfg, checkpoint, _ = inspect_model(source, twins=twins)
  try:
    os.makedirs(work, exist_ok=True)
    source_id = identity(checkpoint, twins)
    journal.agree(work, {"options": options.result, "source": source_id})
    name = "all" if options.worker_count is None else f"{options.worker_index}-of-{options.worker_count}"
    with closing(Journal(work, name)) as notes:
      busy = journal.locked(work, name) if options.worker_count is None else None
      if busy:
        raise UserError(
          f"{directory}: a worker is still at work there ({busy} is locked); the last call comes after it"
        )
      if options.free_source:
        keep_headers(checkpoint, twins)
      reader, limit = Reader(checkpoint), Limit(options.max_inexact)
      output = _output(reader, cfg, options, directory, limit)
      _run(output, reader, notes, work, options, limit)
    if options.worker_count is not None:
      return None
    output.finish()
    manifest = stamp(checkpoint, directory, options, source_id, output.arrays)
    shutil.rmtree(work)
    return manifest
  except OSError as error:
    raise UserError(f"{error.filename or directory}: {error.strerror}; what is done is kept") from error


def _check_places(source: str, directory: str) -> None:
  real, made = os.path.realpath(source), os.path.realpath(directory)
  if os.path.commonpath([real, made]) in (real, made):
    raise UserError(f"DST={directory} and SRC={source} must not lie within each other")
  if is_converted(source):
    raise UserError(f"SRC={source} is itself the work of conversion.convert; give the released checkpoint")
  empty = os.path.isdir(directory) and not os.listdir(directory)
  if os.path.lexists(directory) and not is_converted(directory) and not empty:
    raise UserError(f"DST={directory} is there already and isn't a conversion's; give a new or empty directory")


def _finished(source: str, directory: str, options: Options) -> Manifest:
  """A directory that is stamped already: fine if it is of the same job."""
  manifest = read_manifest(directory)
  for key, asked in options.result.items():
    if getattr(manifest, key) != asked:
      raise UserError(f"{directory} is finished, with {key}={getattr(manifest, key)}, not {asked}; give another DST")
  say(f"{directory} is finished already")
  shutil.rmtree(os.path.join(directory, WORK), ignore_errors=True)
  return manifest


def _output(reader: Reader, cfg: ModelConfig, options: Options, directory: str, limit: Limit) -> Output:
  kind = MaxTextOutput if options.layout == "maxtext" else HfOutput
  return kind(reader, cfg, options.experts, options.dense, directory, limit)


def _run(output: Output, reader: Reader, notes: Journal, work: str, options: Options, limit: Limit) -> None:
  """Does what is missing of this worker's pieces."""
  done = set()
  for piece, records in journal.read(work):
    if piece not in done:
      limit.count(records)
    done.add(piece)
  limit.check()
  mine = output.pieces
  if options.worker_count is not None:
    mine = pieces.share(mine, options.worker_index, options.worker_count)
  todo = [piece for piece in mine if piece.id not in done]
  freed = _Freed(reader, todo) if options.free_source else None
  if not todo:
    return
  output.prepare(todo)
  total, left = (sum(piece.nbytes for piece in some) for some in (mine, todo))
  memory = max(_LEAST_MEMORY, options.workers * _WORKER_MEMORY)
  running = pieces.run(todo, output.write, options.workers, memory)
  try:
    for piece, records in progress_bytes(running, lambda item: item[0].nbytes, total - left, total, "converting"):
      flushed = notes.add(piece.id, records)
      if freed:
        freed.done(piece, flushed)
  finally:
    notes.flush()
  if freed:
    freed.delete()


class _Freed:
  """Deletes shards of the source that no piece needs any more."""

  def __init__(self, reader: Reader, todo: Sequence[Piece]):
    self._reader = reader
    self._needed = Counter(file for piece in todo for file in piece.files)
    self.delete()  # what an earlier run had no time to delete

  def done(self, piece: Piece, flushed: bool) -> None:
    """
    Args:
      flushed: whether the journal of all pieces so far is on disk.
    """
    self._needed.subtract(piece.files)
    if flushed:
      self.delete()

  def delete(self) -> None:
    for file in self._reader.checkpoint.shards:
      path = os.path.join(self._reader.checkpoint.directory, file)
      if self._needed[file] == 0 and os.path.lexists(path):
        self._reader.close(file)
        os.remove(path)


@contextmanager
def _terminable() -> Iterator[None]:
  """SIGTERM ends the program as an interrupt does, with a status of its own."""

  def handler(number, frame):
    raise _Terminated

  before = signal.signal(signal.SIGTERM, handler)
  try:
    yield
  except _Terminated:
    _end(143, "terminated")
  except KeyboardInterrupt:
    _end(130, "interrupted")
  finally:
    signal.signal(signal.SIGTERM, before)


def _end(status: int, what: str) -> None:
  print(f"{what}: what is done is kept, run the same command to go on", file=sys.stderr, flush=True)
  os._exit(status)  # pieces at work aren't waited for: they are done again


def main(argv: Sequence[str]) -> None:
  if len(argv) < 3 or "=" in argv[1] or "=" in argv[2]:
    raise UserError(_USAGE)
  options = parse_keys(Options, argv[3:])
  jax.config.update("jax_platforms", "cpu")  # an accelerator that is there is left to others
  keep_freed_memory()
  with _terminable():
    manifest = convert(argv[1], argv[2], options)
  if manifest is None:
    print(f"{argv[2]}: worker {options.worker_index} of {options.worker_count} has done its part")
  else:
    print(report.describe(argv[2], manifest))


if __name__ == "__main__":
  exit_on_user_error(main, sys.argv)
