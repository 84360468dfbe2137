"""A plan: what a configuration needs on a slice, as one dictionary that the report, the page and the JSON file show.

Sizes are GiB (2^30 bytes) a device unless a name says otherwise. "marks" says of each figure whether it is the
compiler's ("compiled") or comes from shapes ("arithmetic").
"""

import dataclasses
import importlib.metadata
from collections.abc import Callable
from typing import Any

from MaxText.configs.resolve import describe_implementations
from MaxText.errors import UserError
from MaxText.inference.engine import Engine
from MaxText.models import kimi_k3
from MaxText.planning import capacity, hlo, roofline, traffic, trips
from MaxText.planning.capacity import CONTEXTS, Layout
from MaxText.planning.chip import GIB, HBM_BYTES
from MaxText.planning.compiling import Compiled, OutOfMemoryError, abstract_engine, compile_lowered
from MaxText.planning.search import Search
from MaxText.planning.ticker import ticking
from MaxText.weights import count

PHASES = {"both": ("decode", "prefill"), "decode": ("decode",), "prefill": ("prefill",), "arithmetic": ()}
_WORTH_SAYING = 0.05  # relative difference between compiled and arithmetic bytes
_WORTH_BYTES = 2**20  # and absolute: small arrays are padded to tiles
_CURVE_CONTEXTS = tuple(2**i for i in range(12, 21))
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Size:
  """What is asked for. `rows` sequences of all data groups are prefilled at a time, `chunk` tokens of each."""

  slots: int
  context: int
  rows: int
  chunk: int


def _size(config: Any, engine: Engine) -> Size:
  """The configuration's batch, context and chunk.

  Raises:
    UserError: data groups that can't share slots or rows evenly.
  """
  slots = config.plan_slots or max(1, int(config.per_device_batch_size * engine.mesh.size))
  context = config.max_target_length
  chunk = min(config.prefill_chunk_size, context)
  parallel = engine.cfg.parallel
  groups = parallel.data if parallel.splits_batch else 1
  if slots % groups:
    raise UserError(
      f"{slots} slots can't be split over {groups} data groups (parallel_mode=throughput); set plan_slots or "
      "per_device_batch_size"
    )
  rows = config.plan_prefill_rows or engine.prefill_rows(slots, chunk)
  if rows % groups or rows > slots:
    raise UserError(
      f"plan_prefill_rows={rows} must be a multiple of the {groups} data groups and at most the {slots} slots"
    )
  return Size(slots, context, rows, chunk)


def _gib(parts: dict[str, int]) -> dict[str, float]:
  return {name: nbytes / GIB for name, nbytes in parts.items()}


