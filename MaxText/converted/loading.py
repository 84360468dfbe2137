"""A converted checkpoint into a model's parameters: each device asks for its own slice, and no byte is read twice.

Where several devices hold the same slice, each reads a share of it and they exchange shares over their links, which are
much faster than a disk or a bucket.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import tensorstore as ts
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from MaxText import quantization
from MaxText.configs.model_config import ModelConfig
from MaxText.converted import layout
from MaxText.converted.manifest import Manifest
from MaxText.errors import UserError
from MaxText.progress import progress
from MaxText.weights import Stack, Storage, WeightTree, is_stack

Index = tuple[slice, ...]
_PLAIN_DTYPE = "bfloat16"  # of what is stored plain and isn't declared float32


def load(
  directory: str, manifest: Manifest, cfg: ModelConfig, tree: WeightTree, storage: Storage, placements: Any
) -> dict[str, Any]:
  """Reads a converted checkpoint of layout "maxtext" into parameters in the shape of `tree`.

  Args:
    manifest: the directory's.
    storage: of the parameters; its formats are those of the manifest.
    placements: `weights.formats` of the parameters' shardings.

  Raises:
    UserError: an array that is missing, of another shape, cut short or garbled.
  """
  stored = layout.stored_weights(
    cfg, layout.disk_storage(cfg, _PLAIN_DTYPE, experts=manifest.experts, dense=manifest.dense)
  )
  leaves, structure = jax.tree.flatten(tree, is_leaf=is_stack)
  pairs = list(zip(stored.values(), leaves, structure.flatten_up_to(placements), strict=True))
  return jax.tree.unflatten(
    structure,
    [_one(directory, *pair, storage) for pair in progress(pairs, len(pairs), "reading weights")],
  )


def _one(directory: str, stored: layout.StoredWeight, stack: Stack, placed: Any, storage: Storage) -> Any:
  """One stack's parameters."""
  arrays = stack.arrays(storage)
  values = _open(directory, stored.values, stored.form, stack)
  if stored.form is None:
    return place(arrays.shape, placed, lambda index: values(index).astype(arrays.dtype))
  scales = _open(directory, stored.scales, None, stack)
  lead = len(stack.lead_shape)

  def scales_at(index: Index) -> np.ndarray:
    wanted = stack.runs(storage)
    return _with_runs(scales, index, arrays.scales.shape, lead, stored.runs, wanted)

  return stored.form(
    place(arrays.values.shape, placed.values, values), place(arrays.scales.shape, placed.scales, scales_at)
  )


