"""Compiles the engine's programs for a described TPU slice, on a machine without one."""

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh
from jaxlib import _hlo
from maxtext.utils import accelerator_to_spec_map
from tokamax import config as tokamax_config

from MaxText import weights
from MaxText.configs.resolve import make_mesh, model_config
from MaxText.errors import UserError
from MaxText.inference.engine import Engine
from MaxText.inference.sampling import Sampling
from MaxText.models import kimi_k3


@dataclass(frozen=True)
class Compiled:
  """A compiled program.

  Attributes:
    memory: bytes a device, as the compiler's memory analysis gives them.
    hlo: the optimised program.
    seconds: what lowering and compiling took.
  """

  memory: Any
  hlo: str
  seconds: float

  @property
  def nbytes(self) -> int:
    """Bytes a device while it runs: arguments, results that are not written over them, temporaries, code."""
    m = self.memory
    results = m.output_size_in_bytes - m.alias_size_in_bytes
    return m.argument_size_in_bytes + results + m.temp_size_in_bytes + m.generated_code_size_in_bytes


class OutOfMemoryError(Exception):
  """The compiler found no room on a device. Its text is the compiler's first line.

  Attributes:
    needed: GiB that the program would take beyond what the compiler could place, as it says; None where it doesn't.
  """

  def __init__(self, message: str):
    super().__init__(message)
    found = re.search(r"\(([\d.]+)G\) exceeds", message)
    self.needed = float(found[1]) if found else None


def slice_mesh(config: Any) -> Mesh:
  """MaxText's mesh over the described devices of `compile_topology`.

  Raises:
    UserError: no topology of that name, or a mesh that doesn't fit it.
  """
  name = config.compile_topology
  try:
    target = accelerator_to_spec_map.get_system_characteristics(name)
  except KeyError:
    target = None
  if target is None or target.platform != "tpu":
    raise UserError(f"compile_topology={name} is unknown; 16 chips of v7x are tpu7x-32, 32 chips are tpu7x-64")
  described = topologies.get_topology_desc(
    platform="tpu",
    topology_name=target.topology_name,
    chip_config_name=target.chip_config_name,
    chips_per_host_bounds=target.chips_per_host_bounds,
    num_slices=config.compile_topology_num_slices,
    wrap=target.wrap,
  )
  return make_mesh(config, described.devices)


def abstract_engine(config: Any) -> Engine:
  """The engine of a configuration on its described slice, with shapes in place of weights: it lowers, and runs nothing.

  Raises:
    UserError: see `slice_mesh` and `model_config`.
  """
  mesh = slice_mesh(config)
  cfg = model_config(config, "tpu", mesh)
  tree = kimi_k3.weight_tree(cfg)
  params = jax.tree.map(
    lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
    weights.abstract(tree, cfg.storage),
    weights.formats(weights.shardings(tree, mesh, config.logical_axis_rules, cfg.storage)),
  )
  return Engine(
    cfg,
    mesh,
    params,
    Sampling.from_config(config),
    (0,),
    config.prefill_chunk_size,
    config.decode_steps_per_dispatch,
  )


def compile_lowered(mesh: Mesh, lower: Any) -> Compiled:
  """Calls `lower()` (of `Engine.lower_prefill` or `lower_generate`) and compiles what it gives.

  Raises:
    OutOfMemoryError: the program takes more memory than a device has.
  """
  started = time.perf_counter()
  # tokamax would ask the default device what it may do: here it is told to lower for the mesh's.
  with tokamax_config.cross_compile(True), jax.set_mesh(mesh), _no_cache():
    try:
      compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      raise OutOfMemoryError(str(error).splitlines()[0]) from error
  return Compiled(compiled.memory_analysis(), _text(compiled), time.perf_counter() - started)


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
  """Without JAX's cache on disk: it takes programs for a described slice in, but can't read them back."""
  enabled = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()


def _text(compiled: jax.stages.Compiled) -> str:
  """The optimised program with the values of its tables, which loops take their bounds from; `as_text` leaves out all
  but the smallest."""
  options = _hlo.HloPrintOptions()
  options.print_large_constants = True
  return compiled.runtime_executable().hlo_modules()[0].to_string(options)
