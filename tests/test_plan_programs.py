"""The planner's reading of compiled programs: loops, collectives, copies, sizes; against counts known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from MaxText.configs.k3_config import initialize
from MaxText.planning import hlo, traffic, trips
from MaxText.planning.compiling import compile_lowered, slice_mesh

GIB = 2**30
TINY = ("kimi-k3-tiny.yml", "compile_topology=tpu7x-8", "ici_tensor_parallelism=2", "ici_data_parallelism=4")


def compiled(function, in_specs, out_specs, *shapes, donate=()):
  """(module, mesh sizes) of a function on a described slice of eight devices, data 4 × tensor 2."""
  mesh = slice_mesh(initialize(["plan.py", *TINY]))
  mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
  arguments = [
    jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    for shape, spec in zip(shapes, in_specs, strict=True)
  ]
  done = compile_lowered(mesh, lambda: jax.jit(mapped, donate_argnums=donate).lower(*arguments))
  return hlo.parse(done.hlo), dict(mesh.shape)


def counted(module, mesh, steps=False):
  """[(kind, axes, group size, count, per)] of a program's collectives."""
  visits = list(trips.visits(module, steps))
  found = traffic.collectives(module, visits, mesh, "step" if steps else "chunk")
  return sorted((c.kind, c.axes, c.group_size, c.count, c.per) for c in found)


def test_collectives_in_nested_loops_are_counted_by_trips():
  before = jnp.asarray(np.array([0, 2, 5, 5, 9, 11, 12, 15, 18, 21, 23, 23, 30]))  # 30 inner trips in 12 outer ones

  def function(x):
    def inner(i, x):
      return jax.lax.psum(jnp.sin(x + i), "tensor")

    def outer(m, x):
      x = jax.lax.fori_loop(before[m], before[m + 1], inner, x)
      return jnp.tanh(jax.lax.psum(jnp.cos(x), ("data", "tensor")))

    x = jax.lax.fori_loop(0, 12, outer, x)
    return jax.lax.all_gather(x, "data", axis=0, tiled=True)

  module, mesh = compiled(function, (P(),), P(), (16, 128))
  assert counted(module, mesh) == [
    ("all-gather", ("data",), 4, 1, "chunk"),
    ("all-reduce", ("data", "tensor"), 8, 12, "chunk"),
    ("all-reduce", ("tensor",), 2, 30, "chunk"),
  ]


def test_the_steps_loop_counts_once_and_a_loop_on_data_by_the_trip():
  def function(x, n):
    def trip(i, x):
      return jax.lax.psum(jnp.sin(x), "tensor")

    def step(carry):
      i, x = carry
      x = jax.lax.fori_loop(0, 7, lambda j, x: jax.lax.psum(jnp.cos(x), "data"), x)
      return i + 1, jax.lax.fori_loop(0, jnp.max(n).astype(jnp.int32), trip, x)

    start = jax.lax.psum(x, ("data", "tensor"))
    return jax.lax.while_loop(lambda c: (c[0] < 32) & (jnp.max(c[1]) < 1e30), step, (0, start))[1]

  module, mesh = compiled(function, (P(), P()), P(), (16, 128), (4,))
  found = counted(module, mesh, steps=True)
  assert [one[:4] for one in found] == [
    ("all-reduce", ("data",), 4, 7),
    ("all-reduce", ("data", "tensor"), 8, 1),
    ("all-reduce", ("tensor",), 2, 1),
  ]
  assert [one[4] for one in found][:2] == ["step", "dispatch"]
  assert found[2][4].startswith("trip of a loop in")


def test_bytes_groups_and_places_of_collectives():
  def function(x):
    x = jax.lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True)
    x = jax.lax.all_to_all(x, "tensor", split_axis=0, concat_axis=1, tiled=True)
    return jax.lax.ppermute(jnp.sin(x), "data", [(i, (i + 1) % 4) for i in range(4)])

  module, mesh = compiled(function, (P(),), P(("data", "tensor")), (512, 256))
  found = {c.kind: c for c in traffic.collectives(module, trips.visits(module, False), mesh, "chunk")}
  assert found["reduce-scatter"].bytes == 512 * 256 * 4
  assert found["reduce-scatter"].axes == ("data",)
  assert found["all-to-all"].bytes == 128 * 256 * 4
  assert found["all-to-all"].axes == ("tensor",)
  assert "data" in found["collective-permute"].axes
  assert all(c.where.startswith("test_plan_programs.") for c in found.values())
  assert all(c.count == 1 for c in found.values())


@pytest.mark.parametrize(
  ("groups", "size", "axes"),
  [
    ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", 2, ("tensor",)),
    ("replica_groups=[2,4]<=[4,2]T(1,0)", 4, ("data",)),
    ("replica_groups=[1,8]<=[8]", 8, ("data", "tensor")),
    ("replica_groups={}", 8, ("data", "tensor")),
    ("replica_groups=mesh['data'=4,'fsdp'=1,'tensor'=2] {'data'}, use_global_device_ids=true", 4, ("data",)),
  ],
)
def test_groups_are_read_in_each_of_their_forms(groups, size, axes):
  text = f"""HloModule m

ENTRY %main (p: f32[8,128]) -> f32[8,128] {{
  %p = f32[8,128]{{1,0:T(8,128)}} parameter(0), metadata={{op_name="x"}}
  %start = f32[8,128]{{1,0:T(8,128)}} all-reduce-start(%p), channel_id=1, {groups}, to_apply=%add
  ROOT %done = f32[8,128]{{1,0:T(8,128)}} all-reduce-done(%start)
}}
"""
  module = hlo.parse(text)
  found = traffic.collectives(module, trips.visits(module, False), {"data": 4, "fsdp": 1, "tensor": 2}, "chunk")
  assert [(c.kind, c.count, c.bytes, c.group_size, c.axes) for c in found] == [("all-reduce", 1, 4096, size, axes)]


def test_sizes_are_those_of_tiles():
  sizes = {a.shape: a.nbytes for a in hlo.arrays("(bf16[3,100]{1,0:T(8,128)(2,1)S(1)}, f4e2m1fn[64,256]{1,0}, s32[])")}
  assert sizes == {(3, 100): 8 * 128 * 2, (64, 256): 64 * 256 // 2, (): 4}
  assert [a.space for a in hlo.arrays("bf16[3,100]{1,0:T(8,128)(2,1)S(1)}")] == [1]


def test_a_large_copy_is_found_and_a_small_one_is_not():
  def function(x, y):
    return jnp.swapaxes(x, 0, 1) * 1.0, y + 1

  module, mesh = compiled(function, (P(), P()), (P(), P()), (4096, 8192), (8, 8))
  (copy,) = traffic.copies(module, trips.visits(module, False), "chunk")
  assert copy.bytes == 4096 * 8192 * 4
  assert copy.count == 1
  assert traffic.collectives(module, trips.visits(module, False), mesh, "chunk") == []


def test_a_text_that_is_no_program_is_refused():
  with pytest.raises(ValueError, match="ENTRY"):
    hlo.parse("nothing")
