"""A weight is declared once: shape, dtype, logical axes, initialiser and source tensors.

Layers declare their weights with `Weight`; the model arranges them in a tree of `Stack`s (one array for all layers of a
kind). Initialisation, abstract trees, shardings, byte counts and the checkpoint reader all derive from that tree.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from MaxText import quantization
from MaxText.errors import UserError
from quantized_matmul import stack_format

Initializer = Callable[[jax.Array, tuple[int, ...]], jax.Array]


def fan_in(inputs: int) -> Initializer:
  """Normal with standard deviation 1/√inputs: keeps activations at unit scale."""
  return lambda key, shape: jax.random.normal(key, shape, jnp.float32) / math.sqrt(inputs)


def constant(value: float) -> Initializer:
  return lambda key, shape: jnp.full(shape, value, jnp.float32)


def uniform(low: float, high: float, transform: Callable[[jax.Array], jax.Array] = lambda x: x) -> Initializer:
  return lambda key, shape: transform(jax.random.uniform(key, shape, jnp.float32, low, high))


@dataclass(frozen=True)
class Source:
  """One tensor of the released layout that feeds a weight.

  Attributes:
    name: its name below the instance's prefix, without `.weight` where the release has that suffix.
    shape: its shape in the release (torch order, [out, in] for matrices).
    also: other shapes that members of the family store it in.
    packed: whether export writes it as MXFP4 (`weight_packed`, `weight_scale`). A reader goes by what the index holds.
    suffix: ".weight" or "" (`A_log`, `dt_bias`, `e_score_correction_bias` have none).
  """

  name: str
  shape: tuple[int, ...]
  also: tuple[tuple[int, ...], ...] = ()
  packed: bool = False
  suffix: str = ".weight"


@dataclass(frozen=True)
class Weight:
  """One weight of one layer.

  Attributes:
    shape: in this project's layout.
    axes: a MaxText logical axis name, or None, for each dimension.
    sources: the released tensors it is made of.
    init: initialiser for random weights, (key, shape) -> float32.
    assemble: the released tensors as numpy arrays -> an array of `shape`. Default: one matrix, transposed to
      [in, out].
    disassemble: the inverse, for export. Default: the inverse of the default `assemble`.
    kind: whether `Storage.experts` or `Storage.dense` says how it is held; "" where it always stays plain.
    float32: True where the release stores, and the arithmetic wants, float32 whatever `weight_dtype` says.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  sources: tuple[Source, ...]
  init: Initializer
  assemble: Callable[..., np.ndarray] | None = None
  disassemble: Callable[[np.ndarray], tuple[np.ndarray, ...]] | None = None
  kind: Literal["", "dense", "expert"] = ""
  float32: bool = False

  def __post_init__(self):
    if len(self.shape) != len(self.axes):
      raise ValueError(f"{self.sources[0].name}: {len(self.axes)} logical axes for shape {self.shape}")

  def from_release(self, *tensors: np.ndarray) -> np.ndarray:
    return self.arrange(*tensors).reshape(self.shape)

  def arrange(self, *tensors: np.ndarray) -> np.ndarray:
    """Inputs first, the sources side by side. Serves values and their scales alike."""
    dtype = np.result_type(*tensors)
    # Moved as unsigned numbers: NumPy copies its own types several times as fast as those of others.
    moved = [tensor.astype(dtype, copy=False).view(f"u{dtype.itemsize}") for tensor in tensors]
    if self.assemble is not None:
      return self.assemble(*moved).view(dtype)
    (tensor,) = moved
    return (tensor.T if tensor.ndim == 2 else tensor).view(dtype)

  @functools.cached_property
  def outputs_together(self) -> int:
    """How many consecutive outputs of the arranged matrix always come from one 128×128 block of one source, up to 128.

    It is less where sources alternate, such as the q, k and v of heads smaller than a block.
    """
    blocks = [np.arange(source.shape[0])[:, None] // quantization.BLOCK for source in self.sources]
    offsets = np.cumsum([0, *(block[-1, 0] + 1 for block in blocks)])
    (arranged,) = self.arrange(*(block + offset for block, offset in zip(blocks, offsets[:-1], strict=True)))
    return math.gcd(quantization.BLOCK, *(np.flatnonzero(np.diff(arranged)) + 1).tolist())

  def to_release(self, value: np.ndarray) -> tuple[np.ndarray, ...]:
    if self.disassemble is not None:
      return self.disassemble(value)
    (source,) = self.sources
    return (value.reshape(source.shape[::-1]).T if len(source.shape) == 2 else value.reshape(source.shape),)


@dataclass(frozen=True)
class Storage:
  """How a model's weights are held.

  Attributes:
    dtype: of all plain weights but those declared float32.
    experts: one of `quantization.FORMATS`, for the routed experts.
    dense: "plain" or "block_fp8", for the large matrices that every token meets.
    ways: over how many devices each logical axis is split, where that is more than one; it bounds what a scale covers.
  """

  dtype: Any
  experts: str = "plain"
  dense: str = "plain"
  ways: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Stack:
  """A weight for several instances (layers, or layers × experts), stacked on new first axes.

  Attributes:
    weight: the declaration, common to all instances.
    prefixes: the released prefix of each instance, the last of the stacked axes fastest.
    lead: (logical name, size) of each stacked axis; empty for a global, such as the embedding, that stands alone.
  """

  weight: Weight
  prefixes: tuple[str, ...]
  lead: tuple[tuple[str, int], ...] = ()

  @property
  def lead_shape(self) -> tuple[int, ...]:
    return tuple(size for _, size in self.lead)

  @property
  def shape(self) -> tuple[int, ...]:
    return (*self.lead_shape, *self.weight.shape)

  @property
  def logical_axes(self) -> tuple[str | None, ...]:
    return (*(name for name, _ in self.lead), *self.weight.axes)

  def dtype(self, storage: Storage) -> jnp.dtype:
    """Of the weight while it is plain."""
    return jnp.dtype(jnp.float32 if self.weight.float32 else storage.dtype)

  def form(self, storage: Storage) -> type[quantization.Quantized] | None:
    """The quantised form that the weight takes, or None for a plain array."""
    name = {"": "plain", "dense": storage.dense, "expert": storage.experts}[self.weight.kind]
    return quantization.FORMS.get(name)

  def runs(self, storage: Storage) -> tuple[int, ...]:
    """How many values of each dimension of one instance a scale covers, on any device.

    In block-FP8 that is as many as lie in one 128×128 block of a released matrix, wherever a device's part begins: a
    block that the split cuts has its scale once for each run.
    """
    ways = dict(storage.ways)
    local = tuple(n // ways.get(axis, 1) for n, axis in zip(self.weight.shape, self.weight.axes, strict=True))
    inputs, outputs = quantization.runs(self.form(storage), local)
    return inputs, math.gcd(outputs, self.weight.outputs_together)

  def block_scales(self, scales: Sequence[np.ndarray], runs: tuple[int, ...]) -> np.ndarray:
    """Scales of the sources' 128×128 blocks -> those of one instance, one for each run.

    Args:
      scales: of each source [⌈out/128⌉, ⌈in/128⌉], as released.
      runs: see there.

    Returns:
      [in / run, out / run].
    """
    block, sources = quantization.BLOCK, self.weight.sources
    by_output = [np.repeat(s, block, axis=0)[: source.shape[0]] for s, source in zip(scales, sources, strict=True)]
    down, across = runs
    return self.weight.arrange(*by_output)[np.arange(0, self.weight.shape[0], down) // block, ::across]

  def arrays(self, storage: Storage) -> Any:
    """What the weight is held in: a `ShapeDtypeStruct`, or a quantised weight of two of them."""
    form = self.form(storage)
    if form is None:
      return jax.ShapeDtypeStruct(self.shape, self.dtype(storage))
    scales = tuple(n // run for n, run in zip(self.weight.shape, self.runs(storage), strict=True))
    dtypes = (jnp.float8_e4m3fn, jnp.float32) if form is quantization.BlockFP8 else (jnp.float4_e2m1fn, jnp.uint8)
    return form(
      jax.ShapeDtypeStruct(self.shape, dtypes[0]), jax.ShapeDtypeStruct((*self.lead_shape, *scales), dtypes[1])
    )


WeightTree = Mapping[str, Any]  # nested mappings whose leaves are Stacks


def is_stack(node: Any) -> bool:
  return isinstance(node, Stack)


def map_weights(function: Callable[[Stack], Any], tree: WeightTree) -> dict[str, Any]:
  """Applies `function` to every `Stack` of a weight tree."""
  return jax.tree.map(function, tree, is_leaf=is_stack)


def partition_spec(axes: tuple[str | None, ...], rules: Any, name: str) -> PartitionSpec:
  """Logical axes -> mesh axes by MaxText's rules (of several for one name, the first whose mesh axes are still free).

  Raises:
    UserError: a logical axis without a rule, or two dimensions that the rules put on one mesh axis.
  """
  used: dict[str, str] = {}
  spec = []
  for axis in axes:
    if axis is None:
      spec.append(None)
      continue
    candidates = [
      (target,) if isinstance(target, str) else tuple(target) for logical, target in rules if logical == axis
    ]
    if not candidates:
      raise UserError(
        f"logical axis {axis!r} of {name} has no entry in logical_axis_rules; add one, [] to replicate it"
      )
    chosen = next((c for c in candidates if not used.keys() & set(c)), None)
    if chosen is None:
      mesh_axis = next(a for a in candidates[0] if a in used)
      raise UserError(
        f"logical_axis_rules put both {used[mesh_axis]!r} and {axis!r} of {name} on mesh axis {mesh_axis!r}; "
        "change one of the two rules"
      )
    used.update(dict.fromkeys(chosen, axis))
    spec.append(chosen or None)
  return PartitionSpec(*spec)


def shardings(tree: WeightTree, mesh: Mesh, rules: Any, storage: Storage) -> dict[str, Any]:
  """A `NamedSharding` for each array of each weight. Mesh axes of the rules that this mesh lacks count as size 1.

  Scales of a quantised weight are split as its values are.

  Raises:
    UserError: a dimension that its mesh axes don't divide, or see `partition_spec`.
  """

  def one(stack: Stack) -> Any:
    name = stack.weight.sources[0].name
    # Axes of size 1 shard nothing; leaving them out lets two dimensions share a rule that only a larger mesh splits.
    live = [
      (logical, [a for a in ((target,) if isinstance(target, str) else target) if mesh.shape.get(a, 1) > 1])
      for logical, target in rules
    ]
    spec = partition_spec(stack.logical_axes, live, name)
    for size, mesh_axes, logical in zip(stack.shape, spec, stack.logical_axes, strict=True):
      mesh_axes = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ()
      ways = math.prod(mesh.shape[a] for a in mesh_axes)
      if size % ways:
        raise UserError(f"{name}: {logical!r} of size {size} can't be split {ways} ways over {mesh_axes}")
    form = stack.form(storage)
    sharding = NamedSharding(mesh, spec)
    return sharding if form is None else form(sharding, sharding)

  return map_weights(one, tree)


def formats(placements: Any) -> Any:
  """Shardings of parameters -> what they cross the boundary of a jitted function with: row-major where quantised.

  See `quantized_matmul.stack_format`.
  """

  def one(node: Any) -> Any:
    if not isinstance(node, quantization.Quantized):
      return node
    return jax.tree.map(lambda s: stack_format(len(s.spec), s), node)

  return jax.tree.map(one, placements, is_leaf=lambda node: isinstance(node, quantization.Quantized))


def abstract(tree: WeightTree, storage: Storage) -> dict[str, Any]:
  """`ShapeDtypeStruct`s of all parameters: for compiling without weights."""
  return map_weights(lambda s: s.arrays(storage), tree)


def initialize(tree: WeightTree, key: jax.Array, weight_dtype: Any) -> dict[str, Any]:
  """Random plain weights, each by its declared initialiser, from one key."""
  leaves, structure = jax.tree.flatten(tree, is_leaf=is_stack)
  keys = jax.random.split(key, len(leaves))
  return jax.tree.unflatten(
    structure,
    [s.weight.init(k, s.shape).astype(s.dtype(Storage(weight_dtype))) for s, k in zip(leaves, keys, strict=True)],
  )


def count(tree: WeightTree) -> int:
  """Number of scalar weights."""
  return sum(math.prod(s.shape) for s in jax.tree.leaves(tree, is_leaf=is_stack))


def nbytes(tree: WeightTree, storage: Storage) -> int:
  """Bytes of all parameters as they are held on a TPU, where two 4-bit values share a byte."""
  arrays = jax.tree.leaves(abstract(tree, storage))
  return sum(math.ceil(a.size * jnp.finfo(a.dtype).bits / 8) if a.dtype != jnp.uint8 else a.size for a in arrays)
