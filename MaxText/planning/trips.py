"""How often each instruction of a program runs: loops followed inwards, their bounds computed from the program itself.

A loop's bounds may be read from a constant table by the number of the outer loop's trip (the KDA layers before each MLA
layer are). So integers are evaluated through the program, lazily; what depends on data is unknown, and its loop is
counted once and named.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from MaxText.planning.hlo import Computation, Instruction, Module, elements

_MOST_TRIPS = 1 << 24
_MOST_EVALUATED = 4096  # trips of a loop that are looked at one by one
_LARGEST = 4096  # elements of an array that is evaluated
_SAME = ("bitcast", "copy", "copy-start", "copy-done", "reshape", "opt-barrier")
_TWO: dict[str, Callable[[Any, Any], Any]] = {
  "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
  "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip
_COMPARE = {
  "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip
_DTYPES = {"s32": np.int32, "u32": np.uint32, "s8": np.int8, "u8": np.uint8, "s64": np.int64, "pred": np.bool_}

Thunk = Callable[[], Any]


class _Unknown(Exception):
  """A value that the program's text alone doesn't give."""


def _unknown() -> Any:
  raise _Unknown


class _Scope:
  """A computation with what its parameters are: values on demand, each computed once.

  A tuple's value is a list of thunks.
  """

  def __init__(self, module: Module, computation: Computation, parameters: list[Thunk]):
    self.module, self.computation, self.parameters = module, computation, parameters
    self._known: dict[str, Any] = {}

  def __call__(self, name: str) -> Any:
    if name not in self._known:
      try:
        self._known[name] = self._evaluate(self.computation[name])
      except (_Unknown, RecursionError):
        self._known[name] = _Unknown
    if self._known[name] is _Unknown:
      raise _Unknown
    return self._known[name]

  def thunk(self, name: str) -> Thunk:
    return lambda: self(name)

  def inner(self, name: str, parameters: list[Thunk]) -> "_Scope":
    return _Scope(self.module, self.module.computations[name], parameters)

  def _evaluate(self, i: Instruction) -> Any:
    op = i.opcode
    if op == "parameter":
      number = int(i.inside)
      return self.parameters[number]() if number < len(self.parameters) else _unknown()
    if op == "tuple":
      return [self.thunk(name) for name in i.operands]
    if op == "get-tuple-element":
      value = self(i.operands[0])
      return value[int(i.attribute("index") or 0)]() if isinstance(value, list) else _unknown()
    if op in ("fusion", "call"):
      called = i.called.get("calls") or i.called["to_apply"]
      inner = self.inner(called, [self.thunk(name) for name in i.operands])
      return inner(inner.computation.root)
    if op == "while":
      return _Loop(self, i).result()
    if op in _SAME and i.type.startswith("("):
      return self(i.operands[0])
    return self._number(i)

  def _number(self, i: Instruction) -> np.ndarray:
    """An integer array's value."""
    kind = i.arrays
    if len(kind) != 1:
      raise _Unknown
    shape, dtype = kind[0].shape, _DTYPES.get(kind[0].dtype)
    if dtype is None or np.prod(shape, dtype=np.int64) > _LARGEST:
      raise _Unknown
    if i.opcode == "constant":
      if "..." in i.inside:
        raise _Unknown  # a table that the text leaves out
      words = re.findall(r"-?\d+|true|false", i.inside)
      values = [{"true": 1, "false": 0}.get(word, word) for word in words]
      return np.array([int(v) for v in values]).reshape(shape).astype(dtype)
    if i.opcode == "iota":
      along = int(i.attribute("iota_dimension") or 0)
      return np.broadcast_to(np.arange(shape[along]).reshape([-1] + [1] * (len(shape) - along - 1)), shape).astype(
        dtype
      )
    if i.opcode == "select":
      return self(i.operands[1 if self(i.operands[0]).all() else 2]) if not shape else _unknown()
    values = [self(name) for name in i.operands]
    if i.opcode in _SAME:
      return values[0].reshape(shape)
    if i.opcode == "convert":
      return values[0].astype(dtype)
    if i.opcode == "broadcast" and values[0].size == 1:
      return np.full(shape, values[0].reshape(()), dtype)
    if i.opcode == "compare":
      return _COMPARE[i.attribute("direction") or ""](*values)
    if i.opcode == "clamp":
      return np.minimum(np.maximum(values[1], values[0]), values[2])
    if i.opcode == "dynamic-slice":
      starts = [
        int(np.clip(int(v), 0, n - size)) for v, n, size in zip(values[1:], values[0].shape, shape, strict=True)
      ]
      return values[0][tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))]
    if i.opcode == "slice":
      bounds = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", i.attribute("slice") or "")
      return values[0][tuple(slice(int(low), int(high), int(step or 1)) for low, high, step in bounds)]
    if i.opcode == "not":
      return np.logical_not(values[0]) if dtype is np.bool_ else np.invert(values[0])
    if i.opcode in _TWO:
      return _TWO[i.opcode](*values).astype(dtype)
    raise _Unknown


