"""Single layers against float64 numpy, written from the model's formulas, and against outside packages.

Tolerances are relative to the result's scale: float32 rounds at 6e-8, and the sums here are a few hundred terms long.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _models import assert_close, furthest, normal, rng, small_config

from MaxText.layers import (
  activations,
  attention_residuals,
  linears,
  moe,
)
from MaxText.layers.attention_residuals import Residual
from MaxText.layers.normalizations import rms_norm


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


# Activations


def situ64(g, u, beta=4.0, linear_beta=25.0):
  return beta * np.tanh(g / beta) * sigmoid(g) * linear_beta * np.tanh(u / linear_beta)


def test_situ_is_its_formula_far_beyond_both_clamps():
  values = np.linspace(-80, 80, 161)
  g, u = (x.ravel() for x in np.meshgrid(values, values))
  ours = activations.situ(jnp.asarray(g, jnp.float32), jnp.asarray(u, jnp.float32), 4.0, 25.0)
  # Values reach 100.
  assert_close(ours, situ64(g, u), 100 * 1e-6, "situ")
  assert furthest(ours, 4 * np.tanh(g / 4) * sigmoid(g) * u) > 1, "the up branch's clamp"


@pytest.mark.parametrize("act", ["situ", "silu"])
def test_activation_of_bfloat16_is_rounded_once(act):
  g, u = (jnp.asarray(x, jnp.bfloat16) for x in rng().standard_normal((2, 4096)) * 4)
  g64, u64 = (np.asarray(x, np.float64) for x in (g, u))
  expected = situ64(g64, u64) if act == "situ" else g64 * sigmoid(g64) * u64
  ours = activations.gated_activation(small_config(hidden_act=act), g, u)
  assert ours.dtype == jnp.bfloat16
  # Half a unit in the last of 8 bits, and a little for the float32 arithmetic before it.
  assert (np.abs(np.asarray(ours, np.float64) - expected) <= 2.0**-8 * 1.001 * np.abs(expected)).all()


def test_unknown_activation_is_refused():
  with pytest.raises(ValueError, match=r"gelu.*situ, silu"):
    activations.gated_activation(small_config(hidden_act="gelu"), jnp.ones(2), jnp.ones(2))


# RMSNorm


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm_adds_its_epsilon_to_the_mean(eps):
  generator = rng()
  # Mean squares around the epsilon, where its place and size count.
  x, x64 = normal(generator, 16, 128, scale=3e-3)
  w, w64 = normal(generator, 128)
  expected = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + eps) * w64
  assert_close(rms_norm(x, w, eps), expected, 1e-5, "rms_norm")
  other = x64 / np.sqrt((x64**2).sum(-1, keepdims=True) + eps) * w64 * 128**0.5
  assert furthest(expected, other) > 0.1, "this input tells mean from sum"


def test_rms_norm_of_bfloat16_casts_before_the_weight():
  generator = rng()
  x, w = (jnp.asarray(generator.standard_normal(s), jnp.bfloat16) for s in ((8, 64), (64,)))
  x64 = np.asarray(x, np.float64)
  normed = (x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5)).astype(ml_dtypes.bfloat16)
  expected = (normed.astype(np.float32) * np.asarray(w, np.float32)).astype(ml_dtypes.bfloat16)
  ours = np.asarray(rms_norm(x, w, 1e-5))
  assert ours.dtype == ml_dtypes.bfloat16
  # Bit for bit but where float32 and float64 fall on different sides of a rounding boundary: none, or next to none.
  assert (ours != expected).mean() < 0.01
  assert_close(ours, expected.astype(np.float64), 0.04, "one bfloat16 step at 4")


# AttnRes


def mix64(sources, norm, proj, eps=1e-5):
  """sources [n, ..., D]."""
  scores = (sources / np.sqrt((sources**2).mean(-1, keepdims=True) + eps) * norm * proj).sum(-1)
  p = np.exp(scores - scores.max(0))
  p /= p.sum(0)
  return (p[..., None] * sources).sum(0)


@pytest.mark.parametrize("sealed", [0, 1, 2, 3])
def test_mix_weighs_the_sealed_blocks_and_the_stream(sealed):
  generator = rng(sealed)
  cfg = small_config()
  stream, stream64 = normal(generator, 5, 64)
  blocks, blocks64 = normal(generator, 3, 5, 64, scale=3.0)
  norm, norm64 = normal(generator, 64)
  proj, proj64 = normal(generator, 64, scale=0.3)
  # Blocks that aren't sealed yet are never sources, whatever they hold.
  blocks = blocks.at[sealed:].set(1e6)
  expected = mix64(np.concatenate([blocks64[:sealed], stream64[None]]), norm64, proj64)
  for count in (sealed, jnp.asarray(sealed)):
    ours = attention_residuals.mix(cfg, {"norm": norm, "proj": proj}, Residual(stream, blocks), count)
    assert_close(ours, expected, 1e-5, "mix")


def test_mix_epsilon_counts_for_small_streams():
  generator = rng()
  cfg = small_config()
  stream, stream64 = normal(generator, 5, 64, scale=2e-3)
  blocks, blocks64 = normal(generator, 1, 5, 64, scale=2e-3)
  (norm, norm64), (proj, proj64) = normal(generator, 64), normal(generator, 64)
  ours = attention_residuals.mix(cfg, {"norm": norm, "proj": proj}, Residual(stream, blocks), 1)
  sources = np.concatenate([blocks64, stream64[None]])
  assert_close(ours, mix64(sources, norm64, proj64), 1e-8, "mix")
  assert furthest(ours, mix64(sources, norm64, proj64, eps=1e-6)) > 1e-6


@pytest.mark.parametrize("traced", [False, True])
def test_residual_flow_over_layers_is_the_formula(traced):
  """Seven layers with blocks of three: which snapshots exist, when the stream starts anew, what is never added back."""
  generator = rng(7)
  cfg = small_config(attn_res_block_size=3, layers=(("kda", "moe"),) * 7)
  x, p64 = normal(generator, 2, 64)
  residual, blocks64 = attention_residuals.start(cfg, x), []
  weights = [[normal(generator, 64, scale=0.5) for _ in range(4)] for _ in range(7)]

  def pair(norm, proj):
    return {"norm": norm[0], "proj": proj[0]}

  for layer in range(7):
    index = jnp.asarray(layer) if traced else layer
    attention_norm, attention_proj, mlp_norm, mlp_proj = weights[layer]
    h = attention_residuals.attention_input(cfg, pair(attention_norm, attention_proj), residual, index)
    expected = mix64(np.stack([*blocks64, p64]), attention_norm[1], attention_proj[1]) if blocks64 else p64
    assert_close(h, expected, 2e-5, f"attention input {layer}")
    a = np.tanh(expected) + layer
    residual = attention_residuals.add_attention(cfg, residual, index, jnp.asarray(a, jnp.float32))
    if layer % 3 == 0:
      blocks64.append(p64)
      p64 = a
    else:
      p64 = p64 + a
    h = attention_residuals.feed_forward_input(cfg, pair(mlp_norm, mlp_proj), residual, index)
    expected = mix64(np.stack([*blocks64, p64]), mlp_norm[1], mlp_proj[1])
    assert_close(h, expected, 2e-5, f"feed-forward input {layer}")
    m = np.sin(expected)
    residual = attention_residuals.add_feed_forward(residual, jnp.asarray(m, jnp.float32))
    p64 = p64 + m
  assert len(blocks64) == cfg.num_residual_blocks == 3
  (norm, norm64), (proj, proj64) = normal(generator, 64), normal(generator, 64)
  out = attention_residuals.output(cfg, {"norm": norm, "proj": proj}, residual)
  assert_close(out, mix64(np.stack([*blocks64, p64]), norm64, proj64), 2e-5, "output")


def test_without_blocks_residuals_are_ordinary():
  cfg = small_config(attn_res_block_size=0)
  assert attention_residuals.mix_weights(cfg, "mlp_res") == {}
  residual = attention_residuals.start(cfg, jnp.ones((2, 64)))
  residual = attention_residuals.add_attention(cfg, residual, 0, jnp.full((2, 64), 2.0))
  residual = attention_residuals.add_feed_forward(residual, jnp.full((2, 64), 4.0))
  for read in (attention_residuals.attention_input, attention_residuals.feed_forward_input):
    np.testing.assert_array_equal(read(cfg, {}, residual, 1), 7.0)
  np.testing.assert_array_equal(attention_residuals.output(cfg, {}, residual), 7.0)


# Router


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_chooses_with_the_bias_and_weighs_without(renormalize):
  generator = rng(3)
  cfg = small_config(
    num_experts=16, num_experts_per_token=4, routed_scaling_factor=2.446, renormalize=renormalize, hidden_size=64
  )
  x, x64 = normal(generator, 40, 64)
  router, router64 = normal(generator, 64, 16, scale=0.25)
  bias, bias64 = normal(generator, 16, scale=0.3)
  scores = sigmoid(x64 @ router64)
  chosen = np.sort(np.argsort(-(scores + bias64), axis=-1)[:, :4], axis=-1)
  assert (chosen != np.sort(np.argsort(-scores, axis=-1)[:, :4], axis=-1)).any(), "here the bias counts"
  weights = np.take_along_axis(scores, chosen, -1)
  if renormalize:
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
  experts, ours = moe.route(cfg, {"router": router, "bias": bias}, x)
  order = np.argsort(experts, axis=-1)
  np.testing.assert_array_equal(np.take_along_axis(np.asarray(experts), order, -1), chosen)
  assert ours.dtype == jnp.float32
  assert_close(np.take_along_axis(np.asarray(ours), order, -1), weights * 2.446, 1e-6, "weights")


def test_router_sees_bfloat16_inputs_in_float32():
  generator = rng(4)
  cfg = small_config(num_experts=64, num_experts_per_token=8)
  x, router = (jnp.asarray(generator.standard_normal(s), jnp.bfloat16) for s in ((64, 64), (64, 64)))
  scores = sigmoid(np.asarray(x, np.float64) @ np.asarray(router, np.float64) / 8)
  # Powers of two scale exactly in bfloat16.
  experts, _ = moe.route(cfg, {"router": router / 8, "bias": jnp.zeros(64)}, x)
  np.testing.assert_array_equal(np.sort(experts, -1), np.sort(np.argsort(-scores, -1)[:, :8], -1))
  rounded = np.asarray((x @ (router / 8)), np.float64)
  assert (np.sort(np.argsort(-rounded, -1)[:, :8], -1) != np.sort(experts, -1)).any(), "bfloat16 logits would flip some"


# Experts


def sizes_of(generator, rows, groups):
  """Random group sizes with at least a third of the groups empty."""
  live = generator.choice(groups, size=max(1, groups * 2 // 3), replace=False)
  return np.bincount(generator.choice(live, size=rows), minlength=groups).astype(np.int32)


@pytest.mark.parametrize("implementation", ["loop", "ragged_dot"])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 100])
def test_grouped_matmul_multiplies_each_group_by_its_matrix(implementation, rows):
  generator = rng(rows)
  groups, first, total = 6, 4, 13
  x, x64 = normal(generator, rows, 24)
  # Matrices that aren't meant hold NaN: they touch nothing.
  w, w64 = normal(generator, total, 24, 20)
  if implementation == "loop":
    w = w.at[:first].set(jnp.nan).at[first + groups :].set(jnp.nan)
  # Traced, as a loop over layers passes it.
  function = jax.jit(functools.partial(linears.grouped_matmul, out_dtype=jnp.float32, implementation=implementation))
  for sizes in (sizes_of(generator, rows, groups), np.eye(1, groups, 5, dtype=np.int32)[0] * rows):
    group_of_row = np.repeat(np.arange(groups), sizes)
    expected = np.einsum("mi,mio->mo", x64, w64[first + group_of_row])
    ours = function(x, w, jnp.asarray(sizes), jnp.asarray(first))
    assert ours.dtype == jnp.float32
    assert_close(ours, expected, 2e-5, f"{implementation} {sizes}")


def test_ragged_dot_on_one_layers_matrices_alone():
  generator = rng(1)
  (x, x64), (w, w64) = normal(generator, 30, 24), normal(generator, 6, 24, 20)
  sizes = sizes_of(generator, 30, 6)
  ours = linears.grouped_matmul(x, w, jnp.asarray(sizes), 0, jnp.float32, "ragged_dot")
  assert_close(ours, np.einsum("mi,mio->mo", x64, w64[np.repeat(np.arange(6), sizes)]), 2e-5, "ragged_dot")


def test_unknown_grouped_matmul_is_refused():
  with pytest.raises(ValueError, match=r"megablox.*ragged_dot.*loop"):
    linears.grouped_matmul(jnp.ones((2, 2)), jnp.ones((1, 2, 2)), jnp.asarray([2]), 0, jnp.float32, "megablox")


@pytest.mark.parametrize("implementation", sorted({*moe.GROUPED_MATMULS} - {"pallas"}))
def test_routed_experts_are_weighted_on_their_output(implementation):
  generator = rng(5)
  cfg = small_config(num_experts=8, num_experts_per_token=3, grouped_matmul_implementation=implementation)
  n, latent, f, layer = 33, 32, 32, 1
  z, z64 = normal(generator, n, latent)
  wi, wi64 = normal(generator, 3, 8, latent, 2, f, scale=0.5)
  wo, wo64 = normal(generator, 3, 8, f, latent, scale=0.2)
  # Experts 2 and 5 are never chosen.
  experts = np.stack([generator.choice([0, 1, 3, 4, 6, 7], size=3, replace=False) for _ in range(n)]).astype(np.int32)
  scales, scales64 = normal(generator, n, 3)
  expected = np.zeros((n, latent))
  for token in range(n):
    for e, scale in zip(experts[token], scales64[token], strict=True):
      hidden = np.einsum("l,lcf->cf", z64[token], wi64[layer, e])
      expected[token] += scale * (situ64(hidden[0], hidden[1]) @ wo64[layer, e])
  w = {"wi": wi.reshape(*wi.shape[:3], -1), "wo": wo}
  ours = moe.routed_experts(cfg, w, z, jnp.asarray(experts), scales, jnp.asarray(layer))
  assert ours.dtype == jnp.float32
  assert_close(ours, expected, 1e-4, implementation)  # values reach 50


def test_whole_moe_layer_is_the_formula():
  """The order of latent projections, norm and shared expert, at full width and in a latent space."""
  generator = rng(6)
  for latent in (32, 0):
    cfg = small_config(latent_size=latent, latent_norm=bool(latent), num_shared_experts=2, routed_scaling_factor=2.446)
    width = latent or 64
    made = {
      "router": normal(generator, 64, 8, scale=0.2),
      "bias": normal(generator, 8, scale=0.2),
      "wi": normal(generator, 1, 8, width, 2, 32, scale=0.2),
      "wo": normal(generator, 1, 8, 32, width, scale=0.01),  # small sums, where the norm's epsilon counts
      "shared_wi_0": normal(generator, 64, 64, scale=0.1),
      "shared_wi_1": normal(generator, 64, 64, scale=0.1),
      "shared_wo": normal(generator, 64, 64, scale=0.1),
    }
    if latent:
      made |= {
        "down": normal(generator, 64, latent, scale=0.1),
        "up": normal(generator, latent, 64, scale=0.2),
        "norm": normal(generator, latent),
      }
    w32, w = ({k: v[i] for k, v in made.items()} for i in (0, 1))
    x, x64 = normal(generator, 2, 10, 64)
    tokens = x64.reshape(-1, 64)
    scores = sigmoid(tokens @ w["router"])
    chosen = np.argsort(-(scores + w["bias"]), -1)[:, :2]
    z = tokens @ w["down"] if latent else tokens
    y = np.zeros((20, width))
    for t in range(20):
      for e in chosen[t]:
        hidden = np.einsum("l,lcf->cf", z[t], w["wi"][0, e])
        y[t] += scores[t, e] / scores[t, chosen[t]].sum() * 2.446 * (situ64(*hidden) @ w["wo"][0, e])
    if latent:
      y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * w["norm"] @ w["up"]
    expected = y + situ64(tokens @ w["shared_wi_0"], tokens @ w["shared_wi_1"]) @ w["shared_wo"]
    shared = {name: w32[f"shared_{name}"] for name in ("wi_0", "wi_1", "wo")}
    experts = {"wi": w32["wi"].reshape(*w32["wi"].shape[:3], -1), "wo": w32["wo"]}
    every = jnp.ones(20, bool)
    ours = moe.moe(cfg, w32 | {"shared": shared}, experts, x.reshape(20, 64), every, 0)
    assert_close(ours, expected, 2e-5, f"latent {latent}")
