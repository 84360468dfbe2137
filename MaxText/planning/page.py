"""The plan as one HTML page that needs nothing else: no scripts, no fonts, no network."""

from collections.abc import Iterator
from typing import Any

from MaxText.planning import capacity
from MaxText.planning.charts import Markup, bars, escape, log_log, mark, stacked_bar, swatch, table
from MaxText.planning.report import context, size, verdict

_FULL_SIZE = 2e12  # parameters; what others reported is of the model of full size
_STYLE = """
:root{--c0:#0072b2;--c1:#e69f00;--c2:#009e73;--c3:#cc79a7;--c4:#56b4e9;--c5:#d55e00;--c6:#8a6fd1;--c7:#7f7f7f;
--ink:#1a1a1a;--soft:#5a5a5a;--line:#d5d5d5;--paper:#fff;--band:#f4f4f2}
@media(prefers-color-scheme:dark){:root{--c0:#3d9bd9;--c1:#e6a832;--c2:#2bb68c;--c3:#d996bc;--c4:#7cc6ee;--c5:#e87b3a;
--c6:#a48be0;--c7:#8f8f8f;--ink:#e8e8e6;--soft:#a8a8a4;--line:#3c3c3a;--paper:#161615;--band:#21211f}}
*{box-sizing:border-box}body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}h1{font-size:1.5rem;line-height:1.25;margin:.5rem 0}h2{font-size:1.15rem;
margin:2.2rem 0 .6rem;border-top:1px solid var(--line);padding-top:1rem}h3{font-size:1rem;margin:1.2rem 0 .4rem}
p{margin:.5rem 0;max-width:46rem}.soft,small{color:var(--soft)}.note{background:var(--band);padding:.6rem .8rem}
.verdict{font-weight:600}.stack{position:relative;display:flex;height:2.4rem;background:var(--band);
border:1px solid var(--line)}.stack span{height:100%}.stack .limit{position:absolute;top:-4px;bottom:-4px;
border-left:3px solid var(--ink)}.swatch{display:inline-block;width:.8em;height:.8em;margin-right:.5em}
.bars{display:grid;grid-template-columns:minmax(7rem,auto) 1fr auto;gap:.15rem .6rem;align-items:center;font-size:.9rem}
.bars .bar{background:var(--band)}.bars .bar span{display:block;height:1rem}.bars .value{text-align:right;
font-variant-numeric:tabular-nums;white-space:nowrap}.scroll{overflow-x:auto;margin:.6rem 0}
table{border-collapse:collapse;font-size:.9rem;width:100%}th{font-weight:600}
th,td{text-align:left;padding:.25rem .6rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.mark{font-size:.75rem;color:var(--soft);border:1px solid var(--line);padding:0 .3em;white-space:nowrap}
.mark.compiled{color:var(--ink);border-color:var(--ink)}.chart{display:block;width:100%;max-width:36rem}
.chart text{font-size:11px;fill:var(--soft)}.chart .grid{stroke:var(--line);stroke-width:.6}.chart polyline{fill:none;
stroke-width:2}.chart .here{stroke:var(--ink);stroke-width:2}.legend{list-style:none;display:flex;flex-wrap:wrap;
gap:.2rem 1.2rem;padding:0;margin:.4rem 0;font-size:.9rem}.key{width:26px;height:8px;margin-right:.4rem}
.key line{stroke-width:2.5}
"""
# Parts of memory as the bar shows them: name, what it is made of, colour.
_MEMORY = (
  ("routed experts", (capacity.EXPERTS,), 0),
  ("latent projections", (capacity.LATENTS,), 4),
  ("shared expert, dense MLP, router", (capacity.SHARED, capacity.DENSE, capacity.ROUTER), 2),
  ("attention", (capacity.KDA, capacity.MLA), 1),
  ("vocabulary, norms", (capacity.EMBEDDING, capacity.HEAD, capacity.NORMS), 7),
  ("KDA state and conv history", (capacity.KDA_STATE, capacity.KDA_CONV), 3),
  ("MLA cache", (capacity.MLA_CACHE, capacity.OTHER), 5),
)
_TEMPORARY = 6
# Colours of a step's parts; the same as memory's where they are the same.
_COLOURS = {
  capacity.EXPERTS: 0, capacity.LATENTS: 4, capacity.SHARED: 2, capacity.DENSE: 2, capacity.ROUTER: 2,
  capacity.KDA: 1, capacity.MLA: 1, "KDA state": 3, "MLA cache": 5, "collectives": 6,
}  # fmt: skip


