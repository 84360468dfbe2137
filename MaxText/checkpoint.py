"""The released checkpoint layout: sharded safetensors with an index, read straight into a model's parameters.

A matrix is plain (`weight`), packed in MXFP4 (`weight_packed`, `weight_scale`) or in block-FP8 as DeepSeek publishes it
(`weight` in e4m3, `weight_scale_inv` with a float32 for each 128×128 block; a value is their product).

What a tensor should look like comes from the weights' declarations; anything that doesn't agree is an error that names
the tensor: missing, unknown, listed twice, of another shape, or in a shard that isn't whole.
"""

import json
import math
import os
import struct
from typing import Any

import jax
import ml_dtypes  # also registers bfloat16 with numpy, which safetensors relies on
import numpy as np
from safetensors import SafetensorError, safe_open

from MaxText import mxfp4, quantization
from MaxText.converted.manifest import is_converted, read_manifest
from MaxText.errors import UserError
from MaxText.progress import progress
from MaxText.weights import Source, Stack, Storage, Weight, WeightTree, is_stack

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = ("BF16", "F32", "F16")  # of plain tensors: members of the family differ in which they use where
_FP8, _FP8_DTYPE = "F8_E4M3", np.dtype(ml_dtypes.float8_e4m3fn)
_TEXT_PREFIX = "language_model."
# The text model doesn't use these; they are the only tensors that may be there and not be read.
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
_BLOCK_SCALES = ".weight_scale_inv"
ASSETS = os.path.join(os.path.dirname(__file__), "assets")


def checkpoint_directory(config: Any) -> str:
  """`load_parameters_path` as given, or among the checkpoints that ship with the project.

  Raises:
    UserError: it isn't set.
  """
  path = config.load_parameters_path
  if not path:
    raise UserError("load_parameters_path is not set: name the directory of a checkpoint, released or converted")
  if not os.path.exists(path) and os.path.isdir(os.path.join(ASSETS, path)):
    return os.path.normpath(os.path.join(ASSETS, path))
  return path


def check_is_safetensors(directory: str) -> None:
  """Raises `UserError` for a conversion that hasn't finished, and for a converted checkpoint of TensorStore arrays."""
  if is_converted(directory) and read_manifest(directory).layout == "maxtext":
    raise UserError(
      f"{directory} is a converted checkpoint of layout=maxtext: decode.py, score.py and serve.py read it "
      "(load_parameters_path), and conversion.verify checks it; here safetensors in the released layout are wanted"
    )


