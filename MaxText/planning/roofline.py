"""The least time that a decode step and a prefill chunk can take, part by part: arithmetic, nothing measured.

Bytes are those that a device must read and write, at the full bandwidth of its memory; operations those of the
products, at the full rate in bfloat16 (8-bit weights are widened inside a product). A part takes the larger of the two
times, parts follow one another. What isn't counted: activations inside the MLPs, padding, sorting, sampling.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from MaxText.configs.model_config import ModelConfig
from MaxText.planning import capacity
from MaxText.planning.capacity import Layout, Part
from MaxText.planning.chip import BF16_FLOPS, COLLECTIVE_SECONDS, HBM_BANDWIDTH, LINK_BANDWIDTH
from MaxText.planning.traffic import Collective

KDA_STATE, MLA_CACHE, RESIDUALS = "KDA state", "MLA cache", "AttnRes streams"
_KDA_CHUNK = 64  # tokens that the chunked form of the delta rule takes at a time
_FLOAT32_PASSES = 6  # of a bfloat16 unit, for a true float32 product
# Bytes of a channel of a head that KDA's prefill moves besides its state: q, k and v written and read before and after
# the convolution, the decay and the read-out in float32, the gate.
_KDA_CHANNEL_BYTES = 3 * 2 * 4 + 8 + 8 + 4


@dataclass(frozen=True)
class Cost:
  """A part's share of a step or chunk on one device.

  Attributes:
    part: what it is.
    nbytes: read and written in HBM.
    flops: multiplications and additions.
    seconds: the larger of both at full rate; of collectives, their latency and their bytes on the links.
  """

  part: str
  nbytes: float
  flops: float
  seconds: float

  def describe(self) -> dict[str, Any]:
    return {"part": self.part, "bytes": round(self.nbytes), "flops": round(self.flops), "seconds": self.seconds}


def _cost(part: str, nbytes: float, flops: float) -> Cost:
  return Cost(part, nbytes, flops, max(nbytes / HBM_BANDWIDTH, flops / BF16_FLOPS))


def distinct_experts(cfg: ModelConfig, tokens: int) -> float:
  """How many of a device's experts a batch needs, where each token's choice is even and independent of others'."""
  here = cfg.num_experts / cfg.parallel.devices
  return here * (1 - (1 - cfg.num_experts_per_token / cfg.num_experts) ** tokens)


def _weight_cost(cfg: ModelConfig, kind: str, parts: list[Part], group: int, own: float, everyone: int) -> Cost:
  """Products with the weights of one kind.

  Args:
    group: tokens that a tensor group computes together: those that a weight split over it sees.
    own: tokens of one device, which a weight that stands whole on each sees.
    everyone: tokens of all data groups, which the experts see.
  """
  nbytes, values = sum(p.nbytes for p in parts), [p for p in parts if not p.is_scale]
  if kind == capacity.EXPERTS:
    chosen = cfg.num_experts_per_token / cfg.num_experts
    share = distinct_experts(cfg, everyone) / (cfg.num_experts / cfg.parallel.devices)
    return _cost(kind, nbytes * share, 2 * sum(p.size for p in values) * everyone * chosen)
  if kind == capacity.EMBEDDING:
    row = sum(p.nbytes / p.shape[0] for p in parts)
    return _cost(kind, min(nbytes, 2 * row * group), 0)
  flops = sum(2 * p.size * (group if p.split else own) for p in values if "kv_b" not in p.path)
  return _cost(kind, nbytes, flops * (_FLOAT32_PASSES if kind == capacity.ROUTER else 1))


def _weight_costs(layout: Layout, group: int, own: float, everyone: int, heads: int) -> Iterable[Cost]:
  for kind in capacity.WEIGHT_PARTS:
    parts = [p for p in layout.parts if p.kind == kind]
    if not parts:
      continue
    if kind == capacity.HEAD:  # one token of a row has logits
      yield _weight_cost(layout.cfg, kind, parts, heads, heads, heads)
    else:
      yield _weight_cost(layout.cfg, kind, parts, group, own, everyone)


def _kv_b_size(layout: Layout) -> int:
  """Values of a device's part of the matrices that make keys and values of latents, over all layers."""
  return sum(p.size for p in layout.parts if "kv_b" in p.path and not p.is_scale)


