"""LatentMoE: a float32 router, routed experts in a narrow latent space, a shared expert at full width.

Formulas: K3's report; without a latent size (Kimi-Linear) the routed experts read and write the full width.
N tokens, D hidden, L latent (or D), E experts, k of them a token, F an expert's inner width.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from MaxText.configs.model_config import ModelConfig
from MaxText.layers.activations import gated_activation
from MaxText.layers.linears import (
  for_each_group,
  grouped_matmul,
  linear_weight,
  matmul,
  mlp,
  mlp_weights,
  output_weight,
  pick,
  product,
)
from MaxText.layers.normalizations import norm_weight, rms_norm
from MaxText.weights import Source, Weight, constant, fan_in

GROUPED_MATMULS = ("ragged_dot", "loop", "dense")


def weights(cfg: ModelConfig) -> dict[str, Weight | dict[str, Weight]]:
  """Declares what a MoE layer has once; `expert_weights` declares one expert."""
  d, e = cfg.hidden_size, cfg.num_experts
  declared: dict[str, Weight | dict[str, Weight]] = {
    "router": linear_weight(d, (e,), "gate", ("embed", None)),
    "bias": Weight(
      (e,), (None,), (Source("gate.e_score_correction_bias", (e,), suffix=""),), constant(0.0), float32=True
    ),
  }
  if cfg.latent_size:
    declared["down"] = linear_weight(d, (cfg.latent_size,), "routed_expert_down_proj", ("embed", None), ("block_fp8",))
    declared["up"] = output_weight((cfg.latent_size,), d, "routed_expert_up_proj", (None, "embed"), ("block_fp8",))
    if cfg.latent_norm:
      declared["norm"] = norm_weight(cfg.latent_size, "routed_expert_norm")
  if cfg.num_shared_experts:
    declared["shared"] = mlp_weights(cfg, cfg.num_shared_experts * cfg.moe_intermediate_size, "shared_experts.")
  return declared


def expert_weights(cfg: ModelConfig) -> dict[str, Weight]:
  """Declares one routed expert: wi [L, 2·F] (w1, the gate, beside w3) and wo [F, L] (w2).

  Two dimensions each, and not [L, 2, F]: a TPU would copy all layers' experts into another layout for the product.
  """
  latent, f = cfg.expert_width, cfg.moe_intermediate_size
  return {
    "wi": Weight(
      (latent, 2 * f),
      (None, None),
      (Source("w1", (f, latent), packed=True), Source("w3", (f, latent), packed=True)),
      fan_in(latent),
      assemble=lambda w1, w3: np.concatenate([w1.T, w3.T], axis=1),
      disassemble=lambda wi: (wi[:, :f].T, wi[:, f:].T),
      formats=("block_fp8", "mxfp4"),
    ),
    "wo": linear_weight(f, (latent,), "w2", (None, None), ("block_fp8", "mxfp4")),
  }


def route(cfg: ModelConfig, w: dict, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Chooses experts in true float32: in bfloat16 the choice flips.

  Args:
    x: [N, D].

  Returns:
    (experts [N, k] int32, weights [N, k] float32). The correction bias takes part in the choice only.
  """
  logits = jnp.dot(x.astype(jnp.float32), w["router"].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
  scores = jax.nn.sigmoid(logits)
  _, experts = jax.lax.top_k(scores + w["bias"], cfg.num_experts_per_token)
  chosen = jnp.take_along_axis(scores, experts, axis=-1)
  if cfg.renormalize:
    chosen = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20)
  return checkpoint_name(experts, "router_experts"), checkpoint_name(
    chosen * cfg.routed_scaling_factor, "router_weights"
  )


