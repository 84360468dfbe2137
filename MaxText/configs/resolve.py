"""From MaxText's configuration to the frozen `ModelConfig`, with every `auto` resolved."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from maxtext.utils import maxtext_utils

from MaxText.checkpoint import checkpoint_directory
from MaxText.configs.model_config import ModelConfig
from MaxText.converted.manifest import is_converted, read_manifest
from MaxText.errors import UserError
from MaxText.layers import kda_prefill
from MaxText.parallel import DATA, ONE, TENSOR, Parallel
from MaxText.weights import Storage

_REPLICATED_LENGTH = 4096  # up to which mla_cache_mode=auto keeps latents on every device of a tensor group


def make_mesh(config: Any, devices: Any = None) -> Mesh:
  """MaxText's device mesh. Of its axes K3 uses `data` and `tensor`.

  Args:
    devices: to lay out; None for those that are there.

  Raises:
    UserError: parallelism on another axis, or sizes that don't multiply to the number of devices.
  """
  try:
    grid = maxtext_utils.create_device_mesh(config, devices)
  except (AssertionError, ValueError) as error:
    sizes = {axis: getattr(config, f"ici_{axis}_parallelism") for axis in (DATA, TENSOR)}
    count = len(jax.devices() if devices is None else devices)
    raise UserError(
      f"{count} devices can't be laid out as {sizes} (ici_*_parallelism; -1 takes what is left): {error}"
    ) from error
  mesh = Mesh(grid, config.mesh_axes)
  other = {axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in (DATA, TENSOR)}
  if other:
    raise UserError(
      f"mesh axes {other} split nothing of this model; use ici_tensor_parallelism and ici_data_parallelism"
    )
  return mesh


def _weight_formats(config: Any) -> tuple[str, str]:
  """How experts and other large matrices are held: `weight_format` and `dense_weight_format`, `auto` resolved.

  Raises:
    UserError: the checkpoint is a converted one that holds them otherwise, or its conversion hasn't finished.
  """
  experts, dense = config.weight_format, config.dense_weight_format
  directory = checkpoint_directory(config) if config.load_parameters_path else ""
  if directory and is_converted(directory):
    manifest = read_manifest(directory)
    again = f"weight_format={'bfloat16' if experts == 'plain' else experts}"
    scope = f"scope={'experts' if dense == 'plain' else 'all'}"
    for key, given, what, held, convert in (
      ("weight_format", experts, "its experts", manifest.experts, again),
      ("dense_weight_format", dense, "its other large matrices", manifest.dense, scope),
    ):
      if given not in ("auto", held):
        raise UserError(
          f"{key}={given}, but {directory} was converted and holds {what} as {held}: leave {key} out, or convert "
          f"again with {convert}"
        )
    return manifest.experts, manifest.dense
  if experts == "auto":
    experts = "plain"
  if dense == "auto":
    dense = "plain" if experts == "plain" else "block_fp8"
  return experts, dense


def _parallel(config: Any, mesh: Mesh | None, experts: str) -> Parallel:
  """How devices work together.

  Args:
    experts: the format of the experts' weights.
  """
  if mesh is None:
    return ONE
  router = config.router_weights
  if router == "auto":
    # Free beside split latent projections. MXFP4 is for those who are short of memory: a collective for a GiB.
    memory_first = config.latent_projections == "sharded" or experts == "mxfp4"
    router = "sharded" if memory_first else "replicated"
  mla_cache = config.mla_cache_mode
  if mla_cache == "auto":
    # Stripes cost two collectives a layer; short caches are read faster than that.
    mla_cache = "striped" if config.max_target_length > _REPLICATED_LENGTH else "replicated"
  parallel = Parallel(
    data=mesh.shape[DATA],
    tensor=mesh.shape[TENSOR],
    batch="split" if config.parallel_mode == "throughput" else "same",
    mla_cache=mla_cache,
    latents=config.latent_projections,
    router=router,
  )
  for key, heads in (("kda_num_heads", config.kda_num_heads), ("base_num_query_heads", config.num_query_heads)):
    if heads % parallel.tensor:
      raise UserError(f"{key}={heads} can't be split over a tensor group of {parallel.tensor} devices")
  if config.num_experts % parallel.devices:
    raise UserError(f"num_experts={config.num_experts} can't be split over {parallel.devices} devices")
  return parallel


def _ways(config: Any, parallel: Parallel) -> tuple[tuple[str, int], ...]:
  """Over how many devices the rules split each logical axis, where that is more than one."""
  sizes = {DATA: parallel.data, TENSOR: parallel.tensor}
  split = {}
  for logical, target in config.logical_axis_rules:
    axes = (target,) if isinstance(target, str) else target
    split.setdefault(logical, math.prod(sizes.get(axis, 1) for axis in axes))
  return tuple((logical, ways) for logical, ways in split.items() if ways > 1)


def model_config(config: Any, platform: str, mesh: Mesh | None = None) -> ModelConfig:
  """Builds the frozen `ModelConfig`.

  Args:
    config: MaxText's `HyperParameters` of a `K3Config`.
    platform: the devices' platform, "cpu", "tpu" or "gpu": it decides what `auto` means.
    mesh: `make_mesh`'s; None for one device.

  Raises:
    UserError: an implementation that can't serve this model, or see `_weight_formats`.
  """
  head_dim = config.kda_head_dim
  bound = config.kda_gate_lower_bound
  prefill = kda_prefill.resolve_implementation(config.kda_prefill_implementation, platform, head_dim, bound)
  kda_prefill.check_implementation(prefill, bound)
  decode = config.kda_decode_implementation
  if decode == "auto":
    # The kernel takes heads of 128; a model with others runs the reference step, and says so when it starts.
    decode = "pallas" if platform == "tpu" and head_dim == 128 else "reference"
  _check_device("kda_prefill_implementation", prefill, "mosaic", platform, head_dim)
  _check_device("kda_decode_implementation", decode, "pallas", platform, head_dim)
  grouped_matmul = config.grouped_matmul_implementation
  experts, dense = _weight_formats(config)
  plain = experts == "plain"
  if grouped_matmul == "auto":
    grouped_matmul = "loop" if platform == "cpu" else "ragged_dot" if plain else "pallas"
  mla = set(config.full_attn_layers)  # both lists of the release count from one
  if grouped_matmul == "pallas" and platform != "tpu":
    raise UserError(
      f"grouped_matmul_implementation=pallas needs a TPU, and this is a {platform}; use grouped_matmul_implementation="
      "auto"
    )
  if not plain and grouped_matmul in ("ragged_dot", "dense"):
    raise UserError(
      f"weight_format={experts} is served by grouped_matmul_implementation=loop or pallas, not {grouped_matmul}"
    )
  # XLA alone would write the partial sums of every block of inputs to memory.
  quantized_matmul = "pallas" if platform == "tpu" else ""
  if grouped_matmul == "pallas_interpret":
    quantized_matmul = grouped_matmul
  parallel = _parallel(config, mesh, experts)
  latent = config.routed_expert_hidden_size
  if parallel.shards_latents and latent % parallel.tensor:
    raise UserError(
      f"routed_expert_hidden_size={latent} can't be split over a tensor group of {parallel.tensor} devices; use "
      "latent_projections=replicated"
    )
  if parallel.shards_router and config.num_experts % parallel.tensor:
    raise UserError(
      f"num_experts={config.num_experts} can't be split over a tensor group of {parallel.tensor} devices; use "
      "router_weights=replicated"
    )
  layers = tuple(
    ("mla" if i + 1 in mla else "kda", "dense" if i < config.first_num_dense_layers else "moe")
    for i in range(config.num_decoder_layers)
  )
  precision = config.matmul_precision
  return ModelConfig(
    vocab_size=config.vocab_size,
    hidden_size=config.emb_dim,
    rms_norm_eps=config.normalization_layer_epsilon,
    layers=layers,
    kda_num_heads=config.kda_num_heads,
    kda_head_dim=config.kda_head_dim,
    kda_conv_kernel_size=config.kda_short_conv_kernel_size,
    kda_gate_lower_bound=config.kda_gate_lower_bound,
    kda_full_rank_gate=config.kda_use_full_rank_gate,
    kda_prefill_implementation=prefill,
    kda_decode_implementation=decode,
    kda_state_dtype=jnp.dtype(config.kda_state_dtype),
    mla_num_heads=config.num_query_heads,
    q_lora_rank=config.q_lora_rank,
    kv_lora_rank=config.kv_lora_rank,
    qk_nope_head_dim=config.qk_nope_head_dim,
    qk_rope_head_dim=config.qk_rope_head_dim,
    v_head_dim=config.v_head_dim,
    mla_output_gate=config.mla_use_output_gate,
    mla_cache_dtype=jnp.dtype(config.dtype if config.mla_cache_dtype == "auto" else config.mla_cache_dtype),
    mlp_size=config.mlp_dim,
    hidden_act=config.hidden_act,
    situ_beta=config.activation_situ_beta,
    situ_linear_beta=config.activation_situ_linear_beta,
    num_experts=config.num_experts,
    num_experts_per_token=config.num_experts_per_tok,
    num_shared_experts=config.shared_experts,
    moe_intermediate_size=config.moe_mlp_dim,
    latent_size=config.routed_expert_hidden_size,
    latent_norm=config.latent_moe_use_norm,
    renormalize=config.moe_renormalize,
    routed_scaling_factor=config.routed_scaling_factor,
    grouped_matmul_implementation=grouped_matmul,
    quantized_matmul_implementation=quantized_matmul,
    attn_res_block_size=config.attn_res_block_size,
    rolled=config.scan_layers,
    dtype=jnp.dtype(config.dtype),
    storage=Storage(jnp.dtype(config.weight_dtype), experts, dense, _ways(config, parallel)),
    parallel=parallel,
    matmul_precision=str(getattr(precision, "value", precision)),
  )


def _check_device(key: str, chosen: str, kernel: str, platform: str, head_dim: int) -> None:
  """Raises `UserError` where a TPU kernel was asked for that can't run here."""
  if chosen != kernel:
    return
  if platform != "tpu":
    raise UserError(f"{key}={kernel} needs a TPU, and this is a {platform}; use {key}=auto")
  if head_dim != 128:
    raise UserError(f"{key}={kernel} takes heads of 128, and kda_head_dim={head_dim}; use {key}=auto")


def describe_implementations(cfg: ModelConfig) -> str:
  """One line for the start of a program: which implementation each kernel uses."""
  storage = str(cfg.storage.dtype)
  if cfg.storage.experts != "plain" or cfg.storage.dense != "plain":
    storage += f" (experts {cfg.storage.experts}, dense {cfg.storage.dense})"
  parallel = cfg.parallel
  devices = ""
  if parallel.devices > 1:
    devices = (
      f", devices: data {parallel.data} ({parallel.batch} tokens) × tensor {parallel.tensor}, "
      f"MLA cache {parallel.mla_cache}, latent projections {parallel.latents}, router {parallel.router}"
    )
  return (
    f"KDA prefill: {cfg.kda_prefill_implementation} (tokamax), "
    f"KDA decode: {cfg.kda_decode_implementation}, experts: {cfg.grouped_matmul_implementation}, "
    f"layers: {'rolled' if cfg.rolled else 'unrolled'}, weights: {storage}"
    f"{devices}"
  )
