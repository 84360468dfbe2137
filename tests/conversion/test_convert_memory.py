"""What a conversion needs of memory, at K3's sizes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import skeleton_checkpoint  # noqa: E402

EXPERTS = 28  # of 896: more of them take longer, not more memory
# Two layers, the leading one and one with experts; a sixteenth of the vocabulary.
LAYERS = ("base_num_decoder_layers=2", "kda_layers=[1,2]", "full_attn_layers=[]", "vocab_size=10240")
# Not getrusage's peak: a child begins with that of the process that started it, here a test worker of any size.
_MEASURED = """
import sys
from conversion.convert import main
main(["convert", *sys.argv[1:]])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  directory = tmp_path_factory.mktemp("full-size")
  skeleton_checkpoint.write(str(directory), [*LAYERS, f"num_experts={EXPERTS}"], shards=4)
  skeleton_checkpoint.fill_experts(str(directory))
  yield directory
  shutil.rmtree(directory)


@pytest.mark.long
@pytest.mark.parametrize("keys", [("scope=experts",), ("layout=hf", "scope=all")], ids="-".join)
def test_a_layer_of_full_size_takes_less_than_3_gib(keys, source, tmp_path):
  """Experts of 33 MB each, and the largest matrices there are: 528 MB of q, k and v, 484 MB of the leading MLP."""
  made = tmp_path / "made"
  ended = subprocess.run(
    [sys.executable, "-c", _MEASURED, str(source), str(made), "workers=2", *keys],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    check=False,
  )
  shutil.rmtree(made, ignore_errors=True)
  assert ended.returncode == 0, ended.stderr
  assert " 0 of them inexact" in ended.stdout.splitlines()[1]
  peak = int(ended.stdout.splitlines()[-1]) * 1024
  assert peak < 3 * 2**30, peak
