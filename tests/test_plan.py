"""The planner: its arithmetic against figures worked out by hand, plan.py itself.

Nothing here runs on a TPU: small programs are compiled for one by libtpu.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import types
from html.parser import HTMLParser

import pytest
from _plans import FP8_ON_64, MXFP4_ON_32, THROUGHPUT, planned
from jax.sharding import AbstractMesh

from MaxText import plan as program
from MaxText.configs.k3_config import initialize
from MaxText.configs.resolve import model_config
from MaxText.errors import UserError
from MaxText.planning import capacity, page, report, roofline, traffic
from MaxText.planning.chip import HBM_BANDWIDTH, HBM_BYTES
from MaxText.planning.compiling import OutOfMemoryError
from MaxText.planning.search import Search

ROOT = os.path.normpath(os.path.join(os.path.dirname(__file__), ".."))
GIB = 2**30
TINY = ("kimi-k3-tiny.yml", "compile_topology=tpu7x-8", "ici_tensor_parallelism=2", "ici_data_parallelism=4")
ARITHMETIC = "plan_phases=arithmetic"


def layout(data, tensor, *argv):
  """A model on a mesh of that size."""
  config = initialize(["plan.py", "kimi-k3.yml", "compile_topology=tpu7x-64", *argv])
  mesh = AbstractMesh((data, tensor), ("data", "tensor"))
  return capacity.Layout(model_config(config, "tpu", mesh), mesh, config.logical_axis_rules)


def run(*argv, cwd=None):
  """plan.py as its own process."""
  command = [sys.executable, os.path.join(ROOT, "MaxText", "plan.py"), *argv]
  return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=cwd)


# Arithmetic


def test_bytes_of_a_sequence_are_those_of_the_design():
  facts = capacity.sequence_facts(layout(2, 32).cfg)
  assert facts["mla_bytes_a_token"] == 24 * 576 * 2 == 27_648
  assert facts["mla_bytes_a_token_as_stored"] == 24 * 640 * 2 == 30_720
  assert facts["kda_state_bytes"] == 69 * 96 * 128 * 128 * 4  # 434 MB
  assert facts["kda_conv_bytes"] == 69 * 3 * 3 * 96 * 128 * 2  # 15 MB


def test_weights_of_experts_are_counted_by_hand():
  one = 3584 * 6144 + 3072 * 3584  # values of one expert
  scales = (3584 // 32) * 6144 + (3072 // 32) * 3584
  mxfp4 = layout(1, 32, "weight_format=mxfp4", *THROUGHPUT).weights()
  assert mxfp4[capacity.EXPERTS] == 92 * 28 * (one // 2 + scales)  # 42.1 GiB: four bits and a byte for 32 of them
  fp8 = layout(2, 32, "weight_format=block_fp8", *THROUGHPUT).weights()
  assert 1 < fp8[capacity.EXPERTS] / (92 * 14 * one) < 1.001  # eight bits and a float32 a 128×128 block
  # Whole on every device, or split over the tensor group; its bias, for all experts, is whole.
  assert fp8[capacity.ROUTER] in [92 * (7168 * 896 * 2 // ways + 896 * 4) for ways in (1, 32)]
  assert fp8[capacity.HEAD] == 7168 * 163840 * 2 // 32


def test_state_is_divided_as_the_cache_is():
  striped = layout(2, 32, *THROUGHPUT).state(64, 131072)
  assert striped[capacity.MLA_CACHE] == 24 * 32 * (131072 // 32) * 640 * 2
  assert striped[capacity.KDA_STATE] == 69 * 32 * 3 * 128 * 128 * 4
  replicated = layout(2, 32, "mla_cache_mode=replicated").state(64, 131072)  # and the same tokens in both data groups
  assert replicated[capacity.MLA_CACHE] == 24 * 64 * 131072 * 640 * 2


def test_capacity_is_what_the_rest_of_the_memory_holds():
  one = layout(2, 32, *THROUGHPUT, "weight_format=block_fp8")
  count = one.slots_that_fit(1 << 20)
  used = sum(one.weights().values())
  assert count % 2 == 0
  assert used + sum(one.state(count, 1 << 20).values()) <= HBM_BYTES
  assert used + sum(one.state(count + 2, 1 << 20).values()) > HBM_BYTES
  assert count >= 80  # of the issue, before temporaries
  halved = one.with_cache("striped", "float8_e4m3fn")
  assert halved.state(64, 1 << 20)[capacity.MLA_CACHE] * 2 == one.state(64, 1 << 20)[capacity.MLA_CACHE]
  assert one.slots_that_fit(1 << 20, reserved=HBM_BYTES) == 0


def test_expected_experts():
  cfg = layout(2, 32).cfg
  assert roofline.distinct_experts(cfg, 1) == pytest.approx(16 / 64)
  assert roofline.distinct_experts(cfg, 64) == pytest.approx(14 * (1 - (880 / 896) ** 64))
  assert roofline.distinct_experts(cfg, 100_000) == pytest.approx(14)


def test_roofline_of_a_step_reads_what_it_must():
  one = layout(2, 32, *THROUGHPUT, "weight_format=block_fp8")
  costs = {c.part: c for c in roofline.decode_step(one, 64, 131072)}
  state = one.state(64, 131072)
  assert costs["MLA cache"].nbytes == state[capacity.MLA_CACHE]
  assert costs["KDA state"].nbytes == 2 * (state[capacity.KDA_STATE] + state[capacity.KDA_CONV])
  share = 1 - (880 / 896) ** 64
  assert costs[capacity.EXPERTS].nbytes == pytest.approx(one.weights()[capacity.EXPERTS] * share)
  assert costs[capacity.EXPERTS].seconds == pytest.approx(costs[capacity.EXPERTS].nbytes / HBM_BANDWIDTH)
  # 64 tokens × 16 experts of three matrices, over 64 devices and 92 layers.
  assert costs[capacity.EXPERTS].flops == pytest.approx(2 * 64 * 16 * 3 * 3584 * 3072 * 92 / 64)
  # Scores over latent and tail, and values, of three heads over 128 K positions of 32 sequences.
  scores = 24 * 2 * 3 * (576 + 512) * 131072 * 32
  assert costs["MLA cache"].flops == pytest.approx(scores, rel=0.05)


def test_roofline_of_a_chunk_computes_what_it_must():
  one = layout(2, 32, *THROUGHPUT, "weight_format=block_fp8")
  costs = {c.part: c for c in roofline.prefill_chunk(one, 2, 8192, 0)}
  assert costs[capacity.EXPERTS].flops == pytest.approx(2 * 16384 * 16 * 3 * 3584 * 3072 * 92 / 64)
  # q, k, v, gate and output of 3 heads a device, for the group's 8,192 tokens.
  assert costs[capacity.KDA].flops == pytest.approx(2 * 8192 * 5 * 7168 * 384 * 69, rel=0.05)
  end = {c.part: c for c in roofline.prefill_chunk(one, 2, 8192, (1 << 20) - 8192)}
  assert end["MLA cache"].flops > 100 * costs["MLA cache"].flops
  assert end[capacity.EXPERTS] == costs[capacity.EXPERTS]


def test_the_smallest_slice_that_would_do():
  config = initialize(["plan.py", "kimi-k3.yml", "compile_topology=tpu7x-32", *THROUGHPUT, "weight_format=block_fp8"])
  assert capacity.smallest_slice(config, 2, 4096, 0)["name"] == "tpu7x-32"
  assert capacity.smallest_slice(config, 64, 1 << 20, GIB) == {
    "name": "tpu7x-64",
    "devices": 64,
    "data": 2,
    "tensor": 32,
    "gib": pytest.approx(79, abs=3),
  }
  assert capacity.smallest_slice(config, 10**7, 1 << 20, 0) is None


# The program


@pytest.fixture(scope="module")
def tiny():
  """The tiny model's plan for eight devices, both programs compiled."""
  return planned(*TINY)


