"""The released numbers, and the released config.json."""

import json

import jax
import pytest
from _configs import read, refused
from _models import GOLDEN, golden_text_config, settings

from MaxText import weights
from MaxText.configs import hf_config
from MaxText.configs.k3_config import K3Config
from MaxText.configs.resolve import model_config
from MaxText.models import kimi_k3

K3A = f"hf_config={GOLDEN / 'k3-a'}"

# The released numbers

K3 = {
  "vocab_size": 163840,
  "emb_dim": 7168,
  "num_decoder_layers": 93,
  "mlp_dim": 33792,
  "num_query_heads": 96,
  "num_kv_heads": 96,
  "normalization_layer_epsilon": 1e-5,
  "q_lora_rank": 1536,
  "kv_lora_rank": 512,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "mla_use_nope": True,
  "mla_use_output_gate": True,
  "attn_res_block_size": 12,
  "hidden_act": "situ",
  "activation_situ_beta": 4.0,
  "activation_situ_linear_beta": 25.0,
  "num_experts": 896,
  "num_experts_per_tok": 16,
  "shared_experts": 2,
  "moe_mlp_dim": 3072,
  "routed_expert_hidden_size": 3584,
  "latent_moe_use_norm": True,
  "first_num_dense_layers": 1,
  "routed_score_func": "sigmoid",
  "moe_renormalize": True,
  "routed_scaling_factor": 1.0,
  "max_position_embeddings": 1048576,
  "kda_head_dim": 128,
  "kda_num_heads": 96,
  "kda_short_conv_kernel_size": 4,
  "kda_gate_lower_bound": -5.0,
  "kda_use_full_rank_gate": True,
  "full_attn_layers": [*range(4, 93, 4), 93],
  "kda_layers": [n for n in range(1, 93) if n % 4],
}

KIMI_LINEAR = {
  "vocab_size": 163840,
  "emb_dim": 2304,
  "num_decoder_layers": 27,
  "mlp_dim": 9216,
  "num_query_heads": 32,
  "num_kv_heads": 32,
  "normalization_layer_epsilon": 1e-5,
  "q_lora_rank": 0,
  "kv_lora_rank": 512,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "mla_use_output_gate": False,
  "attn_res_block_size": 0,
  "hidden_act": "silu",
  "num_experts": 256,
  "num_experts_per_tok": 8,
  "shared_experts": 1,
  "moe_mlp_dim": 1024,
  "routed_expert_hidden_size": 0,
  "latent_moe_use_norm": False,
  "first_num_dense_layers": 1,
  "moe_renormalize": True,
  "routed_scaling_factor": 2.446,
  "kda_head_dim": 128,
  "kda_num_heads": 32,
  "kda_short_conv_kernel_size": 4,
  "kda_gate_lower_bound": None,
  "kda_use_full_rank_gate": False,
  "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
  "kda_layers": [n for n in range(1, 27) if n % 4],
}


@pytest.mark.parametrize(("yml", "fields"), [("kimi-k3.yml", K3), ("kimi-linear-48b.yml", KIMI_LINEAR)])
def test_a_shipped_configuration_has_the_released_numbers(yml, fields):
  config = read(yml)
  assert {key: getattr(config, key) for key in fields} == fields


def test_k3_has_the_released_models_layers():
  cfg = model_config(read("kimi-k3.yml"), "cpu")
  attention = [kind for kind, _ in cfg.layers]
  assert (attention.count("kda"), attention.count("mla")) == (69, 24)
  # From zero: the last two are both MLA.
  assert [i for i, kind in enumerate(attention) if kind == "mla"] == [*range(3, 92, 4), 92]
  assert [ffn for _, ffn in cfg.layers] == ["dense"] + ["moe"] * 92
  assert cfg.num_residual_blocks == 8  # layers 0, 12, …, 84
  assert cfg.kv_lora_rank + cfg.qk_rope_head_dim == 576


