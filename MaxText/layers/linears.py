"""Matrix products: plain ones, the grouped one over experts, and the gated MLP."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from MaxText.configs.model_config import ModelConfig
from MaxText.layers.activations import gated_activation
from MaxText.quantization import Quantized, scaled_matmul
from MaxText.weights import Source, Weight, fan_in


def linear_weight(
  in_size: int, out_shape: tuple[int, ...], name: str, axes: tuple[str | None, ...], formats: tuple[str, ...] = ()
) -> Weight:
  """Declares a projection [in_size, *out_shape] whose released form is one matrix [prod(out_shape), in_size]."""
  source = Source(name, (int(np.prod(out_shape)), in_size), packed="mxfp4" in formats)
  return Weight((in_size, *out_shape), axes, (source,), fan_in(in_size), formats=formats)


def output_weight(
  in_shape: tuple[int, ...], out_size: int, name: str, axes: tuple[str | None, ...], formats: tuple[str, ...] = ()
) -> Weight:
  """Declares a projection [*in_shape, out_size] whose released form is one matrix [out_size, prod(in_shape)]."""
  in_size = int(np.prod(in_shape))
  source = Source(name, (out_size, in_size))
  return Weight((*in_shape, out_size), axes, (source,), fan_in(in_size), in_dims=len(in_shape), formats=formats)


def matmul(x: jax.Array, w: jax.Array | Quantized, in_dims: int = 1) -> jax.Array:
  """Contracts the last `in_dims` axes of x with the first of w; float32 accumulation, the result in x's dtype.

  Args:
    x: [..., *in].
    w: [*in, *out], any float dtype, read in x's dtype; or a quantised weight of that shape.

  Returns:
    [..., *out].
  """
  if isinstance(w, Quantized):
    out = scaled_matmul(x.reshape(-1, math.prod(w.values.shape[:in_dims])), w, in_dims)
    return out.reshape(*x.shape[: x.ndim - in_dims], *w.values.shape[in_dims:]).astype(x.dtype)
  axes = (tuple(range(x.ndim - in_dims, x.ndim)), tuple(range(in_dims)))
  out = jax.lax.dot_general(x, w.astype(x.dtype), (axes, ((), ())), preferred_element_type=jnp.float32)
  return out.astype(x.dtype)


# One expert's rows are multiplied this many at a time by the "loop" implementation.
_LOOP_ROWS = 16


def grouped_matmul(
  x: jax.Array, w: jax.Array | Quantized, group_sizes: jax.Array, first_group: jax.Array | int, implementation: str
) -> jax.Array:
  """Multiplies consecutive groups of rows, each by its own matrix.

  Args:
    x: [M, I] rows sorted by group.
    w: [G, I, O] matrices, plain or quantised, of which the E from `first_group` on are meant.
    group_sizes: [E] int32, rows of each group; they add up to M.
    first_group: index into w of the first group; may be traced, so that a loop over layers passes all layers' experts.
    implementation: "ragged_dot" (`jax.lax.ragged_dot`, the choice for TPU) or "loop" (one small product at a time, the
      choice for a CPU, where XLA's ragged_dot multiplies every row by every matrix).

  Returns:
    [M, O] float32.

  Raises:
    ValueError: an unknown implementation, or one that can't take the weight.
  """
  if implementation == "ragged_dot":
    if isinstance(w, Quantized):
      raise ValueError(
        f"grouped_matmul: implementation='ragged_dot' takes plain weights, not {type(w).__name__}; use 'loop'"
      )
    sizes = group_sizes
    if w.shape[0] != group_sizes.shape[0]:
      # All other layers' groups are empty. Slicing w instead would copy a layer's experts for every call.
      sizes = jax.lax.dynamic_update_slice(jnp.zeros(w.shape[0], group_sizes.dtype), group_sizes, (first_group,))
    return jax.lax.ragged_dot(x, w.astype(x.dtype), sizes, preferred_element_type=jnp.float32)
  if implementation == "loop":
    return _loop_grouped_matmul(x, w, group_sizes, first_group)
  raise ValueError(f"grouped_matmul: implementation={implementation!r} is unknown; choose 'ragged_dot' or 'loop'")


def _loop_grouped_matmul(
  x: jax.Array, w: jax.Array | Quantized, group_sizes: jax.Array, first_group: jax.Array | int
) -> jax.Array:
  """Tiles of at most `_LOOP_ROWS` rows of one group, in order; only tiles that hold rows are computed."""
  rows = min(_LOOP_ROWS, x.shape[0])
  outputs = (w.values if isinstance(w, Quantized) else w).shape[2]
  starts = jnp.cumsum(group_sizes) - group_sizes
  tiles = -(-group_sizes // rows)
  tile_ends = jnp.cumsum(tiles)
  x = jnp.pad(x, ((0, rows), (0, 0)))

  def body(tile, out):
    group = jnp.searchsorted(tile_ends, tile, side="right", method="compare_all")
    start = starts[group] + (tile - (tile_ends[group] - tiles[group])) * rows
    matrix = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, first_group + group, 0, keepdims=False), w)
    tile_rows = jax.lax.dynamic_slice_in_dim(x, start, rows)
    if isinstance(w, Quantized):
      product = scaled_matmul(tile_rows, matrix, 1)
    else:
      product = jnp.dot(tile_rows, matrix.astype(x.dtype), preferred_element_type=jnp.float32)
    # The tile's tail may hold rows of the next group: those are written again, rightly, by the tiles that follow.
    return jax.lax.dynamic_update_slice_in_dim(out, product, start, axis=0)

  out = jax.lax.fori_loop(0, tile_ends[-1], body, jnp.zeros((x.shape[0], outputs), jnp.float32))
  return out[:-rows]


def mlp_weights(cfg: ModelConfig, size: int, prefix: str = "") -> dict[str, Weight]:
  """Declares a gated MLP of inner width `size`: wi [D, 2, F] (gate, then up) and wo [F, D]."""
  d = cfg.hidden_size
  return {
    "wi": Weight(
      (d, 2, size),
      ("embed", None, "mlp"),
      (Source(f"{prefix}gate_proj", (size, d)), Source(f"{prefix}up_proj", (size, d))),
      fan_in(d),
      assemble=lambda gate, up: np.stack([gate.T, up.T], axis=1),
      disassemble=lambda wi: (wi[:, 0].T, wi[:, 1].T),
      formats=("block_fp8",),
    ),
    "wo": linear_weight(size, (d,), f"{prefix}down_proj", ("mlp", "embed"), ("block_fp8",)),
  }


def mlp(cfg: ModelConfig, w: dict, x: jax.Array) -> jax.Array:
  """down(act(gate x, up x)); x and the result are [..., D]."""
  hidden = matmul(x, w["wi"])
  hidden = gated_activation(cfg, hidden[..., 0, :], hidden[..., 1, :])
  return checkpoint_name(matmul(hidden, w["wo"]), "mlp_out")
