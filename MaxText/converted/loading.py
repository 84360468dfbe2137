"""A converted checkpoint into a model's parameters: each device asks for its own slice, and no byte is read twice.

Where several processes hold the same slice, each reads a share of its layers and they exchange shares over their links,
which are much faster than a disk or a bucket.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tensorstore as ts
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from MaxText import checkpoint, quantization
from MaxText.configs.model_config import ModelConfig
from MaxText.converted import layout
from MaxText.converted.manifest import Manifest, is_converted, read_manifest
from MaxText.errors import UserError
from MaxText.progress import progress
from MaxText.weights import Stack, Storage, WeightTree, is_stack

Index = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]  # an index as (first, last + 1) of each axis
# A read that has begun: calling it waits for its values. So those of all devices of a process are under way together.
Reading = Callable[[], np.ndarray]
_PLAIN_DTYPE = "bfloat16"  # of what is stored plain and isn't declared float32
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def load_parameters(directory: str, cfg: ModelConfig, tree: WeightTree, placements: Any) -> dict[str, Any]:
  """Reads a checkpoint, released or converted, into parameters in the shape of `tree`, held as `cfg.storage` says.

  Args:
    placements: `weights.formats` of the parameters' shardings.

  Raises:
    UserError: it is unfinished or broken, or not what the configuration describes.
  """
  if is_converted(directory):
    manifest = read_manifest(directory)
    if manifest.layout == "maxtext":
      return load(directory, manifest, cfg, tree, placements)
  return checkpoint.load(checkpoint.ReleasedCheckpoint(directory), tree, cfg.storage, placements)


def load(directory: str, manifest: Manifest, cfg: ModelConfig, tree: WeightTree, placements: Any) -> dict[str, Any]:
  """Reads a converted checkpoint of layout "maxtext" into parameters in the shape of `tree`.

  Args:
    manifest: the directory's; `cfg.storage` holds weights in the same formats.
    placements: `weights.formats` of the parameters' shardings.

  Raises:
    UserError: an array that is missing, of another shape, cut short or garbled.
  """
  stored = layout.stored_weights(
    cfg, layout.disk_storage(cfg, _PLAIN_DTYPE, experts=manifest.experts, dense=manifest.dense)
  )
  _check_arrays(directory, layout.arrays_of(stored), manifest.arrays)
  leaves, structure = jax.tree.flatten(tree, is_leaf=is_stack)
  stacks = list(zip(stored.values(), leaves, structure.flatten_up_to(placements), strict=True))
  return jax.tree.unflatten(
    structure, [_one(directory, *stack, cfg.storage) for stack in progress(stacks, len(stacks), "reading weights")]
  )


def _check_arrays(directory: str, wanted: dict[str, Any], held: dict[str, Any]) -> None:
  """Compares `layout.arrays_of` a configuration with a manifest's; raises `UserError` for the first that differs."""
  wrong = f"{directory} was converted from another model than this configuration's: "
  for name, array in wanted.items():
    if name not in held:
      raise UserError(f"{wrong}it lacks {name}")
    if held[name] == array:
      continue
    ours, theirs = (f"{a.get('dtype')} {a.get('shape')}" for a in (array, held[name]))
    if ours != theirs:
      raise UserError(f"{wrong}{name} is {theirs}, the configuration wants {ours}")
    raise UserError(f"{directory}: {name} isn't cut into files as this version and configuration do; convert it again")
  unknown = sorted(held.keys() - wanted.keys())
  if unknown:
    raise UserError(f"{wrong}it has no place for {unknown[0]}")


def _one(directory: str, stored: layout.StoredWeight, stack: Stack, placed: Any, storage: Storage) -> Any:
  """One stack's parameters."""
  arrays, form = stack.arrays(storage), stored.form
  values = _reader(directory, stored.values, stack)
  if form is None:
    return start(arrays, placed, values, stack)()
  if form is quantization.MXFP4:
    values = _unpacked(values, stack.weight.shape[0])
  scales = _with_runs(_reader(directory, stored.scales, stack), arrays.scales.shape, stored.runs, stack.runs(storage))
  started = start(arrays.values, placed.values, values, stack), start(arrays.scales, placed.scales, scales, stack)
  return form(*(finish() for finish in started))


def _reader(directory: str, array: layout.DiskArray, stack: Stack) -> Callable[[Index], Reading]:
  """What begins to read slices of an array on disk."""

  def failed(error: Exception) -> UserError:
    name = stack.weight.sources[0].name
    return UserError(f"{directory}: {array.name} ({name}) can't be read: {str(error).splitlines()[0]}")

  try:
    store = array.open(directory)
  except (ValueError, OSError) as error:
    raise failed(error) from error

  def begin(index: Index) -> Reading:
    reading: ts.Future = store[index].read()

    def wait() -> np.ndarray:
      try:
        return reading.result()
      except (ValueError, OSError) as error:
        raise failed(error) from error

    return wait

  return begin