def _memory(plan: dict[str, Any]) -> Iterator[str]:
  have = plan["weights_by_part_gib"] | plan["cache_by_part_gib"]
  pieces = [(name, sum(have[part] for part in parts), colour) for name, parts, colour in _MEMORY]
  rows = [(Markup(f"{swatch(c)}{escape(name)}"), size(gib), mark("arithmetic")) for name, gib, c in pieces if gib]
  for phase in ("decode", "prefill"):
    if "temp_gib" in plan[phase]:
      rows.append((f"temporaries of {phase}", size(plan[phase]["temp_gib"]), mark("compiled")))
      rows.append((f"code of {phase}", size(plan[phase]["code_gib"]), mark("compiled")))
  if plan["reserved_gib"]:
    pieces.append(("temporaries and code", plan["reserved_gib"], _TEMPORARY))
    name = Markup(f"{swatch(_TEMPORARY)}the larger temporaries and all code")
    rows.append((name, size(plan["reserved_gib"]), mark("compiled")))
  rows.append(("left", f"{plan['headroom_gib']:.2f} GiB", mark(plan["marks"]["headroom_gib"])))
  yield f"<h2>Memory of one device, of {plan['hbm_gib']:.1f} GiB</h2>"
  yield stacked_bar(pieces, plan["hbm_gib"], "GiB")
  yield table(("part", "bytes a device", "how it is known"), rows, (1,))
  for d in plan["disagreements"]:
    yield (
      f'<p class="note">{escape(d["phase"])}: {escape(d["what"])}: the compiler says {size(d["compiled_gib"])}, '
      f"arithmetic {size(d['arithmetic_gib'])}: over 5 % apart.</p>"
    )


def _capacity(plan: dict[str, Any]) -> Iterator[str]:
  series = []
  for curve in plan["capacity"]:
    dashed = curve["dtype"].startswith("float8")
    name = f"{curve['mode']}, {curve['dtype']}"
    series.append((name, curve["points"], 0 if curve["mode"] == "striped" else 5, dashed))
  ticks = [(n, context(n)) for n, _ in plan["capacity"][0]["points"]]
  s, q = plan["settings"], plan["sequence"]
  yield "<h2>Capacity against context</h2>"
  beside = f" beside {size(plan['reserved_gib'])} of temporaries and code" if plan["reserved_gib"] else ""
  yield f"<p>Sequences that the slice holds at once{beside}, by how MLA's latents are kept. {mark('arithmetic')}</p>"
  if len(ticks) > 1:
    point = (s["context"], s["slots"], "this plan")
    yield log_log(series, ticks[::2] if len(ticks) % 2 else ticks, point, "tokens a sequence", "sequences")
  yield table(
    ("context", "as configured", "latents in 8 bits"),
    [(context(n), f"{count:,}", f"{plan['sequences_fp8'][n]:,}") for n, count in plan["sequences"].items()],
    (1, 2),
  )
  yield (
    f"<p>A token costs {q['mla_bytes_a_token']:,} bytes of latents over all MLA layers "
    f"({q['mla_bytes_a_token_as_stored']:,} as stored, in whole tiles), once a group where they are striped and on "
    "every device where they are replicated. A sequence of any length costs "
    f"{q['kda_state_bytes'] / 1e6:.3g} MB of KDA state and {q['kda_conv_bytes'] / 1e6:.3g} MB of conv history. "
    f"{mark('arithmetic')}</p>"
  )
  found = plan["search"]
  if found:
    decode = "decode compiled there too" if found["decode_confirmed"] else "decode was not compiled there"
    yield (
      f"<p>Found by compiling: beside {found['slots']} sequences a prefill chunk of {found['chunk']:,} fits at "
      f"{context(found['chunk_at_context'])}; with that chunk, a context of {found['context']:,} tokens "
      f"({decode}). {mark('compiled')}</p>"
    )


