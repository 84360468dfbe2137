"""Both implementations against tokamax's float64 recurrence, to which norm and output gate are added here."""

import functools

import jax
import kda_cases as cases
import kda_oracle
import kda_tokamax
import numpy as np
import pytest

from kda_decode import kda_decode


@pytest.mark.parametrize("bound", (-5.0, None), ids=("bounded", "softplus"))
@pytest.mark.parametrize("implementation", ("reference", "pallas_interpret"))
def test_against_tokamax(implementation, bound):
  pytest.importorskip("tokamax")
  inputs = cases.make_inputs(3, 3, idle=False)
  options = dict(gate_lower_bound=bound, norm_eps=1e-5)
  got = jax.jit(functools.partial(kda_decode, implementation=implementation, **options))(**inputs)

  names = ("q", "k", "v", "decay", "beta", "slots", "conv_weight", "a_log", "dt_bias")
  o, state, conv_state = kda_tokamax.read_outs(
      kda_tokamax.load(), **{n: inputs[n] for n in names}, state=inputs["state"][cases.LAYER],
      conv_state=inputs["conv_state"][cases.LAYER], gate_lower_bound=bound,
  )  # fmt: skip
  o = o / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + 1e-5) * inputs["o_norm"]
  o = o * kda_oracle.sigmoid(inputs["gate"].astype(np.float64))
  assert cases.relative_error(got[0], o) <= 1e-6
  live = inputs["slots"]
  assert cases.relative_error(np.asarray(got[1])[cases.LAYER : cases.LAYER + 1, live], state[None, live]) <= 1e-6
  np.testing.assert_array_equal(np.asarray(got[2])[cases.LAYER, live], conv_state[live])