def _unpacked(begin: Callable[[Index], Reading], inputs: int) -> Callable[[Index], Reading]:
  """4-bit values [..., I, O] from an array of packed ones [..., I/2, O].

  Args:
    inputs: I.
  """

  def begin_unpacked(index: Index) -> Reading:
    first, last, _ = index[-2].indices(inputs)
    packed = begin((*index[:-2], slice(first // 2, last // 2), index[-1]))  # a device's inputs are groups of 32
    return lambda: layout.codes_of(packed()).view(ml_dtypes.float4_e2m1fn)

  return begin_unpacked


def _with_runs(
  begin: Callable[[Index], Reading], shape: tuple[int, ...], stored: tuple[int, int], wanted: tuple[int, int]
) -> Callable[[Index], Reading]:
  """Scales of a parameter from an array whose scales cover other runs of the same blocks.

  Args:
    shape: of the parameter's scales.
    stored, wanted: how many inputs and outputs a scale covers on disk and in memory.
  """

  def begin_picked(index: Index) -> Reading:
    disk, picks = list(index[:-2]), []
    for part, size, have, want in zip(index[-2:], shape[-2:], stored, wanted, strict=True):
      first, last, _ = part.indices(size)
      # Where each wanted scale begins, in values: all that a run covers belong to one block.
      begins = np.arange(first, last) * want
      start = first * want // have
      disk.append(slice(start, -(-last * want // have)))
      picks.append(begins // have - start)
    reading = begin(tuple(disk))
    return lambda: reading()[..., picks[0][:, None], picks[1]]

  return begin_picked


def start(
  array: jax.ShapeDtypeStruct, placed: Any, begin: Callable[[Index], Reading], stack: Stack
) -> Callable[[], jax.Array]:
  """Begins to read this process's part of a global array: each slice is read once by all processes together.

  Args:
    placed: a sharding, or a `Format` with one; a `NamedSharding` where processes hold the same slices.
    begin: begins to read a slice of it.
    stack: its first axes are those that processes may share a slice by.

  Returns:
    What waits and gives the array; every process must call it, in the same order of arrays.
  """
  sharding = getattr(placed, "sharding", placed)
  holders: dict[Bounds, set[int]] = {}
  for device, index in sharding.devices_indices_map(array.shape).items():
    holders.setdefault(_bounds(index, array.shape), set()).add(device.process_index)
  if any(len(processes) > 1 for processes in holders.values()):
    return _start_shares(array, placed, sharding, begin, bool(stack.lead))
  # Devices of one process that hold the same slice share its one read.
  slices = {_bounds(i, array.shape): i for i in sharding.addressable_devices_indices_map(array.shape).values()}
  reading = {bounds: begin(index) for bounds, index in slices.items()}

  def finish() -> jax.Array:
    values = {bounds: wait().astype(array.dtype, copy=False) for bounds, wait in reading.items()}
    return jax.make_array_from_callback(array.shape, placed, lambda index: values[_bounds(index, array.shape)])

  return finish


def _bounds(index: Index, shape: tuple[int, ...]) -> Bounds:
  return tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))


def _start_shares(
  array: jax.ShapeDtypeStruct, placed: Any, sharding: NamedSharding, begin: Callable[[Index], Reading], stacked: bool
) -> Callable[[], jax.Array]:
  """`start` where processes hold the same slices: each replica reads a share of the slice, and all get all.

  Args:
    stacked: whether the first axis is one of layers, which shares are cut along: parts on disk lie within a layer.
      Otherwise the first replica reads all; only globals, such as the embedding, stand alone.
  """
  shape, dtype, mesh, spec = array.shape, np.dtype(array.dtype), sharding.mesh, sharding.spec
  used = {axis for entry in spec if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry)}
  replicas = tuple(axis for axis in mesh.axis_names if axis not in used and mesh.shape[axis] > 1)
  count = math.prod(mesh.shape[axis] for axis in replicas)
  rows, *rest = sharding.shard_shape(shape)
  share = -(-rows // count) if stacked else rows
  padded = (count, shape[0] // rows * share, *shape[1:])
  shares = NamedSharding(mesh, P(replicas, *spec))
  word = _WORDS[dtype.itemsize]  # shares travel as bits: not every backend exchanges every float

  def begin_share(index: Index) -> Reading | None:
    replica, row = index[0].start or 0, index[1].start or 0
    first = min(replica * share, rows)
    last = min(first + share, rows)
    offset = row // share * rows
    return begin((slice(offset + first, offset + last), *index[2:])) if first < last else None

  reading = {
    _bounds(index, padded): begin_share(index) for index in shares.addressable_devices_indices_map(padded).values()
  }

  def finish() -> jax.Array:
    def fill(index: Index) -> np.ndarray:
      wait = reading[_bounds(index, padded)]
      values = np.zeros((1, share, *rest), word)
      if wait is not None:
        read = wait().astype(dtype, copy=False)
        values[0, : len(read)] = read.view(word)
      return values

    every = jax.make_array_from_callback(padded, shares, fill)
    return _join(mesh, spec, replicas, rows, dtype, placed)(every)

  return finish


@functools.cache
def _join(mesh: Any, spec: P, replicas: tuple[str, ...], rows: int, dtype: np.dtype, placed: Any) -> Any:
  """The program by which replicas exchange their shares, [replicas, rows of a share, …] words each."""

  def gather(words: jax.Array) -> jax.Array:
    words = lax.all_gather(words[0], replicas, axis=0, tiled=True)[:rows]
    if dtype == jnp.float4_e2m1fn:  # whose numbers come one a byte
      words = words.astype(jnp.uint4)
    return lax.bitcast_convert_type(words, dtype)

  joined = jax.shard_map(gather, mesh=mesh, in_specs=P(replicas, *spec), out_specs=spec, check_vma=False)
  return jax.jit(joined, out_shardings=placed)
