"""Speed of the converter: a part of a K3 layer at full size, against copying its result and against a usual tool.

`python bench/convert.py [--experts N] [--repeats R] [--directory DIR] [--peer-python PATH] [--json FILE]`

The source is made here: N experts of K3's size with random MXFP4 values, and little else. All rows take turns in one
run, on the cores at hand, and the table shows medians (bench/README.md).
"""

import os
import sys

# Run as a file, Python puts this folder first on the path, where it would hide packages of the same names.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
  sys.path[0] = os.path.dirname(sys.path[0])
sys.path.append(os.path.join(sys.path[0], "scripts"))

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import skeleton_checkpoint

from conversion import block_fp8
from conversion.convert import convert
from conversion.headers import HeaderCheckpoint
from conversion.inspect import inspect
from conversion.memory import keep_freed_memory
from conversion.options import Options
from conversion.source import Reader
from MaxText.errors import UserError, exit_on_user_error
from MaxText.progress import say

# The leading layer, and one with experts of K3's size; all else is small, as it is beside 896 experts.
LAYERS = (
  "base_num_decoder_layers=2",
  "kda_layers=[1,2]",
  "full_attn_layers=[]",
  "vocab_size=10240",
  "base_emb_dim=1024",
  "base_mlp_dim=3072",
)
FULL_OUTPUT = 2.78e12  # bytes of all of K3 in block-FP8: 2.72 trillion expert values, the rest in bfloat16
PEER_MATRICES = 24
OURS_ALONE = "decode, quantise, transpose; nothing written"
PEER = "compressed-tensors and torch: decode, quantise; nothing written"
# In virtual machines fresh memory costs much, and torch asks for it all the time. Nobody runs the tool so, but it shows
# what of its time isn't its own.
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_ARENA_MAX": "1"}
PEER_KEPT = "the same, told to keep freed memory: " + " ".join(KEPT)
NO_PEER = (
  "the row of compressed-tensors is left out: make an environment as bench/README.md says and pass --peer-python PATH"
)


def copy(directory: str, target: str) -> float:
  """Seconds of `cp` and `sync` of a directory's files."""
  shutil.rmtree(target, ignore_errors=True)
  started = time.perf_counter()
  subprocess.run(["cp", "-r", directory, target], check=True)
  files = [os.path.join(folder, name) for folder, _, names in os.walk(target) for name in names]
  for first in range(0, len(files), 1000):
    subprocess.run(["sync", *files[first : first + 1000]], check=True)
  seconds = time.perf_counter() - started
  shutil.rmtree(target)
  return seconds


def decode_and_quantise(source: str, repeats: int) -> Iterator[tuple[float, int]]:
  """Seconds and bytes of what the peer does: the same matrices into block-FP8, in memory."""
  reader = Reader(HeaderCheckpoint(source))
  every = sorted(name for name in reader.checkpoint.tensors if name.endswith(".weight_packed"))[:PEER_MATRICES]
  tensors = reader.checkpoint.tensors
  pairs = [tuple(reader.array(tensors[n]) for n in (name, name.replace("_packed", "_scale"))) for name in every]

  def one(pair: tuple[np.ndarray, np.ndarray]) -> int:
    values, scales, _ = block_fp8.from_mxfp4(*pair)
    return values.nbytes + scales.nbytes

  with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
    one(pairs[0])
    for _ in range(repeats):
      started = time.perf_counter()
      nbytes = sum(pool.map(one, pairs))
      yield time.perf_counter() - started, nbytes


def ask_peer(python: str, directory: str, repeats: int, variables: Mapping[str, str]) -> dict[str, Any]:
  helper = os.path.join(os.path.dirname(os.path.abspath(__file__)), "requantize_peer.py")
  environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")} | variables
  try:
    ended = subprocess.run(
      [python, helper, directory, str(PEER_MATRICES), str(repeats)], stdout=subprocess.PIPE, text=True, env=environment
    )
  except OSError as error:
    raise UserError(f"--peer-python {python}: {error.strerror}") from error
  if ended.returncode:
    raise UserError("the environment of --peer-python failed (see above); bench/README.md says how to make it")
  return json.loads(ended.stdout)


