"""The text of an optimised program, read: computations, instructions, sizes as they lie in memory, source functions."""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# Bits of a value. What isn't here holds no data (tokens, opaque handles).
_BITS = {
  "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
  "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "f4e2m1fn": 4,
}  # fmt: skip

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([\d,]*)((?::[^{}]*)?)\})?")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LISTS = re.compile(r"\b(?:called_computations|branch_computations)=\{([^}]*)\}")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TILE = re.compile(r"T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True)
class Array:
  """An array's type.

  Attributes:
    dtype: HLO's name of it.
    shape: dimensions.
    nbytes: bytes that it takes, padded to the tiles of its layout.
    space: memory space; 0 is HBM.
  """

  dtype: str
  shape: tuple[int, ...]
  nbytes: int
  space: int

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def _bits(dtype: str) -> int:
  return _BITS.get(dtype, 8 if dtype.startswith("f8") else 0)


def _array(match: re.Match[str]) -> Array:
  dtype, dims, minor_to_major, rest = match.groups()
  shape = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
  rest = rest or ""
  lying = [shape[int(i)] for i in (minor_to_major or "").split(",") if i][::-1] or list(shape)
  tile = _TILE.search(rest)
  if tile:
    sizes = [int(n) for n in tile[1].split(",")]
    lying = [1] * (len(sizes) - len(lying)) + lying
    lying[-len(sizes) :] = [-(-n // size) * size for n, size in zip(lying[-len(sizes) :], sizes, strict=True)]
  space = _SPACE.search(rest)
  return Array(dtype, shape, math.ceil(math.prod(lying) * _bits(dtype) / 8), int(space[1]) if space else 0)


def arrays(type_text: str) -> list[Array]:
  """The arrays of an instruction's type; a tuple's in order."""
  return [_array(match) for match in _ARRAY.finditer(type_text)]


def elements(type_text: str) -> list[str]:
  """Types of a tuple's elements, as text; the type itself where it is no tuple."""
  if not type_text.startswith("("):
    return [type_text]
  found, depth, start = [], 0, 1
  for i, c in enumerate(type_text):
    if c in "([{":
      depth += 1
    elif c in ")]}":
      depth -= 1
    if (c == "," and depth == 1) or depth == 0:
      found.append(re.sub(r"/\*.*?\*/", "", type_text[start:i]).strip())
      start = i + 1
  return [one for one in found if one]


@dataclass(frozen=True)
class Instruction:
  """One instruction.

  Attributes:
    name, type, opcode: as the text has them.
    operands: names of the instructions it reads, all of its own computation.
    inside: what stands between its parentheses (a constant's value, a parameter's number).
    attributes: what follows them.
  """

  name: str
  type: str
  opcode: str
  operands: tuple[str, ...]
  inside: str
  attributes: str

  @property
  def arrays(self) -> list[Array]:
    return arrays(self.type)

  def attribute(self, key: str) -> str | None:
    """`key=value`'s value, up to the next comma; a braced value whole."""
    match = re.search(rf"(?:^|[ ,]){key}=(\{{[^}}]*\}}|[^,]*)", self.attributes)
    return match[1].strip() if match else None

  @property
  def called(self) -> dict[str, str]:
    """Computations it calls, by the attribute's name ("calls", "body", "called_computations.0", …).

    The later halves of an asynchronous operation repeat the first's: they call nothing. Nor do operations that apply
    a scalar function to values (reductions, sorts).
    """
    if self.opcode.endswith(("-done", "-update")):
      return {}
    found = {match[1]: match[2] for match in _CALLED.finditer(self.attributes)}
    if not self.opcode.startswith("call"):
      found.pop("to_apply", None)
    for match in _CALLED_LISTS.finditer(self.attributes):
      for i, name in enumerate(n.strip().lstrip("%") for n in match[1].split(",")):
        found[f"called_computations.{i}"] = name
    return found

  @property
  def op_name(self) -> str:
    """The JAX operation that it comes from; of a parameter, the argument's path."""
    match = _OP_NAME.search(self.attributes)
    return match[1].replace("\\'", "'") if match else ""

  @property
  def frame(self) -> int:
    """Id of its stack frame; 0: none."""
    match = _FRAME.search(self.attributes)
    return int(match[1]) if match else 0


@dataclass
class Computation:
  """Instructions by name, in the program's order; `root` is the result's name."""

  name: str
  instructions: dict[str, Instruction] = field(default_factory=dict)
  root: str = ""

  def __iter__(self) -> Iterator[Instruction]:
    return iter(self.instructions.values())

  def __getitem__(self, name: str) -> Instruction:
    return self.instructions[name]

  @property
  def parameters(self) -> list[Instruction]:
    """In order of their numbers."""
    found = [i for i in self if i.opcode == "parameter"]
    return sorted(found, key=lambda i: int(i.inside))


@dataclass
class Module:
  """A program.

  Attributes:
    computations: by name.
    entry: the one that is run.
    frames: a stack frame's id -> its (file, function), innermost first.
  """

  computations: dict[str, Computation]
  entry: Computation
  frames: dict[int, list[tuple[str, str]]]

  def stack(self, instruction: Instruction) -> list[tuple[str, str]]:
    """(file, function) of the source that an instruction comes from, innermost first; empty where unknown."""
    return self.frames.get(instruction.frame, [])


def _closing(text: str, start: int) -> int:
  """Index of the parenthesis that closes the one at `start`; quotes are respected."""
  depth, quoted = 0, False
  for i in range(start, len(text)):
    c = text[i]
    if c == '"' and text[i - 1] != "\\":
      quoted = not quoted
    elif not quoted and c == "(":
      depth += 1
    elif not quoted and c == ")":
      depth -= 1
      if not depth:
        return i
  raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def _instruction(name: str, text: str) -> Instruction:
  end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
  opcode = _OPCODE.match(text, end)
  if not opcode:
    raise ValueError(f"no operation in {text[:80]!r}")
  close = _closing(text, opcode.end() - 1)
  inside = text[opcode.end() : close]
  operands = () if opcode[1] in ("constant", "parameter") else tuple(re.findall(r"%([\w.\-]+)", inside))
  return Instruction(name, text[:end], opcode[1], operands, inside, text[close + 1 :].lstrip(", "))


def _read_tables(lines: list[str]) -> dict[int, list[tuple[str, str]]]:
  """The source tables before the first computation -> `Module.frames`."""
  tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
  current = None
  for line in lines:
    if line in _TABLES:
      current = tables[line]
    elif current is not None and (match := re.match(r"(\d+) (.*)$", line)):
      current[int(match[1])] = match[2]

  def number(text: str, key: str) -> int:
    match = re.search(rf"{key}=(\d+)", text)
    return int(match[1]) if match else 0

  places = {
    key: (
      os.path.basename(tables["FileNames"].get(number(text, "file_name_id"), "").strip('"')),
      tables["FunctionNames"].get(number(text, "function_name_id"), "").strip('"'),
    )
    for key, text in tables["FileLocations"].items()
  }
  frames: dict[int, list[tuple[str, str]]] = {}
  for key, text in sorted(tables["StackFrames"].items()):
    # A frame's parent is printed as its id plus one, so that "none" is 1.
    parent = number(text, "parent_frame_id") - 1
    place = places.get(number(text, "file_location_id"))
    frames[key] = ([place] if place else []) + frames.get(parent, [])
  return frames


def parse(text: str) -> Module:
  """Reads `compiled.as_text()`.

  Raises:
    ValueError: the text is not that of an HLO module.
  """
  computations: dict[str, Computation] = {}
  entry = current = None
  head = []
  for line in text.splitlines():
    if current is None:
      match = _COMPUTATION.match(line)
      if match:
        current = computations[match[2]] = Computation(match[2])
        entry = current if match[1] else entry
      elif not computations:
        head.append(line)
    elif line.startswith("}"):
      current = None
    elif match := _INSTRUCTION.match(line):
      current.instructions[match[2]] = _instruction(match[2], match[3])
      if match[1]:
        current.root = match[2]
  if entry is None:
    raise ValueError("no ENTRY computation: this is not the text of an HLO module")
  return Module(computations, entry, _read_tables(head))
