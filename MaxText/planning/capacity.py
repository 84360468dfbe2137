"""Bytes a device by part, and what fits: arithmetic on shapes and shardings, nothing compiled."""

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from maxtext.utils import accelerator_to_spec_map

from MaxText import weights
from MaxText.configs.model_config import ModelConfig
from MaxText.configs.resolve import model_config
from MaxText.errors import UserError
from MaxText.inference.cache import cache_shapes, cache_specs
from MaxText.models import kimi_k3
from MaxText.parallel import DATA, TENSOR
from MaxText.planning.chip import HBM_BYTES

CONTEXTS = (4096, 32768, 131072, 1048576)
EXPERTS, LATENTS, SHARED, ROUTER = "routed experts", "latent projections", "shared expert", "router"
KDA, MLA, DENSE = "KDA attention", "MLA attention", "dense MLP"
EMBEDDING, HEAD, NORMS = "embedding", "head", "norms and AttnRes"
WEIGHT_PARTS = (EXPERTS, LATENTS, SHARED, ROUTER, KDA, MLA, DENSE, EMBEDDING, HEAD, NORMS)
KDA_STATE, KDA_CONV, MLA_CACHE, OTHER = "KDA state", "KDA conv history", "MLA cache", "tokens and lengths"
STATE_PARTS = (KDA_STATE, KDA_CONV, MLA_CACHE, OTHER)


@dataclass(frozen=True)
class Part:
  """One array as one device holds it.

  Attributes:
    path: its place in the tree of parameters.
    kind: one of `WEIGHT_PARTS`.
    dtype, shape: of the device's part.
    nbytes: of the device's part; two 4-bit values share a byte.
    split: mesh axes that it is split over.
  """

  path: tuple[str, ...]
  kind: str
  dtype: Any
  shape: tuple[int, ...]
  nbytes: int
  split: frozenset[str]

  @property
  def is_scale(self) -> bool:
    return self.path[-1] == "scales"

  @property
  def size(self) -> int:
    return math.prod(self.shape)


def array_bytes(shape: Iterable[int], dtype: Any) -> int:
  """Bytes of an array; two 4-bit values share a byte."""
  kind = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
  bits = 8 if dtype == jnp.bool_ else kind(dtype).bits
  return math.ceil(math.prod(shape) * bits / 8)


def weight_kind(path: tuple[str, ...]) -> str:
  """Which part of the model a weight belongs to, by its path in the tree of parameters."""
  if path[0] in ("embed", "lm_head"):
    return EMBEDDING if path[0] == "embed" else HEAD
  if "experts" in path:
    return EXPERTS
  if "moe" in path:
    below = path[path.index("moe") + 1]
    return SHARED if below == "shared" else ROUTER if below in ("router", "bias") else LATENTS
  if "attention" in path:
    return KDA if path[0].endswith("kda") else MLA
  return DENSE if "mlp" in path else NORMS


def argument_kind(path: str) -> str:
  """Which part a compiled program's argument belongs to, by the path that the compiler keeps of it."""
  if path.startswith("params"):
    return weight_kind(tuple(re.findall(r"\['(\w+)'\]", path)))
  if path.endswith(".state"):
    return KDA_STATE
  return KDA_CONV if path.endswith(".conv") else MLA_CACHE if ".mla" in path or "_mla" in path else OTHER


