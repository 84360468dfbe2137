"""The core on several devices and in several processes: what one device answers."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from _cores import FACTS, KEYS

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from _hosts import PATIENCE, Hosts

WORKER = os.path.join(os.path.dirname(__file__), "_serving_worker.py")
COMMON = (*KEYS, "prefill_chunk_size=32", "decode_steps_per_dispatch=8")
SPLIT = ("per_device_batch_size=2", "ici_data_parallelism=2", "parallel_mode=throughput")

pytestmark = pytest.mark.long


def results(path):
  return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
  return on_devices(tmp_path_factory.mktemp("one"), 1, "per_device_batch_size=4")


def on_devices(folder, devices, *overrides):
  command = [sys.executable, WORKER, str(folder / "out.json"), str(devices), *COMMON, *overrides]
  done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
  assert done.returncode == 0, done.stderr
  return results(folder / "out.json")


def assert_same(got, expected):
  assert got["texts"][:24] == [f.answer for f in FACTS[:24]]
  for what in ("ids", "ends", "finished"):
    assert got[what] == expected[what]
  assert got["compiled"] == expected["compiled"] == 0
  for mine, theirs in zip(got["logprobs"], expected["logprobs"], strict=True):
    # float32 sums over devices come in another order: seen 1e-6.
    np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_two_data_groups_answer_what_one_device_does(tmp_path, one):
  got = on_devices(tmp_path, 2, *SPLIT)
  assert_same(got, one)
  # Both groups' prompts are prefilled side by side.
  assert any(what[0] == "prefill" and len(what[2]) == 2 for what in got["trace"])


def test_two_processes_of_two_devices_answer_what_one_does(tmp_path, one):
  overrides = ("per_device_batch_size=1", "ici_data_parallelism=2", "ici_tensor_parallelism=2")
  mode = ("parallel_mode=throughput", "mla_cache_mode=striped")
  with Hosts(tmp_path, 2, WORKER, str(tmp_path / "out.json"), "0", *COMMON, *overrides, *mode) as hosts:
    assert hosts.wait() == [0, 0], hosts.err(0) + hosts.err(1)
    hosts.assert_only_the_first_spoke()
  assert_same(results(tmp_path / "out.json"), one)


def test_when_the_first_process_is_killed_the_other_ends(tmp_path):
  # They would serve forever: no request comes.
  program = (
    "import sys, time; from MaxText.configs.k3_config import initialize; from MaxText.decode import load_tokenizer;"
    "from MaxText.errors import exit_on_user_error; from MaxText.inference.serving.start import start_core\n"
    "def main(argv):\n"
    "  config = initialize(argv)\n"
    "  core = start_core(config, load_tokenizer(config))\n"
    "  while core: print('serving', flush=True); time.sleep(1)\n"
    "exit_on_user_error(main, sys.argv)"
  )
  with Hosts(tmp_path, 2, "-c", program, *KEYS, *SPLIT, "prefill_chunk_size=16", devices=1) as hosts:
    end = time.monotonic() + PATIENCE
    while not hosts.out(0) and time.monotonic() < end and all(p.poll() is None for p in hosts.processes):
      time.sleep(0.2)
    assert hosts.out(0), hosts.err(0) + hosts.err(1)
    hosts.processes[0].send_signal(signal.SIGKILL)
    codes = hosts.wait(60)
  assert codes[0] == -signal.SIGKILL
  assert codes[1] != 0
  assert "error: process 0 of 2 ended or can't be reached any more" in hosts.err(1)
