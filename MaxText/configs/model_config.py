"""What the layers need to know of a model, frozen: derived once from the configuration and passed down."""

from dataclasses import dataclass
from typing import Any, Literal

from MaxText.parallel import ONE, Parallel
from MaxText.weights import Storage

AttentionKind = Literal["kda", "mla"]
FeedForwardKind = Literal["dense", "moe"]


@dataclass(frozen=True)
class ModelConfig:
  """The architecture, in K3's terms. Hashable, so that it can be a static argument of a jitted function.

  Sizes are counts of features, heads, layers or tokens. A feature that a model of the family lacks is 0, None or False.
  """

  vocab_size: int
  hidden_size: int
  rms_norm_eps: float
  layers: tuple[tuple[AttentionKind, FeedForwardKind], ...]
  # KDA
  kda_num_heads: int
  kda_head_dim: int
  kda_conv_kernel_size: int
  kda_gate_lower_bound: float | None  # None: softplus decay
  kda_full_rank_gate: bool
  kda_prefill_implementation: str
  kda_decode_implementation: str
  kda_state_dtype: Any
  # MLA
  mla_num_heads: int
  q_lora_rank: int  # 0: one q_proj
  kv_lora_rank: int
  qk_nope_head_dim: int
  qk_rope_head_dim: int
  v_head_dim: int
  mla_output_gate: bool
  mla_cache_dtype: Any
  # Feed-forward
  mlp_size: int
  hidden_act: str
  situ_beta: float
  situ_linear_beta: float
  num_experts: int
  num_experts_per_token: int
  num_shared_experts: int
  moe_intermediate_size: int
  latent_size: int  # 0: experts at full width
  latent_norm: bool
  renormalize: bool
  routed_scaling_factor: float
  grouped_matmul_implementation: str
  quantized_matmul_implementation: str  # for dense quantised weights, read in place from their stack; "": XLA
  # Residuals
  attn_res_block_size: int  # 0: ordinary residuals
  # Running
  rolled: bool
  dtype: Any
  storage: Storage
  matmul_precision: str
  parallel: Parallel = ONE

  @property
  def num_layers(self) -> int:
    return len(self.layers)

  @property
  def num_leading_layers(self) -> int:
    """Layers with a dense MLP, before the repeating pattern; they are never part of a loop."""
    return sum(ffn == "dense" for _, ffn in self.layers)

  def layer_ids(self, kind: AttentionKind, leading: bool) -> tuple[int, ...]:
    """Zero-based indices of the layers whose attention is `kind`, among the leading or the repeating ones."""
    n = self.num_leading_layers
    return tuple(i for i, (attention, _) in enumerate(self.layers) if attention == kind and (i < n) == leading)

  @property
  def expert_width(self) -> int:
    """Width of the stream that the routed experts read and write."""
    return self.latent_size or self.hidden_size

  @property
  def mla_cache_width(self) -> int:
    """Values a token of one MLA layer's cache: normed latent, the shared tail, and zeros up to a multiple of 128.

    A TPU updates such a cache in place; one of K3's 576 it copies two or three times a layer. Small ones aren't padded.
    """
    width = self.kv_lora_rank + self.qk_rope_head_dim
    return width if width <= 128 else -(-width // 128) * 128

  @property
  def num_residual_blocks(self) -> int:
    """Snapshots that AttnRes seals in one pass."""
    return -(-self.num_layers // self.attn_res_block_size) if self.attn_res_block_size else 0
