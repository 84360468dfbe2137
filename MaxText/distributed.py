"""Several processes, one program: how they find each other, place and fetch data, speak and end.

On TPU hosts `jax.distributed` finds the others itself. On CPUs the environment says who they are (`environment`).
Every process runs the same program; the first alone speaks. When one of them fails, all end, and one line says why:

  a person's mistake or a defect, on any process   told to the others through JAX's key-value store   (`end`)
  a process that vanished                          noticed by JAX's heartbeats, told by native_log.py
"""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from MaxText.errors import UserError

try:  # the key-value store, which has no public name
  from jax._src.distributed import global_state
except ImportError as error:
  raise ImportError(
    f"jax's private jax._src.distributed.global_state has moved: this was written for jax 0.12.0.1, installed is "
    f"{jax.__version__}"
  ) from error

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
DEFAULT_PORT = 1234  # MaxText's
_HEARTBEAT_SECONDS = 30  # a process that is silent for so long is lost; JAX's 100 would leave the others waiting
_PATIENCE_SECONDS = 60  # how long a failed collective waits for the news of who was lost
_OWN_FAULTS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")  # errors that no lost process causes
_SAME_ERROR_SECONDS = 5  # how long the first process waits for a mistake of another one to be its own as well
_POLL_MILLISECONDS = 60_000  # of one call that waits for a word; it comes at once
_BARRIER_MILLISECONDS = 4 * 3600 * 1000
_END, _GONE = "kimi-k3/end", "kimi-k3/gone/"  # keys: why the run ends; which processes are on their way out
_GOOD_END = "done"
_TOLD = "kimi-k3/told/"  # keys: what the first process has told the others, in order
_TOLD_TOGETHER = 1000  # words that are forgotten at once; nobody is so far behind


class Place(NamedTuple):
  """Which of how many processes this one is."""

  process: int = 0
  count: int = 1


class Environment(NamedTuple):
  """What the environment says of a run of several processes."""

  address: str
  place: Place


class _Run:
  """This process's part in the run; there is one."""

  def __init__(self):
    self.place = Place()
    self.client: Any = None  # JAX's, while there are several processes
    self.listener: Any = None  # the thread that waits for the others' word
    self.native_log: Any = None  # the process that reads what native code writes
    self.barriers = 0  # waited at so far; JAX wants a name of its own for each
    self.ending = threading.Lock()  # taken once, by who ends this process


_run = _Run()


def is_first() -> bool:
  """Whether this process is the one that speaks."""
  return _run.place.process == 0


def several() -> bool:
  """Whether there are other processes, which have to be told when this one ends."""
  return _run.client is not None


def environment(variables: Mapping[str, str]) -> Environment | None:
  """Reads which process this is: under the names that JAX's launchers use, or those that MaxText's (XPK) sets.

  `JAX_COORDINATOR_ADDRESS` host[:port] of process 0; `JAX_NUM_PROCESSES` or `JAX_PROCESS_COUNT`; `JAX_PROCESS_ID`, or
  `JOB_INDEX` · `PROCESSES_IN_JOB` + `JOB_COMPLETION_INDEX`.

  Returns:
    None where nothing is said, or that there is one process.

  Raises:
    UserError: a variable is missing or isn't a number in range.
  """

  def number(*names: str) -> int | None:
    for name in names:
      if name in variables:
        try:
          return int(variables[name])
        except ValueError as error:
          raise UserError(f"{name}={variables[name]!r} in the environment is not a whole number") from error
    return None

  address = variables.get("JAX_COORDINATOR_ADDRESS")
  count = number("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT")
  process = number("JAX_PROCESS_ID")
  if process is None:
    job = [number(name) for name in ("JOB_INDEX", "PROCESSES_IN_JOB", "JOB_COMPLETION_INDEX")]
    if None not in job:
      process = job[0] * job[1] + job[2]
  if count == 1 or (address is None and count is None):
    return None
  missing = [name for name, value in zip(VARIABLES, (address, count, process), strict=True) if value is None]
  if missing:
    raise UserError(f"of several processes each needs {', '.join(VARIABLES)} in its environment; missing: {missing[0]}")
  if count < 1 or not 0 <= process < count:
    raise UserError(f"JAX_PROCESS_ID={process} must lie in 0..{count - 1} (JAX_NUM_PROCESSES={count})")
  return Environment(address if ":" in address else f"{address}:{DEFAULT_PORT}", Place(process, count))


