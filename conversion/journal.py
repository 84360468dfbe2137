"""What a conversion remembers of itself in DST/.conversion: the job, and the pieces that are safely on disk.

Each worker appends to a journal of its own, a line of JSON for each piece, after the piece itself was synced. Whatever
moment a run ends at, the journals are true: a line that was torn counts as not written.
"""

import fcntl
import glob
import json
import os
import time
from collections.abc import Iterator
from typing import Any

from conversion.source import encode
from MaxText.errors import UserError

_JOB = "job.json"
_FLUSH_SECONDS = 1.0  # of work that a killed machine may have to do again

Record = dict[str, Any]  # a line of tensors.jsonl


class Journal:
  """One worker's journal, open for appending and locked against a second worker of the same index."""

  def __init__(self, work: str, name: str):
    """Raises `UserError` where another process holds it."""
    self._path = os.path.join(work, f"journal-{name}.jsonl")
    self._file = open(self._path, "a+b")  # noqa: SIM115
    if not lock(self._file.fileno()):
      self._file.close()
      raise UserError(f"{os.path.dirname(work)}: another conversion is at work there ({self._path} is locked)")
    self._file.truncate(_whole(self._path))
    self._flushed = time.monotonic()

  def add(self, piece: str, records: list[Record]) -> bool:
    """Notes a piece whose data is synced.

    Returns:
      Whether everything noted so far is on disk: not each piece waits for it.
    """
    self._file.write(encode({"piece": piece, "tensors": records}).encode() + b"\n")
    if time.monotonic() - self._flushed < _FLUSH_SECONDS:
      return False
    self.flush()
    return True

  def flush(self) -> None:
    self._file.flush()
    os.fsync(self._file.fileno())
    self._flushed = time.monotonic()

  def close(self) -> None:
    self.flush()
    self._file.close()


def lock(descriptor: int) -> bool:
  """Takes a file's lock, which ends with the process; False where another holds it."""
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True


def _whole(path: str) -> int:
  """Bytes of a journal's whole lines."""
  with open(path, "rb") as f:
    size = f.seek(0, os.SEEK_END)
    while size:
      start = max(0, size - 65536)
      f.seek(start)
      newline = f.read(size - start).rfind(b"\n")
      if newline >= 0:
        return start + newline + 1
      size = start
  return 0


def read(work: str) -> Iterator[tuple[str, list[Record]]]:
  """All pieces that any worker noted, with their tensors. A piece may come twice, with the same tensors."""
  for path in sorted(glob.glob(os.path.join(glob.escape(work), "journal-*.jsonl"))):
    with open(path, "rb") as f:
      for line in f:
        if line.endswith(b"\n"):
          noted = json.loads(line)
          yield noted["piece"], noted["tensors"]


def locked(work: str, own: str) -> str | None:
  """A journal that another process is writing to, if there is one."""
  for path in sorted(glob.glob(os.path.join(glob.escape(work), "journal-*.jsonl"))):
    if os.path.basename(path) == f"journal-{own}.jsonl":
      continue
    with open(path, "rb") as f:
      if not lock(f.fileno()):
        return path
  return None


def agree(work: str, job: dict[str, Any]) -> None:
  """Writes the job down, or compares it with the one that is there.

  Raises:
    UserError: the directory belongs to a conversion of another source, or into another format.
  """
  path = os.path.join(work, _JOB)
  job = json.loads(encode(job))
  if not os.path.exists(path):
    write_file(path, encode(job) + "\n")
    return
  with open(path, encoding="utf-8") as f:
    there = json.load(f)
  if there == job:
    return
  was, now = there.get("options", {}), job["options"]
  changed = [f"{key}={was.get(key)} there, {key}={now[key]} here" for key in now if was.get(key) != now[key]]
  reason = "; ".join(changed) or "its source has changed since, or is another one"
  raise UserError(
    f"{os.path.dirname(work)} holds another conversion, half done: {reason}; give another DST, or delete it"
  )


def write_file(path: str, text: str) -> None:
  """A small file, there as a whole or not at all."""
  # Workers on several machines may write the same file at the same time.
  partial = f"{path}.{os.uname().nodename}.{os.getpid()}.partial"
  with open(partial, "w", encoding="utf-8") as f:
    f.write(text)
    f.flush()
    os.fsync(f.fileno())
  os.rename(partial, path)
  sync_directory(os.path.dirname(path))


def forget(descriptor: int, offset: int = 0, nbytes: int = 0) -> None:
  """Tells the system that a file, or a part of it, isn't needed in its cache: nobody reads it soon.

  What is on disk is dropped, and the next file takes its memory: filling a cache with terabytes costs more than the
  copy itself, above all in virtual machines, which have to be given each page that they never had. What isn't on disk,
  Linux begins to write, so that a later fsync waits for little.
  """
  os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def sync_directory(path: str) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
