"""How one program's shards work together: the whole step stands in one `shard_map`, every collective is explicit.

Two mesh axes split a model: `tensor` (attention's heads, vocabulary, the shared expert) and `data`. Experts lie over
both. No all-to-all carries tokens to experts: each device computes its own experts for every token, and sums follow.

On one device every function here is the identity.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

DATA, TENSOR = "data", "tensor"

Tree = TypeVar("Tree")


def _side_by_side(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, Callable[[jax.Array, int], tuple[jax.Array, ...]]]:
  """Arrays [N, c] of 16 or 32 bits as one of 16-bit words: a collective costs its ten microseconds whatever it carries.

  Returns:
    (words [N, w]; from words [M, parts · w], gathered along columns or rows, to the arrays [M, parts · c]).
  """
  words = [lax.bitcast_convert_type(a, jnp.uint16).reshape(len(a), -1) for a in arrays]
  ends = list(itertools.accumulate(w.shape[1] for w in words))

  def unpack(packed: jax.Array, parts: int) -> tuple[jax.Array, ...]:
    rows = len(packed)
    pieces = jnp.split(packed.reshape(rows, parts, ends[-1]), ends[:-1], axis=2)
    wide = [(2,) if a.dtype.itemsize == 4 else () for a in arrays]
    return tuple(
      lax.bitcast_convert_type(piece.reshape(rows, parts * a.shape[1], *pair), a.dtype)
      for piece, a, pair in zip(pieces, arrays, wide, strict=True)
    )

  return jnp.concatenate(words, axis=1), unpack


@dataclass(frozen=True)
class Parallel:
  """Sizes of the two mesh axes and the modes of what they split. Hashable.

  Attributes:
    data, tensor: devices along each axis.
    batch: "same" (latency: every data group computes the same tokens) or "split" (throughput: each its own).
    mla_cache: "replicated" over the tensor group, or "striped": token p of a sequence on device p mod `tensor`.
    latents: whether the projections into and out of the experts' latent space stand whole on every device
      ("replicated") or split over the tensor group ("sharded": less memory, two more collectives a layer).
    router: the same for the router. Sharded it needs a collective, or none beside sharded latents: one carries both.
    sequence: between sublayers each device of a tensor group holds an equal part of the tokens (prefill, where streams
      are large), not all of them (decode).
  """

  data: int = 1
  tensor: int = 1
  batch: Literal["same", "split"] = "same"
  mla_cache: Literal["replicated", "striped"] = "replicated"
  latents: Literal["replicated", "sharded"] = "replicated"
  router: Literal["replicated", "sharded"] = "replicated"
  sequence: bool = False

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
  def splits_tokens(self) -> bool:
    return self.sequence and self.tensor > 1

  @property
  def shards_latents(self) -> bool:
    return self.latents == "sharded" and self.tensor > 1

  @property
  def shards_router(self) -> bool:
    return self.router == "sharded" and self.tensor > 1

  @property
  def _token_axes(self) -> tuple[str, ...]:
    """Mesh axes whose devices hold different tokens between sublayers."""
    return (DATA,) * self.splits_batch + (TENSOR,) * self.splits_tokens

  @property
  def token_ways(self) -> int:
    """Over how many devices tokens are divided between sublayers."""
    return math.prod({DATA: self.data, TENSOR: self.tensor}[axis] for axis in self._token_axes)

  @property
  def _every_axis(self) -> tuple[str, ...]:
    return tuple(name for name, size in ((DATA, self.data), (TENSOR, self.tensor)) if size > 1)

  def tensor_index(self) -> jax.Array | int:
    """This device's place in its tensor group."""
    return lax.axis_index(TENSOR) if self.tensor > 1 else 0

  def first_slot(self, slots: int) -> jax.Array | int:
    """The number of the first of this data group's `slots` slots, counted over all groups."""
    return lax.axis_index(DATA) * slots if self.splits_batch else 0

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

  def gather_tokens(self, x: jax.Array) -> jax.Array:
    """[n, …] of this device's tokens -> [N, …] of its data group's: for a weight that the tensor group splits."""
    return lax.all_gather(x, TENSOR, axis=0, tiled=True) if self.splits_tokens else x

  def sum_tokens(self, x: jax.Array) -> jax.Array:
    """A tensor group's partial results [N, …] -> their sum, for this device's tokens [n, …]."""
    if self.splits_tokens:
      return lax.psum_scatter(x, TENSOR, scatter_dimension=0, tiled=True)
    return self.sum_tensor(x)

  def own_tokens(self, x: jax.Array) -> jax.Array:
    """[N, …], the same on every device -> this device's tokens [n, …]."""
    if not self.splits_tokens:
      return x
    rows = x.shape[0] // self.tensor
    return lax.dynamic_slice_in_dim(x, lax.axis_index(TENSOR) * rows, rows)

  def pick_tokens(self, arrays: Tree, owner: jax.Array, place: jax.Array, axes: Tree) -> Tree:
    """Some tokens' entries of arrays that hold this device's tokens, on every device of the tensor group.

    Args:
      owner, place: [R] int32, which device of the group holds a token, and where among its own.
      axes: for each array the axis of its tokens.
    """
    mine = owner == self.tensor_index() if self.splits_tokens else jnp.ones(len(owner), bool)

    def one(x: jax.Array, axis: int) -> jax.Array:
      entries = jnp.take(x, jnp.where(mine, place, 0), axis=axis)
      return jnp.where(mine.reshape(-1, *[1] * (x.ndim - axis - 1)), entries, 0)

    picked = jax.tree.map(one, arrays, axes)
    return self.sum_tensor(picked) if self.splits_tokens else picked

  def whole_rows(self, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """[N, c] each: all tokens, this device's columns -> [n, C]: its own tokens, all columns; as one collective."""
    if self.tensor == 1:
      return arrays
    packed, unpack = _side_by_side(arrays)
    if self.splits_tokens:
      packed = lax.all_to_all(packed, TENSOR, split_axis=0, concat_axis=1, tiled=True)
    else:
      packed = lax.all_gather(packed, TENSOR, axis=1, tiled=True)
    return unpack(packed, self.tensor)

  def own_columns(self, x: jax.Array) -> jax.Array:
    """The reverse of `whole_rows`."""
    if self.splits_tokens:
      return lax.all_to_all(x, TENSOR, split_axis=1, concat_axis=0, tiled=True)
    columns = x.shape[1] // self.tensor
    return lax.dynamic_slice_in_dim(x, self.tensor_index() * columns, columns, axis=1)

  def gather_for_experts(self, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Every token's row of each array [n, …], wherever tokens are split; all arrays travel together."""
    if not self._token_axes:
      return arrays
    packed, unpack = _side_by_side(arrays)
    # One axis after the other: a gather over both at once is compiled to a sum of mostly zeros, twice the bytes.
    for axis in reversed(self._token_axes):
      packed = lax.all_gather(packed, axis, axis=0, tiled=True)
    return unpack(packed, 1)

  def sum_experts(self, y: jax.Array) -> jax.Array:
    """All devices' partial results for every token of `gather_for_experts` -> the sum, for this device's tokens."""
    if self.splits_tokens:
      y = lax.psum_scatter(y, self._token_axes, scatter_dimension=0, tiled=True)
      return lax.psum(y, DATA) if self.data > 1 and not self.splits_batch else y
    return self._own_batch(self.sum_devices(y))

  def once_a_tensor_group(self, x: Tree) -> Tree:
    """A tensor group's partial results, zero in all data groups but the first: made ready for `sum_devices`."""
    if self.data == 1:
      return x
    first = lax.axis_index(DATA) == 0
    return jax.tree.map(lambda a: jnp.where(first, a, 0), x)

  def _own_batch(self, x: jax.Array) -> jax.Array:
    """This data group's rows of the whole batch's."""
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

  def combine_softmax(self, largest: jax.Array, total: jax.Array, acc: jax.Array) -> jax.Array:
    """Partial softmax attention of a tensor group's parts of the cache, for all heads -> the whole, for own heads.

    Args:
      largest, total: [B, H, 1] float32, a part's largest score and its sum of exp(score − largest).
      acc: [B, H, V] float32, its sum of exp(score − largest) · value.

    Returns:
      [B, h, V] float32, h = H / tensor.
    """
    # One collective: largest and total ride along with the values.
    packed = jnp.moveaxis(jnp.concatenate([acc, total, largest], axis=-1), 1, 0)
    parts = jnp.moveaxis(self.exchange_heads(packed), 1, 2)  # [tensor, B, h, V + 2]
    acc, total, largest = jnp.split(parts, [acc.shape[-1], acc.shape[-1] + 1], axis=-1)
    weight = jnp.exp(largest - jnp.max(largest, axis=0))
    total = jnp.sum(total * weight, axis=0)
    return jnp.where(total > 0, jnp.sum(acc * weight, axis=0) / jnp.where(total > 0, total, 1), 0)


ONE = Parallel()