def initialize(tpu: bool, asked: bool, timeout: int) -> None:
  """Joins the other processes, if there are any. Must come before anything touches a device; does nothing twice.

  Args:
    tpu: whether this host has TPUs, which know their processes themselves.
    asked: whether a CPU's processes are to be found by JAX (Slurm, MPI) where the environment says nothing.
    timeout: seconds to wait for the others.

  Raises:
    UserError: the environment contradicts itself, the port of process 0 is taken, or nobody says who the others are.
  """
  if jax.distributed.is_initialized():
    return
  told = None if tpu else environment(os.environ)
  if told is None and not tpu and not asked:
    return
  # Nothing here asks it, and it complains on the way down.
  jax.config.update("jax_enable_preemption_service", False)
  known: dict[str, Any] = {}
  if told is not None:
    address, _run.place = told
    if is_first():
      _check_port(address)
    _divert_native_output(address)
    known = {"coordinator_address": address, "num_processes": told.place.count, "process_id": told.place.process}
  try:
    jax.distributed.initialize(**known, initialization_timeout=timeout, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS)
  except (ValueError, RuntimeError) as error:
    raise UserError(
      f"jax.distributed can't start: {error} Set {', '.join(VARIABLES)} in each process's environment, or "
      "skip_jax_distributed_system=true for a run of one process"
    ) from error
  state = global_state
  _run.place = Place(state.process_id, state.num_processes)
  if _run.place.count > 1:
    if told is None:
      _divert_native_output(state.coordinator_address)
    _run.client = state.client
    _run.listener = threading.Thread(target=_listen, name="other processes", daemon=True)
    _run.listener.start()


def _check_port(address: str) -> None:
  """Refuses a port that is taken: JAX's service would crash on it."""
  port = address.rpartition(":")[2]
  try:
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as s:
      s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      s.bind(("", int(port)))
  except (OSError, ValueError, OverflowError) as error:
    raise UserError(f"JAX_COORDINATOR_ADDRESS={address}: port {port} can't be used ({error})") from error


def _divert_native_output(address: str) -> None:
  """Gives Python its own stdout and stderr. Native code's stderr goes through native_log.py, its stdout nowhere: gloo
  writes there, and what a person asked for comes from Python. Python's stdout of all processes but the first ends here.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  nowhere = os.open(os.devnull, os.O_WRONLY)
  out, err = os.dup(1 if is_first() else nowhere), os.dup(2)
  program = os.path.join(os.path.dirname(__file__), "native_log.py")
  _run.native_log = subprocess.Popen(
    [sys.executable, "-I", "-S", program, *map(str, _run.place), address],
    stdin=subprocess.PIPE,
    stdout=nowhere,
    start_new_session=True,  # it has to outlive this process's Ctrl-C
  )
  os.dup2(nowhere, 1)
  os.dup2(_run.native_log.stdin.fileno(), 2)
  _run.native_log.stdin.close()
  os.close(nowhere)
  sys.stdout = os.fdopen(out, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
  sys.stderr = os.fdopen(err, "w", encoding=sys.stderr.encoding, errors="backslashreplace", buffering=1)


def _listen() -> None:
  """Waits for another process's word that the run has to end. Runs in a thread of its own."""
  while True:
    try:
      word = _run.client.blocking_key_value_get(_END, _POLL_MILLISECONDS)
    except jax.errors.JaxRuntimeError as error:
      if "DEADLINE_EXCEEDED" in str(error):
        continue
      return  # the service is gone, and JAX ends this process
    if word == _GOOD_END:
      return
    told = json.loads(word)
    if is_first():
      time.sleep(_SAME_ERROR_SECONDS)
    text = told["text"]
    _exit(told["status"], f"{text} (on process {told['process']} of {_run.place.count})" if text else "")


