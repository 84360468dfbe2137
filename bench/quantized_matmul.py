"""Estimates the grouped product on quantised weights on TPUs, on a machine without one.

  python bench/quantized_matmul.py [--chip v6e] [--only experts] [--json FILE]

Every time printed here is an estimate by XLA's TPU compiler, not a measurement: the compiler's static profile of the
final program, or the bytes that the call has to move divided by HBM's bandwidth, whichever is longer (the profile
doesn't share HBM between copies). "floor" is the longer of two: weights, scales, x and the result moved once at full
bandwidth, and the multiplications at the peak rate for bfloat16.

The profile runs the kernel's scalar code, so every group is given the same known number of rows. It aborts on programs
that decode float4: for MXFP4 only the floor is shown.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_S = 900


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device of a chip. bandwidth in bytes/s; clock in cycles/s, as the profile counts them; bfloat16 flops/s."""

  bandwidth: float
  clock: float
  flops: float


CHIPS = {
  "tpu7x": Chip(bandwidth=3.69e12, clock=1.9e9, flops=1153e12),
  "v6e": Chip(bandwidth=1.64e12, clock=1.75e9, flops=918e12),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """rows of x, of which each of `groups` groups has `each`; one matrix is [inputs, outputs]."""

  name: str
  form: str
  rows: int
  groups: int
  each: int
  inputs: int
  outputs: int


def experts(name, form, groups, rows, each):
  return [Case(name, form, rows, groups, each, i, o) for i, o in ((3584, 6144), (3072, 3584))]


CASES = [
  *experts("experts, decode", "BLOCK_FP8", 14, 1024, 1),
  *experts("experts, decode", "BLOCK_FP8", 14, 1024, 4),
  *experts("experts, decode", "BLOCK_FP8", 14, 1024, 16),
  *experts("experts, decode", "MXFP4", 28, 1024, 4),
  *experts("experts, prefill", "BLOCK_FP8", 14, 2048, 146),
  *experts("experts, prefill", "BLOCK_FP8", 14, 8192, 585),
  *[
    Case(f"dense, {what}", "BLOCK_FP8", rows, 1, rows, i, o)
    for what, rows in (("decode", 32), ("decode", 64), ("prefill", 8192))
    for i, o in ((7168, 1152), (7168, 3584), (3584, 7168), (384, 7168), (192, 7168), (7168, 2112))
  ],
]


def floors(chip: Chip, case: Case) -> tuple[float, float]:
  """(microseconds to move everything once, microseconds of multiplication)."""
  rows = case.groups * case.each
  matrix = case.inputs * case.outputs
  if case.form == "MXFP4":
    weights = matrix / 2 + matrix / 32
  else:
    weights = matrix + 4 * matrix / math.gcd(128, case.inputs) / math.gcd(128, case.outputs)
  moved = case.groups * weights + rows * (case.inputs + case.outputs) * 2
  return moved / chip.bandwidth * 1e6, 2 * rows * matrix / chip.flops * 1e6


def estimate(chip_name: str, case: Case) -> dict:
  """One row of the table. `us` is None where the compiler can't estimate; `note` says why."""
  chip = CHIPS[chip_name]
  moving, multiplying = floors(chip, case)
  row = dataclasses.asdict(case) | dict(chip=chip_name, hbm_us=moving, mxu_us=multiplying, us=None, note="")
  with tempfile.TemporaryDirectory() as profile:
    environment = os.environ | dict(
      JAX_PLATFORMS="cpu",
      TPU_SKIP_MDS_QUERY="1",
      ALLOW_MULTIPLE_LIBTPU_LOAD="1",
      LIBTPU_INIT_ARGS=f"--xla_jf_dump_static_llo_profile_to={profile}",
      PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT / "kernels"), os.environ.get("PYTHONPATH")))),
    )
    # -P: this file has the name of the package, which mustn't be taken for it.
    command = [sys.executable, "-P", __file__, "--chip", chip_name, "--point", json.dumps(dataclasses.asdict(case))]
    try:
      done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
      return row | dict(note=f"no estimate within {TIMEOUT_S} s")
  if done.returncode:
    reasons = [line for line in done.stderr.splitlines() if "failed:" in line or "Error" in line or "failure" in line]
    return row | dict(note=(reasons or [f"exit status {done.returncode}"])[-1].split("] ")[-1][:80])
  found = json.loads(done.stdout.splitlines()[-1])
  us = found["cycles"] / chip.clock * 1e6
  return row | found | dict(us=max(us, moving), note="bound by bytes" if moving > us else "")


def point(chip_name: str, case: Case) -> dict:
  """Compiles one case in this process, and reads the profile's cycles of the kernel."""
  import jax.numpy as jnp

  from quantized_matmul import aot
  from quantized_matmul.formats import Form

  spec = importlib.util.spec_from_file_location("_kda_point", ROOT / "bench/_kda_point.py")
  kda_point = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(kda_point)
  arguments = aot.abstract_arguments(
    Form[case.form], case.rows, case.groups, case.inputs, case.outputs, aot.one_device(chip_name), layers=92,
    dtype=jnp.bfloat16,
  )  # fmt: skip
  hlo = aot.lower(arguments, known_size=case.each).compile().as_text()
  cycles, _ = kda_point.estimated_cycles(hlo)
  return dict(cycles=cycles, stack_copies=len(aot.stack_copies(hlo, *arguments[1:3])))


def show(row: dict) -> str:
  floor = max(row["hbm_us"], row["mxu_us"])
  us = f"{row['us']:8.1f} {row['us'] / floor:6.2f}×" if row["us"] else "       –       –"
  return (
    f"{row['name']:16} {row['form']:9} {row['rows']:5} {row['groups']:3}·{row['each']:<5}"
    f" {row['inputs']:5}×{row['outputs']:<5} {row['hbm_us']:8.1f} {row['mxu_us']:8.1f} {us}"
    f" {row.get('stack_copies', '–')!s:>6}  {row['note']}"
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--chip", choices=CHIPS, default="tpu7x")
  parser.add_argument("--only", default="", help="only rows whose name holds this text")
  parser.add_argument("--json", type=pathlib.Path, help="write the rows to this file")
  parser.add_argument("--point", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.point:
    print(json.dumps(point(args.chip, Case(**json.loads(args.point)))))
    return

  chip = CHIPS[args.chip]
  print(
    "Estimates by the TPU compiler, not measurements: max(static profile, bytes / bandwidth); bfloat16 activations."
  )
  print(
    f"One device of {args.chip}: {chip.bandwidth / 1e12:.2f} TB/s, {chip.clock / 1e9:.2f} GHz,"
    f" {chip.flops / 1e12:.0f} TFLOP/s in bfloat16."
  )
  print(
    "what             weights    rows groups·each  matrix   HBM us   MXU us       us  /floor copies  note", flush=True
  )
  rows = []
  for case in CASES:
    if args.only in case.name:
      rows.append(estimate(args.chip, case))
      print(show(rows[-1]), flush=True)
  if args.json:
    args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
  main()