def _names(path: Any) -> tuple[str, ...]:
  return tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def _split(sharding: NamedSharding) -> frozenset[str]:
  axes = [axis for entry in sharding.spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
  return frozenset(axis for axis in axes if sharding.mesh.shape[axis] > 1)


class Layout:
  """A model on a mesh, as bytes a device.

  Attributes:
    cfg: the architecture, with how it is split.
    mesh: described devices, or sizes of axes alone.
    parts: the weights.
  """

  def __init__(self, cfg: ModelConfig, mesh: Mesh | AbstractMesh, rules: Any):
    """Raises `UserError` where the mesh doesn't divide a weight."""
    self.cfg, self.mesh = cfg, mesh
    tree = kimi_k3.weight_tree(cfg)
    arrays = jax.tree_util.tree_leaves_with_path(weights.abstract(tree, cfg.storage))
    shardings = jax.tree.leaves(weights.shardings(tree, mesh, rules, cfg.storage))
    self.parts = []
    for (path, array), sharding in zip(arrays, shardings, strict=True):
      names, shape = _names(path), sharding.shard_shape(array.shape)
      nbytes = array_bytes(shape, array.dtype)
      self.parts.append(Part(names, weight_kind(names), array.dtype, shape, nbytes, _split(sharding)))

  @property
  def groups(self) -> int:
    """Data groups with slots of their own."""
    return self.cfg.parallel.data if self.cfg.parallel.splits_batch else 1

  def weights(self) -> dict[str, int]:
    """Bytes a device of each part of the weights."""
    return {kind: sum(p.nbytes for p in self.parts if p.kind == kind) for kind in WEIGHT_PARTS}

  def state(self, slots: int, max_length: int) -> dict[str, int]:
    """Bytes a device of what `slots` sequences (of all data groups) keep."""
    shapes, specs = cache_shapes(self.cfg, slots, max_length), cache_specs(self.cfg)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    found = dict.fromkeys(STATE_PARTS, 0)
    for (path, array), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
      shape = NamedSharding(self.mesh, spec).shard_shape(array.shape)
      found[argument_kind(jax.tree_util.keystr(path))] += array_bytes(shape, array.dtype)
    return found

  def slots_that_fit(self, max_length: int, reserved: int = 0) -> int:
    """Sequences of `max_length` tokens (of all data groups) beside the weights and `reserved` bytes a device."""
    room = HBM_BYTES - sum(self.weights().values()) - reserved
    return max(0, room // sum(self.state(self.groups, max_length).values())) * self.groups

  def with_cache(self, mode: str, dtype: Any) -> "Layout":
    """The same with MLA's latents held otherwise: "replicated" or "striped", and in a dtype."""
    other = object.__new__(Layout)
    parallel = dataclasses.replace(self.cfg.parallel, mla_cache=mode)
    other.cfg = dataclasses.replace(self.cfg, parallel=parallel, mla_cache_dtype=jnp.dtype(dtype))
    other.mesh, other.parts = self.mesh, self.parts
    return other


def sequence_facts(cfg: ModelConfig) -> dict[str, int]:
  """Bytes of one sequence, over all devices of a group and each once."""
  shapes = cache_shapes(cfg, 1, 1)
  layers = sum(stack.latent.shape[0] for stack in (shapes.leading_mla, shapes.mla))
  width, dtype = shapes.mla.latent.shape[-1], shapes.mla.latent.dtype
  total = lambda *stacks: sum(array_bytes(s.shape, s.dtype) for s in stacks)
  return {
    "mla_bytes_a_token": layers * array_bytes((cfg.kv_lora_rank + cfg.qk_rope_head_dim,), dtype),
    "mla_bytes_a_token_as_stored": layers * array_bytes((width,), dtype),
    "kda_state_bytes": total(shapes.leading_kda.state, shapes.kda.state),
    "kda_conv_bytes": total(shapes.leading_kda.conv, shapes.kda.conv),
  }


def known_slices() -> dict[str, int]:
  """Slices of v7x that MaxText knows: name -> devices, the smallest first."""
  known = accelerator_to_spec_map.UserFacingNameToSystemCharacteristics
  found = {name: s.devices_per_slice for name, s in known.items() if name.startswith("tpu7x-")}
  return dict(sorted(found.items(), key=lambda item: item[1]))


def check_slice(name: str) -> None:
  """Raises `UserError` for what is no slice of v7x that MaxText knows."""
  known = list(known_slices())
  if not name:
    raise UserError("compile_topology is not set: 16 chips of v7x are tpu7x-32, 32 chips are tpu7x-64")
  if name not in known:
    raise UserError(f"compile_topology={name}: the planner knows slices of v7x: {', '.join(known[:6])}, …")


def layouts(config: Any, devices: int) -> Iterable[Layout]:
  """The model on that many devices, in each split that divides it, the widest tensor group first."""
  for tensor in (t for t in range(devices, 0, -1) if devices % t == 0):
    mesh = AbstractMesh((devices // tensor, tensor), (DATA, TENSOR))
    try:
      yield Layout(model_config(config, "tpu", mesh), mesh, config.logical_axis_rules)
    except UserError:
      continue  # heads, experts or a width that this split doesn't divide


def smallest_slice(config: Any, slots: int, max_length: int, reserved: int) -> dict[str, Any] | None:
  """The smallest slice known to MaxText that holds weights, state and `reserved` bytes a device.

  Returns:
    {"name", "devices", "data", "tensor", "gib"}, or None where none does.
  """
  for name, devices in known_slices().items():
    if devices > 1024:
      break  # a model of 896 experts can't be split further
    for layout in layouts(config, devices):
      rounded = -(-slots // layout.groups) * layout.groups
      nbytes = sum(layout.weights().values()) + sum(layout.state(rounded, max_length).values()) + reserved
      if nbytes <= HBM_BYTES:
        shape = layout.mesh.shape
        return {"name": name, "devices": devices, "data": shape[DATA], "tensor": shape[TENSOR], "gib": nbytes / 2**30}
  return None
