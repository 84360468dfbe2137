"""Declarations of weights: how they are laid out over devices, initialised, and found in a checkpoint."""

import dataclasses
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import GOLDEN, assert_same, golden, mesh_of_one, small_config
from jax.sharding import PartitionSpec

from MaxText import checkpoint, weights
from MaxText.errors import UserError
from MaxText.models import kimi_k3


def test_shardings_follow_the_rules():
  cfg, _ = golden("k3-a")
  tree = kimi_k3.weight_tree(cfg)
  mesh = jax.sharding.AbstractMesh((2, 2), ("data", "tensor"))
  rules = [("heads", "tensor"), ("embed", "data"), ("mlp", "tensor"), ("vocab", "tensor")]
  rules += [(name, []) for name in ("kv", "layers", "exp")]
  made = weights.shardings(tree, mesh, rules, cfg.storage)
  assert made["kda"]["attention"]["qkv"].spec == PartitionSpec(None, ("data",), ("tensor",))
  assert made["lm_head"].spec == PartitionSpec(("data",), ("tensor",))
  assert made["norm"].spec == PartitionSpec(None)


def test_two_logical_axes_on_one_mesh_axis_are_refused():
  cfg, _ = golden("k3-a")
  mesh = jax.sharding.AbstractMesh((1, 2), ("data", "tensor"))
  rules = [
    ("heads", "tensor"),
    ("kv", "tensor"),
    ("embed", []),
    ("mlp", []),
    ("vocab", []),
    ("layers", []),
    ("exp", []),
  ]
  with pytest.raises(UserError) as caught:
    weights.shardings(kimi_k3.weight_tree(cfg), mesh, rules, cfg.storage)
  for culprit in ("'heads'", "'kv'", "'tensor'"):
    assert culprit in str(caught.value)
  # A mesh axis of one device splits nothing, and two dimensions may share it.
  weights.shardings(kimi_k3.weight_tree(cfg), mesh_of_one(), rules, cfg.storage)


def test_of_several_rules_the_first_with_free_mesh_axes_counts():
  rules = [("a", "x"), ("b", "x"), ("b", "y"), ("c", ["x", "y"])]
  assert weights.partition_spec(("a", "b"), rules, "w") == PartitionSpec(("x",), ("y",))
  assert weights.partition_spec(("b", None), rules, "w") == PartitionSpec(("x",), None)
  assert weights.partition_spec(("c",), rules, "w") == PartitionSpec(("x", "y"))
  with pytest.raises(UserError, match="'a' and 'c' of w on mesh axis 'x'"):
    weights.partition_spec(("a", "c"), rules, "w")


def test_a_logical_axis_without_a_rule_is_named():
  with pytest.raises(UserError, match="'d' of w has no entry"):
    weights.partition_spec(("d",), [("a", "x")], "w")


def test_a_dimension_that_its_mesh_axis_doesnt_divide_is_named():
  cfg, _ = golden("k3-a")
  rules = [(name, []) for name in ("kv", "layers", "exp", "embed", "mlp", "vocab")] + [("heads", "tensor")]
  with pytest.raises(UserError, match=r"'heads' of size 2 can't be split 3 ways"):
    mesh = jax.sharding.AbstractMesh((3,), ("tensor",))
    weights.shardings(kimi_k3.weight_tree(cfg), mesh, rules, cfg.storage)


def test_a_declaration_of_unequal_axes_is_refused():
  with pytest.raises(ValueError, match="w: 1 logical axes"):
    weights.Weight((2, 3), ("embed",), (weights.Source("w", (3, 2)),), weights.fan_in(2))


def test_random_weights_have_declared_shapes_dtypes_and_scales():
  storage = weights.Storage(jnp.dtype(jnp.bfloat16))
  tree = {name: kimi_k3.weight_tree(small_config(storage=storage))[name] for name in ("norm", "kda")}
  initialize = jax.jit(lambda key: weights.initialize(tree, key, storage.dtype))
  params, again = initialize(jax.random.key(0)), initialize(jax.random.key(0))
  assert_same(params, again)
  shapes = weights.abstract(tree, storage)
  assert jax.tree.structure(shapes) == jax.tree.structure(params)
  for ours, declared in zip(jax.tree.leaves(params), jax.tree.leaves(shapes), strict=True):
    assert (ours.shape, ours.dtype) == (declared.shape, declared.dtype)
  assert weights.count(tree) == sum(x.size for x in jax.tree.leaves(params))
  assert weights.nbytes(tree, storage) == sum(x.nbytes for x in jax.tree.leaves(params))
  # 1/√inputs, measured over 2·64·3·2·32 and 8·2·32·32 draws.
  assert abs(np.std(np.asarray(params["kda"]["attention"]["qkv"], np.float32)) * 64**0.5 - 1) < 0.05
  assert abs(np.std(np.asarray(params["kda"]["experts"]["wo"], np.float32)) * 32**0.5 - 1) < 0.05
  a_log = np.asarray(params["kda"]["attention"]["a_log"])
  assert a_log.dtype == np.float32 and (a_log >= 0).all() and (a_log <= math.log(16)).all()


def test_a_checkpoint_that_lacks_experts_is_refused_before_anything_is_read():
  cfg, _ = golden("k3-a")
  released = checkpoint.ReleasedCheckpoint(str(GOLDEN / "k3-a"))
  with pytest.raises(UserError, match=r"lacks model.layers.1.block_sparse_moe.experts.16.w1.weight"):
    released.check(
      {"kda": {"experts": kimi_k3.weight_tree(dataclasses.replace(cfg, num_experts=17))["kda"]["experts"]}}
    )


FOUR_DEVICES = """
import dataclasses
import jax, numpy as np
from _models import GOLDEN, golden, settings
from jax.sharding import Mesh
from MaxText import checkpoint, weights
from MaxText.models import kimi_k3

cfg, params = golden("kl-a")
tree = kimi_k3.weight_tree(cfg)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "tensor"))
rules = [("heads", "tensor"), ("embed", "data"), ("mlp", "tensor"), ("vocab", "tensor"), ("exp", ["data", "tensor"])]
rules += [("kv", []), ("layers", [])]
shardings = weights.shardings(tree, mesh, rules, cfg.storage)
split = checkpoint.load(checkpoint.ReleasedCheckpoint(str(GOLDEN / "kl-a")), tree, cfg.storage, shardings)
parts = 0
for ours, theirs, sharding in zip(*map(jax.tree.leaves, (split, params, shardings)), strict=True):
  assert ours.sharding == sharding
  np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
  parts += ours.addressable_shards[0].data.size < ours.size
print("parts", parts)
"""


def test_loading_onto_four_devices_gives_each_its_part():
  environment = os.environ | {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    "PYTHONPATH": os.pathsep.join([str(GOLDEN.parent), *filter(None, sys.path)]),
  }
  run = subprocess.run(
    [sys.executable, "-c", FOUR_DEVICES], env=environment, capture_output=True, text=True, check=False
  )
  assert run.returncode == 0, run.stderr[-2000:]
  assert int(run.stdout.split()[-1]) > 30, "most arrays are split"
