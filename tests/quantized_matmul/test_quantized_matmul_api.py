"""What the public function refuses and what it says, and its use inside shard_map."""

import functools

import jax
import jax.numpy as jnp
import matmul_cases as cases
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from quantized_matmul import grouped_matmul, stack_format

WRONG = {
  "x_rank": (dict(x=np.zeros((2, 8, 128), np.float32)), r"x is float32\(2, 8, 128\); it must be \[M, I\]"),
  "x_dtype": (dict(x=np.zeros((8, 128), np.float16)), "x is float16.*bfloat16 or float32"),
  "inputs": (dict(x=np.zeros((8, 64), np.float32)), r"values has shape \(6, 128, 256\).*must be \[G, 64, O\]"),
  "groups": (dict(group_sizes=np.zeros(7, np.int32)), r"group_sizes has shape \(7,\).*1 <= E <= G = 6"),
  "sizes_dtype": (dict(group_sizes=np.zeros(2, np.int16)), "group_sizes is int16; it must be int32"),
  "first_group": (dict(first_group=5), "first_group=5; with 2 groups and 6 matrices it must be from 0 to 4"),
  "first_group_rank": (dict(first_group=np.zeros(1, np.int32)), r"first_group has shape \(1,\)"),
  "values_dtype": (dict(values=jnp.zeros((6, 128, 256), jnp.int8)), "values is int8; it must be"),
  "no_scales": (dict(scales=None), "scales is None; float8_e4m3fn values want"),
  "scales_shape": (dict(scales=np.ones((6, 1, 3), np.float32)), r"want float32 scales \[6, 128/ri, 256/ro\]"),
  "scales_dtype": (dict(scales=np.ones((6, 1, 2), np.float16)), "want float32 scales"),
  "long_run": (dict(scales=np.ones((6, 1, 1), np.float32)), "at most ri = 128, ro = 128"),
  "mx_scales": (dict(values=jnp.zeros((6, 128, 256), jnp.float4_e2m1fn)), "MXFP4 values.*want uint8 scales"),
  "plain_scales": (dict(values=np.zeros((6, 128, 256), np.float32)), "plain weights.*take no scales"),
  "out_dtype": (dict(out_dtype=jnp.float16), "out_dtype=float16; it must be bfloat16 or float32"),
  "implementation": (dict(implementation="fast"), "implementation='fast' is unknown; choose one of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses(case):
  changes, message = WRONG[case]
  names = ("x", "values", "scales", "group_sizes")
  arguments = dict(zip(names, cases.arguments("block_fp8", 8, (3, 5), 128, 256), strict=True))
  arguments |= dict(first_group=0, out_dtype=jnp.float32, implementation="reference") | changes
  with pytest.raises(ValueError, match=message):
    grouped_matmul(**arguments)


@pytest.mark.parametrize("implementation", ("pallas_interpret", "reference"))
@pytest.mark.parametrize("form", cases.FORMATS)
def test_inside_shard_map(form, implementation):
  """With replication checked: the result varies over the axis that the arguments vary over."""
  arrays = cases.arguments(form, 24, (8, 16), 64, 128)
  mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
  spec = PartitionSpec("x")
  product = functools.partial(grouped_matmul, out_dtype=jnp.float32, implementation=implementation)
  sharded = jax.shard_map(
    lambda *a: product(*a, 2),
    mesh=mesh,
    in_specs=(spec, spec, None if arrays[2] is None else spec, spec),
    out_specs=spec,
    check_vma=True,
  )
  cases.assert_close(jax.jit(sharded)(*arrays), *arrays, 2)


def test_stack_format_on_this_backend():
  """The loader's code for TPUs also runs on a CPU."""
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  stack = jax.device_put(np.arange(24.0).reshape(2, 3, 4), stack_format(3, sharding))
  np.testing.assert_array_equal(np.asarray(jax.jit(lambda x: x + 1)(stack)), np.arange(24.0).reshape(2, 3, 4) + 1)
