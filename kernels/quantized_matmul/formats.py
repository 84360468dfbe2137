"""The three forms of a weight stack, told from their dtypes, and the checks of the arguments."""

import enum
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

LANES = 128  # of a TPU's registers; also the block of block-FP8
MX_RUN = 32  # inputs that share a scale in MXFP4
_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
_FP8 = jnp.dtype(jnp.float8_e4m3fn)
_FP4 = jnp.dtype(jnp.float4_e2m1fn)


class Form(enum.Enum):
  """What a stack holds; the value is its name in messages."""

  PLAIN = "plain"
  BLOCK_FP8 = "block-FP8"
  MXFP4 = "MXFP4"


@dataclass(frozen=True)
class Format:
  """A stack's form, and how many inputs (ri) and outputs (ro) one scale covers; I and O without scales."""

  form: Form
  ri: int
  ro: int


def format_of(values: jax.Array, scales: jax.Array | None) -> Format:
  """The format of a stack that `check` has passed."""
  inputs, outputs = values.shape[1:]
  if scales is None:
    return Format(Form.PLAIN, inputs, outputs)
  form = Form.MXFP4 if values.dtype == _FP4 else Form.BLOCK_FP8
  return Format(form, inputs // scales.shape[1], outputs // scales.shape[2])


def check(x, values, scales, group_sizes, first_group, out_dtype) -> None:
  """Raises ValueError for the first argument whose shape or dtype isn't supported or contradicts the others."""
  if x.ndim != 2 or x.shape[0] < 1 or x.shape[1] < 1 or x.dtype not in _FLOATS:
    raise ValueError(f"grouped_matmul: x is {x.dtype}{x.shape}; it must be [M, I], bfloat16 or float32.")
  if values.ndim != 3 or values.shape[1] != x.shape[1] or values.shape[2] < 1:
    raise ValueError(
      f"grouped_matmul: values has shape {values.shape}; with x {x.shape} it must be [G, {x.shape[1]}, O]."
    )
  if group_sizes.ndim != 1 or not 1 <= group_sizes.shape[0] <= values.shape[0]:
    raise ValueError(
      f"grouped_matmul: group_sizes has shape {group_sizes.shape}; it must be [E] with 1 <= E <= G = {values.shape[0]}."
    )
  if group_sizes.dtype != jnp.int32:
    raise ValueError(f"grouped_matmul: group_sizes is {group_sizes.dtype}; it must be int32.")
  if jnp.ndim(first_group) != 0:
    raise ValueError(f"grouped_matmul: first_group has shape {jnp.shape(first_group)}; it must be an int32 scalar.")
  if not isinstance(first_group, jax.core.Tracer) and not 0 <= first_group <= len(values) - len(group_sizes):
    raise ValueError(
      f"grouped_matmul: first_group={first_group}; with {len(group_sizes)} groups and {len(values)} matrices it must be"
      f" from 0 to {len(values) - len(group_sizes)}."
    )
  if jnp.dtype(out_dtype) not in _FLOATS:
    raise ValueError(f"grouped_matmul: out_dtype={jnp.dtype(out_dtype)}; it must be bfloat16 or float32.")
  _check_scales(values, scales)


def _check_scales(values, scales) -> None:
  if values.dtype in _FLOATS:
    if scales is not None:
      raise ValueError(f"grouped_matmul: plain weights ({values.dtype}) take no scales; pass None.")
    return
  if values.dtype not in (_FP8, _FP4):
    raise ValueError(
      f"grouped_matmul: values is {values.dtype}; it must be bfloat16, float32, float8_e4m3fn or float4_e2m1fn."
    )
  if scales is None or scales.ndim != 3:
    found = None if scales is None else scales.shape
    raise ValueError(f"grouped_matmul: scales is {found}; {values.dtype} values want three dimensions of them.")
  groups, inputs, outputs = values.shape
  if values.dtype == _FP4:
    if scales.dtype != jnp.uint8 or inputs % MX_RUN or scales.shape != (groups, inputs // MX_RUN, outputs):
      raise ValueError(
        f"grouped_matmul: MXFP4 values {values.shape} want uint8 scales ({groups}, {inputs}/{MX_RUN}, {outputs});"
        f" these are {scales.dtype}{scales.shape}."
      )
    return
  fits = scales.dtype == jnp.float32 and scales.shape[0] == groups
  for size, count in zip((inputs, outputs), scales.shape[1:], strict=True):
    fits = fits and count > 0 and size % count == 0 and LANES % (size // max(count, 1)) == 0
  if not fits:
    raise ValueError(
      f"grouped_matmul: block-FP8 values {values.shape} want float32 scales [{groups}, {inputs}/ri, {outputs}/ro] with"
      f" ri and ro divisors of {LANES} (at most ri = {math.gcd(LANES, inputs)}, ro = {math.gcd(LANES, outputs)}); these"
      f" are {scales.dtype}{scales.shape}."
    )
