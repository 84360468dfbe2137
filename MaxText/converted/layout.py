"""The layout of a converted checkpoint: one TensorStore array for each array of the model's parameters.

DIR/weights is an Orbax checkpoint (a tree of zarr3 arrays, one folder each, named by the path in
`kimi_k3.weight_tree`). An array is cut twice: into files, which the converter writes one at a time, and within a file
into parts that lie together, which is what a device of a group of `MAX_WAYS` reads. A larger part is several of these.

What is stored follows from the same declarations as the model: nothing here knows a weight by its name.
"""

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from MaxText import quantization
from MaxText.configs.model_config import ModelConfig
from MaxText.models import kimi_k3
from MaxText.parallel import Parallel
from MaxText.weights import Stack, Storage, is_stack

WEIGHTS = "weights"  # folder of the arrays
MAX_WAYS = 32  # of a tensor group: K3's 96 heads are split over 32 devices at most
_EXPERT_FILES = 128  # a layer's experts lie in as many files, so that any slice of up to 128 devices opens whole ones
_FILE_BYTES = 192 * 2**20  # up to which several layers share a file
_LEAST_PART = 4096  # bytes; smaller parts aren't worth being found one by one
_TENSOR_AXES = ("heads", "mlp", "vocab", "latent", "router")  # logical axes that a tensor group splits


