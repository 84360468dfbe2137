"""The kernel compiled for real TPUs by their compiler, on this machine: shapes, VMEM, and no copy of a pool.

The points of the issue's table, on both chips, alone and in a loop over layers. No vmem_limit_bytes is set, so a kernel
that compiles fits the default limit.
"""

import functools
import itertools
import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import pytest

from kda_decode import aot, kda_decode

OPTIONS = dict(norm_eps=1e-5, implementation="pallas")
QUICK = (("tpu7x", 3, 64, jnp.bfloat16, True), ("v6e", 12, 8, jnp.bfloat16, False))
POINTS = itertools.product(("tpu7x", "v6e"), (1, 3, 6, 12), (1, 8, 64, 256), (jnp.bfloat16, jnp.float32), (False, True))
TABLE = [
  pytest.param(
    *point,
    marks=() if point in QUICK else pytest.mark.compile,
    id=f"{point[0]}-h{point[1]}-b{point[2]}-{jnp.dtype(point[3])}-{'loop' if point[4] else 'alone'}",
  )
  for point in POINTS
]


def compile_and_check(chip, heads, batch, dtype, in_loop, state_dtype=jnp.float32, gate_lower_bound=-5.0):
  arguments = aot.abstract_arguments(
    batch, heads, aot.one_device(chip), layers=23, slots=batch + 1, dtype=dtype, state_dtype=state_dtype
  )
  pools = arguments["state"], arguments["conv_state"]
  step = functools.partial(kda_decode, gate_lower_bound=gate_lower_bound, **OPTIONS)
  compiled = aot.lower(step, arguments, in_loop=in_loop).compile()
  assert not aot.pool_copies(compiled.as_text(), *pools)
  memory = compiled.memory_analysis()
  sizes = [pool.size * pool.dtype.itemsize for pool in pools]
  assert memory.alias_size_in_bytes >= sum(sizes)
  assert memory.temp_size_in_bytes < min(sizes)
  cost = compiled.cost_analysis()
  assert cost["bytes accessed"] >= 2 * batch * heads * 128 * 128 * arguments["state"].dtype.itemsize


@pytest.mark.parametrize("chip,heads,batch,dtype,in_loop", TABLE)
def test_compiles_in_place(chip, heads, batch, dtype, in_loop):
  compile_and_check(chip, heads, batch, dtype, in_loop)


@pytest.mark.compile
@pytest.mark.parametrize("heads,batch", ((2, 5), (7, 17), (12, 17), (24, 8), (32, 3), (96, 1), (96, 12), (13, 64)))
def test_other_shapes_compile(heads, batch):
  """Odd batches and heads, Kimi-Linear's 32 heads and K3's 96 on one device."""
  compile_and_check("tpu7x", heads, batch, jnp.bfloat16, True)
  compile_and_check("v6e", heads, batch, jnp.bfloat16, True)


@pytest.mark.compile
@pytest.mark.parametrize("chip", ("tpu7x", "v6e"))
def test_options_compile(chip):
  compile_and_check(chip, 12, 64, jnp.bfloat16, True, state_dtype=jnp.bfloat16)
  compile_and_check(chip, 3, 64, jnp.bfloat16, True, gate_lower_bound=None)


def test_a_copy_would_be_seen():
  """The search for copies finds the one that XLA makes when a pool's layout is left to it."""
  arguments = aot.abstract_arguments(8, 3, aot.one_device("tpu7x"), layers=23, slots=9, dtype=jnp.bfloat16)
  pool = arguments["conv_state"]
  arguments["conv_state"] = jax.ShapeDtypeStruct(pool.shape, pool.dtype, sharding=pool.sharding)
  step = functools.partial(kda_decode, gate_lower_bound=-5.0, **OPTIONS)
  function = lambda a: step(**{n: x.reshape(8, 3, 128) if x.shape == (8, 384) else x for n, x in a.items()})
  hlo = jax.jit(function).lower(arguments).compile().as_text()
  assert any(" copy(" in line for line in aot.pool_copies(hlo, pool))
