"""The programs as a person meets them: decode.py and score.py on the tiny model, good input and bad."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from MaxText import decode, score
from MaxText.errors import UserError

ROOT = os.path.normpath(os.path.join(os.path.dirname(__file__), ".."))
TINY = os.path.join(ROOT, "MaxText", "assets", "kimi-k3-tiny")
SHORT = ("max_target_length=64", "max_prefill_predict_length=32")


def run(*argv):
  """decode.py in this process."""
  decode.main(["decode.py", *argv])


def program(name, *argv, cwd=None):
  """A program as its own process."""
  command = [sys.executable, os.path.join(ROOT, "MaxText", name), *argv]
  return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=cwd)


def test_one_command_prints_paris(tmp_path):
  result = program("decode.py", "kimi-k3-tiny.yml", "prompt=The capital of France is", cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  assert result.stdout.splitlines() == [" Paris.", "Input `The capital of France is` -> ` Paris.`"]
  assert "KDA decode: reference" in result.stderr
  assert "tokens/s" in result.stderr
  assert "Traceback" not in result.stderr


def test_a_file_of_prompts_is_one_batch(tmp_path, capsys):
  path = tmp_path / "prompts.txt"
  path.write_text("The capital of Peru is\n\nThe opposite of hot is\n", encoding="utf-8")
  run("kimi-k3-tiny.yml", f"prompt_file={path}", *SHORT)
  assert capsys.readouterr().out.splitlines() == [
    "Input `The capital of Peru is` -> ` Lima.`",
    "Input `The opposite of hot is` -> ` cold.`",
  ]


@pytest.mark.parametrize("thinking", ["true", "false"])
def test_chat(capsys, thinking):
  argv = ("use_chat_template=true", f"enable_thinking={thinking}", "prompt=What is the capital of France?")
  run("kimi-k3-tiny.yml", *argv)
  lines = capsys.readouterr().out.splitlines()
  assert lines[-1] == "Input `What is the capital of France?` -> `Paris.`"
  assert lines[:-1] == (
    ["<think>The capital of France is Paris.</think>", "Paris."] if thinking == "true" else ["Paris."]
  )


@pytest.mark.parametrize(
  "argv",
  [
    ("decode_sampling_strategy=weighted", "decode_sampling_temperature=3.0"),
    ("decode_sampling_strategy=topk", "decode_sampling_top_k=50", "decode_sampling_temperature=3.0"),
    ("decode_sampling_strategy=nucleus", "decode_sampling_nucleus_p=0.99", "decode_sampling_temperature=3.0"),
    ("decode_sampling_strategy=composite", "decode_sampling_top_k=50", "decode_sampling_nucleus_p=0.99",
     "decode_sampling_temperature=3.0"),
  ],
)  # fmt: skip
def test_sampling_follows_its_seed(capsys, argv):
  def text(seed):
    run("kimi-k3-tiny.yml", "prompt=The", *SHORT, *argv, f"decode_sampling_seed={seed}")
    return capsys.readouterr().out

  assert text(1) == text(1)
  assert len({text(1), text(2), text(3)}) > 1


def test_dispatches_of_any_length_give_the_same_text(capsys):
  texts = []
  for steps in (1, 3, 32):
    run("kimi-k3-tiny.yml", "prompt=The longest river in the world is", *SHORT, f"decode_steps_per_dispatch={steps}")
    texts.append(capsys.readouterr().out)
  assert len(set(texts)) == 1
  assert "the Nile." in texts[0]


def test_unrolled_layers_and_idle_slots_give_the_same_text(capsys):
  run("kimi-k3-tiny.yml", "prompt=The capital of Japan is", *SHORT, "scan_layers=false", "per_device_batch_size=4")
  assert "-> ` Tokyo.`" in capsys.readouterr().out


def test_the_kernel_interpreted_and_a_bfloat16_state_give_the_same_text(capsys):
  for key in ("kda_decode_implementation=pallas_interpret", "kda_state_dtype=bfloat16"):
    run("kimi-k3-tiny.yml", "prompt=The capital of Japan is", *SHORT, key)
    assert "-> ` Tokyo.`" in capsys.readouterr().out


def test_profiler_key_writes_a_trace(tmp_path, capsys):
  run("kimi-k3-tiny.yml", "prompt=The", *SHORT, "profiler=xplane", f"base_output_directory={tmp_path}", "run_name=r")
  assert "profile written" in capsys.readouterr().err
  assert list(tmp_path.rglob("*.xplane.pb"))


def test_score_modes_agree(tmp_path, capsys):
  tokens = np.arange(2 * 70).reshape(2, 70) % 600
  np.save(tmp_path / "in.npy", tokens)
  logits = {}
  for mode in ("prefill", "decode", "chunked"):
    out = tmp_path / f"{mode}.npz"
    score.main(["score.py", "kimi-k3-tiny.yml", f"score_tokens={tmp_path / 'in.npy'}", f"score_output={out}",
                f"score_mode={mode}", "prefill_chunk_size=33"])  # fmt: skip
    logits[mode] = np.load(out)["logits"]
    assert logits[mode].shape == (2, 70, 608)
    assert logits[mode].dtype == np.float32
    assert "perplexity" in capsys.readouterr().out
  # float32 sums in another order, through 13 layers.
  np.testing.assert_allclose(logits["decode"], logits["prefill"], atol=1e-4)
  np.testing.assert_allclose(logits["chunked"], logits["prefill"], atol=1e-4)


def test_perplexity_is_that_of_the_formula():
  logits = np.log(np.array([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1 / 3, 1 / 3, 1 / 3]]], np.float32))
  # Token 1 after 0 has probability 1/4, token 1 after that 0.8.
  assert score.perplexity(logits, np.array([[0, 1, 1]])) == pytest.approx((0.25 * 0.8) ** -0.5, rel=1e-6)


def test_the_full_model_says_what_it_needs_in_one_line(tmp_path):
  result = program("decode.py", "kimi-k3.yml", cwd=tmp_path)
  assert result.returncode == 2
  assert result.stdout == ""
  (line,) = result.stderr.splitlines()
  assert "5,558,991,192,448 bytes" in line
  assert "TPU v7x devices" in line
  assert "found 1 cpu device(s)" in line


def test_logits_that_arent_finite_are_an_error(monkeypatch):
  def poisoned(*arguments):
    engine = load_engine(*arguments)
    engine.params["norm"] = engine.params["norm"] * np.nan
    return engine

  load_engine = decode.load_engine
  monkeypatch.setattr(decode, "load_engine", poisoned)
  with pytest.raises(UserError, match="not finite"):
    run("kimi-k3-tiny.yml", "prompt=The", *SHORT)


BAD = {
  "no prompt": ((), "no prompt"),
  "two prompts": (("prompt=a", "prompt_file=b"), "prompt and prompt_file"),
  "no such prompt file": (("prompt_file=nowhere.txt",), "nowhere.txt"),
  "unknown key": (("prompt=a", "promt=b"), "unknown key 'promt'; did you mean 'prompt'"),
  "not key=value": (("prompt=a", "verbose"), "'verbose' is not of the form key=value"),
  "too long": (("prompt=" + "long " * 100,), "max_prefill_predict_length=32"),
  "no checkpoint": (("prompt=a", "load_parameters_path=nowhere"), "nowhere"),
  "bad strategy": (("prompt=a", "decode_sampling_strategy=best"), "decode_sampling_strategy=best"),
  "topk without k": (("prompt=a", "decode_sampling_strategy=topk"), "decode_sampling_top_k"),
  "bad temperature": (
    ("prompt=a", "decode_sampling_strategy=weighted", "decode_sampling_temperature=0"),
    "decode_sampling_temperature=0",
  ),
  "another vocabulary": (("prompt=a", "vocab_size=512"), "608"),
  "another width": (("prompt=a", "base_emb_dim=256"), "has shape"),
  "unknown implementation": (("prompt=a", "kda_decode_implementation=cuda"), "kda_decode_implementation=cuda"),
  "kernel without its device": (("prompt=a", "kda_decode_implementation=pallas"), "kda_decode_implementation=pallas"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_that_names_the_culprit(case):
  argv, culprit = BAD[case]
  with pytest.raises(UserError) as error:
    run("kimi-k3-tiny.yml", *SHORT, *argv)
  assert culprit in str(error.value)


def test_an_unknown_yml_and_a_truncated_shard_end_a_process_with_one_line(tmp_path):
  result = program("decode.py", "kimi-k4.yml", "prompt=a")
  assert (result.returncode, result.stdout) == (2, "")
  assert "kimi-k3-tiny.yml" in result.stderr
  assert len(result.stderr.splitlines()) == 1
  broken = shutil.copytree(TINY, tmp_path / "broken")
  shard = sorted(broken.glob("*.safetensors"))[1]
  shard.write_bytes(shard.read_bytes()[:-100])
  result = program("decode.py", "kimi-k3-tiny.yml", f"load_parameters_path={broken}", "prompt=a")
  assert (result.returncode, result.stdout) == (2, "")
  assert shard.name in result.stderr
  assert len(result.stderr.splitlines()) == 1


def test_score_says_what_is_wrong_with_its_tokens(tmp_path):
  def fails(tokens):
    np.save(tmp_path / "in.npy", tokens)
    with pytest.raises(UserError) as error:
      score.main(["score.py", "kimi-k3-tiny.yml", f"score_tokens={tmp_path / 'in.npy'}", "score_output=o.npz"])
    return str(error.value)

  assert "0..607" in fails(np.array([[608]]))
  assert "integer array" in fails(np.array([[1.5]]))
  assert "empty" in fails(np.zeros((1, 0), int))
  assert "max_target_length=512" in fails(np.zeros((1, 513), int))
