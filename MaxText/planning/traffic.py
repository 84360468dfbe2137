"""What a compiled program moves: collectives between devices, copies in memory, and what it is given."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from MaxText.planning.hlo import Array, Computation, Instruction, Module
from MaxText.planning.trips import Visit

KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "ragged-all-to-all",
         "collective-broadcast")  # fmt: skip
LARGE_COPY = 64 * 2**20
_FAR = 8  # instructions back that a source is looked for

_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# Operations that only carry values to another place, layout or type.
_MOVES = {"parameter", "constant", "bitcast", "copy", "transpose", "reshape", "convert", "slice", "dynamic-slice",
          "concatenate", "pad", "tuple", "get-tuple-element", "broadcast", "iota"}  # fmt: skip
_COPIES = {"copy", "copy-start", "transpose", "convert", "slice", "dynamic-slice", "concatenate", "pad", "reshape"}


@dataclass(frozen=True)
class Collective:
  """Collectives of one kind from one place in the source.

  Attributes:
    kind: HLO's name.
    count: how many run: in a step or chunk; where `per` names something else, in that.
    bytes: of one of them, the larger of what a device gives and what it gets.
    group_size: devices of a group.
    axes: mesh axes that a group spans.
    where: the function that asks for it, as far as the compiler remembers: of like ones it may name the first.
    per: "step" or "chunk"; "dispatch": once around all steps; or the loop of unknown length that it stands in, of
      which it then counts one trip.
  """

  kind: str
  count: int
  bytes: int
  group_size: int
  axes: tuple[str, ...]
  where: str
  per: str

  @property
  def regular(self) -> bool:
    """Whether `count` is that of a step or chunk."""
    return self.per in ("step", "chunk")

  def describe(self) -> dict[str, Any]:
    return {
      "kind": self.kind,
      "count": self.count,
      "bytes": self.bytes,
      "group_size": self.group_size,
      "axes": list(self.axes),
      "crosses_data": "data" in self.axes,
      "where": self.where,
      "per": self.per,
    }


@dataclass(frozen=True)
class Copy:
  """A result of more than 64 MiB in HBM that is nothing but another's values in another place, layout or type.

  Attributes:
    what: the operations, e.g. "copy", "convert fusion".
    array: type and shape, e.g. "bf16[68,7168,576]".
    bytes: of one; count, where, per: as of a `Collective`.
  """

  what: str
  array: str
  bytes: int
  count: int
  where: str
  per: str

  def describe(self) -> dict[str, Any]:
    return vars(self).copy()


def place(module: Module, instruction: Instruction) -> str:
  """The function in the source that an instruction comes from; helpers of `parallel.py` give way to their caller."""
  for file, function in module.stack(instruction):
    if file != "parallel.py":
      return f"{file.removesuffix('.py')}.{function.replace('.<locals>', '')}"
  return ""


class _Origins:
  """Where instructions come from, also those that the compiler made anew and left without a source: by their input."""

  def __init__(self, module: Module):
    self.module = module
    self._callers = {name: (c, i) for c in module.computations.values() for i in c for name in i.called.values()}

  def __call__(self, computation: Computation, i: Instruction) -> str:
    found = place(self.module, i)
    if found:
      return found
    names = self._inputs(computation, i)
    for _ in range(_FAR):
      near = [(c, c[name]) for c, name in names if name in c.instructions]
      named = [found for _, one in near if (found := place(self.module, one))]
      if named:
        return f"{named[0]} (by its input)"
      names = [pair for c, one in near for pair in self._inputs(c, one)]
    return "unknown"

  def _inputs(self, computation: Computation, i: Instruction) -> list[tuple[Computation, str]]:
    """(computation, name) of what an instruction reads; of a parameter, what its computation is called with."""
    if i.opcode != "parameter":
      return [(computation, name) for name in i.operands]
    if computation.name not in self._callers:
      return []
    outer, call = self._callers[computation.name]
    if call.opcode == "while":
      return []
    given = list(call.operands)
    if not given:  # an asynchronous call is given its operands by the half that follows
      given = [name for user in outer if call.name in user.operands for name in user.operands if name != call.name]
    number = int(i.inside)
    return [(outer, given[number])] if number < len(given) else []


def _groups(attributes: str, mesh: Mapping[str, int]) -> tuple[int, tuple[str, ...]]:
  """A collective's attributes -> (devices of a group, mesh axes of size > 1 that it spans)."""
  live = {axis: size for axis, size in mesh.items() if size > 1}
  if match := _MESH.search(attributes):
    sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
    axes = tuple(axis for axis in re.findall(r"'(\w+)'", match[2]) if sizes.get(axis, 1) > 1)
    # A part of an axis is written 'tensor':(1)4.
    parts = {axis: int(size) for axis, size in re.findall(r"'(\w+)':\(\d+\)(\d+)", match[2])}
    return math.prod(parts.get(axis, sizes[axis]) for axis in axes), axes
  if match := _COUNTED.search(attributes):
    shape, grid = ([int(n) for n in match[i].split(",")] for i in (1, 2))
    order = [int(n) for n in match[3].split(",")] if match[3] else range(len(grid))
    groups = np.arange(math.prod(grid)).reshape(grid).transpose(list(order)).reshape(shape)
    groups = groups.reshape(-1, shape[-1])
  elif (match := _LISTED.search(attributes)) and match[1]:
    found = [[int(n) for n in one.split(",")] for one in re.findall(r"\{([\d,]+)\}", match[1])]
    groups = np.array([one for one in found if len(one) == max(map(len, found))])
  else:
    return math.prod(live.values()), tuple(live)
  if groups.max() >= math.prod(live.values()):
    return groups.shape[1], ()
  places = np.stack(np.unravel_index(groups, tuple(live.values())), axis=-1)
  spans = (places != places[:, :1]).any(axis=(0, 1))
  return groups.shape[1], tuple(axis for axis, crossed in zip(live, spans, strict=True) if crossed)