class Plan:
  """Builds the dictionary, arithmetic first.

  Attributes:
    plan: the dictionary so far.
    size, layout: what is planned.
  """

  def __init__(self, config: Any):
    """Raises `UserError` for what no compile could mend."""
    self.config = config
    capacity.check_slice(config.compile_topology)
    self.engine = abstract_engine(config)
    self.cfg = self.engine.cfg
    self.size = _size(config, self.engine)
    self.layout = Layout(self.cfg, self.engine.mesh, config.logical_axis_rules)
    self.weights = self.layout.weights()
    self.state = self.layout.state(self.size.slots, self.size.context)
    self.compiled: dict[str, Compiled] = {}
    self.reserved = 0  # bytes of temporaries and code
    self.plan = self._arithmetic()

  @property
  def static_bytes(self) -> int:
    """Weights and state of a device."""
    return sum(self.weights.values()) + sum(self.state.values())

  def _arithmetic(self) -> dict[str, Any]:
    config, cfg, size = self.config, self.cfg, self.size
    parallel = cfg.parallel
    return {
      "slice": {
        "name": config.compile_topology,
        "devices": parallel.devices,
        "chips": parallel.devices // 2,
        "data": parallel.data,
        "tensor": parallel.tensor,
      },
      "settings": {
        "weight_format": cfg.storage.experts,
        "dense_weight_format": cfg.storage.dense,
        "slots": size.slots,
        "context": size.context,
        "prefill_rows": size.rows,
        "prefill_chunk": size.chunk,
        "parallel_mode": config.parallel_mode,
        "mla_cache_mode": cfg.parallel.mla_cache,
        "mla_cache_dtype": str(cfg.mla_cache_dtype),
        "latent_projections": config.latent_projections,
        "decode_steps_per_dispatch": config.decode_steps_per_dispatch,
        "implementations": describe_implementations(cfg),
      },
      "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu", "maxtext", "tokamax")},
      "parameters": count(kimi_k3.weight_tree(cfg)),
      "hbm_gib": HBM_BYTES / GIB,
      "weights_gib": sum(self.weights.values()) / GIB,
      "weights_by_part_gib": _gib(self.weights),
      "cache_gib": sum(self.state.values()) / GIB,
      "cache_by_part_gib": _gib(self.state),
      "sequence": capacity.sequence_facts(cfg),
      "fits": self.static_bytes <= HBM_BYTES,
      "headroom_gib": (HBM_BYTES - self.static_bytes) / GIB,
      "decode": {"roofline": self._roofline("decode")},
      "prefill": {"roofline": self._roofline("prefill"), "roofline_end": self._roofline("prefill", at_end=True)},
      "on_16_chips": self._on_16_chips(),
      "compile_s": 0.0,
      "disagreements": [],
      "smallest_slice": None,
      "search": None,
      "marks": {
        "weights_gib": "arithmetic",
        "cache_gib": "arithmetic",
        "headroom_gib": "arithmetic",
        "sequences": "arithmetic",
        "decode.roofline": "arithmetic",
        "prefill.roofline": "arithmetic",
      },
    } | self._capacity()

  def _on_16_chips(self) -> dict[str, Any]:
    """This model on the smaller of the two slices that it is meant for, by weight format, latents striped.

    {format: {"weights_by_part_gib", "sequences" by context with nothing set aside for temporaries}}.
    """
    found = {}
    for name in ("mxfp4", "block_fp8"):
      for layout in capacity.layouts(self.config, 32):
        storage = dataclasses.replace(layout.cfg.storage, experts=name, dense="block_fp8")
        cfg = dataclasses.replace(layout.cfg, storage=storage)
        layout = Layout(cfg, layout.mesh, self.config.logical_axis_rules).with_cache("striped", cfg.mla_cache_dtype)
        fits = {str(n): layout.slots_that_fit(n) for n in self._contexts}
        found[name] = {"weights_by_part_gib": _gib(layout.weights()), "sequences": fits}
        break
    return found

  @property
  def _contexts(self) -> list[int]:
    return [n for n in CONTEXTS if n <= self.config.max_position_embeddings]

  def _capacity(self) -> dict[str, Any]:
    longest = self.config.max_position_embeddings
    kept = self.cfg.dtype
    bits = self.layout.with_cache(self.cfg.parallel.mla_cache, "float8_e4m3fn")
    curves = []
    for mode in ("replicated", "striped"):
      for dtype in (str(kept), "float8_e4m3fn"):
        other = self.layout.with_cache(mode, dtype)
        points = [[n, other.slots_that_fit(n, self.reserved)] for n in _CURVE_CONTEXTS if n <= longest]
        curves.append({"mode": mode, "dtype": dtype, "points": points})
    return {
      "reserved_gib": self.reserved / GIB,
      "sequences": {str(n): self.layout.slots_that_fit(n, self.reserved) for n in self._contexts},
      "sequences_fp8": {str(n): bits.slots_that_fit(n, self.reserved) for n in self._contexts},
      "capacity": curves,
    }

  def _roofline(self, phase: str, at_end: bool = False, waits: Any = ()) -> list[dict[str, Any]]:
    size = self.size
    if phase == "decode":
      costs = roofline.decode_step(self.layout, size.slots, size.context, waits)
    else:
      before = size.context - size.chunk if at_end else 0
      costs = roofline.prefill_chunk(self.layout, size.rows, size.chunk, before, waits)
    return [cost.describe() for cost in costs]

  def run(self, say: Say) -> None:
    """Compiles the phases that the configuration asks for and takes in what the compiler says."""
    if not self.plan["fits"]:
      self._too_small(self.static_bytes, 0)
      return
    for phase in PHASES[self.config.plan_phases]:
      say(f"compiling {phase} for {self.config.compile_topology} (minutes, for a model of full size)")
      try:
        with ticking(f"compiling {phase}"):
          compiled = self.compile(phase, self.size)
      except OutOfMemoryError as error:
        needed = int((error.needed or 0) * GIB)
        self.plan[phase] |= {"out_of_memory": str(error), "needed_gib": error.needed}
        self._too_small(max(needed, self.static_bytes), needed - self.static_bytes)
        continue
      say(f"compiled {phase} in {compiled.seconds:.0f} s")
      self._take(phase, compiled)
    if self.compiled:
      self._together()
    if self.plan["fits"] and self.config.plan_search and "prefill" in self.compiled:
      search = Search(self.compile, self.layout, self.size, self.config, say)
      self.plan["search"] = search.run(self.compiled["prefill"])
      self.plan["compile_s"] += search.seconds
      self.plan["marks"]["search"] = "compiled"

  def compile(self, phase: str, size: Size) -> Compiled:
    """Compiles one phase at a size; see `compile_lowered`."""
    engine = self.engine
    if phase == "decode":
      return compile_lowered(engine.mesh, lambda: engine.lower_generate(size.slots, size.context))
    return compile_lowered(engine.mesh, lambda: engine.lower_prefill(size.slots, size.context, size.rows, size.chunk))

  def _take(self, phase: str, compiled: Compiled) -> None:
    """Reads a compiled program into the plan."""
    self.compiled[phase] = compiled
    memory, plan = compiled.memory, self.plan[phase]
    unit = "step" if phase == "decode" else "chunk"
    module = hlo.parse(compiled.hlo)
    visits = list(trips.visits(module, steps=phase == "decode"))
    waits = traffic.collectives(module, visits, dict(self.engine.mesh.shape), unit)
    total = compiled.nbytes
    given = dict.fromkeys((*capacity.WEIGHT_PARTS, *capacity.STATE_PARTS), 0)
    for path, array in traffic.arguments(module):
      given[capacity.argument_kind(path)] += array.nbytes
    plan |= {
      "compile_s": compiled.seconds,
      "arguments_gib": memory.argument_size_in_bytes / GIB,
      "arguments_by_part_gib": _gib(given),
      "arguments_arithmetic_gib": self.static_bytes / GIB,
      "temp_gib": memory.temp_size_in_bytes / GIB,
      "code_gib": memory.generated_code_size_in_bytes / GIB,
      "outputs_beyond_arguments_gib": (memory.output_size_in_bytes - memory.alias_size_in_bytes) / GIB,
      "total_gib": total / GIB,
      "headroom_gib": (HBM_BYTES - total) / GIB,
      "collectives": [c.describe() | {"seconds": roofline.collective_seconds(c)} for c in waits],
      "collectives_count": sum(c.count for c in waits if c.regular),
      "copies": [c.describe() for c in traffic.copies(module, visits, unit)],
      "roofline": self._roofline(phase, waits=waits),
    }
    if phase == "prefill":
      plan["roofline_end"] = self._roofline(phase, at_end=True, waits=waits)
    self.plan[phase] = plan
    self.plan["compile_s"] += compiled.seconds
    names = ("compile_s", "arguments_gib", "temp_gib", "code_gib", "total_gib", "headroom_gib", "collectives", "copies")
    self.plan["marks"] |= {f"{phase}.{name}": "compiled" for name in names}
    self._compare(phase, given)

  def _compare(self, phase: str, given: dict[str, int]) -> None:
    """Notes where the compiler's arguments are not what shapes say."""
    expected = self.weights | self.state
    compared = [("all arguments", self.compiled[phase].memory.argument_size_in_bytes, self.static_bytes)]
    compared += [(part, given[part], expected[part]) for part in expected if part != capacity.OTHER]
    for part, compiled, arithmetic in compared:
      difference = compiled - arithmetic
      if abs(difference) > max(_WORTH_SAYING * arithmetic, _WORTH_BYTES):
        self.plan["disagreements"].append(
          {"phase": phase, "what": part, "compiled_gib": compiled / GIB, "arithmetic_gib": arithmetic / GIB}
        )

  def _together(self) -> None:
    """What both programs leave: they share weights and state, and take turns with their temporaries."""
    temp = max(c.memory.temp_size_in_bytes for c in self.compiled.values())
    code = sum(c.memory.generated_code_size_in_bytes for c in self.compiled.values())
    self.reserved = temp + code
    most = max(c.nbytes - c.memory.generated_code_size_in_bytes for c in self.compiled.values()) + code
    self.plan |= self._capacity()
    if not self.plan["fits"]:
      return  # the other phase has no room at all
    self.plan["headroom_gib"] = (HBM_BYTES - most) / GIB
    self.plan["marks"]["headroom_gib"] = "compiled"
    if most > HBM_BYTES:
      self._too_small(most, self.reserved)

  def _too_small(self, needed: int, reserved: int) -> None:
    size = self.size
    found = capacity.smallest_slice(self.config, size.slots, size.context, max(reserved, 0))
    self.plan |= {"fits": False, "needed_gib": needed / GIB, "smallest_slice": found}
    self.plan["headroom_gib"] = (HBM_BYTES - needed) / GIB