def _stream_bytes(cfg: ModelConfig) -> int:
  """What one token's residual streams cost: all snapshots and the sum are read before each sublayer and the head."""
  sites = 2 * cfg.num_layers + 1
  return sites * (cfg.num_residual_blocks + 2) * cfg.hidden_size * cfg.dtype.itemsize


def _mla_layers(cfg: ModelConfig) -> int:
  return sum(kind == "mla" for kind, _ in cfg.layers)


def decode_step(layout: Layout, slots: int, context: int, collectives: Iterable[Collective] = ()) -> list[Cost]:
  """A decode step of `slots` sequences (of all data groups), each with `context` tokens before it.

  Args:
    collectives: those of the compiled step; without, their time is left out.
  """
  cfg = layout.cfg
  group = slots // layout.groups
  state = layout.state(slots, context)
  kda = state[capacity.KDA_STATE] + state[capacity.KDA_CONV]
  # Decay, read, correction, update and read-out of each value of the state.
  kda_flops = 8 * state[capacity.KDA_STATE] / cfg.kda_state_dtype.itemsize
  heads = cfg.mla_num_heads / cfg.parallel.tensor
  width = 2 * cfg.kv_lora_rank + cfg.qk_rope_head_dim
  mla_flops = _mla_layers(cfg) * 2 * heads * width * context * group + 2 * _kv_b_size(layout) * group
  return [
    *_weight_costs(layout, group, group, slots, group),
    _cost(KDA_STATE, 2 * kda, kda_flops),
    _cost(MLA_CACHE, state[capacity.MLA_CACHE], mla_flops),
    _cost(RESIDUALS, _stream_bytes(cfg) * group, 0),
    *_waiting(collectives),
  ]


def prefill_chunk(
  layout: Layout, rows: int, chunk: int, before: int, collectives: Iterable[Collective] = ()
) -> list[Cost]:
  """A chunk of `chunk` tokens for each of `rows` sequences (of all data groups), `before` tokens into each.

  Between sublayers a tensor group's devices hold equal parts of the tokens.
  """
  cfg = layout.cfg
  sequences = rows / layout.groups
  group = sequences * chunk
  own = group / cfg.parallel.tensor
  one = layout.state(layout.groups, before + chunk)
  kda_heads = cfg.kda_num_heads / cfg.parallel.tensor
  k = cfg.kda_head_dim
  kda_layers = cfg.num_layers - _mla_layers(cfg)
  channels = kda_layers * kda_heads * k * group
  # The chunked form, a token and head: three products with the state, five of them inside a chunk, and its solution.
  delta_rule = 6 * k * k + 10 * _KDA_CHUNK * k + 2 * _KDA_CHUNK**2 // 3
  kda_bytes = 2 * sequences * (one[capacity.KDA_STATE] + one[capacity.KDA_CONV]) + _KDA_CHANNEL_BYTES * channels
  heads = cfg.mla_num_heads / cfg.parallel.tensor
  seen = before + chunk
  score = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim + cfg.v_head_dim
  mla_flops = sequences * (_mla_layers(cfg) * 2 * heads * score * chunk * seen + 2 * _kv_b_size(layout) * seen)
  # Striped latents are gathered: read where they lie, then written and read whole.
  whole = cfg.parallel.tensor if cfg.parallel.stripes_cache else 0
  return [
    *_weight_costs(layout, group, own, rows * chunk, round(sequences)),
    _cost(KDA_STATE, kda_bytes, kda_layers * kda_heads * group * delta_rule),
    _cost(MLA_CACHE, sequences * one[capacity.MLA_CACHE] * (1 + 2 * whole), mla_flops),
    _cost(RESIDUALS, _stream_bytes(cfg) * own, 0),
    *_waiting(collectives),
  ]


def collective_seconds(c: Collective) -> float:
  """One collective done as a ring: its latency, and what a device sends and receives at the links' full rate."""
  n = max(c.group_size, 1)
  passes = 2 if c.kind == "all-reduce" else 1
  return COLLECTIVE_SECONDS + 2 * passes * (n - 1) / n * c.bytes / LINK_BANDWIDTH


def _waiting(collectives: Iterable[Collective]) -> list[Cost]:
  """The time of all collectives; those in loops of unknown length count one trip."""
  counted = [c for c in collectives if c.per != "dispatch"]
  return [Cost("collectives", 0, 0, sum(c.count * collective_seconds(c) for c in counted))] if counted else []
