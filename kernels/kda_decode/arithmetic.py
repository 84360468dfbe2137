"""What the kernel computes: functions of arrays, none of which sees a Ref.

An array [R, K] is one head's vector for R batch rows, rows on sublanes and channels on lanes. Everything is float32,
apart from the bfloat16 operands of `broadcast_columns`, which between them carry a float32 exactly.
"""

import jax
import jax.numpy as jnp

from kda_decode.reference import l2norm

GROUP = 8  # rows transposed together: the sublanes of a float32 register
PIECES = 3  # bfloat16 pieces that hold a float32: 3 × 8 bits of significand
MATRIX_COLUMNS = 2  # vectors that reach their columns through the matrix unit: decay and k


def decay_factor(decay: jax.Array, rate: jax.Array, dt_bias: jax.Array, gate_lower_bound: float | None) -> jax.Array:
  """exp(g), one head's decay. decay [R, K]; rate = exp(a_log) [1, 1]; dt_bias [1, K]. Returns [R, K]."""
  x = decay.astype(jnp.float32) + dt_bias
  if gate_lower_bound is None:
    return jnp.exp(-rate * jax.nn.softplus(x))
  return jnp.exp(gate_lower_bound * jax.nn.sigmoid(rate * x))


def head_vectors(taps, conv_weight, decay, rate, dt_bias, beta, active, gate_lower_bound):
  """One head's vectors from its raw inputs: convolution, normalisation and gates.

  The decay and k go through a matrix product that a row shares with seven others, where 0 · NaN would carry one row's
  NaN into the others. So the vectors come back finite, and a NaN travels in the row's own v instead.

  Args:
    taps: for q, k and v, W arrays [R, K] of any float dtype, oldest first.
    conv_weight: for q, k and v, W arrays [1, K].
    decay: [R, K] raw; rate: [1, 1]; dt_bias: [1, K].
    beta: [R, 1] raw.
    active: [R, K] bool; false on idle rows, whose values may be anything.

  Returns:
    (decay factor, k, q, beta·v, beta, q·k), each [R, K] float32; the last two repeat one number per row.
  """
  q, k, v = (
    jax.nn.silu(sum(w * tap.astype(jnp.float32) for w, tap in zip(ws, xs, strict=True)))
    for xs, ws in zip(taps, conv_weight, strict=True)
  )
  q = l2norm(q) * q.shape[-1] ** -0.5
  k = l2norm(k)
  d = decay_factor(decay, rate, dt_bias, gate_lower_bound)
  beta = jnp.broadcast_to(jax.nn.sigmoid(beta.astype(jnp.float32)), v.shape)
  poison = (d + k + q) * 0.0  # zero, or NaN where a value isn't finite
  usable = active & (poison == 0.0)
  d, k, q = (jnp.where(usable, x, 0.0) for x in (d, k, q))
  qk = jnp.broadcast_to(jnp.sum(q * k, axis=-1, keepdims=True), v.shape)
  return d, k, q, beta * v + poison, beta, qk


def split(x: jax.Array) -> list[jax.Array]:
  """float32 → three float32 arrays, each of which bfloat16 holds exactly, and which sum to x."""
  pieces = []
  for _ in range(PIECES - 1):
    piece = x.astype(jnp.bfloat16).astype(jnp.float32)
    pieces.append(piece)
    x = x - piece
  return [*pieces, x]


def transposed_pieces(d: jax.Array, k: jax.Array) -> jax.Array:
  """[8, K] each → [K, 48] bfloat16: the pieces of eight rows' decay and k, channels now on sublanes."""
  rows = jnp.concatenate([piece for x in (d, k) for piece in split(x)], axis=0)
  return rows.T.astype(jnp.bfloat16)


def selector_shape(key_dim: int) -> tuple[int, int]:
  return MATRIX_COLUMNS * PIECES * GROUP, MATRIX_COLUMNS * key_dim


def selector(row: int, key_dim: int) -> jax.Array:
  """The 0/1 matrix [48, 2·K] bfloat16 with which `broadcast_columns` picks one row of a group of eight."""
  shape = selector_shape(key_dim)
  source = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
  target = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
  same_vector = jax.lax.div(source, PIECES * GROUP) == jax.lax.div(target, key_dim)
  same_row = jax.lax.rem(source, GROUP) == row
  return jnp.where(same_vector & same_row, 1.0, 0.0).astype(jnp.bfloat16)


def broadcast_columns(pieces: jax.Array, select: jax.Array) -> tuple[jax.Array, jax.Array]:
  """One row's decay and k as columns repeated over the lanes: [K, 48], [48, 2·K] → two of [K, K] float32.

  A vector lies along lanes, and the state needs it along K, its sublanes. The transpose unit alone would take longer
  over that than HBM takes over the state. The matrix unit is idle, and repeats for nothing: a product with a 0/1
  matrix adds up the three pieces, and each partial sum is a float32 without rounding.
  """
  cols = jnp.dot(pieces, select, preferred_element_type=jnp.float32, precision=jax.lax.Precision.DEFAULT)
  return cols[:, : cols.shape[0]], cols[:, cols.shape[0] :]


def state_step(state, d, k, q, beta_v, beta, qk):
  """The gated delta rule for one state: decay, correct, write, read.

  The read-out uses the new state, Sᵀq = (decayed S)ᵀq + (k·q)·r, in a form that doesn't wait for its write.

  Args:
    state: [K, V] float32.
    d, k, q: [K, V] columns repeated over V.
    beta_v, beta, qk: [1, V]; beta·v, and beta and q·k repeated over V.

  Returns:
    (o [1, V], new state [K, V]).
  """
  state = state * d
  r = beta_v - beta * jnp.sum(state * k, axis=0, keepdims=True)
  o = jnp.sum(state * q, axis=0, keepdims=True) + qk * r
  return o, state + k * r