class ReleasedCheckpoint:
  """A directory in the released layout, opened and checked for wholeness; tensors are read one at a time.

  Names are without the `language_model.` that K3 puts before its text model.
  """

  def __init__(self, directory: str):
    """Raises `UserError` for a directory, index or shard that is missing or broken; see `check_is_safetensors` too."""
    self.directory = directory
    if not os.path.isdir(directory):
      raise UserError(f"load_parameters_path={directory} is not a directory")
    check_is_safetensors(directory)
    self._files: dict[str, Any] = {}
    self._fp8_offsets: dict[str, dict[str, int]] = {}  # of each file whose e4m3 tensors were asked for
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
    if self._dtype(name) == _FP8:
      return self._get_fp8(file, full_name, self._shape(name))
    return self._open(file).get_tensor(full_name)

  def _get_fp8(self, file: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The safetensors library gives such a tensor to every framework but NumPy; it has checked where it lies."""
    path = os.path.join(self.directory, file)
    if file not in self._fp8_offsets:
      with open(path, "rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(length))
      self._fp8_offsets[file] = {
        tensor: 8 + length + entry["data_offsets"][0] for tensor, entry in header.items() if entry.get("dtype") == _FP8
      }
    return np.fromfile(path, _FP8_DTYPE, math.prod(shape), offset=self._fp8_offsets[file][name]).reshape(shape)

  def tensors_of(self, prefix: str, source: Source) -> tuple[str, ...]:
    """Names of the tensors that hold a source: one, or values and scales. A pair in the index wins nothing by being
    declared: what the index holds decides.

    Raises:
      UserError: it isn't there, is there twice, or has another shape or kind of number.
    """
    plain = f"{prefix}{source.name}{source.suffix}"
    packed = (f"{prefix}{source.name}.weight_packed", f"{prefix}{source.name}.weight_scale")
    blocks = f"{prefix}{source.name}{_BLOCK_SCALES}"
    there = [n for n in packed if n in self.names]
    if there and (plain in self.names or blocks in self.names):
      raise UserError(f"{self.directory} holds {plain if plain in self.names else blocks} twice: also as {there[0]}")
    if len(there) == 1:
      raise UserError(f"{self.directory} holds {there[0]} without its {'scale' if 'packed' in there[0] else 'values'}")
    if not there and plain not in self.names:
      without = f"holds {blocks} without its values" if blocks in self.names else f"lacks {plain}"
      raise UserError(f"{self.directory} {without}")
    if there:
      out, inputs = source.shape
      expected = {packed[0]: ([(out, inputs // 2)], ("U8",)), packed[1]: ([(out, inputs // mxfp4.GROUP)], ("U8",))}
    elif blocks in self.names:
      # Only matrices come so: scales of anything else have no right shape.
      scales = [tuple(-(-n // quantization.BLOCK) for n in source.shape)] if len(source.shape) == 2 else []
      expected = {plain: ([source.shape], (_FP8,)), blocks: (scales, ("F32",))}
    else:
      expected = {plain: ([source.shape, *source.also], _FLOATS)}
    for name, (shapes, dtypes) in expected.items():
      if self._shape(name) not in shapes:
        raise UserError(
          f"{name} in {self.directory} has shape {self._shape(name)}, the configuration wants "
          f"{' or '.join(map(str, shapes)) or 'none such'}"
        )
      if self._dtype(name) not in dtypes:
        raise UserError(f"{name} in {self.directory} is {self._dtype(name)}, not {' or '.join(dtypes)}")
    return tuple(expected)

  def read(self, prefix: str, source: Source) -> np.ndarray:
    """A source's values, decoded where they are quantised."""
    names = self.tensors_of(prefix, source)
    if len(names) == 1:
      return self._get(names[0])
    if names[1].endswith(_BLOCK_SCALES):
      values, scales = self.read_block_fp8(prefix, source)
      return values.astype(np.float32) * quantization.spread_scales(scales, values.shape)
    return mxfp4.unpack(*self.read_packed(prefix, source))

  def read_packed(self, prefix: str, source: Source) -> tuple[np.ndarray, np.ndarray]:
    """A source's packed values [out, in / 2] and scales [out, in / 32], both uint8.

    Raises:
      UserError: it isn't packed, or a scale is NaN.
    """
    names = self.tensors_of(prefix, source)
    if len(names) == 1 or names[1].endswith(_BLOCK_SCALES):
      raise UserError(f"{names[0]} in {self.directory} isn't packed: weight_format=mxfp4 needs MXFP4 experts")
    packed, scale = map(self._get, names)
    if np.any(scale == mxfp4.NAN_SCALE):
      raise UserError(f"{names[1]} in {self.directory} holds {mxfp4.NAN_SCALE}, which is NaN")
    return packed, scale

  def read_block_fp8(self, prefix: str, source: Source) -> tuple[np.ndarray, np.ndarray]:
    """A matrix in block-FP8: as it is stored so, or quantised now.

    Returns:
      Values e4m3 [out, in], scales float32 [⌈out/128⌉, ⌈in/128⌉].

    Raises:
      UserError: a stored scale isn't a finite number.
    """
    names = self.tensors_of(prefix, source)
    if len(names) == 1 or not names[1].endswith(_BLOCK_SCALES):
      return quantization.quantize_block_fp8(self.read(prefix, source).astype(np.float32))
    values, scales = map(self._get, names)
    if not np.all(np.isfinite(scales)):
      raise UserError(f"{names[1]} in {self.directory} holds a scale that isn't a finite number")
    return values, scales

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

  Packed experts are kept as they are under `weight_format=mxfp4`, matrices in block-FP8 under `block_fp8`; under the
  other formats they are decoded.

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
      if stack.form(storage) is quantization.BlockFP8:
        return _block_fp8(checkpoint, prefix, stack, storage)
      value = stack.weight.from_release(*(checkpoint.read(prefix, source) for source in stack.weight.sources))
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


def _block_fp8(
  checkpoint: ReleasedCheckpoint, prefix: str, stack: Stack, storage: Storage
) -> tuple[np.ndarray, np.ndarray]:
  """A weight's e4m3 values, rearranged to inputs first without being decoded, and its scales, one for each run."""
  pairs = [checkpoint.read_block_fp8(prefix, source) for source in stack.weight.sources]
  values = stack.weight.arrange(*(values for values, _ in pairs)).reshape(stack.weight.shape)
  return values, stack.block_scales([scales for _, scales in pairs], stack.runs(storage))