def k3_weights_by_hand():
  """(scalars, tensors of text, bytes), from the table of released tensors."""
  d, heads, vocab = 7168, 96 * 128, 163840
  bf16, f32 = {}, {}
  bf16["embedding, head, norm, mixture"] = 2 * vocab * d + 3 * d
  bf16["norms and mixtures"] = 93 * 6 * d
  bf16["kda"] = 69 * (5 * heads * d + 128 * d + heads * 128 + 96 * d)
  f32["kda"] = 69 * (3 * heads * 4 + 96 + heads + 128)
  mla = 1536 * d + 1536 + 96 * 192 * 1536 + 576 * d + 512 + 96 * 256 * 512 + 2 * heads * d
  bf16["mla"] = 24 * mla
  bf16["dense"] = 3 * 33792 * d
  bf16["moe"] = 92 * (896 * d + 2 * 3584 * d + 3584 + 3 * 6144 * d)
  f32["bias"] = 92 * 896
  expert = 3 * 3072 * 3584
  mxfp4 = 92 * 896 * expert
  tensors = 5 + 93 * 6 + 69 * (4 + 3 + 2 + 1 + 1 + 1 + 1 + 1) + 24 * 8 + 3 + 92 * (2 + 3 + 3) + 92 * 896 * 6
  padding = 69 * 32 * 4  # A_log is stored for 128 heads
  size = 2 * sum(bf16.values()) + 4 * sum(f32.values()) + padding + mxfp4 // 2 + mxfp4 // 32
  return sum(bf16.values()) + sum(f32.values()) + mxfp4, tensors, size


def test_k3s_declarations_add_up_to_the_released_model():
  tree = kimi_k3.weight_tree(model_config(read("kimi-k3.yml"), "cpu"))
  scalars, tensors, size = k3_weights_by_hand()
  assert weights.count(tree) == scalars == 2_779_484_476_000  # 2.7795 T
  stacks = jax.tree.leaves(tree, is_leaf=weights.is_stack)
  per_source = [(len(s.prefixes), source, s.weight.float32) for s in stacks for source in s.weight.sources]
  assert sum(n * (2 if source.packed else 1) for n, source, _ in per_source) == tensors == 497_052
  declared = 0
  for n, source, float32 in per_source:
    values = 1
    for dimension in source.shape:
      values *= dimension
    declared += n * (values // 2 + values // 32 if source.packed else values * (4 if float32 else 2))
  # The release's 1,560.86 GB hold 168 tensors of vision as well, less than a billion bytes.
  assert declared == size
  assert 0 < 1_560_860_000_000 - size < 1_000_000_000
  names = [prefix + source.name for s in stacks for source in s.weight.sources for prefix in s.prefixes]
  assert len(set(names)) == len(names)


def test_every_architecture_key_of_ours_is_one_of_maxtexts_or_k3s():
  for key in (*K3, *KIMI_LINEAR):
    assert key in K3Config.model_fields or f"base_{key}" in K3Config.model_fields


# The released config.json


@pytest.mark.parametrize("name", ["k3-a", "kl-a"])
def test_a_released_config_fills_the_architecture(name):
  config, text = settings(name), golden_text_config(name)
  attention = text["linear_attn_config"]
  assert config.vocab_size == text["vocab_size"]
  assert config.emb_dim == text["hidden_size"]
  assert config.num_decoder_layers == text["num_hidden_layers"]
  assert config.mlp_dim == text["intermediate_size"]
  assert config.num_query_heads == config.num_kv_heads == text["num_attention_heads"]
  assert config.q_lora_rank == (text["q_lora_rank"] or 0)
  assert config.kda_layers == attention["kda_layers"]
  assert config.full_attn_layers == attention["full_attn_layers"]
  assert config.kda_num_heads == attention["num_heads"]
  assert config.num_experts == text["num_experts"]
  assert config.moe_mlp_dim == text["moe_intermediate_size"]
  # What only one member of the family has.
  assert config.kda_gate_lower_bound == attention.get("gate_lower_bound")
  assert config.attn_res_block_size == text.get("attn_res_block_size", 0)
  assert config.routed_expert_hidden_size == text.get("routed_expert_hidden_size", 0)
  assert config.mla_use_output_gate == text.get("mla_use_output_gate", False)
  assert config.kda_use_full_rank_gate == attention.get("use_full_rank_gate", False)
  assert config.routed_scaling_factor == text["routed_scaling_factor"]
  assert config.max_position_embeddings == text.get("max_position_embeddings", text.get("model_max_length"))


def test_a_released_config_wins_over_any_yml(tmp_path):
  """The older member read with K3's yml: none of K3's features stays behind."""
  config = read("kimi-k3.yml", f"hf_config={GOLDEN / 'kl-a'}", "max_target_length=64", "max_prefill_predict_length=64")
  theirs = settings("kl-a")
  for key in (*K3, *KIMI_LINEAR):
    assert getattr(config, key) == getattr(theirs, key), key


@pytest.mark.parametrize("flat", [True, False])
def test_a_released_config_may_be_flat_or_nested_a_file_or_a_directory(tmp_path, flat):
  text = golden_text_config("k3-a")
  path = tmp_path / "config.json"
  path.write_text(json.dumps(text if flat else {"model_type": "kimi_k3", "text_config": text}))
  values, unknown = hf_config.read(str(path))
  assert unknown == []
  assert (values, unknown) == hf_config.read(str(tmp_path)) == hf_config.read(str(GOLDEN / "k3-a"))


def test_what_is_written_reads_the_same():
  for name in ("k3-a", "kl-a"):
    values, _ = hf_config.read(str(GOLDEN / name))
    text = hf_config.write(values)
    theirs = golden_text_config(name)
    for field in ("hidden_size", "num_experts_per_token", "num_shared_experts", "linear_attn_config"):
      ours = (
        {k: v for k, v in text[field].items() if k in theirs[field]} if isinstance(text[field], dict) else text[field]
      )
      assert ours == theirs[field]


def changed(tmp_path, change, name="k3-a"):
  text = golden_text_config(name)
  change(text)
  (tmp_path / "config.json").write_text(json.dumps(text))
  return f"hf_config={tmp_path}"


def test_an_unknown_field_is_shown_and_not_used(tmp_path, capsys):
  read("kimi-k3.yml", changed(tmp_path, lambda t: t.update(attention_sinks=4)), "max_target_length=64",
       "max_prefill_predict_length=64")  # fmt: skip
  assert "attention_sinks" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("change", "culprits"),
  [
    (lambda t: t.pop("hidden_size"), ["hidden_size"]),
    (lambda t: t["linear_attn_config"].pop("kda_layers"), ["linear_attn_config.kda_layers"]),
    (lambda t: t.update(topk_method="greedy"), ["topk_method='greedy'", "noaux_tc"]),
    (lambda t: t.update(num_expert_group=8), ["num_expert_group=8"]),
    (lambda t: t.update(tie_word_embeddings=True), ["tie_word_embeddings=True"]),
    (lambda t: t.update(model_type="llama"), ["model_type='llama'"]),
    (lambda t: t.update(hidden_act="gelu"), ["hidden_act='gelu'", "situ, silu"]),
    (lambda t: t["linear_attn_config"].pop("gate_lower_bound"), ["kda_gate_lower_bound", "-5.0"]),
    (lambda t: t.update(mla_use_nope=False), ["mla_use_nope"]),
    (lambda t: t.update(moe_router_activation_func="softmax"), ["softmax"]),
  ],
)
def test_a_released_config_of_another_model_is_refused(tmp_path, change, culprits):
  message = refused("kimi-k3.yml", changed(tmp_path, change), "max_target_length=64", "max_prefill_predict_length=64")
  for culprit in culprits:
    assert culprit in message


