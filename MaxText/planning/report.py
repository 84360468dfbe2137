"""The plan as text. Every figure carries its mark: [compiled] from the compiler, [arithmetic] from shapes and rates."""

from collections.abc import Iterator
from typing import Any

_MIB = 2**20


def context(n: int | str) -> str:
  n = int(n)
  return f"{n // 2**20} M" if n >= 2**20 and n % 2**20 == 0 else f"{n // 1024} K" if n % 1024 == 0 else f"{n:,}"


def size(gib: float) -> str:
  """GiB, or MiB where that says more."""
  return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.2f} MiB"


def _rows(title: str, mark: str, parts: dict[str, float]) -> Iterator[str]:
  yield f"{title} [{mark}]"
  for name, gib in parts.items():
    if gib:
      yield f"  {name:<24} {size(gib):>14}"


def _roofline(title: str, costs: list[dict[str, Any]]) -> Iterator[str]:
  total = sum(c["seconds"] for c in costs)
  yield f"{title}: at least {total * 1e3:.2f} ms [arithmetic]"
  for c in sorted(costs, key=lambda c: -c["seconds"]):
    if c["seconds"] >= total / 1000:
      bound = "waiting" if not c["bytes"] and not c["flops"] else f"{c['bytes'] / 2**30:8.3f} GiB"
      work = f"{c['flops'] / 1e12:8.3f} TFLOP" if c["flops"] else ""
      yield f"  {c['part']:<24} {c['seconds'] * 1e3:8.3f} ms   {bound:>12}  {work}"


def _collectives(phase: dict[str, Any], unit: str) -> Iterator[str]:
  yield f"  collectives: {phase['collectives_count']} a {unit} [compiled]; the least time of each [arithmetic]"
  for c in phase["collectives"]:
    across = " × ".join(c["axes"]) or "?"
    per = "" if c["per"] == unit else f", per {c['per']}"
    group = f"{c['group_size']} ({across})"
    each = f"{c['seconds'] * 1e6:8.0f} µs each"
    yield f"    {c['count']:>4} {c['kind']:<18} group {group:<20} {c['bytes']:>12,} B {each}  {c['where']}{per}"


def _phase(name: str, phase: dict[str, Any], unit: str) -> Iterator[str]:
  if "out_of_memory" in phase:
    yield f"{name}: does not compile, the device is too small [compiled]: {phase['out_of_memory']}"
  if "compile_s" not in phase:
    return
  yield f"{name}, compiled in {phase['compile_s']:.0f} s [compiled]"
  arithmetic = f"(arithmetic: {size(phase['arguments_arithmetic_gib'])})"
  for label, key, note in (
    ("arguments", "arguments_gib", arithmetic),
    ("temporaries", "temp_gib", ""),
    ("code", "code_gib", ""),
    ("all of it", "total_gib", ""),
    ("headroom", "headroom_gib", ""),
  ):
    yield f"  {label:<24} {size(phase[key]):>14} {note}".rstrip()
  yield from _collectives(phase, unit)
  if not phase["copies"]:
    yield "  materialised copies over 64 MiB: none [compiled]"
  else:
    yield "  materialised copies over 64 MiB [compiled]:"
  for c in phase["copies"]:
    yield f"    {c['count']:>4} × {c['bytes'] / _MIB:8.0f} MiB  {c['what']} {c['array']}  {c['where']}, per {c['per']}"


def _search(found: dict[str, Any] | None) -> Iterator[str]:
  if not found:
    return
  yield f"largest that fit together, beside {found['slots']} sequences [compiled, {found['compiles']} compiles]"
  yield f"  prefill chunk {found['chunk']:,} at a context of {context(found['chunk_at_context'])}"
  checked = "decode compiled there too" if found["decode_confirmed"] else "decode not compiled there"
  yield f"  with it, a context of {context(found['context'])} ({found['context']:,} tokens; {checked})"
  if found["exhausted"]:
    yield "  the search ended with its allowance (plan_search_compiles): larger ones may fit"


