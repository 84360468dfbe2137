"""`python MaxText/plan.py CONFIG.yml compile_topology=tpu7x-64 [key=value …] [--json FILE] [--html FILE]`.

Compiles this project's decode and prefill programs for a slice that isn't there, and says what fits and what a step
costs at least. The report goes to stdout, progress to stderr. Exit status 0: it fits; 1: it doesn't; 2: bad input.
"""

import os
import sys

# Run as a file, Python puts this folder first on the path; its parent belongs there.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
  sys.path[0] = os.path.dirname(sys.path[0])

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from MaxText.configs.k3_config import initialize
from MaxText.errors import UserError, exit_on_user_error
from MaxText.planning import capacity, page, report
from MaxText.planning.assemble import Plan

WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
  "--json": lambda plan: json.dumps(plan, indent=1) + "\n",
  "--html": page.render,
}


def say(line: str) -> None:
  """Tells something of the run, apart from the report itself."""
  print(line, file=sys.stderr, flush=True)


def split_arguments(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
  """Arguments without `--json FILE` and `--html FILE` (or `--json=FILE`), and the files by option.

  Raises:
    UserError: an option without its file, or an unknown one.
  """
  rest, files = [], {}
  arguments = iter(argv)
  for argument in arguments:
    name, equals, value = argument.partition("=")
    if not name.startswith("--"):
      rest.append(argument)
      continue
    if name not in WRITERS:
      raise UserError(f"unknown option {name}; there are {' FILE, '.join(WRITERS)} FILE, and key=value")
    files[name] = value if equals else next(arguments, "")
    if not files[name] or files[name].startswith("--"):
      raise UserError(f"{name} wants a file to write")
  return rest, files


def check_writable(option: str, path: str) -> None:
  """Raises `UserError` where a file can't be written: before the minutes of compiling, not after."""
  existed = os.path.exists(path)
  try:
    with open(path, "a", encoding="utf-8"):
      pass
    if not existed:
      os.remove(path)
  except OSError as error:
    raise UserError(f"{option} {path}: {error.strerror or error}") from error


def main(argv: Sequence[str]) -> None:
  arguments, files = split_arguments(argv)
  for argument in arguments:
    key, _, value = argument.partition("=")
    if key == "compile_topology":
      capacity.check_slice(value)  # MaxText would answer with all that it knows
  config = initialize(arguments)
  for option, path in files.items():
    check_writable(option, path)
  # tokamax warns of each kernel that nobody tuned for this shape.
  logging.getLogger("absl").setLevel(logging.ERROR)
  planned = Plan(config)
  planned.run(say)
  planned.plan["settings"]["config"] = os.path.basename(arguments[1])
  print("\n".join(report.lines(planned.plan)), flush=True)
  for option, path in files.items():
    try:
      with open(path, "w", encoding="utf-8") as f:
        f.write(WRITERS[option](planned.plan))
    except OSError as error:
      raise UserError(f"{option} {path}: {error.strerror or error}") from error
    say(f"written: {path}")
  if not planned.plan["fits"]:
    sys.exit(1)


if __name__ == "__main__":
  exit_on_user_error(main, sys.argv)
