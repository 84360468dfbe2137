"""The released `config.json` in MaxText's terms: one table, both ways."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from MaxText.errors import UserError

_REQUIRED = object()


@dataclass(frozen=True)
class _Field:
  """One field of the release: its path in (text) config, our key, and what its absence means."""

  path: str
  key: str
  absent: Any = _REQUIRED


# Absence is a fact about a model: the family's older member simply lacks K3's fields.
_FIELDS = (
  _Field("vocab_size", "vocab_size"),
  _Field("hidden_size", "base_emb_dim"),
  _Field("num_hidden_layers", "base_num_decoder_layers"),
  _Field("intermediate_size", "base_mlp_dim"),
  _Field("num_attention_heads", "base_num_query_heads"),
  _Field("num_key_value_heads", "base_num_kv_heads"),
  _Field("rms_norm_eps", "normalization_layer_epsilon"),
  _Field("q_lora_rank", "q_lora_rank", 0),
  _Field("kv_lora_rank", "kv_lora_rank"),
  _Field("qk_nope_head_dim", "qk_nope_head_dim"),
  _Field("qk_rope_head_dim", "qk_rope_head_dim"),
  _Field("v_head_dim", "v_head_dim"),
  _Field("mla_use_nope", "mla_use_nope", False),
  _Field("mla_use_output_gate", "mla_use_output_gate", False),
  _Field("attn_res_block_size", "attn_res_block_size", 0),
  _Field("hidden_act", "hidden_act"),
  _Field("activation_situ_beta", "activation_situ_beta", 4.0),
  _Field("activation_situ_linear_beta", "activation_situ_linear_beta", 25.0),
  _Field("num_experts", "num_experts"),
  _Field("num_experts_per_token", "num_experts_per_tok"),
  _Field("num_shared_experts", "shared_experts", 0),
  _Field("moe_intermediate_size", "base_moe_mlp_dim"),
  _Field("routed_expert_hidden_size", "routed_expert_hidden_size", 0),
  _Field("latent_moe_use_norm", "latent_moe_use_norm", False),
  _Field("first_k_dense_replace", "first_num_dense_layers", 0),
  _Field("moe_renormalize", "moe_renormalize", True),
  _Field("moe_router_activation_func", "routed_score_func", "sigmoid"),
  _Field("routed_scaling_factor", "routed_scaling_factor", 1.0),
  _Field("max_position_embeddings", "max_position_embeddings", None),
  _Field("linear_attn_config.head_dim", "kda_head_dim"),
  _Field("linear_attn_config.num_heads", "kda_num_heads"),
  _Field("linear_attn_config.short_conv_kernel_size", "kda_short_conv_kernel_size"),
  _Field("linear_attn_config.gate_lower_bound", "kda_gate_lower_bound", None),
  _Field("linear_attn_config.use_full_rank_gate", "kda_use_full_rank_gate", False),
  _Field("linear_attn_config.full_attn_layers", "full_attn_layers"),
  _Field("linear_attn_config.kda_layers", "kda_layers"),
)

# Fields with one value that this project serves; another one is a model that it doesn't know.
_FIXED = {
  "topk_method": ("noaux_tc",),
  "num_expert_group": (1,),
  "topk_group": (1,),
  "moe_layer_freq": (1,),
  "tie_word_embeddings": (False,),
  "num_nextn_predict_layers": (0,),
  "model_type": ("kimi_linear", "kimi_k3"),
}

# Fields that say nothing about the arithmetic of the text model.
_IRRELEVANT = frozenset([
  "architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype",
  "transformers_version", "use_cache", "initializer_range", "model_max_length", "use_grouped_topk",
  "quantization_config", "head_dim", "rope_theta", "rope_scaling", "_name_or_path", "ignore_index", "vision_config",
  "text_config", "media_placeholder_token_id", "image_placeholder", "media_placeholder", "attention_dropout",
  "output_attentions", "output_hidden_states", "return_dict",
])  # fmt: skip


def _lookup(config: dict, path: str) -> Any:
  for part in path.split("."):
    if not isinstance(config, dict) or part not in config:
      return _REQUIRED
    config = config[part]
  return config


def _paths(config: dict, prefix: str = "") -> Iterator[str]:
  for name, value in config.items():
    if name == "linear_attn_config" and isinstance(value, dict):
      yield from _paths(value, f"{name}.")
    else:
      yield prefix + name


def resolve_path(path: str) -> str:
  """`DIR` or `DIR/config.json` -> the file."""
  return os.path.join(path, "config.json") if os.path.isdir(path) else path


def read(path: str) -> tuple[dict[str, Any], list[str]]:
  """Reads a released config.

  Args:
    path: a `config.json`, or the directory that holds one. The text model may be nested under `text_config` or flat.

  Returns:
    (MaxText key -> value for every architecture field, names of fields that this project doesn't know).

  Raises:
    UserError: no such file, not JSON, a missing field, or a value that no model of the family here has.
  """
  path = resolve_path(path)
  try:
    with open(path, encoding="utf-8") as f:
      config = json.load(f)
  except OSError as error:
    raise UserError(f"hf_config={path}: {error.strerror}") from error
  except ValueError as error:
    raise UserError(f"hf_config={path} is not JSON: {error}") from error
  if not isinstance(config, dict):
    raise UserError(f"hf_config={path} holds a {type(config).__name__}, not an object")
  text = config.get("text_config", config)
  if not isinstance(text, dict):
    raise UserError(f"hf_config={path}: text_config is a {type(text).__name__}, not an object")

  for name, allowed in _FIXED.items():
    value = text.get(name, allowed[0])
    if value not in allowed:
      raise UserError(f"{path}: {name}={value!r} is not supported, only {' or '.join(map(repr, allowed))}")

  values = {}
  for field in _FIELDS:
    value = _lookup(text, field.path)
    if value is _REQUIRED or (value is None and field.absent is not _REQUIRED):
      value = field.absent
    if value is _REQUIRED:
      raise UserError(f"{path} lacks {field.path}, which every model of the family has")
    values[field.key] = value
  if values["max_position_embeddings"] is None:
    values["max_position_embeddings"] = text.get("model_max_length", 1048576)

  known = {f.path for f in _FIELDS} | _FIXED.keys() | _IRRELEVANT
  return values, sorted(set(_paths(text)) - known)


def release_name(key: str) -> str:
  """The released name of one of our keys, for messages."""
  return next(f.path for f in _FIELDS if f.key == key)


def write(values: dict[str, Any]) -> dict[str, Any]:
  """The inverse of `read`: our keys -> the text model's part of a released config."""
  text: dict[str, Any] = {name: allowed[0] for name, allowed in _FIXED.items()}
  for field in _FIELDS:
    node = text
    *parents, leaf = field.path.split(".")
    for parent in parents:
      node = node.setdefault(parent, {})
    node[leaf] = values[field.key]
  return text