def _time(plan: dict[str, Any]) -> Iterator[str]:
  yield "<h2>Where the time goes, at least</h2>"
  yield (
    "<p>Each part at the full bandwidth of memory or the full rate of the chip, whichever is slower; as many experts "
    "as a batch is expected to choose; collectives at 10 µs each and their bytes at the links' published rate. It is "
    f"a floor, not a forecast. {mark('arithmetic')}</p>"
  )
  s = plan["settings"]
  for title, phase, key in (
    (f"A decode step of {s['slots']} sequences at {context(s['context'])}", "decode", "roofline"),
    (f"A prefill chunk, {s['prefill_rows']} × {s['prefill_chunk']:,}, at the start", "prefill", "roofline"),
    ("The same chunk at the end of the context", "prefill", "roofline_end"),
  ):
    costs = plan[phase][key]
    total = sum(c["seconds"] for c in costs)
    without = "" if any(c["part"] == "collectives" for c in costs) else ", collectives left out"
    rows = [
      (c["part"], c["seconds"], f"{c['seconds'] * 1e3:.2f} ms", _COLOURS.get(c["part"], 7))
      for c in sorted(costs, key=lambda c: -c["seconds"])
      if c["seconds"] > total / 500
    ]
    yield f"<h3>{escape(title)}: {total * 1e3:.2f} ms{without}</h3>" + bars(rows)


def _collectives(plan: dict[str, Any]) -> Iterator[str]:
  for phase, unit in (("decode", "step"), ("prefill", "chunk")):
    found = plan[phase].get("collectives")
    if found is None:
      continue
    count = plan[phase]["collectives_count"]
    yield f"<h2>Collectives of {phase}: {count} a {unit} {mark('compiled')}</h2>"
    rows = [
      (
        c["count"],
        c["kind"],
        f"{c['group_size']} ({' × '.join(c['axes']) or '?'})",
        "yes" if c["crosses_data"] else "no",
        f"{c['bytes']:,}",
        f"{c['seconds'] * 1e6:,.0f} µs",
        c["where"] if c["per"] == unit else f"{c['where']}, per {c['per']}",
      )
      for c in found
    ]
    head = ("count", "kind", "group", "crosses data", "bytes", "at least", "asked for by")
    yield table(head, rows, (0, 4, 5)) if rows else "<p>None.</p>"
    yield (
      f"<p><small>The least time of each is {mark('arithmetic')}. Of like collectives the compiler may keep the name "
      "of the first; those in a loop whose length depends on data count one trip of it.</small></p>"
    )
    copies = plan[phase]["copies"]
    yield f"<h3>Materialised copies over 64 MiB: {len(copies) or 'none'} {mark('compiled')}</h3>"
    if copies:
      rows = [(c["count"], size(c["bytes"] / 2**30), f"{c['what']} {c['array']}", c["where"], c["per"]) for c in copies]
      yield table(("count", "bytes", "what", "asked for by", "per"), rows, (0, 1))


