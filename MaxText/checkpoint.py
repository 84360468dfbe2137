"""The released checkpoint layout: sharded safetensors with an index, read straight into a model's parameters.

What a tensor should look like comes from the weights' declarations; anything that doesn't agree is an error that names
the tensor: missing, unknown, listed twice, of another shape, or in a shard that isn't whole.
"""

import json
import os
from typing import Any

import jax
import ml_dtypes  # also registers bfloat16 with numpy, which safetensors relies on
import numpy as np
from safetensors import SafetensorError, safe_open

from MaxText import mxfp4, quantization
from MaxText.errors import UserError
from MaxText.progress import progress
from MaxText.weights import Source, Stack, Storage, Weight, WeightTree, is_stack

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = ("BF16", "F32", "F16")  # of plain tensors: members of the family differ in which they use where
_TEXT_PREFIX = "language_model."
# The text model doesn't use these; they are the only tensors that may be there and not be read.
VISION_PREFIXES = ("vision_tower.", "mm_projector.")


class ReleasedCheckpoint:
  """A directory in the released layout, opened and checked for wholeness; tensors are read one at a time.

  Names are without the `language_model.` that K3 puts before its text model.
  """

  def __init__(self, directory: str):
    """Raises `UserError` for a directory, index or shard that is missing or broken."""
    self.directory = directory
    if not os.path.isdir(directory):
      raise UserError(f"load_parameters_path={directory} is not a directory")
    self._files: dict[str, Any] = {}
    where = self._read_index()
    self._where = {self._strip(name): (file, name) for name, file in where.items()}
    if len(self._where) < len(where):
      doubled = min(name for name in where if self._strip(name) != name and self._strip(name) in where)
      raise UserError(f"{directory} holds {self._strip(doubled)} twice: also as {doubled}")
    self.names = frozenset(n for n in self._where if not n.startswith(VISION_PREFIXES))

  @staticmethod
  def _strip(name: str) -> str:
    return name.removeprefix(_TEXT_PREFIX)

  def _read_index(self) -> dict[str, str]:
    path = os.path.join(self.directory, INDEX)
    if not os.path.exists(path):
      if not os.path.exists(os.path.join(self.directory, SINGLE)):
        raise UserError(f"{self.directory} holds neither {INDEX} nor {SINGLE}")
      return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
    try:
      with open(path, encoding="utf-8") as f:
        where = json.load(f)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise UserError(f"{path} is not a safetensors index: {error!r}") from error
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
      raise UserError(f"{path} is not a safetensors index: weight_map must give a file for each tensor")
    listed: dict[str, set[str]] = {}
    for name, file in where.items():
      listed.setdefault(file, set()).add(name)
    for file, names in sorted(listed.items()):
      held = set(self._open(file).keys())
      if names - held:
        raise UserError(f"{INDEX} places {min(names - held)} in {file}, which doesn't hold it")
      if held - names:
        raise UserError(f"{file} holds {min(held - names)}, which {INDEX} doesn't place there")
    return where

  def _open(self, file: str) -> Any:
    if file not in self._files:
      path = os.path.join(self.directory, file)
      if not os.path.exists(path):
        raise UserError(f"{path} is missing")
      try:
        self._files[file] = safe_open(path, "numpy")
      except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is broken or truncated ({error})") from error
    return self._files[file]

  def _shape(self, name: str) -> tuple[int, ...]:
    file, full_name = self._where[name]
    return tuple(self._open(file).get_slice(full_name).get_shape())

  def _dtype(self, name: str) -> str:
    file, full_name = self._where[name]
    return self._open(file).get_slice(full_name).get_dtype()

  def _get(self, name: str) -> np.ndarray:
    file, full_name = self._where[name]
    return self._open(file).get_tensor(full_name)

  def tensors_of(self, prefix: str, source: Source) -> tuple[str, ...]:
    """Names of the tensors that hold a source: one, or a packed pair. A pair in the index wins nothing by being
    declared: what the index holds decides.

    Raises:
      UserError: it isn't there, is there twice, or has another shape or kind of number.
    """
    plain = f"{prefix}{source.name}{source.suffix}"
    packed = (f"{prefix}{source.name}.weight_packed", f"{prefix}{source.name}.weight_scale")
    there = [n for n in packed if n in self.names]
    if plain in self.names and there:
      raise UserError(f"{self.directory} holds {plain} twice: also as {there[0]}")
    if len(there) == 1:
      raise UserError(f"{self.directory} holds {there[0]} without its {'scale' if 'packed' in there[0] else 'values'}")
    if not there and plain not in self.names:
      raise UserError(f"{self.directory} lacks {plain}")
    if there:
      out, inputs = source.shape
      expected = {packed[0]: [(out, inputs // 2)], packed[1]: [(out, inputs // mxfp4.GROUP)]}
    else:
      expected = {plain: [source.shape, *source.also]}
    for name, shapes in expected.items():
      if self._shape(name) not in shapes:
        raise UserError(
          f"{name} in {self.directory} has shape {self._shape(name)}, the configuration wants "
          f"{' or '.join(map(str, shapes))}"
        )
      allowed = ("U8",) if there else _FLOATS
      if self._dtype(name) not in allowed:
        raise UserError(f"{name} in {self.directory} is {self._dtype(name)}, not {' or '.join(allowed)}")
    return tuple(expected)

  def read(self, prefix: str, source: Source) -> np.ndarray:
    """A source's values, unpacked where they are packed."""
    names = self.tensors_of(prefix, source)
    if len(names) == 1:
      return self._get(names[0])
    return mxfp4.unpack(*self.read_packed(prefix, source))

  def read_packed(self, prefix: str, source: Source) -> tuple[np.ndarray, np.ndarray]:
    """A source's packed values [out, in / 2] and scales [out, in / 32], both uint8.

    Raises:
      UserError: it isn't packed, or a scale is NaN.
    """
    names = self.tensors_of(prefix, source)
    if len(names) == 1:
      raise UserError(f"{names[0]} in {self.directory} isn't packed: weight_format=mxfp4 needs MXFP4 experts")
    packed, scale = map(self._get, names)
    if np.any(scale == mxfp4.NAN_SCALE):
      raise UserError(f"{names[1]} in {self.directory} holds {mxfp4.NAN_SCALE}, which is NaN")
    return packed, scale

  def check(self, tree: WeightTree) -> None:
    """Compares all names and shapes with a model's declarations, reading no values.

    Raises:
      UserError: naming the first tensor that is missing, doubled, mis-shaped or unknown.
    """
    used = set()
    for stack in jax.tree.leaves(tree, is_leaf=is_stack):
      for prefix in stack.prefixes:
        for source in stack.weight.sources:
          used.update(self.tensors_of(prefix, source))
    unknown = sorted(self.names - used)
    if unknown:
      more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
      raise UserError(f"{self.directory} holds {unknown[0]}{more}, which this configuration has no place for")


def load(checkpoint: ReleasedCheckpoint, tree: WeightTree, storage: Storage, shardings: Any) -> dict[str, Any]:
  """Reads a checkpoint into parameters in the shape of `tree`, each device filled with its own part.

  Packed experts are kept as they are under `weight_format=mxfp4`, and decoded under the others.

  Args:
    storage: dtype and format to hold the weights in.
    shardings: `weights.shardings` of the same tree and storage.

  Raises:
    UserError: see `ReleasedCheckpoint.check`; or a weight to be kept packed isn't.
  """
  checkpoint.check(tree)

  def one(stack: Stack, sharding: Any) -> Any:
    def whole(prefix: str) -> tuple[np.ndarray, ...]:
      """One instance: (values,) or (values, scales)."""
      if stack.form(storage) is quantization.MXFP4:
        return _packed(checkpoint, prefix, stack.weight)
      value = stack.weight.from_release(*(checkpoint.read(prefix, source) for source in stack.weight.sources))
      if stack.form(storage) is quantization.BlockFP8:
        values, scales = quantization.quantize_block_fp8(value.astype(np.float32))
        scales = quantization.spread_scales(scales, values.shape).reshape(stack.weight.shape)
        every = tuple(slice(None, None, run) for run in stack.runs(storage))
        return values.reshape(stack.weight.shape), scales[every]
      return (value.astype(stack.dtype(storage)),)

    scales_of: dict[str, np.ndarray] = {}  # read with the values, placed after them

    def values(prefix: str) -> np.ndarray:
      value, *scales = whole(prefix)
      if scales:
        scales_of[prefix] = scales[0]
      return value

    def scales(prefix: str) -> np.ndarray:
      return scales_of[prefix] if prefix in scales_of else whole(prefix)[1]

    def place(array: jax.ShapeDtypeStruct, sharding, read) -> jax.Array:
      prefixes = np.array(stack.prefixes).reshape(stack.lead_shape)
      lead = prefixes.ndim

      def fill(index: tuple[slice, ...]) -> np.ndarray:
        wanted = prefixes[index[:lead]]
        instances = [read(str(prefix))[index[lead:]] for prefix in wanted.flat]
        return np.stack(instances).reshape(*wanted.shape, *instances[0].shape)

      return jax.make_array_from_callback(array.shape, sharding, fill)

    arrays, form = stack.arrays(storage), stack.form(storage)
    if form is None:
      return place(arrays, sharding, values)
    return form(place(arrays.values, sharding.values, values), place(arrays.scales, sharding.scales, scales))

  leaves, structure = jax.tree.flatten(tree, is_leaf=is_stack)
  pairs = zip(leaves, structure.flatten_up_to(shardings), strict=True)
  return jax.tree.unflatten(structure, [one(*pair) for pair in progress(pairs, len(leaves), "reading weights")])


def _packed(checkpoint: ReleasedCheckpoint, prefix: str, weight: Weight) -> tuple[np.ndarray, np.ndarray]:
  """A weight's 4-bit values and scales, rearranged to inputs first without being decoded."""
  pairs = [checkpoint.read_packed(prefix, source) for source in weight.sources]
  values = weight.arrange(*(mxfp4.nibbles(packed) for packed, _ in pairs)).reshape(weight.shape)
  scales = weight.arrange(*(scale for _, scale in pairs))
  scale_shape = tuple(
    n // run for n, run in zip(weight.shape, quantization.runs(quantization.MXFP4, weight.shape), strict=True)
  )
  return np.ascontiguousarray(values).view(ml_dtypes.float4_e2m1fn), scales.reshape(scale_shape)
