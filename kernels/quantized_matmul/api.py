"""The public face of the grouped matrix product: one function, its checks, and the choice of implementation."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from quantized_matmul import formats, reference

Implementation = Literal["pallas", "pallas_interpret", "reference"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


def grouped_matmul(
  x: jax.Array,
  values: jax.Array,
  scales: jax.Array | None,
  group_sizes: jax.Array,
  first_group: jax.Array | int,
  *,
  out_dtype: Any,
  implementation: Implementation,
) -> jax.Array:
  """Multiplies consecutive groups of rows, each by its own matrix of a stack, which stays where and as it is in HBM.

  Group i < E is the next `group_sizes[i]` rows of x, times the matrix `first_group + i`. So a loop over layers passes
  all layers' matrices and `first_group = layer · E`; no layer is sliced or copied out of the stack. A dense projection
  is one group. The format follows from the dtypes:

    plain       values bfloat16 or float32, scales None; values are read in x's dtype
    block-FP8   values float8_e4m3fn, scales float32 [G, I / ri, O / ro]: a value is value · scale, and the scales are
                applied to the float32 partial sums of each run of ri inputs
    MXFP4       values float4_e2m1fn, scales uint8 [G, I / 32, O], biased exponents b: a value is value · 2^(b − 127),
                decoded to x's dtype, which is exact for 1 < b < 253 (b = 0 counts as zero)

  Products are accumulated in float32: with a bfloat16 x in one pass of the matrix unit, with a float32 x at
  `Precision.HIGHEST`. On a mesh, call it inside `jax.shard_map`. It isn't differentiable.

  Args:
    x: [M, I] bfloat16 or float32, rows sorted by group. Rows beyond sum(group_sizes) may hold anything.
    values: [G, I, O].
    scales: as above. Where ri < 128 it divides 128, and so does ro.
    group_sizes: [E] int32, none negative, adding up to at most M. The weights of an empty group aren't read.
    first_group: int32 scalar, may be traced; 0 ≤ first_group ≤ G − E, which isn't checked when it's traced.
    out_dtype: bfloat16 or float32.
    implementation: "pallas" (a TPU; MXFP4 wants a v7x), "pallas_interpret" (the same kernel on a CPU) or "reference"
      (jnp; any backend; it reads every group's weights).

  Returns:
    [M, O] in out_dtype. Rows beyond sum(group_sizes) mean nothing: they may be anything, NaN too.

  Raises:
    ValueError: a shape, dtype or implementation that isn't supported. Nothing falls back to another implementation.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"grouped_matmul: implementation={implementation!r} is unknown; choose one of {IMPLEMENTATIONS}.")
  formats.check(x, values, scales, group_sizes, first_group, out_dtype)
  arrays = (x, values, scales, group_sizes, jnp.asarray(first_group, jnp.int32))
  if implementation == "reference":
    return reference.grouped_matmul_reference(*arrays, out_dtype=out_dtype)
  from quantized_matmul import kernel  # Pallas loads only for those who use it.

  return kernel.grouped_matmul_pallas(*arrays, out_dtype=out_dtype, interpret=implementation == "pallas_interpret")


def stack_format(ndim: int, sharding: jax.sharding.Sharding) -> Format:
  """The format in which a stack crosses the boundary of a jitted function on a TPU: row-major, as the kernel reads.

  Left to itself, XLA gives a parameter the layout that pads least. For scales [G, I / ri, O / ro], and for values whose
  O isn't a multiple of 128, that isn't row-major, and all layers' matrices are copied in each call of the program. So
  stacks are created and passed in this format: in `in_shardings`, in `device_put`, or on a `jax.ShapeDtypeStruct`. On
  a CPU it changes nothing.

  Args:
    ndim: of the stack, 3 as the kernel takes it.
    sharding: of the stack.
  """
  return Format(Layout(major_to_minor=tuple(range(ndim))), sharding)
