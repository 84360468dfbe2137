"""Plausible mistakes, each made on purpose: the tolerances of tests/test_golden.py tell them from the right model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _golden import (
  BF16_FACTOR,
  BF16_RMS,
  LOGITS,
  assert_layers_close,
  prompts,
  root_mean_square,
  trace,
)
from _models import (
  empty_cache,
  fresh_entry_points,
  furthest,
  golden,
  golden_arrays,
  load,
  run_decode,
  run_prefill,
)

from kda_decode import reference
from MaxText import mxfp4
from MaxText.layers import activations, attention_kda, attention_mla, attention_residuals, moe


def _situ_without_up_clamp(gate, up, beta, linear_beta):
  return beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate) * up


def _situ_sigmoid_of_clamped_gate(gate, up, beta, linear_beta):
  clamped = beta * jnp.tanh(gate / beta)
  return clamped * jax.nn.sigmoid(clamped) * linear_beta * jnp.tanh(up / linear_beta)


def _log_decay_per_channel(decay, a_log, dt_bias, gate_lower_bound):
  """The release pads A_log to the head size, which invites taking it for one value a channel."""
  rate = jnp.exp(jnp.pad(a_log, (0, decay.shape[-1] - a_log.shape[0])))
  x = decay + dt_bias
  return -rate * jax.nn.softplus(x) if gate_lower_bound is None else gate_lower_bound * jax.nn.sigmoid(rate * x)


def _log_decay_bias_outside(decay, a_log, dt_bias, gate_lower_bound):
  x = jnp.exp(a_log)[:, None] * decay + dt_bias
  return -jax.nn.softplus(x) if gate_lower_bound is None else gate_lower_bound * jax.nn.sigmoid(x)


def _with_eps(eps):
  def rms_norm(x, weight, _):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight

  return rms_norm


def _tail_normed_too(cfg, w, x):
  latent, tail = jnp.split(attention_mla.matmul(x, w["kv_a"]), [cfg.kv_lora_rank], axis=-1)
  norm = attention_mla.rms_norm
  return jnp.concatenate([norm(latent, w["kv_a_norm"], 1e-6), norm(tail, jnp.ones(tail.shape[-1]), 1e-6)], axis=-1)


def _bias_in_the_weights(cfg, w, x):
  scores = jax.nn.sigmoid(x @ w["router"]) + w["bias"]
  chosen, experts = jax.lax.top_k(scores, cfg.num_experts_per_token)
  return experts, cfg.routed_scaling_factor * chosen / jnp.sum(chosen, axis=-1, keepdims=True)


def _choice_without_bias(cfg, w, x):
  chosen, experts = jax.lax.top_k(jax.nn.sigmoid(x @ w["router"]), cfg.num_experts_per_token)
  return experts, cfg.routed_scaling_factor * chosen / jnp.sum(chosen, axis=-1, keepdims=True)


def _mixture_of_normed_sources(cfg, w, residual, sealed):
  sources = jnp.concatenate([residual.blocks, residual.stream[None]])
  normed = sources * jax.lax.rsqrt(jnp.mean(sources * sources, axis=-1, keepdims=True) + cfg.rms_norm_eps)
  scores = jnp.sum(normed * w["norm"] * w["proj"], axis=-1)
  index = jnp.arange(sources.shape[0]).reshape(-1, *[1] * (scores.ndim - 1))
  scores = jnp.where((index < sealed) | (index == sources.shape[0] - 1), scores, -jnp.inf)
  return jnp.sum(jax.nn.softmax(scores, axis=0)[..., None] * normed, axis=0)


def _sealed_too_early(cfg, w, residual, layer):
  return attention_residuals.mix(cfg, w, residual, layer // cfg.attn_res_block_size + 1)


_ORIGINAL_MIX = attention_residuals.mix


def _unmasked_mixture(cfg, w, residual, sealed):
  return _ORIGINAL_MIX(cfg, w, residual, residual.blocks.shape[0])


MISTAKES = {
  # mla
  "scores scaled without the tail": ("k3-a", attention_mla, "_scale", lambda cfg: cfg.qk_nope_head_dim**-0.5),
  "latent norms with the other epsilon": ("k3-a", attention_mla, "LATENT_NORM_EPS", 1e-5),
  "latent norm with the other epsilon": ("kl-a", attention_mla, "LATENT_NORM_EPS", 1e-5),
  "the tail normed too": ("k3-a", attention_mla, "_latents", _tail_normed_too),
  "no output gate of MLA": (
    "k3-a",
    attention_mla,
    "_gated_output",
    lambda cfg, w, x, out: attention_mla.matmul(out.reshape(*out.shape[:-2], -1), w["o"]),
  ),
  # kda
  "q and k normalised with the epsilon on the mean": (
    "k3-a",
    reference,
    "l2norm",
    lambda x: x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6 * x.shape[-1]),
  ),
  "A_log per channel": ("k3-a", reference, "log_decay", _log_decay_per_channel),
  "dt_bias outside the scale": ("k3-a", reference, "log_decay", _log_decay_bias_outside),
  "A_log per channel, softplus": ("kl-a", reference, "log_decay", _log_decay_per_channel),
  "taps of the convolution turned round": (
    "k3-a",
    reference,
    "causal_conv",
    lambda taps, weight: jax.nn.silu(sum(weight[:, -1 - i] * tap for i, tap in enumerate(taps))),
  ),
  "no SiLU after the convolution": (
    "k3-a",
    reference,
    "causal_conv",
    lambda taps, weight: sum(weight[:, i] * tap for i, tap in enumerate(taps)),
  ),
  "no epsilon in the read-out's norm": (
    "k3-a",
    reference,
    "gated_rms_norm",
    lambda o, gate, weight, eps: _with_eps(0.0)(o, weight, eps) * jax.nn.sigmoid(gate),
  ),
  "SiLU as the output gate of KDA": (
    "k3-a",
    reference,
    "gated_rms_norm",
    lambda o, gate, weight, eps: _with_eps(eps)(o, weight, eps) * jax.nn.silu(gate),
  ),
  # feed-forward
  "no clamp of SiTU's up branch": ("k3-a", activations, "situ", _situ_without_up_clamp),
  "SiTU's sigmoid takes the clamped gate": ("k3-a", activations, "situ", _situ_sigmoid_of_clamped_gate),
  "routed_expert_norm with the other epsilon": ("k3-a", moe, "rms_norm", _with_eps(1e-6)),
  "the router's bias in the weights": ("k3-a", moe, "route", _bias_in_the_weights),
  "experts chosen without the bias": ("kl-a", moe, "route", _choice_without_bias),
  # residuals
  "a mixture of normalised sources": ("k3-a", attention_residuals, "mix", _mixture_of_normed_sources),
  "unsealed snapshots take part in the mixture": ("k3-a", attention_residuals, "mix", _unmasked_mixture),
  "a snapshot sealed before attention has read its mixture": (
    "k3-a",
    attention_residuals,
    "attention_input",
    _sealed_too_early,
  ),
  "no mixture before the head": ("k3-a", attention_residuals, "output", lambda cfg, w, residual: residual.stream),
}

# Those that the bound on bfloat16 tells as well.
GROSS = {
  "no output gate of MLA",
  "A_log per channel",
  "A_log per channel, softplus",
  "dt_bias outside the scale",
  "taps of the convolution turned round",
  "no SiLU after the convolution",
  "no epsilon in the read-out's norm",
  "SiLU as the output gate of KDA",
  "experts chosen without the bias",
  "a mixture of normalised sources",
  "no mixture before the head",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_moves_the_prefill_logits_beyond_the_tolerance(mistake, monkeypatch):
  name, owner, attribute, wrong = MISTAKES[mistake]
  cfg, params = golden(name)
  monkeypatch.setattr(owner, attribute, wrong)
  prefill, _ = fresh_entry_points()
  tokens = jnp.asarray(prompts(name, 31))
  logits, _ = prefill(cfg, params, tokens, jnp.full(2, 31, jnp.int32), empty_cache(cfg, 2))
  expected = golden_arrays(name)["logits_31"]
  assert furthest(logits, expected) > 2 * LOGITS
  if mistake in GROSS:
    assert root_mean_square(logits, expected) > 2 * BF16_FACTOR * BF16_RMS[name][31]


_DELTA_STEP = reference.delta_step


def _read_before_update(state, q, k, v, g, beta):
  _, new = _DELTA_STEP(state, q, k, v, g, beta)
  return jnp.einsum("...kv,...k->...v", state * jnp.exp(g)[..., None], q), new


def _transposed_state(state, *inputs):
  return _DELTA_STEP(jnp.swapaxes(state, -1, -2), *inputs)


def _history_newest_first(x, history, weight):
  y = reference.causal_conv([*(history[:, i] for i in reversed(range(weight.shape[1] - 1))), x], weight)
  return y, jnp.concatenate([history[:, 1:], x[:, None]], axis=1)


DECODE_MISTAKES = {
  "the state is read before its update": ("delta_step", _read_before_update),
  "the state is read transposed": ("delta_step", _transposed_state),
  "the history is read newest first": ("short_conv_step", _history_newest_first),
}


@pytest.mark.parametrize("mistake", DECODE_MISTAKES)
def test_a_mistake_moves_the_decode_logits_beyond_the_tolerance(mistake, monkeypatch):
  cfg, params = golden("k3-a")
  monkeypatch.setattr(reference, *DECODE_MISTAKES[mistake])
  _, step = fresh_entry_points()
  logits, _ = run_decode(cfg, params, prompts("k3-a", 31), step=step)
  assert furthest(logits, golden_arrays("k3-a")["logits_31"]) > 2 * LOGITS


def test_swapped_nibbles_move_the_logits_beyond_the_tolerance(monkeypatch):
  unpack = mxfp4.unpack
  monkeypatch.setattr(mxfp4, "unpack", lambda packed, scale: unpack(packed >> 4 | packed << 4, scale))
  cfg, _ = golden("k3-a")
  logits, _ = run_prefill(cfg, load("k3-a", cfg), prompts("k3-a", 31))
  assert furthest(logits, golden_arrays("k3-a")["logits_31"]) > 2 * LOGITS


@pytest.mark.parametrize("change", [{"routed_scaling_factor": 1.0}, {"renormalize": False}])
def test_a_wrong_field_moves_the_logits_beyond_the_tolerance(change):
  cfg, params = golden("kl-a")
  logits, _ = run_prefill(dataclasses.replace(cfg, **change), params, prompts("kl-a", 31))
  assert furthest(logits, golden_arrays("kl-a")["logits_31"]) > 2 * LOGITS


def _times(delta_rule, factor):
  def scaled(*args, **kwargs):
    out, state = delta_rule(*args, **kwargs)
    return out * factor, state

  return scaled


# The trace's tolerance, on the first four layers alone: three with KDA, one with MLA. A right model passes there.
TRACE_MISTAKES = {
  "none": None,
  # routed_expert_norm all but hides a constant factor from the logits.
  "a constant factor on the experts' weights": lambda m: None,
  "the read-out's norm with another epsilon": lambda m: m.setattr(
    reference,
    "gated_rms_norm",
    lambda o, gate, weight, eps: _with_eps(1e-6)(o, weight, eps) * jax.nn.sigmoid(gate),
  ),
  "the routed norm with another epsilon": lambda m: m.setattr(moe, "rms_norm", _with_eps(1e-6)),
  "q without its scale": lambda m: m.setattr(
    attention_kda.kda_prefill, "delta_rule", _times(attention_kda.kda_prefill.delta_rule, 128**0.5)
  ),
}


@pytest.mark.parametrize("mistake", TRACE_MISTAKES)
def test_the_trace_tolerance_tells_right_from_wrong(mistake, monkeypatch):
  cfg, params = golden("k3-a")
  arrays = golden_arrays("k3-a")
  if TRACE_MISTAKES[mistake]:
    TRACE_MISTAKES[mistake](monkeypatch)
  factor = 1.001 if mistake == "a constant factor on the experts' weights" else 1.0
  made = trace("k3-a", dataclasses.replace(cfg, layers=cfg.layers[:4], routed_scaling_factor=factor), params)

  def check():
    assert_layers_close(np.asarray(made.tags["kda_read_out"][0]), arrays["trace_kda0_o"][None], "read-out")
    assert_layers_close(made.layers("moe_latent"), arrays["trace_moe_latent_pre_norm"][:3], "latents")
    assert_layers_close(made.layers("moe_latent_normed"), arrays["trace_moe_latent_post_norm"][:3], "normed latents")
    assert_layers_close(made.layers("layer_out"), arrays["trace_P"][:4], "layers")

  if mistake == "none":
    check()
  else:
    with pytest.raises(AssertionError, match="elements beyond"):
      check()
