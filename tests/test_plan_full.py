"""K3 at full size on its slices, compiled as it would run: what the project promises, behind --run-compile.

Bytes are the compiler's, a device. Compile times aren't asserted; docs/many_devices.md has them.
"""

import pytest
from _plans import FP8_ON_64, MXFP4_ON_32, ON_64, planned


@pytest.mark.compile
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
  ("latents", "weights"), [("replicated", 47.5), ("sharded", 43.5)], ids=["latents replicated", "latents sharded"]
)
def test_32_chips_hold_64_sequences_of_128k(latents, weights):
  overrides = (f"latent_projections={latents}", "max_target_length=131072", "plan_slots=64", "plan_phases=decode")
  plan = planned(*FP8_ON_64, *overrides)
  assert plan["fits"]
  assert plan["weights_gib"] <= weights
  # What the compiler counts is padded to whole tiles.
  assert plan["decode"]["arguments_gib"] - plan["cache_gib"] <= weights
  assert plan["decode"]["temp_gib"] <= 0.3
  assert plan["decode"]["arguments_gib"] == pytest.approx(plan["weights_gib"] + plan["cache_gib"], rel=0.05)
  assert plan["decode"]["copies"] == []


@pytest.mark.compile
@pytest.mark.timeout(3600)
def test_32_chips_hold_80_sequences_of_1m_beside_a_chunk_of_8192():
  size = ("max_target_length=1048576", "plan_slots=80", "plan_prefill_rows=2", "prefill_chunk_size=8192")
  plan = planned(*FP8_ON_64, *size)
  assert plan["fits"]
  assert plan["prefill"]["temp_gib"] <= 1.0
  assert plan["sequences"]["1048576"] >= 80
  assert plan["sequences_fp8"]["1048576"] >= 160


@pytest.mark.compile
@pytest.mark.timeout(3600)
def test_32_chips_prefill_a_chunk_of_32768():
  size = ("max_target_length=131072", "plan_slots=64", "plan_prefill_rows=2", "prefill_chunk_size=32768")
  plan = planned(*FP8_ON_64, *size, "plan_phases=prefill")
  assert plan["fits"]
  assert plan["prefill"]["temp_gib"] <= 2.5


@pytest.mark.compile
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
  ("latents", "weights"), [("replicated", 49.0), ("sharded", 45.0)], ids=["latents replicated", "latents sharded"]
)
def test_16_chips_hold_mxfp4(latents, weights):
  overrides = (f"latent_projections={latents}", "max_target_length=131072", "plan_slots=32", "plan_phases=decode")
  plan = planned(*MXFP4_ON_32, *overrides)
  assert plan["fits"]
  assert plan["weights_gib"] <= weights
  # What the compiler counts is padded to whole tiles.
  assert plan["decode"]["arguments_gib"] - plan["cache_gib"] <= weights
  assert plan["decode"]["temp_gib"] <= 0.5
  assert plan["sequences"]["1048576"] >= 40


@pytest.mark.compile
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cache", ["replicated", "striped"])
def test_latency_mode_of_full_size_needs_two_collectives_a_layer(cache):
  size = ("plan_slots=2", "max_target_length=131072", "plan_phases=decode", f"mla_cache_mode={cache}")
  plan = planned("kimi-k3.yml", *ON_64, "weight_format=block_fp8", *size)
  found = [one for one in plan["decode"]["collectives"] if one["per"] == "step"]
  striped = 2 * 24 if cache == "striped" else 0
  assert plan["decode"]["collectives_count"] <= 2 * 93 + 6 + striped
  assert sum(one["count"] for one in found if one["kind"] == "all-to-all") == striped // 2
  assert sum(one["count"] for one in found if one["crosses_data"]) <= 92


@pytest.mark.compile
@pytest.mark.timeout(1800)
def test_32_chips_hold_160_sequences_of_1m_in_eight_bits():
  size = ("max_target_length=1048576", "plan_slots=160", "plan_phases=decode", "mla_cache_dtype=float8_e4m3fn")
  plan = planned(*FP8_ON_64, *size)
  assert plan["fits"]
  assert plan["decode"]["temp_gib"] <= 0.3


@pytest.mark.compile
@pytest.mark.timeout(1800)
def test_16_chips_hold_40_sequences_of_1m_beside_a_chunk_of_8192():
  size = ("max_target_length=1048576", "plan_slots=40", "plan_prefill_rows=1", "prefill_chunk_size=8192")
  plan = planned(*MXFP4_ON_32, *size)
  assert plan["fits"]
  assert plan["decode"]["temp_gib"] <= 0.5
  assert plan["prefill"]["temp_gib"] <= 1.0
