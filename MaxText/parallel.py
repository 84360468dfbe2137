"""How one program's shards work together: the whole step stands in one `shard_map`, every collective is explicit.

Two mesh axes split a model: `tensor` (attention's heads, vocabulary, the shared expert) and `data`. Experts lie over
both. No all-to-all carries tokens to experts: each device computes its own experts for every token, and sums follow.

On one device every function here is the identity.
"""

import itertools
from dataclasses import dataclass
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

DATA, TENSOR = "data", "tensor"

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Parallel:
  """Sizes of the two mesh axes and the modes of what they split. Hashable.

  Attributes:
    data, tensor: devices along each axis.
    batch: "same" (latency: every data group computes the same tokens) or "split" (throughput: each its own).
    mla_cache: "replicated" over the tensor group, or "striped": token p of a sequence on device p mod `tensor`.
  """

  data: int = 1
  tensor: int = 1
  batch: Literal["same", "split"] = "same"
  mla_cache: Literal["replicated", "striped"] = "replicated"

  @property
  def devices(self) -> int:
    return self.data * self.tensor

  @property
  def splits_batch(self) -> bool:
    return self.batch == "split" and self.data > 1

  @property
  def stripes_cache(self) -> bool:
    return self.mla_cache == "striped" and self.tensor > 1

  @property
  def _every_axis(self) -> tuple[str, ...]:
    return tuple(name for name, size in ((DATA, self.data), (TENSOR, self.tensor)) if size > 1)

  def tensor_index(self) -> jax.Array | int:
    """This device's place in its tensor group."""
    return lax.axis_index(TENSOR) if self.tensor > 1 else 0

  def device_index(self) -> jax.Array | int:
    """This device's place among all: the order in which experts lie."""
    return lax.axis_index(self._every_axis) if self.devices > 1 else 0

  def sum_tensor(self, x: Tree) -> Tree:
    """Sums partial results of a tensor group; several arrays travel as one collective."""
    return lax.psum(x, TENSOR) if self.tensor > 1 else x

  def sum_devices(self, x: Tree) -> Tree:
    """Sums partial results of all devices; several arrays travel as one collective."""
    return lax.psum(x, self._every_axis) if self.devices > 1 else x

  def gather_tensor(self, x: jax.Array, axis: int) -> jax.Array:
    """Concatenates a tensor group's parts along `axis`."""
    return lax.all_gather(x, TENSOR, axis=axis % x.ndim, tiled=True) if self.tensor > 1 else x

  def gather_batch(self, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """All data groups' rows of each array [N, …], where the batch is split among them; as one collective."""
    if not self.splits_batch:
      return arrays
    # As bits side by side: a collective costs some ten microseconds whatever it carries.
    bits = [lax.bitcast_convert_type(a, jnp.uint16).reshape(len(a), -1) for a in arrays]
    packed = lax.all_gather(jnp.concatenate(bits, axis=1), DATA, axis=0, tiled=True)
    parts = jnp.split(packed, list(itertools.accumulate(b.shape[1] for b in bits))[:-1], axis=1)
    return tuple(
      lax.bitcast_convert_type(part.reshape(-1, *a.shape[1:], *[2] * (a.dtype.itemsize == 4)), a.dtype)
      for part, a in zip(parts, arrays, strict=True)
    )

  def once_a_tensor_group(self, x: Tree) -> Tree:
    """A tensor group's partial results, zero in all data groups but the first: made ready for `sum_devices`."""
    if self.data == 1:
      return x
    first = lax.axis_index(DATA) == 0
    return jax.tree.map(lambda a: jnp.where(first, a, 0), x)

  def own_batch(self, x: jax.Array) -> jax.Array:
    """This data group's rows of what `gather_batch` gathered."""
    if not self.splits_batch:
      return x
    rows = x.shape[0] // self.data
    return lax.dynamic_slice_in_dim(x, lax.axis_index(DATA) * rows, rows)

  def any_row(self, flags: jax.Array) -> jax.Array:
    """Whether any row of the whole batch has its flag set, the same on every device."""
    some = jnp.any(flags)
    return lax.pmax(some.astype(jnp.int32), DATA) > 0 if self.splits_batch else some

  def exchange_heads(self, x: jax.Array) -> jax.Array:
    """[tensor · h, …] parts for every head -> [tensor, h, …]: every device's part for this device's heads."""
    parts = x.reshape(self.tensor, x.shape[0] // self.tensor, *x.shape[1:])
    return lax.all_to_all(parts, TENSOR, split_axis=0, concat_axis=0) if self.tensor > 1 else parts

  def combine_softmax(self, maximum: jax.Array, total: jax.Array, acc: jax.Array) -> jax.Array:
    """Partial softmax attention of a tensor group's parts of the cache, for all heads -> the whole, for own heads.

    Args:
      maximum, total: [B, H, T, 1] float32, a part's largest score and its sum of exp(score − maximum).
      acc: [B, H, T, V] float32, its sum of exp(score − maximum) · value.

    Returns:
      [B, h, T, V] float32, h = H / tensor.
    """
    # One collective: maximum and total ride along with the values.
    packed = jnp.moveaxis(jnp.concatenate([acc, total, maximum], axis=-1), 1, 0)
    parts = jnp.moveaxis(self.exchange_heads(packed), 1, 2)  # [tensor, B, h, T, V + 2]
    acc, total, maximum = jnp.split(parts, [acc.shape[-1], acc.shape[-1] + 1], axis=-1)
    weight = jnp.exp(maximum - jnp.max(maximum, axis=0))
    total = jnp.sum(total * weight, axis=0)
    return jnp.where(total > 0, jnp.sum(acc * weight, axis=0) / jnp.where(total > 0, total, 1), 0)


ONE = Parallel()
