"""K3's configuration: one line for every way to get it wrong, and overrides that reach what they name."""

import os
import subprocess
import sys

import pytest
from _configs import read, refused

from MaxText.configs.k3_config import CONFIG_DIR, find_config
from MaxText.configs.resolve import model_config

TINY = "kimi-k3-tiny.yml"


@pytest.mark.parametrize(
  ("argv", "culprits"),
  [
    # arguments
    ([], ["usage"]),
    (["kimi-k3"], ["usage", "CONFIG.yml"]),
    (["kimi-k4.yml"], ["kimi-k4.yml", "kimi-k3.yml", "kimi-k3-tiny.yml", "kimi-linear-48b.yml"]),
    ([TINY, "prompt"], ["'prompt'", "key=value"]),
    ([TINY, "hiden_act=situ"], ["'hiden_act'", "'hidden_act'"]),
    ([TINY, "qwertyuiop=1"], ["'qwertyuiop'"]),
    # types
    ([TINY, "vocab_size=many"], ["vocab_size=many", "integer"]),
    ([TINY, "kda_num_heads=x"], ["kda_num_heads=x", "integer"]),
    ([TINY, "kda_num_heads=-3"], ["kda_num_heads=-3"]),
    ([TINY, "scan_layers=maybe"], ["scan_layers=maybe", "boolean"]),
    ([TINY, "kda_layers=3"], ["kda_layers=3", "list"]),
    ([TINY, "dtype=float99"], ["dtype=float99", "float32"]),
    ([TINY, "score_mode=fast"], ["score_mode=fast", "chunked"]),
    ([TINY, "kda_layers=[1,2"], ["kda_layers=[1,2", "can't be read"]),
    ([TINY, "vocab_size={"], ["vocab_size={", "can't be read"]),
    # layers
    ([TINY, "full_attn_layers=[3,7,11,12]", "kda_layers=[0,1,2,4,5,6,8,9,10]"], ["[0]", "1..13", "count from one"]),
    ([TINY, "kda_layers=[1,2,3]"], ["[5, 6, 7, 9, 10, 11]", "kda_layers", "full_attn_layers"]),
    ([TINY, "full_attn_layers=[1,4,8,12,13]"], ["[1]", "twice"]),
    ([TINY, "full_attn_layers=[4,8,12,13,13]"], ["twice"]),
    ([TINY, "full_attn_layers=[4,8,12,14]"], ["[14]", "1..13"]),
    ([TINY, "base_num_decoder_layers=14"], ["[14]"]),
    ([TINY, "first_num_dense_layers=13"], ["first_num_dense_layers=13"]),
    # architecture
    ([TINY, "hidden_act=gelu"], ["hidden_act='gelu'", "situ", "silu"]),
    ([TINY, "kda_gate_lower_bound=null"], ["kda_gate_lower_bound is missing", "-5.0"]),
    ([TINY, "kda_gate_lower_bound=-6"], ["kda_gate_lower_bound=-6"]),
    ([TINY, "kda_gate_lower_bound=1"], ["kda_gate_lower_bound=1"]),
    ([TINY, "kda_num_heads=0"], ["kda_num_heads=0", "kda_layers"]),
    ([TINY, "mla_use_nope=false"], ["mla_use_nope"]),
    ([TINY, "base_num_kv_heads=1"], ["base_num_kv_heads=1", "base_num_query_heads=2"]),
    ([TINY, "num_experts_per_tok=17"], ["num_experts_per_tok=17", "num_experts=16"]),
    ([TINY, "routed_score_func=softmax"], ["routed_score_func='softmax'", "sigmoid"]),
    ([TINY, "logits_via_embedding=true"], ["logits_via_embedding"]),
    ([TINY, "routed_expert_hidden_size=0"], ["latent_moe_use_norm", "routed_expert_hidden_size"]),
    # implementations
    ([TINY, "kda_decode_implementation=cuda"], ["kda_decode_implementation=cuda", "pallas", "reference"]),
    ([TINY, "kda_prefill_implementation=triton"], ["kda_prefill_implementation=triton", "mosaic"]),
    ([TINY, "grouped_matmul_implementation=gather"], ["grouped_matmul_implementation=gather", "ragged_dot"]),
    (["kimi-linear-48b.yml", "kda_prefill_implementation=xla_chunked"], ["xla_chunked", "kda_gate_lower_bound"]),
    (["kimi-linear-48b.yml", "kda_prefill_implementation=mosaic"], ["mosaic", "kda_gate_lower_bound"]),
    # parallelism
    (["kimi-k3.yml", "ici_tensor_parallelism=5"], ["kda_num_heads=96", "ici_tensor_parallelism=5"]),
    (
      ["kimi-k3.yml", "ici_tensor_parallelism=64", "kda_num_heads=64"],
      ["base_num_query_heads=96", "ici_tensor_parallelism=64"],
    ),
    # lengths
    ([TINY, "max_target_length=5000"], ["max_target_length=5000", "max_position_embeddings=4096"]),
    ([TINY, "max_prefill_predict_length=600"], ["max_prefill_predict_length=600", "max_target_length=512"]),
  ],
)
def test_a_wrong_configuration_is_refused_in_one_line(argv, culprits):
  message = refused(*argv)
  for culprit in culprits:
    assert culprit in message, message


