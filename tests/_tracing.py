"""Reads what a traced function computes on its way, by the names that the layers give to values.

The layers tag values with `jax.ad_checkpoint.checkpoint_name`, which does nothing when a program runs. Here the
function's jaxpr is evaluated again, equation by equation, and what passes a tag is kept, so that no tracing code enters
the product.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

# Calls whose body is evaluated as well. Loops are not among them: a tag inside a loop has one value an iteration.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


def recorded(function: Callable[..., Any]) -> Callable[..., tuple[Any, dict[str, list[jax.Array]]]]:
  """`function` with a second result: {tag: its values, in the order in which they were computed}.

  It is a JAX function itself, so it may be jitted. All arguments must be arrays (or trees of them).
  """

  def run(*args):
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    seen: dict[str, list[jax.Array]] = {}
    out = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), seen)
    return jax.tree.unflatten(jax.tree.structure(shape), out), seen

  return run


def _evaluate(jaxpr, consts, args, seen):
  values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

  def read(atom):
    return atom.val if isinstance(atom, core.Literal) else values[atom]

  for eqn in jaxpr.eqns:
    inputs = [read(atom) for atom in eqn.invars]
    name = eqn.primitive.name
    if name == "name":
      outputs = inputs
      seen.setdefault(eqn.params["name"], []).append(inputs[0])
    elif name in _CALLS:
      inner = eqn.params[_CALLS[name]]
      outputs = _evaluate(inner.jaxpr, inner.consts, inputs, seen)
    else:
      outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
      outputs = outputs if eqn.primitive.multiple_results else [outputs]
    values.update(zip(eqn.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]
