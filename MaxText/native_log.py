"""Run as a program beside each of several processes: reads what native code writes, and passes on what a person needs.

JAX's coordination service ends a process by aborting it from C++ with pages of text as soon as another process is
lost; no Python of that process runs any more. So its native output goes to this small program, which sees the end
however it comes, and says in one line what happened. Whatever it doesn't recognise it passes on unchanged.

  native_log.py PROCESS COUNT ADDRESS   native output on stdin; the person's terminal on stderr
"""

import os
import re
import select
import sys

# From such a line on, all is held back until it is clear whether the process ends of it.
_SUSPECT = re.compile(r"[EF]\d{4} .*(coordination_service|distributed/client|client\.h)")
_FATAL = "JAX distributed service detected fatal errors"
_HOLD_SECONDS = 10.0


def explain(text: str, process: int, count: int, address: str) -> str:
  """One line for the native report of a lost connection; empty where another process says it.

  Args:
    text: what JAX's coordination service wrote before it aborted this process.
    process, count: which of how many processes this one was.
    address: of process 0, host:port.
  """
  again = f"start all {count} processes again"
  lost = re.search(r"stopped sending heartbeats\):\s*((?:\S*?\d+\s*\n)+)", text)
  if lost:
    if process:
      return ""
    names = ", ".join(re.findall(r"(\d+)\s*\n", lost[1]))
    return f"error: process {names} of {count} ended or can't be reached any more, so all end; {again}"
  if "RegisterTask" in text:
    if process:
      return f"error: process {process} of {count} found no process 0 at {address} in time; {again}"
    return f"error: not all {count} processes reached process 0 at {address} in time; {again}"
  if "Failed to send RPC to coordination service" in text:
    return f"error: process 0 of {count} ended or can't be reached any more, so process {process} ends; {again}"
  status = re.search(r"absl::Status: ([^\n]*)", text)
  return f"error: process {process} of {count} lost the others: {status[1] if status else 'no reason given'}; {again}"


def main() -> None:
  process, count, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
  source, target = sys.stdin.fileno(), sys.stderr.buffer
  pending, held = b"", b""

  def take(lines: bytes) -> None:
    nonlocal held
    for line in lines.splitlines(keepends=True):
      text = line.decode(errors="replace")
      if held or _SUSPECT.match(text):
        held += line
      else:
        target.write(line)
    target.flush()

  while True:
    ready, _, _ = select.select([source], [], [], _HOLD_SECONDS if held else None)
    if not ready:  # it lives on
      target.write(held)
      target.flush()
      held = b""
      continue
    data = os.read(source, 1 << 16)
    if not data:
      break
    lines, newline, pending = (pending + data).rpartition(b"\n")
    take(lines + newline)
  take(pending)
  report = held.decode(errors="replace")
  if _FATAL in report:
    line = explain(report, process, count, address)
    target.write(f"{line}\n".encode() if line else b"")
  else:
    target.write(held)
  target.flush()


if __name__ == "__main__":
  main()
