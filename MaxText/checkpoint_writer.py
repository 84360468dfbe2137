"""Writes parameters in the released layout: config.json, sharded safetensors with an index, MXFP4 experts."""

import json
import os
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from MaxText import mxfp4
from MaxText.checkpoint import INDEX
from MaxText.configs import hf_config
from MaxText.configs.k3_config import K3Config
from MaxText.weights import WeightTree, is_stack

_PREFIX = "language_model."


def released_tensors(tree: WeightTree, params: dict[str, Any]) -> dict[str, np.ndarray]:
  """Parameters under their released names, in the release's shapes and dtypes; packed sources as their pairs."""
  tensors = {}
  for stack, values in zip(jax.tree.leaves(tree, is_leaf=is_stack), jax.tree.leaves(params), strict=True):
    dtype = np.float32 if stack.weight.float32 else ml_dtypes.bfloat16
    values = np.asarray(values, np.float32)
    for prefix, value in zip(stack.prefixes, values.reshape(-1, *stack.weight.shape), strict=True):
      for source, tensor in zip(stack.weight.sources, stack.weight.to_release(value), strict=True):
        name = f"{_PREFIX}{prefix}{source.name}"
        if source.packed:
          tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"] = mxfp4.pack(tensor)
        else:
          tensors[name + source.suffix] = np.ascontiguousarray(tensor.reshape(source.shape)).astype(dtype)
  return tensors


def _quantization_config() -> dict[str, Any]:
  """As the release has it: what the experts are packed as. Readers go by the index, not by its ignore list."""
  weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": mxfp4.GROUP, "symmetric": True}
  group = {"format": "mxfp4-pack-quantized", "targets": ["Linear"], "weights": weights}
  ignore = ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*"]
  return {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": group},
    "ignore": ignore,
  }


def write(
  directory: str,
  tree: WeightTree,
  params: dict[str, Any],
  config: K3Config,
  token_ids: dict[str, int],
  shards: int = 2,
) -> None:
  """Writes a whole checkpoint directory (all but the tokenizer).

  Args:
    token_ids: `bos_token_id`, `eos_token_id` and `pad_token_id` of the tokenizer.
    shards: files to spread the tensors over, by size, in the tensors' order.
  """
  os.makedirs(directory, exist_ok=True)
  tensors = dict(sorted(released_tensors(tree, params).items()))
  total = sum(t.nbytes for t in tensors.values())
  files: list[dict[str, np.ndarray]] = [{} for _ in range(shards)]
  seen = 0
  for name, tensor in tensors.items():
    files[min(seen * shards // total, shards - 1)][name] = tensor
    seen += tensor.nbytes
  where = {}
  for i, held in enumerate(files):
    file = f"model-{i + 1:05d}-of-{shards:06d}.safetensors"
    save_file(held, os.path.join(directory, file), metadata={"format": "pt"})
    where |= dict.fromkeys(held, file)
  text = hf_config.write(config.get_keys()) | token_ids
  text["dtype"] = "bfloat16"
  text["quantization_config"] = _quantization_config()
  outer = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16"}
  _write_json(directory, "config.json", outer | token_ids | {"text_config": text | {"model_type": "kimi_linear"}})
  _write_json(directory, INDEX, {"metadata": {"total_size": total}, "weight_map": where}, indent=0)


def _write_json(directory: str, name: str, value: Any, indent: int = 2) -> None:
  with open(os.path.join(directory, name), "w", encoding="utf-8") as f:
    json.dump(value, f, indent=indent)
    f.write("\n")
