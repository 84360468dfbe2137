"""AttnRes: each sublayer reads a softmax mixture of the running stream and the snapshots sealed before it.

The stream P is the sum of sublayer outputs since the last seal. Layer L (from zero) with L mod block_size = 0 seals P
as a snapshot after its attention has read its mixture. It is local to a token, so decoding keeps no cache of it.
Without `attn_res_block_size` the same functions give ordinary residuals.

Every function takes the layer's index as a number or a traced scalar, and so serves a loop and an unrolled model alike.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from MaxText.configs.model_config import ModelConfig
from MaxText.layers.normalizations import norm_weight
from MaxText.weights import Source, Weight, fan_in

LayerIndex = int | jax.Array


class Residual(NamedTuple):
  """What flows between layers.

  Attributes:
    stream: P, [..., D] activation dtype.
    blocks: [n, ..., D], the snapshots; those not sealed yet are zero and never read. n = 0 for ordinary residuals.
  """

  stream: jax.Array
  blocks: jax.Array


def mix_weights(cfg: ModelConfig, name: str) -> dict[str, Weight]:
  """Declares one mixture: a norm [D] and a projection to one score [D]. Empty without AttnRes."""
  if not cfg.attn_res_block_size:
    return {}
  d = cfg.hidden_size
  return {
    "norm": norm_weight(d, f"{name}_norm"),
    "proj": Weight((d,), (None,), (Source(f"{name}_proj", (1, d)),), fan_in(d)),
  }


def start(cfg: ModelConfig, embedded: jax.Array) -> Residual:
  """The residual before layer 0: the embedding [..., D] as the stream, nothing sealed."""
  return Residual(embedded, jnp.zeros((cfg.num_residual_blocks, *embedded.shape), embedded.dtype))


def mix(cfg: ModelConfig, w: dict, residual: Residual, sealed: LayerIndex) -> jax.Array:
  """softmax_i(Σ_d V_i·rsqrt(mean V_i² + eps)·norm·proj)-weighted sum of the sources V = [blocks…, stream], float32.

  Args:
    w: {"norm": [D], "proj": [D]}, or empty for ordinary residuals: then the stream itself.
    sealed: how many blocks count as sources.

  Returns:
    [..., D] in the stream's dtype.
  """
  if not w:
    return residual.stream
  sources = jnp.concatenate([residual.blocks, residual.stream[None]]).astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(sources * sources, axis=-1) + cfg.rms_norm_eps)
  direction = w["norm"].astype(jnp.float32) * w["proj"].astype(jnp.float32)
  scores = jnp.sum(sources * direction, axis=-1) * scale
  index = jnp.arange(sources.shape[0])
  valid = (index < sealed) | (index == sources.shape[0] - 1)
  scores = jnp.where(valid.reshape(-1, *[1] * (scores.ndim - 1)), scores, -jnp.inf)
  return jnp.sum(jax.nn.softmax(scores, axis=0)[..., None] * sources, axis=0).astype(residual.stream.dtype)


def attention_input(cfg: ModelConfig, w: dict, residual: Residual, layer: LayerIndex) -> jax.Array:
  """What layer `layer`'s attention reads (before its norm)."""
  return mix(cfg, w, residual, _sealed_before(cfg, layer))


def add_attention(cfg: ModelConfig, residual: Residual, layer: LayerIndex, out: jax.Array) -> Residual:
  """Seals the stream where a block begins, then adds the attention's output to it (or starts it anew with that)."""
  block_size = cfg.attn_res_block_size
  if not block_size:
    return residual._replace(stream=residual.stream + out)
  seal = layer % block_size == 0
  block = layer // block_size
  kept = jax.lax.dynamic_index_in_dim(residual.blocks, block, 0, keepdims=False)
  blocks = jax.lax.dynamic_update_index_in_dim(residual.blocks, jnp.where(seal, residual.stream, kept), block, 0)
  return Residual(jnp.where(seal, out, residual.stream + out), blocks)


def feed_forward_input(cfg: ModelConfig, w: dict, residual: Residual, layer: LayerIndex) -> jax.Array:
  """What layer `layer`'s feed-forward reads (before its norm)."""
  return mix(cfg, w, residual, _sealed_before(cfg, layer + 1))


def add_feed_forward(residual: Residual, out: jax.Array) -> Residual:
  return residual._replace(stream=residual.stream + out)


def output(cfg: ModelConfig, w: dict, residual: Residual) -> jax.Array:
  """What the head reads (before its norm): the mixture of all blocks and the stream."""
  return mix(cfg, w, residual, cfg.num_residual_blocks)


def _sealed_before(cfg: ModelConfig, layer: LayerIndex) -> LayerIndex:
  """Number of blocks that layers 0 … layer-1 have sealed."""
  if not cfg.attn_res_block_size:
    return 0
  return (layer + cfg.attn_res_block_size - 1) // cfg.attn_res_block_size