def test_a_compiled_plan_has_the_fields_that_others_read(tiny):
  tiny = json.loads(json.dumps(tiny))
  assert tiny["weights_gib"] > 0
  assert tiny["cache_gib"] > 0
  assert tiny["decode"]["temp_gib"] > 0
  assert tiny["prefill"]["temp_gib"] > 0
  assert tiny["compile_s"] == pytest.approx(tiny["decode"]["compile_s"] + tiny["prefill"]["compile_s"])
  assert tiny["sequences"]["4096"] > 0
  for one in tiny["decode"]["collectives"]:
    assert one["kind"] in traffic.KINDS
    assert one["count"] > 0
    assert one["bytes"] > 0
    assert one["group_size"] in (2, 4, 8)
  assert tiny["marks"]["decode.temp_gib"] == "compiled"
  assert tiny["marks"]["weights_gib"] == "arithmetic"
  assert tiny["fits"]


def test_latency_mode_needs_two_collectives_a_layer(tiny):
  found = tiny["decode"]["collectives"]
  layers = 13
  assert tiny["decode"]["collectives_count"] <= 2 * layers + 6
  assert {one["per"] for one in found} <= {"step", "dispatch"}
  assert not any(one["kind"] == "all-to-all" for one in found)
  assert sum(one["count"] for one in found if one["crosses_data"]) == layers - 1  # the experts' sums
  assert {one["where"].split(".")[0] for one in found if one["crosses_data"]} == {"moe"}


