"""A conversion that is killed, or whose disk is full or broken, goes on and ends with the same bytes."""

import errno
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from _conversions import SHARDS, TINY, copy_of_tiny, fail_reads, quick_folder, run, tree

from conversion import journal, verify
from conversion.convert import main
from conversion.journal import Journal
from conversion.verify import VerifyOptions
from MaxText.checkpoint import ReleasedCheckpoint
from MaxText.converted.manifest import read_manifest
from MaxText.errors import UserError

KILLS, SEED = {"maxtext": 20, "hf": 8}, 5


@pytest.fixture
def folder(tmp_path):
  made = quick_folder(tmp_path)
  yield made
  shutil.rmtree(made)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """Layout -> digests of all files of an undisturbed conversion."""
  folder = quick_folder(tmp_path_factory.mktemp("undisturbed"))
  yield {layout: run(TINY, folder / layout, layout=layout) and tree(folder / layout) for layout in ("maxtext", "hf")}
  shutil.rmtree(folder)


def _convert(source: str, directory: str, layout: str, noted) -> None:
  """Runs in a process of its own and counts the pieces that it notes in its journal."""
  original = Journal.add

  def add(self, piece, records):
    flushed = original(self, piece, records)
    noted.value += 1
    return flushed

  Journal.add = add
  journal._FLUSH_SECONDS = 0.1  # runs are short here, and each shall find something that an earlier one did
  main(["convert", source, directory, f"layout={layout}", "workers=2"])


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", ["maxtext", "hf"])
def test_killed_at_random_moments_it_ends_with_the_same_bytes(layout, folder, undisturbed):
  """SIGKILL at a random moment, again and again; whenever a conversion is finished, a new one begins.

  Moments are drawn by how far a run has come, as a process first reads its configuration for seconds: some milliseconds
  after any piece up to a quarter of all, so that several kills hit each conversion.
  """
  processes = multiprocessing.get_context("forkserver")
  processes.set_forkserver_preload(["conversion.convert"])
  chance = random.Random(SEED)
  kills = finished = pieces = 0
  made = folder / "0"
  while kills < KILLS[layout] or not finished:
    noted = processes.Value("i", 0)
    child = processes.Process(target=_convert, args=(str(TINY), str(made), layout, noted))
    child.start()
    # The first run isn't killed: it tells how many pieces there are.
    aim = chance.randint(1, pieces // 4) if pieces and kills < KILLS[layout] else math.inf
    while child.is_alive() and noted.value < aim:
      time.sleep(0.001)
    if aim < math.inf:
      child.join(chance.uniform(0, 0.02))
    if child.is_alive():
      child.kill()
      child.join()
      kills += 1
      continue
    child.join()
    assert child.exitcode == 0
    pieces = pieces or noted.value
    assert tree(made) == undisturbed[layout]
    finished += 1
    shutil.rmtree(made)
    made = folder / str(finished)
  assert kills == KILLS[layout] and finished > 1


class _Stopped(BaseException):
  """Stands for a kill: nothing may catch it."""


@pytest.mark.parametrize("layout", ["maxtext", "hf"])
def test_each_step_of_the_end_can_be_the_last(layout, folder, undisturbed, monkeypatch):
  """Stops before each rename of the stamp, and before the notes are deleted."""
  made, stops = folder / "made", 0
  original = os.rename
  while True:
    reached = 0

    def rename(source, target, at=stops):
      nonlocal reached
      last = str(target).startswith(f"{made}/") and ".conversion" not in str(target)
      reached += last
      if last and reached > at:
        raise _Stopped
      original(source, target)

    monkeypatch.setattr(os, "rename", rename)
    try:
      run(TINY, made, layout=layout)
      break
    except _Stopped:
      stops += 1
      with pytest.raises(UserError, match="hasn't finished"):
        read_manifest(str(made))
      if layout == "hf":
        with pytest.raises(UserError):
          ReleasedCheckpoint(str(made))
  assert stops >= 4 and tree(made) == undisturbed[layout]
  monkeypatch.setattr(os, "rename", original)
  (made / ".conversion").mkdir()  # killed between the stamp and the deletion
  run(TINY, made, layout=layout)
  assert tree(made) == undisturbed[layout]


def test_a_torn_line_counts_as_not_written(folder, undisturbed, monkeypatch):
  made, original = folder / "made", Journal.add
  seen = []

  def add(self, piece, records):
    if len(seen) == 40:
      self._file.write(b'{"piece":"torn')
      self.flush()
      raise _Stopped
    seen.append(piece)
    return original(self, piece, records)

  monkeypatch.setattr(Journal, "add", add)
  with pytest.raises(_Stopped):
    run(TINY, made)
  monkeypatch.setattr(Journal, "add", original)
  run(TINY, made)
  assert tree(made) == undisturbed["maxtext"]


def test_options_can_change_only_where_the_bytes_stay_the_same(folder, undisturbed, monkeypatch):
  made = folder / "made"

  def broken():
    raise OSError(errno.EIO, os.strerror(errno.EIO))

  fail_reads(monkeypatch, lambda path, count: count >= 300, broken)
  with pytest.raises(UserError) as refused:
    run(TINY, made)
  said = str(refused.value)
  assert (
    "Input/output error" in said
    and "can't be read at byte" in said
    and str(TINY / "model-0") in said
    and "\n" not in said
  )
  monkeypatch.undo()
  with pytest.raises(UserError, match="weight_format=block_fp8 there, weight_format=mxfp4 here"):
    run(TINY, made, weight_format="mxfp4")
  other = copy_of_tiny(folder / "other")
  (other / "config.json").write_text((TINY / "config.json").read_text() + "\n")
  with pytest.raises(UserError, match="its source has changed since, or is another one"):
    run(other, made)
  run(TINY, made, workers=1, max_inexact=3)
  assert tree(made) == undisturbed["maxtext"]


@pytest.mark.parametrize("layout", ["maxtext", "hf"])
def test_a_source_that_is_cut_short_meanwhile(layout, folder, undisturbed, monkeypatch):
  fail_reads(monkeypatch, lambda path, count: path.endswith(SHARDS[1]) and count >= 200, lambda: 0)
  with pytest.raises(UserError, match=rf"{SHARDS[1]} is cut short: it ends before byte"):
    run(TINY, folder / "made", layout=layout)
  monkeypatch.undo()
  run(TINY, folder / "made", layout=layout)
  assert tree(folder / "made") == undisturbed[layout]


@pytest.mark.parametrize("layout", ["maxtext", "hf"])
def test_files_that_cant_be_written(layout, folder, undisturbed):
  """A limit on the size of files, which any user may set."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (60_000 if layout == "maxtext" else 3_000_000, before[1]))
  try:
    with pytest.raises(UserError) as refused:
      run(TINY, folder / "made", layout=layout)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert "File too large" in str(refused.value) and "\n" not in str(refused.value)
  run(TINY, folder / "made", layout=layout)
  assert tree(folder / "made") == undisturbed[layout]


_FULL_DISK = textwrap.dedent(
  """
  mount -t tmpfs -o size=7m none "$3" || exit 77
  "$1" -m conversion.convert "$2" "$3/made" layout="$4"; first=$?
  test -e "$3/made/manifest.json" && exit 78
  mount -o remount,size=200m none "$3"
  "$1" -m conversion.convert "$2" "$3/made" layout="$4" || exit 79
  cp -r "$3/made" "$5"
  exit $first
  """
)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["maxtext", "hf"])
def test_a_full_disk(layout, folder, undisturbed):
  """A real one of 7 MB, in a mount namespace of its own; the same command goes on once there is room."""
  (folder / "disk").mkdir()
  arguments = [sys.executable, str(TINY), str(folder / "disk"), layout, str(folder / "result")]
  ended = subprocess.run(
    ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _FULL_DISK, "sh", *arguments],
    cwd=Path(__file__).parents[2],
    capture_output=True,
    text=True,
    check=False,
  )
  if ended.returncode == 77 or "unshare" in ended.stderr:
    pytest.skip("no mounts here: run as root, or allow user namespaces (kernel.unprivileged_userns_clone=1)")
  assert ended.returncode == 2, ended.stderr
  errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
  assert len(errors) == 1 and "No space left on device" in errors[0] and "Traceback" not in ended.stderr
  assert tree(folder / "result") == undisturbed[layout]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_it_in_one_line(number, status, folder):
  """Reads never end here, so that the signal finds the conversion at work."""
  code = textwrap.dedent(
    f"""
    import os, signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children would ignore it
    from conversion.convert import main
    from MaxText.errors import exit_on_user_error
    def preadv(*_):
      os.write(1, b"reading\\n")
      time.sleep(600)
    os.preadv = preadv
    exit_on_user_error(main, ["convert", {str(TINY)!r}, {str(folder / "made")!r}])
    """
  )
  root = Path(__file__).parents[2]
  environment = os.environ | {"PYTHONPATH": str(root)}
  process = subprocess.Popen(
    [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root, env=environment
  )
  assert process.stdout.readline() == "reading\n"
  process.send_signal(number)
  _, said = process.communicate(timeout=60)
  assert process.returncode == status
  what = "interrupted" if number == signal.SIGINT else "terminated"
  assert said.splitlines()[-1] == f"{what}: what is done is kept, run the same command to go on"


@pytest.mark.parametrize("layout", ["maxtext", "hf"])
def test_shards_are_deleted_as_they_are_done_with(layout, folder, monkeypatch):
  source, made = copy_of_tiny(folder / "source"), folder / "made"
  run(source, folder / "kept", layout=layout)

  def broken():
    raise OSError(errno.EIO, os.strerror(errno.EIO))

  # Fails as soon as the first shard is gone, so that the second run has to do without it.
  monkeypatch.setattr("conversion.journal._FLUSH_SECONDS", 0)
  fail_reads(monkeypatch, lambda path, count: not (source / SHARDS[0]).exists(), broken)
  with pytest.raises(UserError, match="Input/output error"):
    run(source, made, layout=layout, free_source=True, workers=1)
  monkeypatch.undo()
  assert not (source / SHARDS[0]).exists() and (source / SHARDS[1]).exists()
  run(source, made, layout=layout, free_source=True)
  assert sorted(path.name for path in source.iterdir()) == [
    "config.json", "model.safetensors.index.json", "tiktoken.model",
  ]  # fmt: skip
  assert tree(made) == tree(folder / "kept")
  said = verify.verify(str(source), str(made), VerifyOptions())
  assert "are right; nothing was compared" in said


def test_two_at_once_are_refused(folder, monkeypatch):
  made = folder / "made"
  (made / ".conversion").mkdir(parents=True)
  for held, said in (("all", "another conversion is at work there"), ("1-of-3", "a worker is still at work there")):
    notes = Journal(str(made / ".conversion"), held)
    with pytest.raises(UserError, match=said):
      run(TINY, made)
    notes.close()


def test_a_piece_that_fails_doesnt_lose_the_others(folder):
  """What other threads finished before the error came through is in the journal."""
  from conversion.pieces import Piece
  from conversion.pieces import run as run_pieces

  def write(piece):
    if piece.id == "2":
      raise UserError("broken")
    return [{"name": piece.id}]

  some = [Piece(str(i), (), ("", i), 1, 1, "", None) for i in range(6)]
  done = []
  with pytest.raises(UserError, match="broken"):
    for piece, _ in run_pieces(some, write, 4, 100):
      done.append(piece.id)
  assert {"0", "1"} <= set(done) and "2" not in done
