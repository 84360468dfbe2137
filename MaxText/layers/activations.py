"""The gated activations of the family, chosen by the configuration's `hidden_act`."""

import jax
import jax.numpy as jnp

from MaxText.configs.model_config import ModelConfig

SUPPORTED = ("situ", "silu")


def situ(gate: jax.Array, up: jax.Array, beta: float, linear_beta: float) -> jax.Array:
  """SiTU: [β·tanh(g/β)·sigmoid(g)] · [β_lin·tanh(u/β_lin)] in float32 (K3's report).

  The sigmoid takes the raw gate; both branches are softly clamped, at ±β and ±β_lin.
  """
  g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
  return (beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g)) * (linear_beta * jnp.tanh(u / linear_beta))


def gated_activation(cfg: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
  """The model's activation of (gate, up), each [..., F]; float32 inside, the result in the gate's dtype.

  Raises:
    ValueError: `hidden_act` is not one of `SUPPORTED`.
  """
  if cfg.hidden_act == "situ":
    return situ(gate, up, cfg.situ_beta, cfg.situ_linear_beta).astype(gate.dtype)
  if cfg.hidden_act == "silu":
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)
  raise ValueError(f"hidden_act={cfg.hidden_act!r} is unknown; supported: {', '.join(SUPPORTED)}")
