"""Run as a program: converted checkpoints loaded onto meshes of fake CPU devices, every shard compared with the file.

  _loading_worker.py meshes 8 DIR…               one process; many meshes, devices in shuffled order; the exchange
  _loading_worker.py hosts OUT DIR… key=value…    one of several processes; OUT<process> gets the bytes it read

Says nothing where all is well.
"""

import json
import os
import sys

import jax

if sys.argv[1] == "meshes":
  jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))

import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from _hosts_worker import shuffled_mesh
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from MaxText import distributed, quantization, weights
from MaxText.configs.k3_config import initialize
from MaxText.configs.resolve import model_config
from MaxText.converted import loading
from MaxText.errors import exit_on_user_error
from MaxText.models import kimi_k3
from MaxText.weights import is_stack

# (data, tensor, overrides)
MESHES = (
  (1, 2, ()),
  (2, 2, ("parallel_mode=throughput", "latent_projections=sharded")),
  (4, 2, ("router_weights=sharded",)),
)


def on_mesh(directory, mesh, *overrides):
  """(declarations, parameters) on a mesh; on this process's first device where it is None."""
  config = initialize(["worker", "kimi-k3-tiny.yml", f"load_parameters_path={directory}", *overrides])
  one = mesh is None
  mesh = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), ("data", "tensor")) if one else mesh
  cfg = model_config(config, "cpu", mesh)
  tree = kimi_k3.weight_tree(cfg)
  placements = weights.formats(weights.shardings(tree, mesh, config.logical_axis_rules, cfg.storage))
  if one:
    placements = jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), placements)
  return tree, cfg, loading.load_parameters(directory, cfg, tree, placements)


def bits(array):
  return np.asarray(array).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def same(part, whole):
  """Each of this process's shards against its slice of the whole, bit for bit."""
  assert part.shape == whole.shape and part.dtype == whole.dtype
  whole = bits(whole)
  assert len(part.addressable_shards) >= 1
  for shard in part.addressable_shards:
    np.testing.assert_array_equal(bits(shard.data), whole[shard.index])


def same_scales(part, whole, shape):
  """As `same`, where the scales of parts may cover shorter runs than those of the whole; `shape` is the values'."""
  assert part.dtype == whole.dtype
  whole = bits(whole)
  for axis in (-2, -1):  # one for each value, then those where the part's runs begin
    whole = np.repeat(whole, shape[axis] // whole.shape[axis], axis)
    whole = np.take(whole, np.arange(0, shape[axis], shape[axis] // part.shape[axis]), axis)
  assert part.shape == whole.shape
  for shard in part.addressable_shards:
    np.testing.assert_array_equal(bits(shard.data), whole[shard.index])


def compare(tree, got, whole):
  leaf = lambda node: isinstance(node, quantization.Quantized)
  stacks = jax.tree.leaves(tree, is_leaf=is_stack)
  pairs = zip(stacks, jax.tree.leaves(got, is_leaf=leaf), jax.tree.leaves(whole, is_leaf=leaf), strict=True)
  for stack, a, b in pairs:
    assert type(a) is type(b) or not leaf(b)
    if leaf(b):
      same(a.values, b.values)
      same_scales(a.scales, b.scales, stack.shape)
    else:
      same(a, b)


def bytes_read():
  """(TensorStore's count of bytes read from files, the kernel's of this process's reads)."""
  metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")  # none before a read
  with open("/proc/self/io", encoding="ascii") as f:
    kernel = int(next(line for line in f if line.startswith("rchar")).split()[1])
  return sum(value["value"] for metric in metrics for value in metric["values"]), kernel


def exchange(devices):
  """Shares of every dtype, on devices that would all be other processes': each element is read once, by one of them."""
  mesh = Mesh(devices.reshape(4, 2), ("data", "tensor"))
  cases = (
    ((6, 8, 5), P(None, "tensor"), True),  # layers that four don't divide
    ((3, 4), P(), True),  # fewer layers than replicas
    ((8, 6), P("tensor"), False),
    ((8, 6), P(("data", "tensor")), True),  # no replicas
  )
  for dtype in (jnp.float4_e2m1fn, jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32):
    for shape, spec, stacked in cases:
      whole = jax.random.randint(jax.random.key(0), shape, 0, 16).astype(dtype)
      whole = np.asarray(whole)
      times = np.zeros(shape, int)

      def begin(index, whole=whole, times=times):
        times[index] += 1
        return lambda: whole[index]

      placed = NamedSharding(mesh, spec)
      got = loading._start_shares(jax.ShapeDtypeStruct(shape, dtype), placed, placed, begin, stacked)()
      assert got.sharding == placed
      same(got, whole)
      np.testing.assert_array_equal(times, 1)


def meshes(directories):
  devices = np.random.default_rng(0).permutation(jax.devices())
  exchange(devices)
  for directory in directories:
    _, _, whole = on_mesh(directory, None)
    for data, tensor, overrides in MESHES:
      mesh = Mesh(devices[: data * tensor].reshape(data, tensor), ("data", "tensor"))
      tree, _, got = on_mesh(directory, mesh, *overrides)
      compare(tree, got, whole)


def hosts(out, arguments):
  directories = [a for a in arguments if "=" not in a]
  overrides = [a for a in arguments if "=" in a]
  read = {}
  for directory in directories:
    config = initialize(["worker", "kimi-k3-tiny.yml", f"load_parameters_path={directory}", *overrides])
    mesh = shuffled_mesh(config)
    before = bytes_read()
    tree, _, got = on_mesh(directory, mesh, *overrides)
    jax.block_until_ready(got)
    read[directory] = [after - b for after, b in zip(bytes_read(), before, strict=True)]
    _, _, whole = on_mesh(directory, None, *overrides)
    compare(tree, got, whole)
    distributed.wait_for_all()
  with open(f"{out}{jax.process_index()}", "w", encoding="utf-8") as f:
    json.dump(read, f)


def main(argv):
  what, first, *rest = argv[1:]
  meshes(rest) if what == "meshes" else hosts(first, rest)


if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"
  exit_on_user_error(main, sys.argv)
