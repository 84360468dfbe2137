"""Matrix products: plain ones, the grouped one over experts, and the gated MLP."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import quantized_matmul
from MaxText.configs.model_config import ModelConfig
from MaxText.layers.activations import gated_activation
from MaxText.quantization import InStack, Quantized, scaled_matmul
from MaxText.weights import Source, Weight, fan_in


def linear_weight(in_size: int, out_size: int, name: str, axes: tuple[str | None, ...], kind: str = "") -> Weight:
  """Declares a projection [in_size, out_size] whose released form is one matrix [out_size, in_size].

  A matrix has two dimensions, and not one a head: a TPU would copy a stack of them into another layout to use it.
  """
  source = Source(name, (out_size, in_size), packed=kind == "expert")
  return Weight((in_size, out_size), axes, (source,), fan_in(in_size), kind=kind)


def matmul(x: jax.Array, w: jax.Array | Quantized | InStack) -> jax.Array:
  """Contracts the last axis of x with the first of w; float32 accumulation, the result in x's dtype.

  Args:
    x: [..., I].
    w: [I, O], any float dtype, read in x's dtype; or a quantised weight of that shape.

  Returns:
    [..., O].
  """
  rows = x.reshape(-1, x.shape[-1])
  if isinstance(w, InStack):
    one_group = jnp.full(1, len(rows), jnp.int32)
    out = quantized_matmul.grouped_matmul(
      rows, w.stack.values, w.stack.scales, one_group, w.index, out_dtype=x.dtype, implementation=w.implementation
    )
  else:
    out = product(rows, w).astype(x.dtype)
  return out.reshape(*x.shape[:-1], out.shape[-1])


def product(x: jax.Array, w: jax.Array | Quantized) -> jax.Array:
  """x [M, I] times one matrix [I, O], plain or quantised, in float32 [M, O]."""
  if isinstance(w, Quantized):
    return scaled_matmul(x, w)
  return jnp.dot(x, w.astype(x.dtype), preferred_element_type=jnp.float32)


def grouped_matmul(
  x: jax.Array,
  w: jax.Array | Quantized,
  group_sizes: jax.Array,
  first_group: jax.Array | int,
  out_dtype: Any,
  implementation: str,
) -> jax.Array:
  """Multiplies consecutive groups of rows, each by its own matrix.

  Args:
    x: [M, I] rows sorted by group; those beyond the groups' sum belong to none.
    w: [G, I, O] matrices, plain or quantised, of which the E from `first_group` on are meant.
    group_sizes: [E] int32, rows of each group.
    first_group: index into w of the first group; may be traced, so that a loop over layers passes all layers' experts.
    implementation: "ragged_dot" (`jax.lax.ragged_dot`, plain weights on a TPU), "pallas" (our kernel, for quantised
      weights on a TPU; "pallas_interpret" on a CPU) or "loop" (one small product at a time, the choice for a CPU, where
      XLA's ragged_dot multiplies every row by every matrix).

  Returns:
    [M, O] in `out_dtype`, accumulated in float32; rows of no group mean nothing.

  Raises:
    ValueError: an unknown implementation, or one that can't take the weight.
  """
  if implementation in ("pallas", "pallas_interpret"):
    values, scales = (w.values, w.scales) if isinstance(w, Quantized) else (w, None)
    return quantized_matmul.grouped_matmul(
      x, values, scales, group_sizes, first_group, out_dtype=out_dtype, implementation=implementation
    )
  if implementation == "ragged_dot":
    if isinstance(w, Quantized):
      raise ValueError(
        f"grouped_matmul: implementation='ragged_dot' takes plain weights, not {type(w).__name__}; use 'pallas' or "
        "'loop'"
      )
    sizes = group_sizes
    if w.shape[0] != group_sizes.shape[0]:
      # All other layers' groups are empty. Slicing w instead would copy a layer's experts for every call.
      sizes = jax.lax.dynamic_update_slice(jnp.zeros(w.shape[0], group_sizes.dtype), group_sizes, (first_group,))
    return jax.lax.ragged_dot(x, w.astype(x.dtype), sizes, preferred_element_type=jnp.float32).astype(out_dtype)
  if implementation == "loop":

    def multiply(rows, group):
      return product(rows, pick(w, first_group + group))

    outputs = (w.values if isinstance(w, Quantized) else w).shape[2]
    return for_each_group(multiply, x, group_sizes, outputs).astype(out_dtype)
  raise ValueError(
    f"grouped_matmul: implementation={implementation!r} is unknown; choose 'ragged_dot', 'pallas' or 'loop'"
  )


def pick(w: jax.Array | Quantized, index: jax.Array | int) -> jax.Array | Quantized:
  """One matrix of a stack [G, I, O], plain or quantised."""
  return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False), w)


_MOST_ROWS = 16  # that `for_each_group` hands to its function


def for_each_group(
  function: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, group_sizes: jax.Array, outputs: int
) -> jax.Array:
  """Applies a function to consecutive groups of rows, a tile of one group's rows at a time, in order.

  Only tiles that hold rows are computed. A tile has room for twice the mean group: a decode step's groups are small.

  Args:
    function: (rows [R, I], their group, int32 scalar) -> [R, outputs] float32, each row by itself.
    x: [M, I] rows sorted by group.
    group_sizes: [E] int32, rows of each group; rows beyond their sum belong to none.

  Returns:
    [M, outputs] float32; rows of no group mean nothing.
  """
  twice_mean = max(1, 2 * x.shape[0] // group_sizes.shape[0])
  rows = min(_MOST_ROWS, 1 << (twice_mean - 1).bit_length())
  tiles = -(-group_sizes // rows)
  tile_ends = jnp.cumsum(tiles)
  # Before the loop, since each small operation in it costs as much as a tenth of a product.
  tile = jnp.arange(x.shape[0] // rows + group_sizes.shape[0])
  groups = jnp.searchsorted(tile_ends, tile, side="right", method="compare_all")
  starts = (jnp.cumsum(group_sizes) - group_sizes)[groups] + (tile - (tile_ends - tiles)[groups]) * rows
  x = jnp.pad(x, ((0, rows), (0, 0)))

  def body(i, out):
    result = function(jax.lax.dynamic_slice_in_dim(x, starts[i], rows), groups[i])
    # The tile's tail may hold rows of the next group: those are written again, rightly, by the tiles that follow.
    return jax.lax.dynamic_update_slice_in_dim(out, result, starts[i], axis=0)

  out = jax.lax.fori_loop(0, tile_ends[-1], body, jnp.zeros((x.shape[0], outputs), jnp.float32))
  return out[:-rows]


def mlp_weights(cfg: ModelConfig, size: int, prefix: str = "") -> dict[str, Weight]:
  """Declares a gated MLP of inner width `size`: wi_0 [D, F] (gate), wi_1 [D, F] (up) and wo [F, D]."""
  d = cfg.hidden_size
  return {
    "wi_0": linear_weight(d, size, f"{prefix}gate_proj", ("embed", "mlp"), "dense"),
    "wi_1": linear_weight(d, size, f"{prefix}up_proj", ("embed", "mlp"), "dense"),
    "wo": linear_weight(size, d, f"{prefix}down_proj", ("mlp", "embed"), "dense"),
  }


def mlp(cfg: ModelConfig, w: dict, x: jax.Array) -> jax.Array:
  """down(act(gate x, up x)); x and the result are [..., D]."""
  hidden = gated_activation(cfg, matmul(x, w["wi_0"]), matmul(x, w["wi_1"]))
  return checkpoint_name(matmul(hidden, w["wo"]), "mlp_out")
