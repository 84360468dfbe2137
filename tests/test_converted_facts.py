"""Converted checkpoints in use: decode.py says what it says of the source, score.py gives its logits."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from _converted import SOURCE, converted

from MaxText import decode, score

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import tiny_facts

FACTS = tiny_facts.facts()
SHORT = ("max_target_length=48", "max_prefill_predict_length=32")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
  path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
  path.write_text("\n".join(fact.prompt for fact in FACTS), encoding="utf-8")
  return path


def answers(directory, prompts, capsys):
  """What decode.py says to each fact's prompt, all in one batch."""
  decode.main(["decode.py", "kimi-k3-tiny.yml", f"load_parameters_path={directory}", f"prompt_file={prompts}", *SHORT])
  lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Input ")]
  found = [re.fullmatch(r"Input `(.*)` -> `(.*)`", line).groups() for line in lines]
  assert [prompt for prompt, _ in found] == [fact.prompt for fact in FACTS]
  return [text for _, text in found]


@pytest.fixture(scope="module")
def said():
  return {}  # by checkpoint


@pytest.mark.parametrize(
  ("weight_format", "layout"),
  [(weight_format, layout) for weight_format in ("block_fp8", "mxfp4", "bfloat16") for layout in ("maxtext", "hf")],
)
def test_experts_alone_converted_say_the_same(weight_format, layout, prompts, said, tmp_path_factory, capsys):
  directory = converted(tmp_path_factory, weight_format, "experts", layout)
  if not said:
    said["source"] = answers(SOURCE, prompts, capsys)
  assert answers(directory, prompts, capsys) == said["source"]


@pytest.mark.parametrize("weight_format", ["block_fp8", "mxfp4"])
def test_with_dense_matrices_rounded_most_facts_stay(weight_format, prompts, tmp_path_factory, capsys):
  said = answers(converted(tmp_path_factory, weight_format, "all"), prompts, capsys)
  assert np.mean([text == fact.answer for text, fact in zip(said, FACTS, strict=True)]) >= 0.95


def test_score_gives_the_sources_logits(tmp_path, tmp_path_factory):
  np.save(tmp_path / "ids.npy", np.random.default_rng(5).integers(0, 600, (2, 16)))

  def logits(directory):
    output = tmp_path / "out.npz"
    given = (f"load_parameters_path={directory}", f"score_tokens={tmp_path / 'ids.npy'}", f"score_output={output}")
    score.main(["score.py", "kimi-k3-tiny.yml", *given, *SHORT])
    return np.load(output)["logits"]

  expected = logits(SOURCE)
  assert expected.shape == (2, 16, 608)
  # The weights are equal; float32 products of quantised ones are summed block by block.
  np.testing.assert_allclose(logits(converted(tmp_path_factory, "block_fp8", "experts")), expected, atol=1e-4)