def routed_experts(
  cfg: ModelConfig,
  w: dict,
  z: jax.Array,
  experts: jax.Array,
  expert_scales: jax.Array,
  layer: jax.Array | int,
) -> jax.Array:
  """This device's share of Σ over a token's experts of scale · w2(act(w1 z, w3 z)).

  Weighted on the experts' output and summed in float32.

  Args:
    w: all layers' experts, as far as this device has them: {"wi": [layers, e, L, 2·F], "wo": [layers, e, F, L]},
      plain or quantised.
    z: [N, L].
    experts: [N, k] int32 in [0, E).
    expert_scales: [N, k] float32.
    layer: which layer's experts.

  Returns:
    [N, L] float32.
  """
  n, k = experts.shape
  f = cfg.moe_intermediate_size
  if cfg.grouped_matmul_implementation == "dense":
    return _dense_experts(cfg, w, z, experts, expert_scales, layer)

  here = cfg.num_experts // cfg.parallel.devices
  chosen = experts.reshape(-1) - cfg.parallel.device_index() * here
  mine = (chosen >= 0) & (chosen < here)
  # Flat over layers, so that a loop over layers takes a group's matrix from the whole stack and copies none.
  w = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), w)
  loop = cfg.grouped_matmul_implementation == "loop"

  def activate(hidden):
    hidden = hidden.astype(z.dtype)
    return gated_activation(cfg, hidden[:, :f], hidden[:, f:])

  def expert(rows, group):
    index = layer * here + group
    return product(activate(product(rows, pick(w["wi"], index))), pick(w["wo"], index))

  if loop and n == 1:
    # One token's experts all differ: there is nothing to sort.
    out = jax.lax.map(lambda group: expert(z, group)[0], jnp.clip(chosen, 0, here - 1))
  else:
    # Rows for other devices' experts are sorted to the end, into no group: they cost nothing.
    chosen = jnp.where(mine, chosen, here)
    order = jnp.argsort(chosen, stable=True)
    group_sizes = jnp.bincount(chosen, length=here + 1)[:here]
    rows = z[order // k]
    if loop:
      out = for_each_group(expert, rows, group_sizes, z.shape[1])
    else:
      sizes_from = (group_sizes, layer * here, cfg.grouped_matmul_implementation)
      out = grouped_matmul(activate(grouped_matmul(rows, w["wi"], *sizes_from)), w["wo"], *sizes_from)
    # Back in the tokens' order, so that a token's sum is taken in the same order whatever else is in the batch.
    out = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
  out = jnp.where(mine[:, None], out, 0).reshape(n, k, -1)
  return jnp.sum(out * expert_scales[..., None], axis=1)


def _dense_experts(cfg, w, z, experts, expert_scales, layer) -> jax.Array:
  """Every expert on every token, the rest of them weighted with zero: for training a tiny model on a CPU."""
  latent = z.shape[1]
  wi, wo = (jax.lax.dynamic_index_in_dim(w[name], layer, 0, keepdims=False).astype(z.dtype) for name in ("wi", "wo"))
  scales = jnp.sum(jax.nn.one_hot(experts, cfg.num_experts) * expert_scales[..., None], axis=1)
  # Two plain products over all experts side by side: several times faster here than one product an expert, most of
  # all backwards. The scale moves before the second product, which is linear.
  hidden = matmul(z, jnp.moveaxis(wi, 0, 1))
  hidden = hidden.reshape(*hidden.shape[:2], 2, -1)
  hidden = gated_activation(cfg, hidden[:, :, 0], hidden[:, :, 1]).astype(jnp.float32) * scales[..., None]
  return jnp.dot(hidden.reshape(len(z), -1), wo.reshape(-1, latent).astype(jnp.float32))


def moe(cfg: ModelConfig, w: dict, experts: dict, x: jax.Array, layer: jax.Array | int) -> jax.Array:
  """The layer: routed experts in the latent space, norm, up-projection, plus the shared expert.

  On many devices the partial sums meet before the norm, which isn't linear: the latents of the routed experts (over
  all devices) and the shared expert's output (over a tensor group) as one collective where both go the same way.

  Args:
    w: this layer's weights (`weights`).
    experts: all layers' experts; see `routed_experts`.
    x: [..., D], normed input.
    layer: this layer's place among `experts`.

  Returns:
    [..., D].
  """
  parallel = cfg.parallel
  tokens = x.reshape(-1, x.shape[-1])
  chosen, scales = route(cfg, w, tokens)
  z = matmul(tokens, w["down"]) if cfg.latent_size else tokens
  z, chosen, scales = parallel.gather_batch((z, chosen, scales))
  y = routed_experts(cfg, experts, z, chosen, scales, layer)
  shared = mlp(cfg, w["shared"], tokens) if cfg.num_shared_experts else None
  if parallel.splits_batch:
    y, shared = parallel.own_batch(parallel.sum_devices(y)), parallel.sum_tensor(shared)
  else:
    y, shared = parallel.sum_devices((y, parallel.once_a_tensor_group(shared)))
  y = checkpoint_name(y, "moe_latent").astype(x.dtype)
  if cfg.latent_size:
    if cfg.latent_norm:
      y = checkpoint_name(rms_norm(y, w["norm"], cfg.rms_norm_eps), "moe_latent_normed")
    y = matmul(y, w["up"])
  if shared is not None:
    y = y + shared
  return y.reshape(x.shape)
