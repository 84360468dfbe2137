"""How fast the tiny model is served on a CPU: one, eight and 64 clients at a time, over HTTP, on eight slots.

`python bench/serve.py [--json FILE] [--rounds R] [key=value …]`

One server answers all of it; the numbers of clients take turns, since a machine's speed drifts (bench/README.md).
"""

import os
import sys

# Run as a file, Python puts this folder first on the path; its parent belongs there.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
  sys.path[0] = os.path.dirname(sys.path[0])

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import psutil

from bench._serving import SLOTS, Answer, Server, ask, running_server
from MaxText.errors import UserError, exit_on_user_error
from MaxText.progress import say
from scripts.tiny_facts import facts

CLIENTS = (1, 8, 64)
_BODIES = 32  # of a load, asked for in turn
_REQUESTS = {1: 32, 8: 64, 64: 128}  # of one measurement: every body equally often
_PERCENTILES = (50, 90, 99)
_LONG_TOKENS = 256  # of an answer
_VOCABULARY = 500  # the first ids, which are all text


class Load(NamedTuple):
  """What is asked for: bodies, which clients take in turn, and what to call them."""

  name: str
  bodies: list[dict[str, Any]]


def loads() -> list[Load]:
  """Long answers of equal lengths, whose tokens are varied enough to keep all experts busy, and facts, which are short.

  Greedy, or at a lower temperature, the tiny model says one word for ever when it knows no answer: all sequences would
  then go through the same few experts.
  """
  rng = np.random.default_rng(0)
  long = [
    {"prompt": ids.tolist(), "max_tokens": _LONG_TOKENS, "ignore_eos": True, "temperature": 2.0, "seed": seed}
    for seed, ids in enumerate(rng.integers(0, _VOCABULARY, (_BODIES, 32)))
  ]
  short = [{"prompt": fact.prompt, "max_tokens": 32, "temperature": 0} for fact in facts()[:_BODIES]]
  return [Load("long", long), Load("facts", short)]


class Usage(NamedTuple):
  """What a measurement took: seconds on the clock, and of CPU in the server and in this process."""

  seconds: float
  server_cpu: float
  client_cpu: float


@dataclass
class Row:
  """One line of the table: a load from a number of clients."""

  load: Load
  clients: int
  usages: list[Usage] = field(default_factory=list)
  tokens: list[int] = field(default_factory=list)  # of each measurement
  first: list[float] = field(default_factory=list)  # seconds to the first token, of each request
  each: list[float] = field(default_factory=list)  # seconds a token after it

  def rates(self) -> list[float]:
    """Tokens a second of each measurement."""
    return [tokens / usage.seconds for tokens, usage in zip(self.tokens, self.usages, strict=True)]

  def request_rate(self) -> float:
    return statistics.median(_REQUESTS[self.clients] / usage.seconds for usage in self.usages)

  def cores(self, which: str) -> float:
    """CPU seconds a second, of "server_cpu" or "client_cpu"."""
    return sum(getattr(u, which) for u in self.usages) / sum(u.seconds for u in self.usages)

  def take(self, answers: Sequence[Answer], usage: Usage) -> None:
    self.usages.append(usage)
    self.tokens.append(sum(answer.tokens for answer in answers))
    for answer in answers:
      self.first.append(answer.times[0] - answer.started)
      # Tokens come a dispatch at a time, so one answer's seconds a token are a mean; the last event is the usage.
      if answer.tokens > 1:
        self.each.append((answer.times[-2] - answer.times[0]) / (answer.tokens - 1))


def percentiles(values: Sequence[float]) -> list[float]:
  """The `_PERCENTILES`, each a value that occurs: the least one that so many percent don't exceed."""
  return [float(np.percentile(values, p, method="inverted_cdf")) for p in _PERCENTILES]


def cpu_seconds(pid: int) -> float:
  times = psutil.Process(pid).cpu_times()
  return times.user + times.system


async def measure(server: Server, load: Load, clients: int) -> tuple[list[Answer], Usage]:
  """Each client asks again as soon as it has its answer, until `_REQUESTS` are through; answers in the order asked."""
  todo = iter(range(_REQUESTS[clients]))
  answers: dict[int, Answer] = {}

  async def client() -> None:
    for i in todo:
      answers[i] = await ask(server.host, server.port, load.bodies[i % _BODIES])

  before, own, started = cpu_seconds(server.pid), time.process_time(), time.perf_counter()
  await asyncio.gather(*(client() for _ in range(clients)))
  seconds = time.perf_counter() - started
  usage = Usage(seconds, cpu_seconds(server.pid) - before, time.process_time() - own)
  return [answers[i] for i in range(_REQUESTS[clients])], usage


