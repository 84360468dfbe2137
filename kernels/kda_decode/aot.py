"""Compiles the step for a TPU on a machine without one, for tests and benchmarks.

The environment needs JAX_PLATFORMS=cpu and TPU_SKIP_MDS_QUERY=1, and ALLOW_MULTIPLE_LIBTPU_LOAD=1 where several
processes compile at once. Nothing that a compiled program says about time is a measurement: it's an estimate.
"""

import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kda_decode.api import pool_format

TOPOLOGIES = {"tpu7x": "tpu7x:2x2x1", "v6e": "v6e:2x2"}
WIDTH = 4


def one_device(chip: str) -> NamedSharding:
  """A sharding on one described device of a chip ("tpu7x" or "v6e")."""
  devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices
  return NamedSharding(Mesh(np.array(devices[:1]), ("x",)), PartitionSpec())


def abstract_arguments(batch, heads, sharding, *, layers, slots, dtype, state_dtype=jnp.float32, key_dim=128):
  """The arguments of `kda_decode` as shapes. Activations are [B, H·K], as a projection leaves them."""

  def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=pool_format(len(shape), sharding) if shape else sharding)

  f32, i32 = jnp.float32, jnp.int32
  return dict(
    **{name: array((batch, heads * key_dim), dtype) for name in ("q", "k", "v", "decay", "gate")},
    beta=array((batch, heads), dtype),
    state=array((layers, slots, heads, key_dim, key_dim), state_dtype),
    conv_state=array((layers, slots, WIDTH - 1, 3, heads, key_dim), dtype),
    layer=array((), i32),
    slots=array((batch,), i32),
    conv_weight=array((3, WIDTH, heads, key_dim), f32),
    a_log=array((heads,), f32),
    dt_bias=array((heads, key_dim), f32),
    o_norm=array((key_dim,), f32),
  )


def lower(step: Callable, arguments: dict, *, in_loop: bool = False):
  """Lowers one step, or one step a layer in a loop that carries the pools, with the pools donated.

  Args:
    step: `kda_decode` with its options bound: keyword arrays → (out, state, conv_state).
    arguments: of `abstract_arguments`.
  """
  arguments = dict(arguments)
  pools = arguments.pop("state"), arguments.pop("conv_state")
  layers, _, heads, key_dim, _ = pools[0].shape
  batch = arguments["slots"].shape[0]

  def one_layer(pools, arguments):
    heads_apart = {n: arguments[n].reshape(batch, heads, key_dim) for n in ("q", "k", "v", "decay", "gate")}
    out, *pools = step(**(arguments | heads_apart), state=pools[0], conv_state=pools[1])
    return out.reshape(batch, heads * key_dim), tuple(pools)

  def all_layers(pools, arguments):
    def body(layer, carry):
      return one_layer(carry[1], arguments | dict(q=carry[0], layer=layer))

    return jax.lax.fori_loop(0, layers, body, (arguments["q"], pools))

  function = all_layers if in_loop else one_layer
  out_formats = (arguments["q"].format, tuple(p.format for p in pools))
  return jax.jit(function, donate_argnums=0, out_shardings=out_formats).lower(pools, arguments)


_DEFINITION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")
_IN_PLACE = {"parameter", "get-tuple-element", "tuple", "while", "bitcast", "custom-call"}


def pool_copies(hlo: str, *pools: jax.ShapeDtypeStruct) -> list[str]:
  """The instructions of an optimised HLO text that make an array as large as one of the pools.

  A pool that is updated in place only ever passes through parameters, tuples, loops and custom calls.
  """
  sizes = {math.prod(pool.shape) for pool in pools}
  found = []
  for line in hlo.splitlines():
    match = _DEFINITION.match(line)
    if not match or match[2] in _IN_PLACE:
      continue
    for dims in re.findall(r"\w+\[([\d,]+)\]", match[1]):
      if math.prod(map(int, dims.split(","))) in sizes:
        found.append(line.strip())
        break
  return found