def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
  """Runs all rows; bytes and seconds of each."""
  source, made = os.path.join(folder, "source"), os.path.join(folder, "made")
  say("making the source …")
  skeleton_checkpoint.write(source, [*LAYERS, f"num_experts={args.experts}"], shards=4)
  skeleton_checkpoint.fill_experts(source)
  os.sync()
  rows: dict[str, dict[str, Any]] = {}

  def add(name: str, seconds: float, nbytes: int) -> None:
    rows.setdefault(name, {"seconds": [], "nbytes": nbytes})["seconds"].append(seconds)

  started = time.perf_counter()
  inspect(source)
  start_up = time.perf_counter() - started
  for i in range(args.repeats):
    for layout in ("maxtext", "hf"):
      shutil.rmtree(made, ignore_errors=True)
      os.sync()
      started = time.perf_counter()
      manifest = convert(source, made, Options(layout=layout))
      add(f"conversion.convert, layout={layout}", time.perf_counter() - started, manifest.nbytes)
      if layout == "maxtext":
        os.sync()
        add("cp and sync of that result", copy(made, os.path.join(folder, "copy")), manifest.nbytes)
    say(f"round {i + 1} of {args.repeats}")
  shutil.rmtree(made)
  for seconds, nbytes in decode_and_quantise(source, args.repeats):
    add(OURS_ALONE, seconds, nbytes)
  peer = None
  if args.peer_python:
    peer = rows[PEER] = ask_peer(args.peer_python, source, args.repeats, {})
    rows[PEER_KEPT] = ask_peer(args.peer_python, source, args.repeats, KEPT)
  return {"rows": rows, "start_up": start_up, "exactness": manifest.exactness, "peer": peer}


def report(found: dict[str, Any], args: argparse.Namespace, load: float) -> None:
  rates = {name: row["nbytes"] / statistics.median(row["seconds"]) for name, row in found["rows"].items()}
  print(
    f"{len(os.sched_getaffinity(0))} cores, load before {load:.1f}; {args.experts} experts; median of {args.repeats}"
  )
  if found["peer"]:
    print(", ".join(f"{k} {v}" for k, v in found["peer"]["versions"].items()), found["peer"]["way"])
  print("\n| what | output GB | s | output GB/s | fastest … slowest s |\n| --- | ---: | ---: | ---: | ---: |")
  for name, row in found["rows"].items():
    low, high = min(row["seconds"]), max(row["seconds"])
    seconds = statistics.median(row["seconds"])
    print(f"| {name} | {row['nbytes'] / 1e9:.2f} | {seconds:.2f} | {rates[name] / 1e9:.3f} | {low:.2f} … {high:.2f} |")
  ours, copied, hf, *_ = rates.values()
  ratios = {"layout=maxtext / cp and sync": ours / copied}
  if found["peer"]:
    ratios["layout=maxtext, all of it, / compressed-tensors and torch"] = ours / rates[PEER]
    ratios["layout=hf, all of it, / compressed-tensors and torch"] = hf / rates[PEER]
    ratios["decode and quantise alone / compressed-tensors and torch"] = rates[OURS_ALONE] / rates[PEER]
    ratios["layout=maxtext, all of it, / compressed-tensors and torch that keep memory"] = ours / rates[PEER_KEPT]
  print()
  for name, ratio in ratios.items():
    print(f"{name}: {ratio:.2f}×")
  print(f"of each conversion some {found['start_up']:.1f} s are start-up: reading headers and the configuration")
  print(f"the full checkpoint at that rate: {FULL_OUTPUT / ours / 3600:.1f} hours (arithmetic, not measured)")
  if args.json:
    with open(args.json, "w", encoding="utf-8") as f:
      json.dump(found | {"ratios": ratios}, f, indent=2)
      f.write("\n")


def main(argv: Sequence[str]) -> None:
  parser = argparse.ArgumentParser(prog="bench/convert.py", description=__doc__.split("\n", 1)[0])
  parser.add_argument("--experts", type=int, default=224, metavar="N", help="experts of the layer (K3 has 896)")
  parser.add_argument("--repeats", type=int, default=3, metavar="R", help="measurements of each row")
  parser.add_argument("--directory", metavar="DIR", help="where to write; needs about four times the result")
  parser.add_argument("--peer-python", metavar="PATH", help="python of an environment with compressed-tensors")
  parser.add_argument("--json", metavar="FILE", help="also write the figures there")
  args = parser.parse_args(argv[1:])
  if args.experts < 16 or args.repeats < 1:
    raise UserError("--experts must be at least 16 and --repeats at least 1")
  jax.config.update("jax_platforms", "cpu")  # this and the next, as the command does
  keep_freed_memory()
  load = os.getloadavg()[0]
  if load > 0.5:
    say(f"other work is running here (load {load:.1f} on {os.cpu_count()} cores): the figures are provisional")
  if not args.peer_python:
    say(NO_PEER)
  with tempfile.TemporaryDirectory(dir=args.directory) as folder:
    report(measure(args, folder), args, load)


if __name__ == "__main__":
  exit_on_user_error(main, sys.argv)
