"""LatentMoE: a float32 router, routed experts in a narrow latent space, a shared expert at full width.

Formulas: K3's report; without a latent size (Kimi-Linear) the routed experts read and write the full width.
N tokens, D hidden, L latent (or D), E experts, k of them a token, F an expert's inner width.
"""

from collections.abc import Callable

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
  pick,
  product,
)
from MaxText.layers.normalizations import norm_weight, rms_norm
from MaxText.weights import Source, Weight, constant, fan_in

GROUPED_MATMULS = ("ragged_dot", "pallas", "pallas_interpret", "loop", "dense")

# Most tokens that go through the experts at a time, and most rows (token, expert) of them: what a chunk needs beyond
# its streams is bounded by these, not by its length.
_TOKENS = 8192
_ROWS = 4096


def weights(cfg: ModelConfig) -> dict[str, Weight | dict[str, Weight]]:
  """Declares what a MoE layer has once; `expert_weights` declares one expert."""
  d, e = cfg.hidden_size, cfg.num_experts
  declared: dict[str, Weight | dict[str, Weight]] = {
    "router": linear_weight(d, e, "gate", ("embed", "router" if cfg.parallel.shards_router else None)),
    "bias": Weight(
      (e,), (None,), (Source("gate.e_score_correction_bias", (e,), suffix=""),), constant(0.0), float32=True
    ),
  }
  if cfg.latent_size:
    axis = "latent" if cfg.parallel.shards_latents else None
    size = cfg.latent_size
    declared["down"] = linear_weight(d, size, "routed_expert_down_proj", ("embed", axis), "dense")
    declared["up"] = linear_weight(size, d, "routed_expert_up_proj", (axis, "embed"), "dense")
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
      assemble=lambda w1, w3: np.concatenate([w1, w3]).T,
      disassemble=lambda wi: (wi[:, :f].T, wi[:, f:].T),
      kind="expert",
    ),
    "wo": linear_weight(f, latent, "w2", (None, None), "expert"),
  }