def _open(
  directory: str, array: layout.DiskArray, form: type[quantization.Quantized] | None, stack: Stack
) -> Callable[[Index], np.ndarray]:
  """A reader of slices of an array, in the shape of the parameter that it holds."""
  name = stack.weight.sources[0].name

  def failed(error: Exception) -> UserError:
    return UserError(f"{directory}: {array.name} ({name}) can't be read: {str(error).splitlines()[0]}")

  try:
    store = array.open(directory)
  except ValueError as error:
    raise failed(error) from error

  def read(index: Index) -> np.ndarray:
    if form is quantization.MXFP4:
      *lead, inputs, outputs = index
      first, last, _ = inputs.indices(2 * array.shape[-2])
      halves = slice(first // 2, last // 2)  # of groups of 32
      packed = _read(store, (*lead, halves, outputs), failed)
      return layout.codes_of(packed).view(ml_dtypes.float4_e2m1fn)
    return _read(store, index, failed)

  return read


def _read(store: ts.TensorStore, index: Index, failed: Callable[[Exception], UserError]) -> np.ndarray:
  try:
    # A file that isn't there would be taken for zeros.
    stats = store[index].storage_statistics(query_not_stored=False, query_fully_stored=True).result()
    if not stats.fully_stored:
      raise ValueError("files are missing")
    return store[index].read().result()
  except (ValueError, OSError) as error:
    raise failed(error) from error


def _with_runs(
  read: Callable[[Index], np.ndarray],
  index: Index,
  shape: tuple[int, ...],
  lead: int,
  stored: tuple[int, ...],
  wanted: tuple[int, ...],
) -> np.ndarray:
  """Scales of a slice of a parameter, from an array whose scales cover other runs of the same blocks.

  Args:
    index: of the parameter's scales, whose shape is `shape`.
    lead: number of leading axes, which have no runs.
    stored, wanted: how many inputs and outputs a scale covers on disk and in memory.
  """
  disk, picks = list(index[:lead]), []
  for part, size, have, want in zip(index[lead:], shape[lead:], stored, wanted, strict=True):
    first, last, _ = part.indices(size)
    first, last = first * want, last * want  # in values
    start = first // have
    disk.append(slice(start, -(-last // have)))
    # Which of the scales read is each wanted one's: all that a run covers belong to one block.
    picks.append(np.arange(first, last, want) // have - start)
  scales = read(tuple(disk))
  for axis, pick in enumerate(picks, start=lead):
    scales = np.take(scales, pick, axis=axis)
  return scales


def place(shape: tuple[int, ...], placed: Any, read: Callable[[Index], np.ndarray]) -> jax.Array:
  """A global array whose slices `read` gives, each slice being read once by all processes together.

  Args:
    placed: a `NamedSharding`, or a `Format` with one.
    read: (index) -> that part of the array, in its final dtype. Each process is asked for other parts.
  """
  sharding: NamedSharding = getattr(placed, "sharding", placed)
  holders: dict[tuple, set[int]] = {}
  for device, index in sharding.devices_indices_map(shape).items():
    holders.setdefault(_bounds(index, shape), set()).add(device.process_index)
  if all(len(processes) == 1 for processes in holders.values()):
    once: dict[tuple, np.ndarray] = {}  # for devices of one process that hold the same

    def fill(index: Index) -> np.ndarray:
      key = _bounds(index, shape)
      if key not in once:
        once[key] = read(index)
      return once[key]

    return jax.make_array_from_callback(shape, placed, fill)
  return _place_shares(shape, placed, sharding, read)


def _bounds(index: Index, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
  return tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))


def _place_shares(
  shape: tuple[int, ...], placed: Any, sharding: NamedSharding, read: Callable[[Index], np.ndarray]
) -> jax.Array:
  """`place` where processes hold the same slices: a replica reads a share of the slice's rows, and all get all."""
  mesh, local = sharding.mesh, sharding.shard_shape(shape)
  spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
  used = {axis for entry in spec if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry)}
  replicas = tuple(axis for axis in mesh.axis_names if axis not in used and mesh.shape[axis] > 1)
  count = math.prod(mesh.shape[axis] for axis in replicas)
  # Whole layers where there are several; else the first axis long enough.
  axis = next((i for i, n in enumerate(local) if n >= count), int(np.argmax(local)))
  share = -(-local[axis] // count)
  stacked = list(shape)
  stacked[axis] = share * (shape[axis] // local[axis])
  whole = list(local)
  whole[axis] = share

  def fill(index: Index) -> np.ndarray:
    replica, parts = index[0].start or 0, list(index[1:])
    first = (parts[axis].start or 0) // share * local[axis]
    start = min(first + replica * share, first + local[axis])
    stop = min(start + share, first + local[axis])
    parts[axis] = slice(start, stop)
    values = read(tuple(parts))
    missing = [(0, n - m) for n, m in zip(whole, values.shape, strict=True)]
    return np.pad(values, missing)[None]

  shares = jax.make_array_from_callback((count, *stacked), NamedSharding(mesh, P(replicas, *spec)), fill)
  return _join(mesh, P(*spec), replicas, axis, local[axis], placed)(shares)


def _join(mesh: Any, spec: P, replicas: tuple[str, ...], axis: int, size: int, placed: Any) -> Any:
  """The program by which replicas exchange their shares."""

  def gather(share: jax.Array) -> jax.Array:
    every = lax.all_gather(share[0], replicas, axis=axis, tiled=True)
    return lax.slice_in_dim(every, 0, size, axis=axis)

  joined = jax.shard_map(gather, mesh=mesh, in_specs=P(replicas, *spec), out_specs=spec, check_vma=False)
  return jax.jit(joined, out_shardings=placed)