class _Loop:
  """A `while` instruction in its scope: which of its carried values count, and how often it goes round."""

  def __init__(self, scope: _Scope, instruction: Instruction):
    self.scope, self.instruction = scope, instruction
    self.body = scope.module.computations[instruction.called["body"]]
    self.condition = scope.module.computations[instruction.called["condition"]]
    self.size = len(elements(instruction.type))
    self._steps: dict[int, int] = {}

  def _start(self, k: int) -> Any:
    value = self.scope(self.instruction.operands[0])
    return value[k]() if isinstance(value, list) else _unknown()

  def _after(self, k: int, given: Callable[[int], Any]) -> Any:
    """Carried value k after one trip that begins with the values `given`."""
    scope = self._at(self.body, given)
    result = scope(scope.computation.root)
    return result[k]() if isinstance(result, list) else _unknown()

  def _at(self, computation: Computation, given: Callable[[int], Any]) -> _Scope:
    carried = [lambda k=k: given(k) for k in range(self.size)]
    return _Scope(self.scope.module, computation, [lambda: carried])

  def _step(self, k: int) -> int:
    """By how much every trip changes carried value k; `_Unknown` where it isn't a fixed number."""
    if k not in self._steps:
      changes = set()
      for probe in (0, 1000):

        def given(j, probe=probe):
          return np.int32(probe) if j == k else _unknown()

        changes.add(int(self._after(k, given)) - probe)
      if len(changes) > 1:
        raise _Unknown
      self._steps[k] = changes.pop()
    return self._steps[k]

  def carried(self, k: int, trip: int | None) -> Any:
    """Carried value k when trip number `trip` begins; None: any trip, so that only what never changes is known."""
    source = _handed_on(self.scope.module, self.body, k)
    if source == k or trip == 0:
      return self._start(k)
    if source is None:
      step = self._step(k)
      return self._start(k) + np.int32(step * trip) if trip is not None else _unknown()
    # A table is often prefetched for the next trip: the fast copy's place is filled from the slow one's.
    if trip is not None:
      return self.carried(source, trip - 1)
    first, later = self._start(k), self.carried(source, None)
    return first if isinstance(first, np.ndarray) and np.array_equal(first, later) else _unknown()

  def inside(self, trip: int | None) -> _Scope:
    return self._at(self.body, lambda k: self.carried(k, trip))

  def trips(self) -> int | None:
    """How often it goes round: the most, where it may end early; None where that depends on data."""

    def goes_on(trip: int) -> bool:
      scope = self._at(self.condition, lambda k: self.carried(k, trip))
      return _holds(scope, scope.computation.root)

    try:
      if not goes_on(0):
        return 0
      low, high = 0, 1
      while goes_on(high):
        low, high = high, high * 2
        if high > _MOST_TRIPS:
          return None
      while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if goes_on(middle) else (low, middle)
      return high
    except _Unknown:
      return None

  def result(self) -> list[Thunk]:
    """What it leaves: known where a value never changes, or counts a known number of trips."""

    def one(k: int) -> Any:
      if _handed_on(self.scope.module, self.body, k) == k:
        return self._start(k)
      trips = self.trips()
      return self.carried(k, trips) if trips is not None else _unknown()

    return [lambda k=k: one(k) for k in range(self.size)]


def _handed_on(module: Module, body: Computation, k: int) -> int | None:
  """Which carried value a loop's body hands on, untouched, as carried value k; None where it computes a new one."""
  root = body[body.root]
  if root.opcode != "tuple":
    return None
  i = body[root.operands[k]]
  while True:
    if i.opcode in _SAME and i.operands:
      i = body[i.operands[0]]
      continue
    if i.opcode != "get-tuple-element":
      return None
    source, index = body[i.operands[0]], int(i.attribute("index") or 0)
    if source.opcode == "parameter":
      return index
    if source.opcode != "while" or _handed_on(module, module.computations[source.called["body"]], index) != index:
      return None
    # An inner loop hands it on too: what it was given, then.
    given = body[source.operands[0]]
    if given.opcode != "tuple":
      return None
    i = body[given.operands[index]]


