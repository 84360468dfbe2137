"""Several processes of one run on this machine."""

import contextlib
import os
import socket
import subprocess
import sys
import time

ROOT = os.path.normpath(os.path.join(os.path.dirname(__file__), ".."))
PATIENCE = 300  # seconds for what takes some ten on an idle machine


def free_port():
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


class Hosts:
  """Processes of one run on loopback, their output in files."""

  def __init__(self, folder, count, *command, devices=2):
    self.folder = folder
    shared = {
      "JAX_PLATFORMS": "cpu",
      "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
      "JAX_NUM_PROCESSES": str(count),
      "JAX_NUM_CPU_DEVICES": str(devices),
      # Every process compiles for itself: quickly rather than well.
      "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
      "PYTHONPATH": os.pathsep.join([ROOT, os.path.join(ROOT, "kernels")]),
    }
    self.processes = []
    for i in range(count):
      with open(folder / f"out{i}", "wb") as out, open(folder / f"err{i}", "wb") as err:
        environ = os.environ | shared | {"JAX_PROCESS_ID": str(i)}
        self.processes.append(
          subprocess.Popen([sys.executable, *command], stdout=out, stderr=err, env=environ, cwd=folder)
        )

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self.processes:
      with contextlib.suppress(ProcessLookupError):
        process.kill()
      process.wait()

  def wait(self, seconds=PATIENCE):
    """Exit statuses; raises where one hasn't ended after `seconds`."""
    end = time.monotonic() + seconds
    codes = [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]
    time.sleep(0.5)  # native_log.py writes once its process has gone
    return codes

  def out(self, process):
    return (self.folder / f"out{process}").read_text(encoding="utf-8", errors="replace")

  def err(self, process):
    return (self.folder / f"err{process}").read_text(encoding="utf-8", errors="replace")

  def assert_only_the_first_spoke(self):
    assert [self.out(i) + self.err(i) for i in range(1, len(self.processes))] == [""] * (len(self.processes) - 1)
    assert "Traceback" not in self.err(0)
