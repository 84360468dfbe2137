"""Each planted error of `kda_oracle.MUTATIONS` is told apart from both implementations."""

import functools

import jax
import kda_cases as cases
import kda_oracle
import numpy as np
import pytest

from kda_decode import kda_decode

TOLERANCE = 1e-6


@functools.cache
def inputs_and_result(implementation):
  inputs = cases.tiny_keys(cases.make_inputs(5, 2, 32, seed=3), scale=3e-3)
  # Slot 0 is live and belongs to an active row, so that an idle row clamped to it would spoil it.
  slots = inputs["slots"]
  live = slots[slots >= 0][0]
  for pool in ("state", "conv_state"):
    inputs[pool][cases.LAYER, [0, live]] = inputs[pool][cases.LAYER, [live, 0]]
  swap = {0: live, live: 0}
  inputs["slots"] = np.array([swap.get(s, s) for s in slots.tolist()], np.int32)
  assert (inputs["slots"] == 0).sum() == 1 and (inputs["slots"] == -1).any()
  return inputs, jax.jit(functools.partial(kda_decode, implementation=implementation, **cases.OPTIONS))(**inputs)


def agrees(got, want):
  return all(
    np.array_equal(np.isnan(np.asarray(g)), np.isnan(w)) and cases.relative_error(g, w) <= TOLERANCE
    for g, w in zip(got, want, strict=True)
  )


@pytest.mark.parametrize("implementation", ("reference", "pallas_interpret"))
@pytest.mark.parametrize("mutation", (None, *kda_oracle.MUTATIONS))
def test_mutation_is_seen(mutation, implementation):
  inputs, got = inputs_and_result(implementation)
  want = kda_oracle.decode_step(**inputs, **cases.OPTIONS, mutation=mutation)
  assert agrees(got, want) == (mutation is None)