def test_compiled_arguments_are_what_the_shapes_say(tiny):
  for phase in ("decode", "prefill"):
    parts = tiny[phase]["arguments_by_part_gib"]
    assert sum(parts.values()) == pytest.approx(tiny[phase]["arguments_gib"], rel=0.02)
    # Tiles of 8 × 128 enlarge the tiny model's small heads; its experts fill them.
    assert parts[capacity.EXPERTS] == pytest.approx(tiny["weights_by_part_gib"][capacity.EXPERTS])
  assert any(d["what"] == capacity.KDA_STATE for d in tiny["disagreements"])


class Page(HTMLParser):
  """Checks that a page's tags close in order, and keeps what it refers to."""

  VOID = ("meta", "br", "img", "link", "input")

  def __init__(self):
    super().__init__()
    self.open, self.refers, self.tags = [], [], set()

  def handle_starttag(self, tag, attrs):
    self.tags.add(tag)
    self.refers += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action", "srcset")]
    if tag not in self.VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.add(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag


def checked(text):
  """A page's tags, after checking that it is whole and needs nothing from elsewhere."""
  parser = Page()
  parser.feed(text)
  parser.close()
  assert parser.open == []
  assert parser.refers == []
  assert not parser.tags & {"script", "link", "img", "iframe", "object"}
  assert "url(" not in text
  assert "@import" not in text
  assert not re.search(r"https?://", text)
  assert "prefers-color-scheme:dark" in text
  assert 'name="viewport"' in text
  return parser.tags


def test_the_page_stands_alone(tiny):
  text = page.render(tiny)
  assert "section" not in checked(text)
  assert "nothing ran on a TPU" in text
  assert "Collectives of decode" in text
  assert "others" not in text  # of the model of full size only


def test_the_page_of_the_full_model_compares_and_explains():
  plan = planned(*FP8_ON_64, ARITHMETIC, "max_target_length=131072")
  text = page.render(plan)
  assert "svg" in checked(text)
  for figure in ("29.8 GiB", "35.3 GiB at 32,768", "178 K", "50.3 GiB", "its author's", "27,648", "30,720"):
    assert figure in text
  assert "Why block-FP8 is not for 16 chips" in text
  assert sum(plan["on_16_chips"]["block_fp8"]["weights_by_part_gib"].values()) == pytest.approx(86, abs=2)
  assert text.count("polyline points") == 4


def test_the_report_marks_every_figure(tiny):
  lines = list(report.lines(tiny))
  assert any("nothing ran on a TPU" in line for line in lines)
  for start in ("weights a device", "state a device", "a sequence", "sequences that fit", "a decode step", "fits"):
    (line,) = [line for line in lines if line.startswith(start)]
    assert "[arithmetic]" in line or "[compiled]" in line


def test_arithmetic_alone_answers_at_once(tmp_path, capsys):
  path = tmp_path / "plan.json"
  program.main(["plan.py", *MXFP4_ON_32, ARITHMETIC, "max_target_length=131072", "--json", str(path)])
  plan = json.loads(path.read_text(encoding="utf-8"))
  assert plan["compile_s"] == 0
  assert "temp_gib" not in plan["decode"]
  assert plan["settings"]["slots"] == 32
  assert plan["fits"]
  assert plan["sequences"]["1048576"] >= 40
  assert "fits tpu7x-32" in capsys.readouterr().out


def test_a_slice_too_small_is_an_answer(tmp_path):
  done = run("kimi-k3.yml", "compile_topology=tpu7x-32", *THROUGHPUT, f"--html={tmp_path / 'page.html'}")
  assert done.returncode == 1
  assert "Traceback" not in done.stderr
  last = done.stdout.splitlines()[-1]
  assert last.startswith("does not fit tpu7x-32 (16 chips): 17")
  assert "the smallest slice that would do is tpu7x-64" in last
  checked((tmp_path / "page.html").read_text(encoding="utf-8"))


def test_what_the_compiler_has_no_room_for_is_an_answer(tmp_path):
  # Fits by arithmetic; the compiler's padded state does not.
  plan = planned(*TINY, "max_target_length=4096", "plan_slots=20000", "plan_phases=decode")
  assert not plan["fits"]
  assert "RESOURCE_EXHAUSTED" in plan["decode"]["out_of_memory"]
  assert plan["needed_gib"] > plan["hbm_gib"]
  assert "does not fit" in report.verdict(plan)
  checked(page.render(plan))


@pytest.mark.parametrize(
  ("argv", "culprit"),
  [
    (("kimi-k3-tiny.yml",), "compile_topology is not set"),
    (("kimi-k3-tiny.yml", "compile_topology=tpu9-1"), "compile_topology=tpu9-1"),
    (("kimi-k3-tiny.yml", "compile_topology=v6e-8"), "slices of v7x"),
    (("kimi-k3-tiny.yml", "compile_topology="), "compile_topology is not set"),
    (
      ("kimi-k3.yml", "compile_topology=tpu7x-64", "ici_data_parallelism=1"),
      "can't be split over a tensor group of 64",
    ),
    ((*FP8_ON_64, "plan_slots=7"), "7 slots can't be split over 2 data groups"),
    ((*FP8_ON_64, "plan_prefill_rows=3"), "plan_prefill_rows=3"),
    ((*TINY, "plan_phases=all"), "plan_phases=all"),
    ((*TINY, "plan_slots=-1"), "plan_slots=-1"),
    ((*TINY, "--json"), "--json wants a file"),
    ((*TINY, "--json", "--html", "x"), "--json wants a file"),
    ((*TINY, "--pdf", "x"), "unknown option --pdf"),
    ((*TINY, "--json", "/nowhere/plan.json"), "/nowhere/plan.json"),
    ((*TINY, "--html", "/"), "--html /"),
  ],
)
def test_bad_input_is_one_line(argv, culprit):
  with pytest.raises(UserError) as error:
    program.main(["plan.py", *argv])
  assert culprit in str(error.value)


def test_bad_input_of_the_process():
  done = run(*TINY, "--html", "/nowhere/page.html")
  assert done.returncode == 2
  assert done.stdout == ""
  (line,) = done.stderr.splitlines()
  assert line.startswith("error: --html /nowhere/page.html:")


def test_a_file_that_is_there_survives_a_check(tmp_path):
  path = tmp_path / "plan.json"
  path.write_text("kept", encoding="utf-8")
  program.check_writable("--json", str(path))
  assert path.read_text(encoding="utf-8") == "kept"
  program.check_writable("--json", str(tmp_path / "new.json"))
  assert not (tmp_path / "new.json").exists()


@dataclasses.dataclass
class Size:
  slots: int
  context: int
  rows: int
  chunk: int


class Compiler:
  """Stands in for minutes of compiling: a program's bytes are weights, state and so many temporaries a chunk token."""

  def __init__(self, one, bytes_a_token):
    self.layout, self.bytes_a_token, self.asked = one, bytes_a_token, []

  def __call__(self, phase, size):
    self.asked.append((phase, size.chunk, size.context))
    temp = self.bytes_a_token * size.chunk if phase == "prefill" else GIB // 10
    state = self.layout.state(size.slots, size.context)
    total = sum(self.layout.weights().values()) + sum(state.values()) + temp
    if total > 1.2 * HBM_BYTES:
      raise OutOfMemoryError("RESOURCE_EXHAUSTED: the total memory required (529.33G) exceeds available HBM (94.74G)")
    return types.SimpleNamespace(nbytes=total, seconds=1.0)


def searched(bytes_a_token, compiles, chunk=2048, slots=80):
  one = layout(2, 32, *THROUGHPUT, "weight_format=block_fp8")
  compiler, start = Compiler(one, bytes_a_token), Size(slots, 131072, 2, chunk)
  config = types.SimpleNamespace(plan_search_compiles=compiles, max_position_embeddings=1 << 20)
  found = Search(compiler, one, start, config, lambda line: None).run(compiler("prefill", start))
  return found, compiler, one


def test_the_search_finds_chunk_and_context_by_compiling():
  found, compiler, one = searched(bytes_a_token=1 << 20, compiles=10)
  assert found["chunk"] == 32768  # 65,536 would take 64 GiB
  room = HBM_BYTES - sum(one.weights().values()) - 32 * GIB
  assert sum(one.state(80, found["context"]).values()) <= room
  assert sum(one.state(80, found["context"] + 2 * 16384).values()) > room
  assert ("prefill", 32768, found["context"]) in compiler.asked
  assert ("decode", 32768, found["context"]) in compiler.asked
  assert found["decode_confirmed"]
  assert found["compiles"] == len(compiler.asked) - 1 <= 10


def test_the_search_keeps_to_its_allowance():
  found, compiler, _ = searched(bytes_a_token=1 << 20, compiles=2)
  assert found["compiles"] == len(compiler.asked) - 1 == 2
  assert found["exhausted"]
  assert not found["decode_confirmed"]
  small, _, _ = searched(bytes_a_token=1 << 10, compiles=10)
  assert small["chunk"] == 65536
  assert small["context"] == 1 << 20