def end(status: int, text: str) -> NoReturn:
  """Ends the program: every process of it, with the same status; the first prints `text`, once."""
  if _run.client is None:  # alone, or the others aren't found yet
    if text:
      print(text, file=sys.stderr, flush=True)
    sys.exit(status)
  with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one may have told its reason first
    _run.client.key_value_set(_END, json.dumps({"process": _run.place.process, "status": status, "text": text}))
  _exit(status, text)


def crash(error: Exception) -> NoReturn:
  """Ends a run of several processes after a defect of ours, or after a collective that failed since a peer is lost."""
  if isinstance(error, jax.errors.JaxRuntimeError) and not str(error).startswith(_OWN_FAULTS):
    time.sleep(_PATIENCE_SECONDS)  # who was lost is told by JAX or by `_listen`, which end this process
  end(1, "".join(traceback.format_exception(error)).rstrip())


def _exit(status: int, text: str) -> NoReturn:
  """Ends this process; the first goes last, since JAX aborts those that are left without it."""
  if not _run.ending.acquire(blocking=False):
    time.sleep(_PATIENCE_SECONDS)  # another thread is at it
  sys.stdout.flush()
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    if is_first():
      if text:
        print(text, file=sys.stderr, flush=True)
      deadline = time.monotonic() + _SAME_ERROR_SECONDS
      while time.monotonic() < deadline and len(_run.client.key_value_dir_get(_GONE)) < _run.place.count - 1:
        time.sleep(0.05)
    else:
      _run.client.key_value_set(f"{_GONE}{_run.place.process}", "")
  os._exit(status)  # sys.exit would wait for the others in JAX's shutdown


def finish() -> None:
  """The good end: waits until every process has come here, then leaves the others."""
  if _run.client is None:
    return
  wait_for_all()
  # Python can't end while a thread waits in native code: that would abort the process.
  with contextlib.suppress(jax.errors.JaxRuntimeError):  # one of them does it
    _run.client.key_value_set(_END, _GOOD_END)
  _run.listener.join()
  _run.client = None
  jax.distributed.shutdown()


def wait_for_all() -> None:
  """Returns when every process has called it. Collectives on CPUs give up on a process that comes 30 s later."""
  if _run.client is not None:
    _run.barriers += 1
    _run.client.wait_at_barrier(f"kimi-k3/barrier/{_run.barriers}", _BARRIER_MILLISECONDS)


def _told(number: int) -> str:
  return f"{_TOLD}{number // _TOLD_TOGETHER}/{number}"


def tell(number: int, words: str) -> None:
  """The first process's words to the others, numbered from 0 on, which `hear` them."""
  _run.client.key_value_set(_told(number), words)
  block, place = divmod(number, _TOLD_TOGETHER)
  if place == 0 and block > 1:
    _run.client.key_value_delete(f"{_TOLD}{block - 2}/")


def hear(number: int) -> str:
  """Waits, however long, for words that the first process tells; when that is lost, this process is ended."""
  while True:
    try:
      return _run.client.blocking_key_value_get(_told(number), _POLL_MILLISECONDS)
    except jax.errors.JaxRuntimeError as error:
      if "DEADLINE_EXCEEDED" not in str(error):
        raise


def place(value: np.ndarray, sharding: Sharding) -> jax.Array:
  """An array that every process holds -> the global array, each device filled with the slices that are its own."""
  return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


@functools.lru_cache
def _replicate(mesh: Mesh) -> Any:
  return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))


def fetch(array: jax.Array) -> np.ndarray:
  """A global array's values on every host; every process must ask, in the same order."""
  if not (array.is_fully_addressable or array.is_fully_replicated):
    array = _replicate(array.sharding.mesh)(array)
  return np.asarray(array)
