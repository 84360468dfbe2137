"""The delta rule over a chunk of tokens, through tokamax. The one file that imports tokamax's private KDA module."""

import importlib.metadata
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kda_decode import reference
from MaxText.errors import UserError

try:
  from tokamax._src.ops.kda import reference as tokamax_reference
  from tokamax._src.ops.kda.api import kimi_delta_attention
except ImportError as error:
  raise ImportError(
    "tokamax's private modules tokamax._src.ops.kda.api and .reference have moved: this project was written for "
    f"tokamax 0.0.17, installed is {importlib.metadata.version('tokamax')}"
  ) from error

IMPLEMENTATIONS = ("xla", "xla_chunked", "mosaic")
_CHUNK = 64  # tokamax's chunked implementations take lengths that this divides


def resolve_implementation(name: str, platform: str, head_dim: int, gate_lower_bound: float | None) -> str:
  """`auto` -> "mosaic" on a TPU where it can serve the model: heads of 128, a bounded gate; else "xla"."""
  if name != "auto":
    return name
  return "mosaic" if platform == "tpu" and head_dim == 128 and gate_lower_bound is not None else "xla"


def check_implementation(name: str, gate_lower_bound: float | None) -> None:
  """Raises `UserError` where tokamax can't serve the model with this implementation."""
  if name not in IMPLEMENTATIONS:
    raise UserError(f"kda_prefill_implementation={name} is unknown; choose auto, {', '.join(IMPLEMENTATIONS)}")
  # Both chunked forms factor a chunk's decay. Unbounded, its exponent leaves float32's range: mosaic then gives NaN,
  # and says nothing.
  if name != "xla" and gate_lower_bound is None:
    raise UserError(
      f"kda_prefill_implementation={name} needs a bounded gate, and this model has no kda_gate_lower_bound; "
      "use kda_prefill_implementation=xla"
    )


def delta_rule(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  decay: jax.Array,
  beta: jax.Array,
  state: jax.Array,
  valid: jax.Array,
  *,
  a_log: jax.Array,
  dt_bias: jax.Array,
  gate_lower_bound: float | None,
  implementation: str,
) -> tuple[jax.Array, jax.Array]:
  """Runs S ← diag(exp g)·S; S ← S + β·k·(v − Sᵀk)ᵀ; o = Sᵀq·K^-1/2 over the valid tokens of each row.

  Args:
    q, k: [B, T, H, K] float32, l2-normalised.
    v: [B, T, H, V] float32.
    decay: [B, T, H, K] raw low-rank gate. Its dtype is the activations', in which "mosaic" multiplies.
    beta: [B, T, H] float32 in (0, 1).
    state: [B, H, K, V] float32, what came before.
    valid: [B, T] bool; a token that isn't valid leaves the state as it was, and its output means nothing.
    a_log, dt_bias: [H], [H, K] float32.
    gate_lower_bound: K3's bound of the log decay, or None for softplus.
    implementation: one of `IMPLEMENTATIONS`; all but "xla" need a bound.

  Returns:
    (o [B, T, H, V] float32, state [B, H, K, V] float32).
  """
  length = q.shape[1]
  fused_gate = implementation != "xla"
  if fused_gate:
    # A raw gate this low gives a decay of exactly one: an invalid token neither decays nor (β = 0) writes.
    gate = jnp.where(valid[..., None, None], decay.astype(jnp.float32), -1e9)
  else:
    gate = checkpoint_name(reference.log_decay(decay, a_log, dt_bias, gate_lower_bound), "kda_log_decay")
    gate = jnp.where(valid[..., None, None], gate, 0.0)
  beta = jnp.where(valid[..., None], beta, 0.0)

  # tokamax's kernel multiplies in the dtype that it is given; its sums, the state and beta stay float32.
  q, k, v, gate = (x.astype(decay.dtype) if implementation == "mosaic" else x for x in (q, k, v, gate))

  def head_first(x):
    if implementation != "xla":
      pad = [(0, 0)] * x.ndim
      pad[1] = (0, -length % _CHUNK)
      x = jnp.pad(x, pad, constant_values=-1e9 if x is gate and fused_gate else 0.0)
    return jnp.moveaxis(x, 2, 0)

  arrays = [head_first(x) for x in (q, k, v, gate, beta)]
  if implementation == "xla":
    # What the call below comes to, without its debugging check: that does nothing here, but jax would start a program
    # with such an effect from Python, a millisecond late.
    attend = partial(
      tokamax_reference.kimi_delta_attention,
      scale=k.shape[-1] ** -0.5,
      use_qk_l2norm=False,
      segment_ids=None,
      context_parallel_metadata=None,
      max_num_segments=1,
    )
  else:
    attend = partial(kimi_delta_attention, implementation=implementation)
  out, final = attend(
    *arrays,
    a_log=a_log if fused_gate else None,
    delta_time_bias=dt_bias.reshape(-1) if fused_gate else None,
    initial_state=state[:, None],
    output_final_state=True,
    use_gate_in_kernel=fused_gate,
    lower_bound=gate_lower_bound if fused_gate else None,
  )
  return jnp.moveaxis(out, 0, 2)[:, :length].astype(jnp.float32), final[:, 0].astype(jnp.float32)
