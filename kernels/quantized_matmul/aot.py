"""Compiles the product for a TPU on a machine without one, for tests and benchmarks.

The environment needs JAX_PLATFORMS=cpu and TPU_SKIP_MDS_QUERY=1, and ALLOW_MULTIPLE_LIBTPU_LOAD=1 where several
processes compile at once. Nothing that a compiled program says about time is a measurement: it's an estimate.
"""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from quantized_matmul.api import stack_format
from quantized_matmul.formats import LANES, MX_RUN, Form
from quantized_matmul.kernel import grouped_matmul_pallas

TOPOLOGIES = {"tpu7x": "tpu7x:2x2x1", "v6e": "v6e:2x2"}
_DTYPES = {Form.PLAIN: jnp.bfloat16, Form.BLOCK_FP8: jnp.float8_e4m3fn, Form.MXFP4: jnp.float4_e2m1fn}


def one_device(chip: str) -> NamedSharding:
  """A sharding on one described device of a chip ("tpu7x" or "v6e")."""
  devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices
  return NamedSharding(Mesh(np.array(devices[:1]), ("x",)), PartitionSpec())


def abstract_arguments(
  form: Form, rows: int, groups: int, inputs: int, outputs: int, sharding, *, layers: int, dtype: Any, formatted=True
) -> tuple:
  """(x, values, scales, group_sizes) as shapes, the stacks of `layers` layers in `stack_format` (or XLA's own)."""

  def stack(*shape, dtype):
    where = stack_format(1 + len(shape), sharding) if formatted else sharding
    return jax.ShapeDtypeStruct((layers * groups, *shape), dtype, sharding=where)

  scales = {
    Form.PLAIN: lambda: None,
    Form.BLOCK_FP8: lambda: stack(*(n // math.gcd(LANES, n) for n in (inputs, outputs)), dtype=jnp.float32),
    Form.MXFP4: lambda: stack(inputs // MX_RUN, outputs, dtype=jnp.uint8),
  }[form]()
  return (
    jax.ShapeDtypeStruct((rows, inputs), dtype, sharding=sharding),
    stack(inputs, outputs, dtype=_DTYPES[form]),
    scales,
    jax.ShapeDtypeStruct((groups,), jnp.int32, sharding=sharding),
  )


def lower(arguments: tuple, *, out_dtype: Any = jnp.bfloat16, in_loop: bool = False, **options):
  """Lowers one product, or one a layer in a loop whose steps depend on one another.

  Args:
    arguments: of `abstract_arguments`.
    options: of `grouped_matmul_pallas`.
  """
  product = functools.partial(grouped_matmul_pallas, out_dtype=out_dtype, interpret=False, **options)
  x, values, _, sizes = arguments
  groups, outputs = sizes.shape[0], values.shape[2]

  def all_layers(x, values, scales, sizes):
    def body(layer, carry):
      return product(x + carry[:, :1].astype(x.dtype), values, scales, sizes, layer * groups)

    layers = values.shape[0] // groups
    return jax.lax.fori_loop(0, layers, body, jnp.zeros((x.shape[0], outputs), out_dtype))

  alone = lambda x, values, scales, sizes: product(x, values, scales, sizes, jnp.int32(groups))
  # The mesh tells the kernel what it's compiled for, as it does inside shard_map.
  with jax.sharding.use_abstract_mesh(x.sharding.mesh.abstract_mesh):
    return jax.jit(all_layers if in_loop else alone).lower(*arguments)


_DEFINITION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")
_IN_PLACE = {"parameter", "get-tuple-element", "tuple", "while", "bitcast"}


def stack_copies(hlo: str, *stacks: jax.ShapeDtypeStruct | None) -> list[str]:
  """The instructions of an optimised HLO text that make an array as large as one of the stacks.

  A stack that is read in place only ever passes through parameters, tuples and loops.
  """
  sizes = {math.prod(stack.shape) for stack in stacks if stack is not None}
  found = []
  for line in hlo.splitlines():
    match = _DEFINITION.match(line)
    if not match or match[2] in _IN_PLACE:
      continue
    if any(math.prod(map(int, dims.split(","))) in sizes for dims in re.findall(r"\w+\[([\d,]+)\]", match[1])):
      found.append(line.strip())
  return found
