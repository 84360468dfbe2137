"""Estimates the single-step KDA decode on TPUs, on a machine without one.

  python bench/kda_decode.py [--chip v6e] [--heads 3 6 12] [--batch 1 8 64 256] [--json FILE]

Every time printed here is an estimate by XLA's TPU compiler, not a measurement: the compiler's static profile of the
final program, or the bytes that the step has to move divided by HBM's bandwidth, whichever is longer (the profile
doesn't share HBM between copies). Activations are float32, because the profiler aborts on programs that unpack
bfloat16. "floor" is the recurrent state read once and written once at full bandwidth.
The reference is one XLA program of many fusions, on which the profiler doesn't end: its time is XLA's own cost model.
tokamax's kernels loop over lengths that only their arguments tell. The profiler guesses them, and so its time for
tokamax is shown but isn't to be quoted.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
IMPLEMENTATIONS = ("pallas", "reference", "tokamax")
K = V = 128
WIDTH = 4
TIMEOUT_S = 600


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device of a chip. bandwidth in bytes/s; clock in cycles/s, as the profile counts them."""

  bandwidth: float
  clock: float


CHIPS = {"tpu7x": Chip(bandwidth=3.69e12, clock=1.9e9), "v6e": Chip(bandwidth=1.64e12, clock=1.75e9)}


def state_bytes(batch: int, heads: int) -> int:
  return 2 * batch * heads * K * V * 4


def moved_bytes(batch: int, heads: int) -> int:
  """State and history read and written, five inputs and one output of [B, H, K], all float32."""
  return state_bytes(batch, heads) + batch * heads * K * 4 * (2 * (WIDTH - 1) * 3 + 6)


def estimate(chip: str, heads: int, batch: int, implementation: str) -> dict:
  """One row of the table. `us` and `fraction` are None where the compiler can't estimate; `note` says why."""
  with tempfile.TemporaryDirectory() as profile:
    environment = os.environ | dict(
      JAX_PLATFORMS="cpu",
      TPU_SKIP_MDS_QUERY="1",
      ALLOW_MULTIPLE_LIBTPU_LOAD="1",
      LIBTPU_INIT_ARGS="" if implementation == "reference" else f"--xla_jf_dump_static_llo_profile_to={profile}",
      PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT / "kernels"), os.environ.get("PYTHONPATH")))),
    )
    # -P: this folder holds a kda_decode.py too, which mustn't be taken for the package.
    command = [sys.executable, "-P", str(ROOT / "bench/_kda_point.py"), chip, str(heads), str(batch), implementation]
    try:
      done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
      done = subprocess.CompletedProcess(command, 1, "", f"Error: no estimate within {TIMEOUT_S} s")
  floor_us = state_bytes(batch, heads) / CHIPS[chip].bandwidth * 1e6
  row = dict(chip=chip, heads=heads, batch=batch, implementation=implementation, us=None, floor_us=floor_us)
  row |= dict(fraction=None, pool_copies=None, cycles=None, note="")
  if done.returncode:
    reasons = [line for line in done.stderr.splitlines() if "failed:" in line or "Error" in line]
    return row | dict(note=(reasons or [f"exit status {done.returncode}"])[-1].split("] ")[-1][:160])
  found = json.loads(done.stdout.splitlines()[-1])
  row |= dict(cycles=found["cycles"], pool_copies=found["pool_copies"])
  if not found["cycles"]:
    return row | dict(note="the profile has no cycles for this program")
  profile_us = found["cycles"] / CHIPS[chip].clock * 1e6
  us = max(profile_us, moved_bytes(batch, heads) / CHIPS[chip].bandwidth * 1e6)
  notes = [] if found["loops_known"] else ["a loop of unknown length is counted once: too short"]
  notes += ["the profiler guessed the loops: don't quote"] if implementation == "tokamax" else []
  notes += ["bound by bytes"] if us > profile_us else []
  return row | dict(us=us, fraction=floor_us / us, note="; ".join(notes))


def show(row: dict, ours: dict | None) -> str:
  us = f"{row['us']:9.2f}" if row["us"] else "        –"
  fraction = f"{row['fraction']:6.3f}" if row["us"] else "     –"
  times = f"{row['us'] / ours['us']:6.2f}×" if ours and ours["us"] and row["us"] else "      –"
  mib = moved_bytes(row["batch"], row["heads"]) / 2**20
  copies = "–" if row["pool_copies"] is None else row["pool_copies"]
  return (
    f"{row['chip']:6} {row['heads']:5} {row['batch']:5}  {row['implementation']:10} {us} {row['floor_us']:9.2f}"
    f" {fraction} {times} {mib:9.1f} {copies!s:>6}  {row['note']}"
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--chip", choices=CHIPS, default="tpu7x")
  parser.add_argument("--heads", type=int, nargs="+", default=[3, 6, 12])
  parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
  parser.add_argument("--implementation", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
  parser.add_argument("--json", type=pathlib.Path, help="write the rows to this file")
  args = parser.parse_args()

  chip = CHIPS[args.chip]
  print("Estimates by the TPU compiler, not measurements: max(static profile, bytes / bandwidth); float32 activations.")
  print(f"One device of {args.chip}: {chip.bandwidth / 1e12:.2f} TB/s, {chip.clock / 1e9:.2f} GHz. K = V = {K}.")
  print("chip   heads batch  implementation   us    floor us  fract. / ours  MiB moved copies  note", flush=True)
  rows = []
  for heads in args.heads:
    for batch in args.batch:
      ours = None
      for implementation in args.implementation:
        row = estimate(args.chip, heads, batch, implementation)
        ours = row if implementation == "pallas" else ours
        print(show(row, ours), flush=True)
        rows.append(row)
  if args.json:
    args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
  main()
