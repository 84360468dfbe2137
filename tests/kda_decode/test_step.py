"""Both implementations against float64 written from the formula. The kernel runs in Pallas's TPU interpreter."""

import functools

import jax
import jax.numpy as jnp
import kda_cases as cases
import kda_oracle
import numpy as np
import pytest

from kda_decode import kda_decode
from kda_decode.blocks import Blocks
from kda_decode.kernel import kda_decode_pallas

TOLERANCE = 1e-6
IMPLEMENTATIONS = ("reference", "pallas_interpret")
QUICK = {(1, 12), (3, 3), (8, 1), (17, 6)}
GRID = [
  pytest.param(b, h, marks=() if (b, h) in QUICK else pytest.mark.compile, id=f"b{b}_h{h}")
  for b in (1, 3, 8, 17, 64)
  for h in (1, 3, 6, 12)
]


@functools.cache
def jitted(implementation, gate_lower_bound=-5.0):
  options = cases.OPTIONS | dict(gate_lower_bound=gate_lower_bound)
  return jax.jit(functools.partial(kda_decode, implementation=implementation, **options))


def run(inputs, implementation, **options):
  return jitted(implementation, **options)(**inputs)


def check(got, inputs, tolerance=TOLERANCE, **options):
  want = kda_oracle.decode_step(**inputs, **(cases.OPTIONS | options))
  for name, g, w in zip(("out", "state", "conv_state"), got, want, strict=True):
    assert cases.relative_error(g, w) <= tolerance, name
  cases.assert_untouched(inputs["state"], got[1], inputs["slots"])
  cases.assert_untouched(inputs["conv_state"], got[2], inputs["slots"])
  return want


@pytest.mark.parametrize("batch,heads", GRID)
def test_kernel_over_batches_and_heads(batch, heads):
  inputs = cases.make_inputs(batch, heads)
  check(run(inputs, "pallas_interpret"), inputs)


@pytest.mark.parametrize("heads", (1, 3, 6, 12))
@pytest.mark.parametrize("batch", (1, 3, 8, 17, 64))
def test_reference_over_batches_and_heads(batch, heads):
  inputs = cases.make_inputs(batch, heads)
  check(run(inputs, "reference"), inputs)


