"""Compiles the engine's programs for a described TPU slice, on a machine without one."""

import time
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh
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
    weights.shardings(tree, mesh, config.logical_axis_rules, cfg.storage),
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
  """Calls `lower()` (of `Engine.lower_prefill` or `lower_generate`) and compiles what it gives."""
  started = time.perf_counter()
  # tokamax would ask the default device what it may do: here it is told to lower for the mesh's.
  with tokamax_config.cross_compile(True), jax.set_mesh(mesh):
    compiled = lower().compile()
  return Compiled(compiled.memory_analysis(), compiled.as_text(), time.perf_counter() - started)
