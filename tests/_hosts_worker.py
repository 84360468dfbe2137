"""Run as one of several processes, on a mesh of shuffled devices.

  _hosts_worker.py placement CONFIG.yml key=value…   every shard of every weight, in each format
  _hosts_worker.py score CONFIG.yml key=value…       score.py
  _hosts_worker.py both CONFIG.yml key=value…        score.py, then decode.py

Says nothing where all is well, but for what the programs print.
"""

import dataclasses
import re
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from MaxText import checkpoint, decode, distributed, score, weights
from MaxText.configs import resolve
from MaxText.configs.k3_config import initialize
from MaxText.errors import exit_on_user_error
from MaxText.inference import engine
from MaxText.models import kimi_k3


def shuffled_mesh(config):
  """MaxText's mesh with its devices in an order that is neither that of ids nor that of processes."""
  mesh = resolve.make_mesh(config)
  devices = np.random.default_rng(0).permutation(mesh.devices.reshape(-1))
  processes = [d.process_index for d in devices]
  assert processes != sorted(processes)
  # A tensor group crosses processes: a data group of neighbours would hide a mix-up.
  assert len(set(processes[:2])) == 2
  return Mesh(devices.reshape(mesh.devices.shape), mesh.axis_names)


class Recorded(checkpoint.ReleasedCheckpoint):
  """Remembers the tensors whose values were read."""

  def __init__(self, directory):
    super().__init__(directory)
    self.read_names = set()

  def _get(self, name):
    self.read_names.add(name)
    return super()._get(name)


def check_blocks(mesh):
  """`place` against blocks cut by hand, `fetch` against the whole."""
  shape = (mesh.shape["data"] * 3, mesh.shape["tensor"] * 5)
  value = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
  array = distributed.place(value, NamedSharding(mesh, P("data", "tensor")))
  grid = mesh.devices.reshape(mesh.shape["data"], mesh.shape["tensor"])
  for shard in array.addressable_shards:
    ((i, j),) = np.argwhere(grid == shard.device)
    np.testing.assert_array_equal(shard.data, value[3 * i : 3 * i + 3, 5 * j : 5 * j + 5])
  np.testing.assert_array_equal(distributed.fetch(array), value)


def check_weights(config, mesh, experts, dense):
  """Each device's part of each weight against the slice of the whole; and what this process read for them."""
  cfg = resolve.model_config(config, "cpu", mesh)
  cfg = dataclasses.replace(cfg, storage=dataclasses.replace(cfg.storage, experts=experts, dense=dense))
  tree = kimi_k3.weight_tree(cfg)
  shardings = weights.shardings(tree, mesh, config.logical_axis_rules, cfg.storage)
  directory = engine.checkpoint_directory(config)
  released = Recorded(directory)
  got = checkpoint.load(released, tree, cfg.storage, weights.formats(shardings))
  here = jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), shardings)
  whole = checkpoint.load(checkpoint.ReleasedCheckpoint(directory), tree, cfg.storage, here)

  def compare(part, array):
    array = np.asarray(array)
    assert len(part.addressable_shards) == jax.local_device_count()
    for shard in part.addressable_shards:
      assert np.asarray(shard.data).tobytes() == array[shard.index].tobytes(), (part.shape, shard.index)

  jax.tree.map(compare, got, whole)

  mine = [i for i, d in enumerate(mesh.devices.reshape(-1)) if d.process_index == jax.process_index()]
  each = cfg.num_experts // mesh.size
  expected = {e for i in mine for e in range(i * each, (i + 1) * each)}
  read = {int(m[1]) for name in released.read_names if (m := re.search(r"\.experts\.(\d+)\.", name))}
  assert read == expected, (read, expected)


def main(argv):
  what, *rest = argv[1:]
  if what == "placement":
    config = initialize(["worker", *rest])
    mesh = shuffled_mesh(config)
    check_blocks(mesh)
    for experts, dense in (("plain", "plain"), ("mxfp4", "plain"), ("block_fp8", "block_fp8")):
      check_weights(config, mesh, experts, dense)
    return
  engine.make_mesh = shuffled_mesh
  score.main(["score.py", *rest])
  if what == "both":
    decode.main(["decode.py", *rest])


if __name__ == "__main__":
  exit_on_user_error(main, sys.argv)