@pytest.mark.parametrize(
  ("override", "theirs"),
  [
    ("vocab_size=513", "vocab_size=512"),
    ("base_emb_dim=128", "hidden_size=192"),
    ("full_attn_layers=[4,8,12]", "linear_attn_config.full_attn_layers=[4, 8, 12, 13]"),
    ("kda_gate_lower_bound=-4", "linear_attn_config.gate_lower_bound=-5.0"),
    ("hidden_act=silu", "hidden_act=situ"),
    ("num_experts_per_tok=2", "num_experts_per_token=4"),
    ("normalization_layer_epsilon=1e-6", "rms_norm_eps=1e-05"),
  ],
)
def test_an_override_that_contradicts_the_released_config_is_refused_by_both_names(override, theirs):
  message = refused("kimi-k3.yml", K3A, override)
  assert override in message and theirs in message and "config.json" in message


@pytest.mark.parametrize(
  "override",
  ["vocab_size=512", "full_attn_layers=[4, 8, 12, 13]", "kda_gate_lower_bound=-5", "kda_use_full_rank_gate=True",
   "normalization_layer_epsilon=1e-5", "normalization_layer_epsilon=0.00001", "hidden_act=situ"],
)  # fmt: skip
def test_an_override_that_repeats_the_released_config_is_no_contradiction(override):
  assert read("kimi-k3.yml", K3A, override, "max_target_length=64", "max_prefill_predict_length=64").vocab_size == 512


@pytest.mark.parametrize(
  ("content", "culprit"),
  [
    (None, "No such file"),
    ("{", "not JSON"),
    ("[1]", "not an object"),
    ("", "not JSON"),
    ('{"text_config": 3}', "text_config is a int"),
  ],
)
def test_a_released_config_that_isnt_one_is_named(tmp_path, content, culprit):
  if content is not None:
    (tmp_path / "config.json").write_text(content)
  message = refused("kimi-k3.yml", f"hf_config={tmp_path}")
  assert culprit in message and str(tmp_path) in message
