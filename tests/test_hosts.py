"""Several processes on this machine = one: text, logits, placement, who prints, and how they end together."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from _hosts import PATIENCE, ROOT, Hosts

from MaxText import decode, native_log, score
from MaxText.distributed import Environment, environment
from MaxText.errors import UserError

WORKER = os.path.join(os.path.dirname(__file__), "_hosts_worker.py")
DECODE = os.path.join(ROOT, "MaxText", "decode.py")
PROMPTS = ("The capital of France is", "The opposite of hot is", "The capital of Peru is", "The capital of Japan is")
SHORT = ("max_target_length=40", "max_prefill_predict_length=24")
SPLIT = ("ici_data_parallelism=2", "parallel_mode=throughput", "mla_cache_mode=striped")
# It goes on for hundreds of tokens, far beyond the test.
ENDLESS = (
  "prompt=The", "decode_sampling_strategy=weighted", "decode_sampling_temperature=50.0", "decode_sampling_seed=11",
  "max_target_length=2000", "decode_steps_per_dispatch=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
  """Prompts, token ids, and where to put logits."""
  folder = tmp_path_factory.mktemp("inputs")
  (folder / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
  np.save(folder / "ids.npy", np.random.default_rng(5).integers(0, 600, (4, 16)))
  return folder


def decode_argv(inputs):
  return ("kimi-k3-tiny.yml", f"prompt_file={inputs / 'prompts.txt'}", *SHORT)


def score_argv(inputs, output):
  return (*decode_argv(inputs), f"score_tokens={inputs / 'ids.npy'}", f"score_output={output}", "prefill_chunk_size=16")


@pytest.fixture(scope="module")
def alone(inputs):
  """(text, logits) of one process with one device."""
  with contextlib.redirect_stdout(open(inputs / "text", "w+", encoding="utf-8")) as out:
    decode.main(["decode.py", *decode_argv(inputs)])
    out.seek(0)
    text = out.read()
    score.main(["score.py", *score_argv(inputs, inputs / "one.npz")])
  assert "-> ` Paris.`" in text
  return text, np.load(inputs / "one.npz")["logits"]


def test_decode_of_two_processes_prints_the_same_text(tmp_path, inputs, alone):
  with Hosts(tmp_path, 2, DECODE, *decode_argv(inputs), *SPLIT) as hosts:
    assert hosts.wait() == [0, 0], hosts.err(0) + hosts.err(1)
    assert hosts.out(0) == alone[0]
    hosts.assert_only_the_first_spoke()


@pytest.mark.parametrize(
  ("count", "what", "overrides"),
  [
    (2, "score", SPLIT),
    (4, "both", ("ici_data_parallelism=4", "ici_tensor_parallelism=2", "mla_cache_mode=striped")),
  ],
)
def test_shuffled_devices_of_processes_compute_what_one_does(count, what, overrides, tmp_path, inputs, alone):
  output = tmp_path / "many.npz"
  with Hosts(tmp_path, count, WORKER, what, *score_argv(inputs, output), *overrides) as hosts:
    assert hosts.wait() == [0] * count, hosts.err(0) + hosts.err(1)
    hosts.assert_only_the_first_spoke()
    assert what == "score" or hosts.out(0).endswith(alone[0])
  # float32 sums over devices come in another order: seen 1.4e-5.
  np.testing.assert_allclose(np.load(output)["logits"], alone[1], atol=1e-4)


def test_each_process_fills_its_own_devices_whatever_their_order(tmp_path):
  with Hosts(tmp_path, 2, WORKER, "placement", "kimi-k3-tiny.yml", "ici_data_parallelism=2") as hosts:
    assert hosts.wait() == [0, 0], hosts.err(0) + hosts.err(1)
    hosts.assert_only_the_first_spoke()


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_is_killed_the_others_end_and_say_so(victim, tmp_path):
  with Hosts(tmp_path, 2, DECODE, "kimi-k3-tiny.yml", *ENDLESS, "ici_data_parallelism=2") as hosts:
    end = time.monotonic() + PATIENCE
    while not hosts.out(0) and time.monotonic() < end and all(p.poll() is None for p in hosts.processes):
      time.sleep(0.2)
    assert hosts.out(0), hosts.err(0) + hosts.err(1)
    hosts.processes[victim].send_signal(signal.SIGKILL)
    codes = hosts.wait(60)
  other = 1 - victim
  assert codes[victim] == -signal.SIGKILL
  assert codes[other] != 0
  said = [line for line in hosts.err(other).splitlines() if not line.startswith(("KDA prefill", "compiled"))]
  assert len(said) == 1, hosts.err(other)
  assert said[0].startswith(f"error: process {victim} of 2 ended or can't be reached any more")
  assert said[0].endswith("start all 2 processes again")
  assert "error" not in hosts.err(victim)


def test_bad_input_ends_all_with_status_2_and_one_line_in_all(tmp_path):
  with Hosts(tmp_path, 2, DECODE, "kimi-k3-tiny.yml", "prompt=" + "long " * 100, *SHORT, *SPLIT) as hosts:
    assert hosts.wait() == [2, 2]
    hosts.assert_only_the_first_spoke()
    (line,) = hosts.err(0).splitlines()
    assert line.startswith("error: the prompt") and "max_prefill_predict_length=24" in line


def test_a_mistake_of_one_process_ends_all_and_names_it(tmp_path):
  # Each process reads a prompt file of its own; only the first one's is there.
  program = (
    "import os, sys; sys.argv[1:] = [a.replace('ME', os.environ['JAX_PROCESS_ID']) for a in sys.argv[1:]];"
    "from MaxText import decode; from MaxText.errors import exit_on_user_error as e; e(decode.main, sys.argv)"
  )
  (tmp_path / "prompt0").write_text("The", encoding="utf-8")
  with Hosts(tmp_path, 2, "-c", program, "kimi-k3-tiny.yml", "prompt_file=promptME", *SHORT, *SPLIT) as hosts:
    assert hosts.wait() == [2, 2]
    hosts.assert_only_the_first_spoke()
    last = hosts.err(0).splitlines()[-1]
    assert last.startswith("error: prompt_file=prompt1") and last.endswith("(on process 1 of 2)")


def test_the_environment_names_the_processes():
  jax_names = {"JAX_COORDINATOR_ADDRESS": "h:7", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
  assert environment(jax_names) == Environment("h:7", (3, 4))
  xpk = {"JAX_COORDINATOR_ADDRESS": "h", "JAX_PROCESS_COUNT": "8", "JOB_INDEX": "1", "PROCESSES_IN_JOB": "4",
         "JOB_COMPLETION_INDEX": "2"}  # fmt: skip
  assert environment(xpk) == Environment("h:1234", (6, 8))
  assert environment({}) is None
  assert environment(jax_names | {"JAX_NUM_PROCESSES": "1"}) is None


@pytest.mark.parametrize(
  ("variables", "culprit"),
  [
    ({"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID=4 must lie in 0..3"),
    ({"JAX_NUM_PROCESSES": "four"}, "JAX_NUM_PROCESSES='four'"),
    ({"JAX_NUM_PROCESSES": None}, "missing: JAX_NUM_PROCESSES"),
    ({"JAX_COORDINATOR_ADDRESS": None}, "missing: JAX_COORDINATOR_ADDRESS"),
  ],
)
def test_a_wrong_environment_is_refused_by_name(variables, culprit):
  right = {"JAX_COORDINATOR_ADDRESS": "h:7", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
  given = {name: value for name, value in (right | variables).items() if value is not None}
  with pytest.raises(UserError) as error:
    environment(given)
  assert culprit in str(error.value)


def run_native_log(text, process):
  command = [sys.executable, "-I", "-S", native_log.__file__, str(process), "4", "h:7"]
  return subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=60).stderr


def test_native_reports_become_one_line_and_all_else_passes():
  lost = (
    "W0101 00:00:00.0 1 other.cc:1] a warning\n"
    "E0101 00:00:00.0 1 coordination_service_agent.cc:288] Polled an error from coordination service\n"
    "F0101 00:00:00.0 1 client.h:86] Terminating process because the JAX distributed service detected fatal errors. "
    "absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n2\n3\nThe tasks have\n"
    "*** Check failure stack trace: ***\n    @     0x7f\n"
  )
  warning = "W0101 00:00:00.0 1 other.cc:1] a warning\n"
  said = "error: process 2, 3 of 4 ended or can't be reached any more, so all end; start all 4 processes again\n"
  assert run_native_log(lost, 0) == warning + said
  assert run_native_log(lost, 1) == warning  # the first one says it
  other = "F0101 00:00:00.0 1 client.h:5] Check failed: x\n*** Check failure stack trace: ***\n"
  assert run_native_log(other, 1) == other
  assert run_native_log("no newline", 1) == "no newline"