def _others(plan: dict[str, Any]) -> Iterator[str]:
  """Figures of full size that others gave, beside this plan's."""

  def compiled(phase: str) -> Any:
    have = plan[phase].get("temp_gib")
    return "not compiled" if have is None else Markup(f"{size(have)} {mark('compiled')}")

  s, q, longest = plan["settings"], plan["sequence"], plan["sequences"]
  chunk = f"{s['prefill_rows']} × {s['prefill_chunk']:,}"
  most = [context(n) for n, count in longest.items() if count]
  rows = [
    ("weights a device", "50.3 GiB", Markup(f"{size(plan['weights_gib'])} {mark('arithmetic')}")),
    ("decode, temporaries", "29.8 GiB", compiled("decode")),
    ("prefill, temporaries", "35.3 GiB at 32,768", Markup(f"{compiled('prefill')} at {escape(chunk)}")),
    ("cache a token", "55,296 B", Markup(f"{q['mla_bytes_a_token_as_stored']:,} B {mark('arithmetic')}")),
    (
      "context",
      "178 K, one sequence beside chunks of 32 K",
      Markup(f"{longest[str(max(map(int, longest)))]:,} sequences of {most[-1] if most else '0'} {mark('arithmetic')}"),
    ),
  ]
  yield "<h2>Beside what others reported for 16 chips</h2>"
  head = ("", "others, 16 chips", f"this plan, {plan['slice']['chips']} chips, {s['weight_format']}")
  yield table(head, rows)
  yield (
    "<p><small>Each figure is its author's. Theirs are of other code, another compiler and other settings (93 layers "
    "over 32 devices, bfloat16 kept as float32); ours are for the settings below.</small></p>"
  )


def _block_fp8(plan: dict[str, Any]) -> Iterator[str]:
  both, hbm = plan["on_16_chips"], plan["hbm_gib"]
  if len(both) < 2:
    return
  yield "<h2>Why block-FP8 is not for 16 chips</h2>"
  left, total = {}, {}
  for name, title in (("block_fp8", "block-FP8"), ("mxfp4", "MXFP4, experts as released")):
    parts = both[name]["weights_by_part_gib"]
    total[name] = sum(parts.values())
    left[name] = hbm - total[name]
    yield f"<h3>{title}: {total[name]:.1f} GiB of {hbm:.1f} a device</h3>"
    yield stacked_bar([(n, sum(parts.get(p, 0) for p in made), colour) for n, made, colour in _MEMORY], hbm, "GiB")
  experts = both["block_fp8"]["weights_by_part_gib"][capacity.EXPERTS]
  longest = max(both["mxfp4"]["sequences"], key=int)
  fits = {name: both[name]["sequences"][longest] for name in both}
  yield (
    f"<p>In eight bits the experts alone take {experts:.1f} GiB of each of 32 devices, and all weights "
    f"{total['block_fp8']:.1f}. The {left['block_fp8']:.1f} GiB left would have to hold the state of every sequence, "
    "the temporaries of a prefill chunk and the code. Even with nothing set aside for those two, and latents striped, "
    f"that is {fits['block_fp8']} sequences of {context(longest)}, where MXFP4 leaves {left['mxfp4']:.1f} GiB for "
    f"{fits['mxfp4']}. So 16 chips keep the experts in MXFP4, and block-FP8 is for 32 chips. {mark('arithmetic')}</p>"
  )


def _settings(plan: dict[str, Any]) -> Iterator[str]:
  yield "<h2>What was planned</h2>"
  rows = [(name.replace("_", " "), value) for name, value in plan["settings"].items()]
  rows += [(name, f"data {plan['slice']['data']} × tensor {plan['slice']['tensor']}") for name in ("devices",)]
  rows += [(name, version) for name, version in plan["versions"].items()]
  if plan["compile_s"]:
    rows.append(("compile time", f"{plan['compile_s']:.0f} s"))
  yield table(("", ""), rows)


def render(plan: dict[str, Any]) -> str:
  """The page of a plan (`assemble.Plan.plan`)."""
  slice_ = plan["slice"]
  title = f"{plan['settings'].get('config', 'Kimi K3')} on {slice_['name']}"
  sections = [_memory, _capacity, _time, _collectives]
  if plan["parameters"] > _FULL_SIZE:
    sections += [_others, _block_fp8]
  body = "\n".join(piece for section in [*sections, _settings] for piece in section(plan))
  return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}: {slice_["chips"]} chips, {slice_["devices"]} devices</h1>
<p class="verdict">{escape(verdict(plan))}</p>
<p class="note">Nothing here was measured and nothing ran on a TPU. Figures marked {mark("compiled")} are the TPU
compiler's own, for this program at this size; those marked {mark("arithmetic")} follow from shapes and rates.</p>
{body}
</body></html>
"""