async def warm_up(server: Server, load: Load) -> list[str]:
  """Asks for everything once, one at a time; returns the texts: those that all clients must get."""
  texts = []
  for body in load.bodies:
    answer = await ask(server.host, server.port, body)
    if answer.status != 200 or not answer.done:
      raise UserError(f"the server answered {answer.status}: {answer.events[-1:]}")
    texts.append(answer.text)
  return texts


async def measure_all(server: Server, rows: Sequence[Row], rounds: int) -> None:
  texts = {row.load.name: await warm_up(server, row.load) for row in rows if row.clients == 1}
  for i in range(rounds):
    for row in rows:
      answers, usage = await measure(server, row.load, row.clients)
      expected = texts[row.load.name]
      wrong = sum(not a.done or a.text != expected[j % _BODIES] for j, a in enumerate(answers))
      if wrong:
        raise UserError(f"{wrong} of {len(answers)} answers to {row.clients} clients aren't those given one at a time")
      row.take(answers, usage)
    say(f"round {i + 1} of {rounds}")


def print_table(rows: Sequence[Row]) -> None:
  """The rows as a Markdown table."""
  named = " … ".join(f"p{p}" for p in _PERCENTILES)
  columns = ("load", "clients", "tokens/s", "requests/s", f"first token, ms: {named}", f"a token, ms: {named}")
  print(f"| {' | '.join(columns)} | server, client: cores |")
  print("| --- | ---: | ---: | ---: | --- | --- | --- |")
  for row in rows:
    first, each = (
      " … ".join(f"{value * 1e3:,.1f}" for value in percentiles(values)) for values in (row.first, row.each)
    )
    print(
      f"| {row.load.name} | {row.clients} | {statistics.median(row.rates()):,.0f} | {row.request_rate():,.1f} | "
      f"{first} | {each} | {row.cores('server_cpu'):.2f}, {row.cores('client_cpu'):.2f} |"
    )


def gains(rows: Sequence[Row]) -> dict[str, list[float]]:
  """Tokens a second with as many clients as slots, over those of one client, round by round."""
  found = {(row.load.name, row.clients): row.rates() for row in rows}
  return {
    name: [many / one for many, one in zip(found[name, SLOTS], found[name, 1], strict=True)]
    for name in dict.fromkeys(row.load.name for row in rows)
  }


def main(argv: Sequence[str]) -> None:
  parser = argparse.ArgumentParser(prog="bench/serve.py", description=__doc__.split("\n", 1)[0])
  parser.add_argument("--json", metavar="FILE", help="also write the figures there")
  parser.add_argument("--rounds", type=int, default=5, metavar="R", help="measurements of each row")
  parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of kimi-k3-tiny.yml")
  args = parser.parse_args(argv[1:])
  if args.rounds < 1:
    raise UserError("--rounds must be at least 1")
  load = os.getloadavg()[0]
  if load > 0.5:
    say(f"other work is running here (load {load:.1f} on {os.cpu_count()} cores): the figures are provisional")
  rows = [Row(load, clients) for load in loads() for clients in CLIENTS]
  with running_server(args.overrides) as server:
    asyncio.run(measure_all(server, rows, args.rounds))
  print(f"{os.cpu_count()} cores, load before {load:.1f}; {SLOTS} slots; medians of {args.rounds} rounds\n")
  print_table(rows)
  print()
  ratios = gains(rows)
  for name, values in ratios.items():
    print(f"{name}: {SLOTS} clients / one: {statistics.median(values):.1f}× ({min(values):.1f} … {max(values):.1f})")
  if args.json:
    table = [
      {
        "load": row.load.name,
        "clients": row.clients,
        "tokens": row.tokens,
        "usages": [usage._asdict() for usage in row.usages],
        "first_token_s": row.first,
        "token_s": row.each,
      }
      for row in rows
    ]
    with open(args.json, "w", encoding="utf-8") as file:
      json.dump({"cores": os.cpu_count(), "load_before": load, "rows": table, "ratios": ratios}, file, indent=2)
      file.write("\n")


if __name__ == "__main__":
  exit_on_user_error(main, sys.argv)