def router_logits(w: dict, x: jax.Array) -> jax.Array:
  """[N, D] -> [N, e], of the experts whose columns this device has. True float32: in bfloat16 a choice flips."""
  return jnp.dot(x.astype(jnp.float32), w["router"].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def route(cfg: ModelConfig, w: dict, x: jax.Array, logits: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
  """Chooses experts.

  Args:
    x: [N, D].
    logits: [N, E] float32, where they are known already.

  Returns:
    (experts [N, k] int32, weights [N, k] float32). The correction bias takes part in the choice only.
  """
  scores = jax.nn.sigmoid(router_logits(w, x) if logits is None else logits)
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
  implementation = cfg.grouped_matmul_implementation

  def activate(hidden):
    return gated_activation(cfg, hidden[:, :f], hidden[:, f:])

  def expert(rows, group):
    index = layer * here + group
    return product(activate(product(rows, pick(w["wi"], index)).astype(z.dtype)), pick(w["wo"], index))

  def in_groups(rows, group_sizes):
    first = layer * here
    hidden = grouped_matmul(rows, w["wi"], group_sizes, first, z.dtype, implementation)
    return grouped_matmul(activate(hidden), w["wo"], group_sizes, first, jnp.float32, implementation)

  if implementation == "loop" and n == 1:
    # One token's experts all differ: there is nothing to sort.
    out = jax.lax.map(lambda group: expert(z, group)[0], jnp.clip(chosen, 0, here - 1))
  else:
    # Rows for other devices' experts are sorted to the end, into no group: they cost nothing.
    chosen = jnp.where(mine, chosen, here)
    order = jnp.argsort(chosen, stable=True)
    group_sizes = jnp.bincount(chosen, length=here + 1)[:here]
    if implementation != "loop" and n * k > _ROWS:
      return _in_row_blocks(in_groups, z, order, group_sizes, expert_scales)
    rows = z[order // k]
    if implementation == "loop":
      out = for_each_group(expert, rows, group_sizes, z.shape[1])
    else:
      out = in_groups(rows, group_sizes)
    # Back in the tokens' order, so that a token's sum is taken in the same order whatever else is in the batch.
    out = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
  out = jnp.where(mine[:, None], out, 0).reshape(n, k, -1)
  return jnp.sum(out * expert_scales[..., None], axis=1)


def _in_row_blocks(
  in_groups: Callable[[jax.Array, jax.Array], jax.Array],
  z: jax.Array,
  order: jax.Array,
  group_sizes: jax.Array,
  expert_scales: jax.Array,
) -> jax.Array:
  """`_ROWS` sorted rows at a time, as many blocks as there are rows for this device: none is dropped, none is idle.

  In the worst case a device is every token's every expert, so arrays of all rows would be tens of times too large. A
  token's sum is taken in the order of its experts.

  Args:
    in_groups: (rows [_ROWS, L], group sizes [e]) -> [_ROWS, L] float32.
    z: [N, L].
    order: [N·k] int32, rows sorted by expert; row r is token r // k.
    group_sizes: [e] int32.
    expert_scales: [N, k] float32.

  Returns:
    [N, L] float32.
  """
  k = expert_scales.shape[1]
  scales = expert_scales.reshape(-1)
  order = jnp.pad(order, (0, _ROWS))
  ends = jnp.cumsum(group_sizes)
  starts = ends - group_sizes

  def body(i, y):
    first = i * _ROWS
    rows = jax.lax.dynamic_slice_in_dim(order, first, _ROWS)
    sizes = jnp.clip(ends - first, 0, _ROWS) - jnp.clip(starts - first, 0, _ROWS)
    out = in_groups(z[rows // k], sizes)
    live = jnp.arange(_ROWS) < ends[-1] - first
    return y.at[rows // k].add(jnp.where(live[:, None], out * scales[rows][:, None], 0))

  return jax.lax.fori_loop(0, -(-ends[-1] // _ROWS), body, jnp.zeros(z.shape, jnp.float32))


def _dense_experts(cfg, w, z, experts, expert_scales, layer) -> jax.Array:
  """Every expert on every token, the rest of them weighted with zero: for training a tiny model on a CPU."""
  latent = z.shape[1]
  wi, wo = (jax.lax.dynamic_index_in_dim(w[name], layer, 0, keepdims=False).astype(z.dtype) for name in ("wi", "wo"))
  scales = jnp.sum(jax.nn.one_hot(experts, cfg.num_experts) * expert_scales[..., None], axis=1)
  # Two plain products over all experts side by side: several times faster here than one product an expert, most of
  # all backwards. The scale moves before the second product, which is linear.
  hidden = matmul(z, jnp.moveaxis(wi, 0, 1).reshape(latent, -1)).reshape(len(z), cfg.num_experts, 2, -1)
  hidden = gated_activation(cfg, hidden[:, :, 0], hidden[:, :, 1]).astype(jnp.float32) * scales[..., None]
  return jnp.dot(hidden.reshape(len(z), -1), wo.reshape(-1, latent).astype(jnp.float32))


def moe(cfg: ModelConfig, w: dict, experts: dict, x: jax.Array, valid: jax.Array, layer: jax.Array | int) -> jax.Array:
  """The layer: routed experts in the latent space, norm, up-projection, plus the shared expert.

  On many devices the partial sums meet before the norm, which isn't linear. With the latent projections whole on every
  device and all tokens on each, that is one collective: the latents of the routed experts (over all devices) and the
  shared expert's output (over a tensor group) travel together.

  Args:
    w: this layer's weights (`weights`).
    experts: all layers' experts; see `routed_experts`.
    x: [n, D], normed input, this device's tokens.
    valid: [n] bool; other tokens are padding: no expert computes them, and their result means nothing.
    layer: this layer's place among `experts`.

  Returns:
    [n, D].
  """
  return in_parts(cfg, lambda x, valid: _moe(cfg, w, experts, x, valid, layer), x, valid)


def in_parts(cfg: ModelConfig, function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
  """Applies a function of tokens [m, …] -> [m, …] to `_TOKENS` of all devices' tokens at a time.

  Args:
    arrays: [n, …], of this device's tokens.
  """
  n = len(arrays[0])
  parts = -(-n * cfg.parallel.token_ways // _TOKENS)
  if parts == 1:
    return function(*arrays)
  padding = -n % parts
  padded = (jnp.pad(a, ((0, padding), *((0, 0),) * (a.ndim - 1))) for a in arrays)
  out = jax.lax.map(lambda part: function(*part), tuple(a.reshape(parts, -1, *a.shape[1:]) for a in padded))
  return out.reshape(-1, *out.shape[2:])[:n]


def _moe(cfg: ModelConfig, w: dict, experts: dict, x: jax.Array, valid: jax.Array, layer: jax.Array | int) -> jax.Array:
  parallel = cfg.parallel
  every = parallel.gather_tokens(x)
  sharded = bool(cfg.latent_size) and parallel.shards_latents
  columns = {}  # what this device knows a part of
  if parallel.shards_router:
    columns["logits"] = router_logits(w, every)
  if sharded:
    columns["z"] = matmul(every, w["down"])
  known = dict(zip(columns, parallel.whole_rows(tuple(columns.values())), strict=True)) if columns else {}
  chosen, scales = route(cfg, w, x, known["logits"]) if parallel.shards_router else route(cfg, w, x)
  chosen = jnp.where(valid[:, None], chosen, cfg.num_experts)
  if sharded:
    z = known["z"]
  else:
    z = matmul(x, w["down"]) if cfg.latent_size else x
  # Partial sums travel in the activations' dtype, as everywhere.
  y = routed_experts(cfg, experts, *parallel.gather_for_experts((z, chosen, scales)), layer).astype(x.dtype)
  shared = mlp(cfg, w["shared"], every) if cfg.num_shared_experts else None

  if sharded:
    y = _latent_norm(cfg, w, parallel.sum_experts(y))
    partial = matmul(parallel.own_columns(y), w["up"])
    return parallel.sum_tokens(partial if shared is None else partial + shared)
  if parallel.splits_batch or parallel.splits_tokens:
    y = parallel.sum_experts(y)
    shared = None if shared is None else parallel.sum_tokens(shared)
  else:
    y, shared = parallel.sum_devices((y, None if shared is None else parallel.once_a_tensor_group(shared)))
  if cfg.latent_size:
    y = matmul(_latent_norm(cfg, w, y), w["up"])
  return y if shared is None else y + shared


def _latent_norm(cfg: ModelConfig, w: dict, y: jax.Array) -> jax.Array:
  y = checkpoint_name(y, "moe_latent")
  return checkpoint_name(rms_norm(y, w["norm"], cfg.rms_norm_eps), "moe_latent_normed") if cfg.latent_norm else y
