"""Ten minutes of mixed requests to one server: are all answers right, and does its memory stay flat?

`python bench/soak.py [--minutes M] [--json FILE] [key=value …]`

Clients stream facts, stream long answers, cut connections, send what is refused; every half minute their number
changes. It ends with status 1 if an answer was wrong or the server grew (bench/README.md).
"""

import os
import sys

# Run as a file, Python puts this folder first on the path; its parent belongs there.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
  sys.path[0] = os.path.dirname(sys.path[0])

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import psutil

from bench._serving import Server, ask, running_server
from MaxText.errors import UserError, exit_on_user_error
from MaxText.progress import say
from scripts.tiny_facts import facts

_CLIENTS = (4, 24, 1, 12, 64, 8)  # at a time, one phase after the other
_PHASE_SECONDS = 30
_SAMPLE_SECONDS = 2
_WARM_UP = 0.2  # of the time: allocators and caches still fill
_MOST_MIB = 16  # that the last third's median may lie above the first third's, after the warm-up
_MOST_MIB_PER_MINUTE = 2  # that a line through all samples after the warm-up may rise
_LONG = {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 2.0, "seed": 1}
_REFUSED = (
  {"prompt": ""},
  {"prompt": "word " * 2000},
  {"prompt": "Hi", "max_tokens": -1},
  {"prompt": "Hi", "n": 10**6},
  {"prompt": "Hi", "tools": [{}]},
)


class Sample(NamedTuple):
  """What the server holds: MiB of resident memory, file descriptors, threads."""

  minute: float
  mib: float
  files: int
  threads: int


class Soak:
  """Clients of a server, and what became of their requests.

  Attributes:
    done: requests by kind.
    wrong: what was wrong, one line each.
  """

  def __init__(self, server: Server, seconds: float):
    self.done: Counter[str] = Counter()
    self.wrong: list[str] = []
    self._server, self._seconds, self._started = server, seconds, time.monotonic()
    self._random = random.Random(0)
    self._facts = facts()
    self._long = ""

  async def run(self) -> list[Sample]:
    self._long = (await ask(self._server.host, self._server.port, _LONG)).text
    sampling = asyncio.create_task(self._sample())
    for phase in range(-(-int(self._seconds) // _PHASE_SECONDS)):
      clients = _CLIENTS[phase % len(_CLIENTS)]
      end = self._started + min((phase + 1) * _PHASE_SECONDS, self._seconds)
      await asyncio.gather(*(self._client(end) for _ in range(clients)))
      say(f"{clients} clients; {sum(self.done.values())} requests so far, {len(self.wrong)} wrong")
    sampling.cancel()
    return self._samples

  async def _sample(self) -> None:
    process = psutil.Process(self._server.pid)
    self._samples: list[Sample] = []
    while True:
      minute = (time.monotonic() - self._started) / 60
      self._samples.append(Sample(minute, process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()))
      await asyncio.sleep(_SAMPLE_SECONDS)

  async def _client(self, end: float) -> None:
    kinds = {"fact": self._fact, "long": self._whole, "cut": self._cut, "refused": self._refuse}
    while time.monotonic() < end:
      kind = self._random.choices(list(kinds), (6, 2, 2, 2))[0]
      try:
        problem = await kinds[kind]()
      except Exception as error:
        problem = repr(error)
      self.done[kind] += 1
      if problem:
        self.wrong.append(f"{kind}: {problem}")

  async def _fact(self) -> str:
    fact = self._random.choice(self._facts)
    answer = await ask(
      self._server.host, self._server.port, {"prompt": fact.prompt, "max_tokens": 32, "temperature": 0}
    )
    good = answer.status == 200 and answer.done and answer.text == fact.answer
    return "" if good else f"{fact.prompt!r} got {answer.status} {answer.events}"

  async def _whole(self) -> str:
    answer = await ask(self._server.host, self._server.port, _LONG)
    good = answer.status == 200 and answer.done and answer.text == self._long
    return "" if good else f"got {answer.status} {answer.events}, not {self._long!r}"

  async def _cut(self) -> str:
    events = self._random.randrange(8)
    answer = await ask(self._server.host, self._server.port, _LONG, events)
    good = answer.status == 200 and self._long.startswith(answer.text)
    return "" if good else f"got {answer.status} {answer.events}"

  async def _refuse(self) -> str:
    fields = self._random.choice(_REFUSED)
    answer = await ask(self._server.host, self._server.port, fields)
    return "" if answer.status == 400 else f"{fields} got {answer.status}"


def growth(samples: Sequence[Sample]) -> tuple[float, float]:
  """(MiB that the last third's median lies above the first third's, MiB a minute that a line through all rises)."""
  third = len(samples) // 3
  first, last = (statistics.median(s.mib for s in part) for part in (samples[:third], samples[-third:]))
  slope, _ = statistics.linear_regression([s.minute for s in samples], [s.mib for s in samples])
  return last - first, slope


def main(argv: Sequence[str]) -> None:
  parser = argparse.ArgumentParser(prog="bench/soak.py", description=__doc__.split("\n", 1)[0])
  parser.add_argument("--minutes", type=float, default=10, metavar="M", help="how long")
  parser.add_argument("--json", metavar="FILE", help="also write all samples there")
  parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of kimi-k3-tiny.yml")
  args = parser.parse_args(argv[1:])
  if not args.minutes >= 0.5:
    raise UserError("--minutes must be at least 0.5")
  with running_server(args.overrides) as server:
    soak = Soak(server, args.minutes * 60)
    samples = asyncio.run(soak.run())
  warm = [sample for sample in samples if sample.minute >= args.minutes * _WARM_UP]
  print("| minute | MiB | file descriptors | threads |")
  print("| ---: | ---: | ---: | ---: |")
  for sample in samples[:: max(1, len(samples) // 12)]:
    print(f"| {sample.minute:.1f} | {sample.mib:.1f} | {sample.files} | {sample.threads} |")
  above, slope = growth(warm)
  print(f"\n{', '.join(f'{n} {kind}' for kind, n in soak.done.items())}; {len(soak.wrong)} wrong")
  print(f"after the warm-up: last third {above:+.1f} MiB (most {_MOST_MIB}), ", end="")
  print(f"{slope:+.2f} MiB a minute (most {_MOST_MIB_PER_MINUTE})")
  if args.json:
    with open(args.json, "w", encoding="utf-8") as file:
      json.dump({"done": soak.done, "wrong": soak.wrong, "samples": [s._asdict() for s in samples]}, file, indent=2)
      file.write("\n")
  for line in soak.wrong[:20]:
    say(line)
  if soak.wrong or above > _MOST_MIB or slope > _MOST_MIB_PER_MINUTE:
    sys.exit(1)


if __name__ == "__main__":
  exit_on_user_error(main, sys.argv)