# Finding a configuration


def test_a_configuration_is_found_by_bare_name_by_path_and_beside_the_caller(tmp_path, monkeypatch):
  assert find_config(TINY) == os.path.join(CONFIG_DIR, TINY)
  assert find_config(os.path.join(CONFIG_DIR, TINY)) == os.path.join(CONFIG_DIR, TINY)
  monkeypatch.chdir(tmp_path)
  mine = tmp_path / "mine.yml"
  mine.write_text(f"base_config: {os.path.join(CONFIG_DIR, TINY)}\nprefill_chunk_size: 48\n")
  assert find_config("mine.yml") == str(mine)
  config = read("mine.yml")
  assert config.prefill_chunk_size == 48 and config.num_decoder_layers == 13


def test_overrides_reach_maxtexts_keys_and_ours():
  config = read(TINY, "per_device_batch_size=3", "decode_steps_per_dispatch=7", "kda_gate_lower_bound=-4.5")
  assert (config.per_device_batch_size, config.decode_steps_per_dispatch) == (3, 7)
  assert config.kda_gate_lower_bound == -4.5


@pytest.mark.parametrize(
  "prompt",
  ["", "Q: why?", "${x}", "a ${oc.env:HOME} b",
    "a # b", "# a", "[a", "{", "123", "1e5", "yes", "null", '"a" b', "it's", "a=b, c", "*a", "@a", "a\nb",
   " a ", "2024-01-01", "- a", "日本 🙂"],
)  # fmt: skip
def test_a_prompt_is_taken_as_it_stands(prompt):
  """MaxText reads values as YAML, to which these are mappings, comments, numbers or errors."""
  assert read(TINY, f"prompt={prompt}").prompt == prompt


# As a program


def run_program(*argv):
  """A three-line program around `initialize`, outside pytest: there MaxText exits instead of raising."""
  program = (
    "import sys\n"
    "from MaxText.configs.k3_config import initialize\n"
    "from MaxText.errors import exit_on_user_error\n"
    "exit_on_user_error(lambda argv: print('vocabulary', initialize(argv).vocab_size), sys.argv)\n"
  )
  environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
  environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
  return subprocess.run(
    [sys.executable, "-c", program, *argv], env=environment, capture_output=True, text=True, timeout=300, check=False
  )


@pytest.mark.parametrize(
  ("argv", "culprit"),
  [
    ([TINY, "vocab_size=many"], "vocab_size=many"),  # MaxText's own check
    ([TINY, "hidden_act=gelu"], "hidden_act='gelu'"),  # ours, within MaxText's
    (["kimi-k4.yml"], "kimi-k4.yml"),  # ours, before MaxText's
  ],
)
def test_a_program_exits_with_status_2_and_one_line(argv, culprit):
  run = run_program(*argv)
  assert run.returncode == 2, run.stderr
  lines = run.stderr.strip().splitlines()
  assert len(lines) == 1 and lines[0].startswith("error: ") and culprit in lines[0], run.stderr
  assert run.stdout == ""


def test_a_right_configuration_says_nothing_but_what_it_was_asked():
  run = run_program(TINY)
  assert (run.returncode, run.stdout, run.stderr) == (0, "vocabulary 608\n", "")


@pytest.mark.parametrize(
  ("platform", "yml", "expected"),
  [("tpu", "kimi-k3.yml", "mosaic"), ("tpu", "kimi-linear-48b.yml", "xla"), ("tpu", "kimi-k3-tiny.yml", "xla"),
   ("cpu", "kimi-k3.yml", "xla")],
)  # fmt: skip
def test_auto_prefill_takes_the_kernel_only_where_it_can_serve(platform, yml, expected):
  """Unbounded decays make tokamax's kernel overflow to NaN; heads other than 128 it doesn't take."""
  assert model_config(read(yml), platform).kda_prefill_implementation == expected


@pytest.mark.parametrize(("arguments", "threads"), [((), 1), (("cpu_threads=3",), 3)])
def test_products_on_a_cpu_have_the_threads_asked_for(arguments, threads):
  program = f"""
import os, jax
from MaxText.configs.k3_config import initialize
initialize(["test", "{TINY}", *{arguments}])
jax.devices()
print([open(f"/proc/self/task/{{task}}/comm").read().strip() for task in os.listdir("/proc/self/task")])
"""
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
  assert done.stdout.count("tf_XLAEigen") == threads