def verdict(plan: dict[str, Any]) -> str:
  """One line: it fits or it doesn't, with the smallest slice that would do."""
  where = f"{plan['slice']['name']} ({plan['slice']['chips']} chips)"
  if plan["fits"]:
    compiled = plan["marks"]["headroom_gib"]
    return f"fits {where}: {plan['headroom_gib']:.2f} GiB of {plan['hbm_gib']:.1f} a device are left [{compiled}]"
  needed = f"does not fit {where}: {plan['needed_gib']:.1f} GiB a device are needed, {plan['hbm_gib']:.1f} are there"
  found = plan["smallest_slice"]
  if not found:
    return f"{needed}; no slice known to MaxText holds it"
  if found["devices"] == plan["slice"]["devices"]:
    split = f"data {found['data']} × tensor {found['tensor']}"
    return f"{needed}; the same slice would do, split as {split} ({found['gib']:.1f} GiB a device, arithmetic)"
  return (
    f"{needed}; the smallest slice that would do is {found['name']} ({found['devices'] // 2} chips, data "
    f"{found['data']} × tensor {found['tensor']}, {found['gib']:.1f} GiB a device, arithmetic)"
  )


def lines(plan: dict[str, Any]) -> Iterator[str]:
  """The report. Nothing in it was measured: no program ran on a TPU."""
  s, slice_ = plan["settings"], plan["slice"]
  yield f"{slice_['name']}: {slice_['chips']} chips, {slice_['devices']} devices of {plan['hbm_gib']:.1f} GiB"
  yield f"{s['implementations']}; MLA cache in {s['mla_cache_dtype']}"
  yield f"{s['slots']} sequences of {context(s['context'])}, prefill {s['prefill_rows']} × {s['prefill_chunk']:,}"
  yield "Estimates of a compiler and arithmetic: nothing here was measured, and nothing ran on a TPU."
  yield ""
  yield from _rows(f"weights a device: {size(plan['weights_gib'])}", "arithmetic", plan["weights_by_part_gib"])
  yield from _rows(f"state a device: {size(plan['cache_gib'])}", "arithmetic", plan["cache_by_part_gib"])
  q = plan["sequence"]
  yield (
    f"a sequence [arithmetic]: MLA {q['mla_bytes_a_token']:,} B a token ({q['mla_bytes_a_token_as_stored']:,} as "
    f"stored), KDA state {q['kda_state_bytes'] / 1e6:.3g} MB + conv {q['kda_conv_bytes'] / 1e6:.3g} MB"
  )
  yield ""
  for phase, unit in (("decode", "step"), ("prefill", "chunk")):
    yield from _phase(phase, plan[phase], unit)
  for d in plan["disagreements"]:
    yield (
      f"{d['phase']}: {d['what']}: {size(d['compiled_gib'])} [compiled], {size(d['arithmetic_gib'])} [arithmetic]: "
      "over 5 % apart"
    )
  yield ""
  beside = f" beside {plan['reserved_gib']:.2f} GiB of compiled temporaries and code" if plan["reserved_gib"] else ""
  yield f"sequences that fit{beside} [arithmetic]"
  for n, count in plan["sequences"].items():
    yield f"  {context(n):>6}: {count:>6,} as configured, {plan['sequences_fp8'][n]:>6,} with latents in 8 bits"
  yield from _search(plan["search"])
  yield ""
  waits = "" if "collectives" in plan["decode"] else ", collectives left out"
  yield from _roofline(f"a decode step at full context{waits}", plan["decode"]["roofline"])
  waits = "" if "collectives" in plan["prefill"] else ", collectives left out"
  yield from _roofline(f"a prefill chunk at the start of a prompt{waits}", plan["prefill"]["roofline"])
  total = sum(c["seconds"] for c in plan["prefill"]["roofline_end"])
  yield f"a prefill chunk at the end of the context{waits}: at least {total * 1e3:.2f} ms [arithmetic]"
  if plan["compile_s"]:
    yield f"compile time: {plan['compile_s']:.0f} s"
  yield verdict(plan)