def _payload(computation: Computation, i: Instruction) -> int:
  given = sum(a.nbytes for name in i.operands for a in computation[name].arrays)
  got = sum(a.nbytes for a in i.arrays)
  # The first half of an asynchronous one returns what it was given beside what it makes.
  if i.opcode.endswith("-start") and i.type.startswith("(") and got > given:
    got -= given
  return max(given, got)


def _per(module: Module, visit: Visit, phase: str) -> str:
  if visit.loops is not None:
    word = "branch of" if visit.loops.opcode == "conditional" else "trip of a loop in"
    return f"{word} {place(module, visit.loops) or visit.loops.name}"
  return phase if phase == "chunk" or visit.repeated else "dispatch"


def collectives(module: Module, visits: Iterable[Visit], mesh: Mapping[str, int], phase: str) -> list[Collective]:
  """All collectives of a program, those that are alike together, the most frequent first.

  Args:
    mesh: sizes by axis, in the order in which devices are numbered.
    phase: "step" or "chunk".
  """
  found: dict[Collective, int] = {}
  origin = _Origins(module)
  for visit in visits:
    i = visit.instruction
    kind = i.opcode.removesuffix("-start")
    if kind not in KINDS:
      continue
    size, axes = _groups(i.attributes, mesh)
    nbytes = _payload(visit.computation, i)
    one = Collective(kind, 0, nbytes, size, axes, origin(visit.computation, i), _per(module, visit, phase))
    found[one] = found.get(one, 0) + visit.count
  counted = [replace(one, count=count) for one, count in found.items()]
  return sorted(counted, key=lambda c: (not c.regular, -c.count, -c.bytes))


def _moved(module: Module, i: Instruction) -> str | None:
  """How a result is a mere copy of something; None where it is more than that."""
  if i.opcode in _COPIES:
    return i.opcode.removesuffix("-start")
  if i.opcode != "fusion":
    return None
  inside = list(module.computations[i.called["calls"]])
  large = [x for x in inside if any(a.shape for a in x.arrays)]
  if any(x.opcode not in _MOVES for x in large) or not any(x.opcode == "parameter" for x in large):
    return None
  sizes = max((math.prod(a.shape) for a in i.arrays), default=0)
  whole = {x.opcode for x in large if x.opcode in _COPIES and any(math.prod(a.shape) >= sizes for a in x.arrays)}
  return f"{'+'.join(sorted(whole))} fusion" if whole else None


def copies(module: Module, visits: Iterable[Visit], phase: str) -> list[Copy]:
  """Materialised copies of more than `LARGE_COPY` bytes in HBM, the most bytes first."""
  found: dict[Copy, int] = {}
  origin = _Origins(module)
  for visit in visits:
    i = visit.instruction
    if visit.in_fusion:
      continue
    results = i.arrays[:1] if i.opcode == "copy-start" else i.arrays
    large = [a for a in results if a.space == 0 and a.nbytes > LARGE_COPY]
    if not large or (what := _moved(module, i)) is None:
      continue
    nbytes = sum(a.nbytes for a in large)
    one = Copy(what, ", ".join(map(str, large)), nbytes, 0, origin(visit.computation, i), _per(module, visit, phase))
    found[one] = found.get(one, 0) + visit.count
  counted = [replace(one, count=count) for one, count in found.items()]
  return sorted(counted, key=lambda c: -c.bytes * c.count)


def arguments(module: Module) -> list[tuple[str, Array]]:
  """(path of the argument, its array as it lies in memory) of each parameter of the program."""
  return [(p.op_name, array) for p in module.entry.parameters for array in p.arrays]