@dataclass(frozen=True)
class DiskArray:
  """One array on disk.

  Attributes:
    name: its folder's: keys of the parameters' tree joined by dots, then `values` or `scales` where it is quantised.
    shape: of the whole array.
    dtype: numpy's name. 4-bit values are stored as bytes, two to each: inputs 2i (low) and 2i + 1.
    file_shape: what one file holds, from a multiple of it on.
    part_shape: what lies together in a file; it divides `file_shape`.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  file_shape: tuple[int, ...]
  part_shape: tuple[int, ...]

  def spec(self, directory: str) -> dict[str, Any]:
    """TensorStore's description of the array in a converted checkpoint's directory."""
    codec: dict[str, Any] = {"name": "bytes"}
    if ts.dtype(self.dtype).numpy_dtype.itemsize > 1:
      codec["configuration"] = {"endian": "little"}
    whole = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {
      "chunk_shape": list(self.part_shape),
      # A checksum with each part: what a disk or a bucket garbles is noticed by whoever reads it.
      "codecs": [codec, {"name": "crc32c"}],
      "index_codecs": whole,
    }
    return {
      "driver": "zarr3",
      "kvstore": {"driver": "file", "path": os.path.join(directory, WEIGHTS, self.name) + "/"},
      # A file of zeros is written like any other, so that one that is missing isn't taken for zeros.
      "store_data_equal_to_fill_value": True,
      "fill_missing_data_reads": False,
      "metadata": {
        "shape": list(self.shape),
        "data_type": self.dtype,
        "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.file_shape)}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
      },
    }

  def open(self, directory: str, create: bool = False) -> ts.TensorStore:
    """Opens it; where it isn't created, without a look at its metadata, which follows from the model.

    Raises:
      ValueError: TensorStore's, such as for another array that is there already.
    """
    how = {"create": True, "open": True} if create else {"open": True, "assume_metadata": True}
    return ts.open(self.spec(directory), **how).result()

  def files(self) -> list[tuple[slice, ...]]:
    """The part of the array that each file holds, in the order of their names."""
    counts = tuple(-(-n // size) for n, size in zip(self.shape, self.file_shape, strict=True))
    return [
      tuple(
        slice(i * size, min((i + 1) * size, n)) for i, size, n in zip(number, self.file_shape, self.shape, strict=True)
      )
      for number in np.ndindex(counts)
    ]


@dataclass(frozen=True)
class StoredWeight:
  """One stack of the model on disk.

  Attributes:
    stack: the declaration.
    form: of the values: plain (None), block-FP8 or MXFP4.
    values: their array.
    scales: the array of their scales, cut into files as the values are; None where they are plain.
    runs: how many inputs and outputs one stored scale covers.
  """

  stack: Stack
  form: type[quantization.Quantized] | None
  values: DiskArray
  scales: DiskArray | None
  runs: tuple[int, ...]

  @property
  def arrays(self) -> tuple[DiskArray, ...]:
    return (self.values,) if self.scales is None else (self.values, self.scales)


def ways(cfg: ModelConfig) -> int:
  """Over how many devices a tensor group can split this model at most, up to `MAX_WAYS`."""
  sizes = [cfg.kda_num_heads, cfg.mla_num_heads, cfg.vocab_size, cfg.mlp_size, cfg.latent_size, cfg.num_experts]
  return math.gcd(MAX_WAYS, *sizes, cfg.num_shared_experts * cfg.moe_intermediate_size)


def disk_storage(cfg: ModelConfig, dtype: Any, experts: str, dense: str) -> Storage:
  """How weights are held on disk: `Storage` for the largest tensor group.

  The rule for blocks that a split would cut is the model's own (`Stack.runs`): the 128×128 block of the released matrix
  keeps its scale, and the scale stands once for each run of gcd(128, columns of a device) columns. Runs that fit the
  largest group fit all smaller ones.
  """
  split = ways(cfg)
  return Storage(np.dtype(dtype), experts, dense, tuple((axis, split) for axis in _TENSOR_AXES if split > 1))


def stored_weights(cfg: ModelConfig, storage: Storage) -> dict[str, StoredWeight]:
  """All weights of a model by their paths in `kimi_k3.weight_tree`, joined by dots.

  Args:
    cfg: of the model; how it is spread over devices doesn't matter.
    storage: `disk_storage`.
  """
  # The split forms of latent projections and router name the axes that a group may split.
  parallel = Parallel(data=1, tensor=ways(cfg), latents="sharded", router="sharded")
  tree = kimi_k3.weight_tree(dataclasses.replace(cfg, parallel=parallel))
  leaves = jax.tree.leaves_with_path(tree, is_leaf=is_stack)
  return {name: _stored(name, stack, storage) for name, stack in ((_dotted(path), stack) for path, stack in leaves)}


def arrays_of(stored: dict[str, StoredWeight]) -> dict[str, dict[str, Any]]:
  """What a manifest says of the arrays, as JSON has it: their dtypes, and their shapes whole, in a file and in a part.

  Whoever opens an array goes by the model alone, without a look at the array's own metadata. So this has to be equal.
  """
  return {
    array.name: {
      "dtype": array.dtype,
      "shape": list(array.shape),
      "file": list(array.file_shape),
      "part": list(array.part_shape),
    }
    for weight in stored.values()
    for array in weight.arrays
  }


def _dotted(path: tuple[Any, ...]) -> str:
  return ".".join(key.key for key in path)


def _stored(name: str, stack: Stack, storage: Storage) -> StoredWeight:
  form, shape = stack.form(storage), stack.weight.shape
  split = dict(storage.ways)
  part = tuple(n // split.get(axis, 1) for n, axis in zip(shape, stack.weight.axes, strict=True))
  if form is None:
    return StoredWeight(
      stack, form, _array(name, stack, shape, str(stack.dtype(storage)), part), None, (1,) * len(shape)
    )
  runs = stack.runs(storage)
  packed = 2 if form is quantization.MXFP4 else 1
  dtypes = ("uint8", "uint8") if form is quantization.MXFP4 else ("float8_e4m3fn", "float32")

  def one(suffix: str, dtype: str, per: tuple[int, ...], like: DiskArray | None = None) -> DiskArray:
    fewer = lambda sizes: tuple(n // k for n, k in zip(sizes, per, strict=True))
    return _array(f"{name}.{suffix}", stack, fewer(shape), dtype, fewer(part), like)

  values = one("values", dtypes[0], (packed, 1))
  return StoredWeight(stack, form, values, one("scales", dtypes[1], runs, values), runs)


def _array(
  name: str, stack: Stack, shape: tuple[int, ...], dtype: str, part: tuple[int, ...], like: DiskArray | None = None
) -> DiskArray:
  """An array of a stack whose instances have `shape` and are read in parts of `part`.

  Args:
    like: an array of the same stack that it shares its cut into files with.
  """
  itemsize = ts.dtype(dtype).numpy_dtype.itemsize
  if math.prod(part) * itemsize < _LEAST_PART:
    part = shape
  lead = stack.lead_shape
  if like is not None:
    instances = like.file_shape[: len(lead)]
  elif len(lead) == 2:  # layers, experts
    instances = (1, lead[1] // math.gcd(lead[1], _EXPERT_FILES))
  elif lead:
    fitting = max(1, _FILE_BYTES // (math.prod(shape) * itemsize))
    instances = (max(n for n in range(1, lead[0] + 1) if lead[0] % n == 0 and n <= fitting),)
  else:
    instances = ()
  # The embedding and the head are the only matrices of gigabytes: they are written part by part.
  file = part if "vocab" in stack.weight.axes else shape
  return DiskArray(name, (*lead, *shape), dtype, (*instances, *file), (*(1 for _ in lead), *part))


def codes_of(packed: np.ndarray) -> np.ndarray:
  """4-bit codes as they are stored, [..., I/2, O] uint8 -> [..., I, O] uint8, one code each."""
  *lead, half, outputs = packed.shape
  return np.stack([packed & 0xF, packed >> 4], axis=-2).reshape(*lead, 2 * half, outputs)