def _holds(scope: _Scope, name: str) -> bool:
  """A loop's condition; of `known and unknown` the unknown half counts as true, so that the most trips come out."""
  i = scope.computation[name]
  if i.opcode == "and":
    sides = []
    for operand in i.operands:
      try:
        sides.append(_holds(scope, operand))
      except _Unknown:
        continue
    return all(sides) if sides else _unknown()
  if i.opcode == "fusion":
    inner = scope.inner(i.called["calls"], [scope.thunk(n) for n in i.operands])
    return _holds(inner, inner.computation.root)
  return bool(np.all(scope(name)))


@dataclass(frozen=True)
class Visit:
  """An instruction and how often it runs.

  Attributes:
    instruction, computation: it, and where it stands.
    count: runs. Inside a loop of unknown length, runs in one trip of that loop.
    loops: the innermost loop of unknown length around it, or the branch of a conditional; None without.
    in_fusion: it is part of a fusion: its result isn't materialised.
    repeated: it stands in the outermost loop, the one of the decode steps.
  """

  instruction: Instruction
  computation: Computation
  count: int
  loops: Instruction | None
  in_fusion: bool
  repeated: bool


class _Walk:
  def __init__(self, module: Module, step_loop: Instruction | None):
    self.module, self.step_loop = module, step_loop
    self.counts: dict[tuple[str, str, Instruction | None, bool, bool], int] = {}
    self._holds_loops: dict[str, bool] = {}

  def has_loops(self, name: str) -> bool:
    if name not in self._holds_loops:
      self._holds_loops[name] = False
      self._holds_loops[name] = any(
        i.opcode == "while" or any(map(self.has_loops, i.called.values())) for i in self.module.computations[name]
      )
    return self._holds_loops[name]

  def visit(self, scope: _Scope, count: int, loops: Instruction | None, fused: bool, repeated: bool) -> None:
    for i in scope.computation:
      key = (scope.computation.name, i.name, loops, fused, repeated)
      self.counts[key] = self.counts.get(key, 0) + count
      if i.opcode == "while":
        self._while(_Loop(scope, i), count, loops, fused, repeated)
        continue
      for name in i.called.values():
        inner = scope.inner(name, [scope.thunk(n) for n in i.operands])
        within = i if i.opcode == "conditional" else loops
        self.visit(inner, count, within, fused or i.opcode == "fusion", repeated)

  def _while(self, loop: _Loop, count: int, loops: Instruction | None, fused: bool, repeated: bool) -> None:
    if loop.instruction is self.step_loop:
      self.visit(loop.inside(None), count, loops, fused, True)
      return
    trips = loop.trips()
    if trips is None:
      self.visit(loop.inside(None), count, loop.instruction, fused, repeated)
    elif self.has_loops(loop.body.name) and trips <= _MOST_EVALUATED:
      for trip in range(trips):
        self.visit(loop.inside(trip), count, loops, fused, repeated)
    else:
      self.visit(loop.inside(None), count * trips, loops, fused, repeated)


def _weight(module: Module, name: str, seen: set[str]) -> int:
  """Instructions of a computation and of all that it calls."""
  if name in seen:
    return 0
  seen.add(name)
  return sum(1 + sum(_weight(module, n, seen) for n in i.called.values()) for i in module.computations[name])


def visits(module: Module, steps: bool) -> Iterator[Visit]:
  """Every instruction that runs, with how often.

  Args:
    steps: the program is a dispatch of decode steps: its outermost loop (the largest, where there are several) is that
      of the steps and counts once, so that all counts inside are those of one step.
  """
  loops = [i for i in module.entry if i.opcode == "while"]
  step_loop = max(loops, key=lambda i: _weight(module, i.called["body"], set()), default=None) if steps else None
  walk = _Walk(module, step_loop)
  walk.visit(_Scope(module, module.entry, []), 1, None, False, False)
  for (computation, name, within, fused, repeated), count in walk.counts.items():
    where = module.computations[computation]
    if count:
      yield Visit(where[name], where, count, within, fused, repeated)
