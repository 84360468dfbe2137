"""What the public function refuses, and what it says."""

import jax
import jax.numpy as jnp
import kda_cases as cases
import numpy as np
import pytest

from kda_decode import aot, kda_decode, pool_format

WRONG = {
  "k_shape": (dict(k=np.zeros((2, 2, 64), np.float32)), r"k has shape \(2, 2, 64\).*must be \(2, 2, 32\)"),
  "beta_dtype": (dict(beta=np.zeros((2, 2), np.float16)), "beta is float16; it must be float32"),
  "conv_dtype": (dict(conv_state=jnp.zeros((2, 5, 3, 3, 2, 32), jnp.bfloat16)), "conv_state is bfloat16"),
  "state_dtype": (dict(state=np.zeros((2, 5, 2, 32, 32), np.float16)), "state is float16.*float32 or bfloat16"),
  "slots_dtype": (dict(slots=np.zeros(2, np.int16)), "slots is int16; it must be int32"),
  "k_not_v": (dict(v=np.zeros((2, 2, 64), np.float32)), "K=32 and V=64 differ"),
  "implementation": (dict(implementation="fast"), "implementation='fast' is unknown; choose one of"),
  "bound": (dict(gate_lower_bound=5.0), "gate_lower_bound=5.0 must be negative"),
  "layer": (dict(layer=np.zeros(1, np.int32)), r"layer has shape \(1,\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses(case):
  changes, message = WRONG[case]
  inputs = cases.make_inputs(2, 2, 32) | cases.OPTIONS | dict(implementation="reference") | changes
  with pytest.raises(ValueError, match=message):
    kda_decode(**inputs)


@pytest.mark.parametrize("implementation,key_dim", (("pallas", 64), ("pallas_interpret", 24)))
def test_kernel_refuses_other_head_sizes(implementation, key_dim):
  with pytest.raises(ValueError, match=f"K = V = {key_dim}.*supports K = V = 128 on a TPU.*implementation='reference'"):
    kda_decode(**cases.make_inputs(2, 2, key_dim), **cases.OPTIONS, implementation=implementation)


def test_pool_format_on_this_backend():
  """The engine's code for TPUs also runs on a CPU."""
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  row_major = pool_format(6, sharding)
  make = jax.jit(lambda: jnp.zeros((2, 3, 3, 3, 2, 32)), out_shardings=row_major)
  add = jax.jit(lambda x: x + 1, donate_argnums=0, in_shardings=(row_major,), out_shardings=row_major)
  assert float(add(make()).sum()) == 2 * 3 * 3 * 3 * 2 * 32


def test_reference_updates_its_pools_in_place():
  """Inside a loop over layers the CPU's compiled reference makes no second pool."""
  inputs = cases.make_inputs(4, 2, 32)
  pools = inputs.pop("state"), inputs.pop("conv_state")

  def layers(pools, inputs):
    def body(layer, carry):
      out, *pools = kda_decode(
          **(inputs | dict(q=carry[0], layer=layer)), state=carry[1][0], conv_state=carry[1][1], **cases.OPTIONS,
          implementation="reference",
      )  # fmt: skip
      return out, tuple(pools)

    return jax.lax.fori_loop(0, cases.LAYERS, body, (inputs["q"], pools))

  hlo = jax.jit(layers, donate_argnums=0).lower(pools, inputs).compile().as_text()
  copies = [line for line in aot.pool_copies(hlo, *pools) if " copy(" in line or " copy-start(" in line]
  assert not copies, copies