@pytest.mark.parametrize("bound", (-5.0, None), ids=("bounded", "softplus"))
@pytest.mark.parametrize("gates", ("spread", "saturated", "near_zero"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gates(implementation, gates, bound):
  inputs = cases.make_inputs(3, 2, 64, gates=gates)
  check(run(inputs, implementation, gate_lower_bound=bound), inputs, gate_lower_bound=bound)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_64_steps(implementation):
  """Errors hardly build up over 64 steps on the same slots.

  As a whole, outputs and states stay within the tolerance of one step at every step. The worst single vector, in a row
  whose state decays by nothing, may be off by twice that: float32 itself has rounded 64 times by then.
  """
  inputs = cases.make_inputs(4, 2, 64, gates="mixed")
  want = None, inputs["state"], inputs["conv_state"]
  got = want
  rng = np.random.default_rng(1)
  for _ in range(64):
    for name in ("q", "k", "v", "beta", "gate"):
      inputs[name] = rng.permutation(inputs[name].reshape(-1)).reshape(inputs[name].shape)
    got = run(inputs | dict(state=got[1], conv_state=got[2]), implementation)
    want = kda_oracle.decode_step(**(inputs | dict(state=want[1], conv_state=want[2])), **cases.OPTIONS)
    for g, w in zip(got, want, strict=True):
      assert cases.relative_error(g, w) <= 2 * TOLERANCE
      assert np.sqrt(np.nansum((np.asarray(g, np.float64) - w) ** 2) / np.nansum(w**2)) <= TOLERANCE
  cases.assert_untouched(inputs["state"], got[1], inputs["slots"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vanishing_keys(implementation):
  """q and k so small that the epsilon of their norm decides."""
  inputs = cases.tiny_keys(cases.make_inputs(3, 2, 64))
  check(run(inputs, implementation), inputs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_activations(implementation):
  inputs = cases.make_inputs(3, 3, 64, dtype=jnp.bfloat16)
  got = run(inputs, implementation)
  out, state, conv_state = kda_oracle.decode_step(**inputs, **cases.OPTIONS)
  assert got[0].dtype == got[2].dtype == jnp.bfloat16
  assert cases.relative_error(got[0], out) <= 2**-8  # one rounding, at the end
  assert cases.relative_error(got[1], state) <= TOLERANCE
  assert cases.relative_error(got[2], conv_state) == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_state(implementation):
  """The state is rounded where it's stored, and the output comes from the state before that."""
  inputs = cases.make_inputs(3, 3, 64, state_dtype=jnp.bfloat16)
  got = run(inputs, implementation)
  out, state, _ = kda_oracle.decode_step(**inputs, **cases.OPTIONS)
  assert got[1].dtype == jnp.bfloat16
  assert cases.relative_error(got[0], out) <= TOLERANCE
  assert cases.relative_error(got[1], state) <= 2**-8


@pytest.mark.parametrize("batch,heads,rows,head_block", ((20, 4, 8, 2), (9, 3, 9, 1), (40, 1, 16, 1)))
def test_blocks(batch, heads, rows, head_block):
  """Heads over several steps, a ragged last block, rows that don't fill a group, and no race between copies."""
  from jax._src.pallas.mosaic.interpret import interpret_pallas_call
  from jax.experimental.pallas import tpu as pltpu

  inputs = cases.make_inputs(batch, heads, 32)
  step = functools.partial(
      kda_decode_pallas, interpret=pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
      blocks=Blocks(batch, heads, rows, head_block), **cases.OPTIONS,
  )  # fmt: skip
  got = jax.block_until_ready(jax.jit(step)(**inputs))
  check(got, inputs)
  assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_idle_rows_only(implementation):
  inputs = cases.make_inputs(9, 2, 32) | dict(slots=np.full(9, -1, np.int32))
  inputs["q"] = np.full_like(inputs["q"], np.nan)
  out, state, conv_state = run(inputs, implementation)
  np.testing.assert_array_equal(out, np.zeros_like(inputs["q"]))
  cases.assert_untouched(inputs["state"], state, inputs["slots"])
  cases.assert_untouched(inputs["conv_state"], conv_state, inputs["slots"])


@pytest.mark.parametrize("name", ("q", "k", "v", "decay", "beta", "state", "conv_state"))
def test_a_rows_nan_stays_in_the_row(name):
  """Eight rows share a matrix product in the kernel; a NaN in one of them mustn't reach the others."""
  inputs = cases.make_inputs(8, 2, 32, idle=False)
  clean = run(inputs, "pallas_interpret")
  bad, slot = 2, inputs["slots"][2]
  inputs = {k: np.array(x) for k, x in inputs.items()}
  index = (cases.LAYER, slot, ..., 5) if name in ("state", "conv_state") else (bad, 1)
  inputs[name][index] = np.nan
  got = run(inputs, "pallas_interpret")
  others = np.arange(8) != bad
  np.testing.assert_array_equal(np.asarray(got[0])[others], np.asarray(clean[0])[others])
  states = lambda result: np.asarray(result[1])[cases.LAYER, inputs["slots"][others]]
  np.testing.assert_array_equal(states(got), states(clean))
  assert np.isnan(np.asarray(got[0])[bad, 1]).all()


@pytest.mark.parametrize("layer", (-1, 2))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_layer_out_of_range_touches_nothing(implementation, layer):
  inputs = cases.make_inputs(2, 1, 32, idle=False) | dict(layer=np.int32(layer))
  out, state, _ = run(inputs, implementation)
  np.testing.assert_array_equal(out, np.zeros_like(inputs["q"]))
  np.testing.assert_array_equal(np.asarray(state).view(np.uint32), inputs["state"].view(np.uint32))


def test_loop_over_layers_and_shard_map():
  """The kernel in the two places where a model puts it, against the reference in the same places."""
  inputs = cases.make_inputs(3, 2, 32)
  inputs["state"] = np.nan_to_num(inputs["state"], nan=0.1)
  inputs["conv_state"] = np.nan_to_num(inputs["conv_state"], nan=0.1)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[: 2 if len(jax.devices()) > 1 else 1]), ("heads",))
  axis = dict.fromkeys(("q", "k", "v", "decay", "beta", "gate"), 1) | dict(
    state=2, conv_state=4, conv_weight=2, a_log=0, dt_bias=0
  )
  spec = lambda name: jax.P(*([None] * axis[name]), "heads") if name in axis else jax.P()
  results = []
  for implementation in IMPLEMENTATIONS:

    def layers(inputs):
      def body(layer, carry):
        _, state, conv_state = carry
        one = inputs | dict(q=carry[0], state=state, conv_state=conv_state, layer=layer)
        return kda_decode(**one, implementation=implementation, **cases.OPTIONS)

      return jax.lax.fori_loop(0, cases.LAYERS, body, (inputs["q"], inputs["state"], inputs["conv_state"]))

    in_specs = ({name: spec(name) for name in inputs},)
    out_specs = tuple(map(spec, ("q", "state", "conv_state")))
    sharded = jax.shard_map(layers, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    results.append(jax.jit(sharded)(inputs))
  for got, want in zip(results[1], results[0], strict=True):
    assert cases.relative_error(got, want) <= TOLERANCE
