"""Estimates one point of bench/kda_decode.py in a process of its own, as the compiler's profiler aborts on some
programs, and prints it as one line of JSON. Run by bench/kda_decode.py; never by hand.
"""

import argparse
import functools
import json
import re

import jax
import jax.numpy as jnp

from kda_decode import aot, kda_decode

K = 128
WIDTH = aot.WIDTH
LAYERS = 69  # K3's KDA layers; the profiler runs the kernel with a layer index of its own choice, which must exist


def ours(implementation, arguments):
  step = functools.partial(kda_decode, gate_lower_bound=-5.0, norm_eps=1e-5, implementation=implementation)
  return aot.lower(step, arguments), (arguments["state"], arguments["conv_state"])


def tokamax(arguments):
  """tokamax's fused convolution and delta rule, which has neither output norm nor gate, on a pool of one layer."""
  from tokamax._src.ops.causal_conv1d_gated_delta_rule import config, wrapper

  batch, heads = arguments["beta"].shape
  slots, dtype = arguments["state"].shape[1], arguments["q"].dtype
  sharding = arguments["slots"].sharding
  array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
  channels = 3 * heads * K
  pools = array((slots, WIDTH - 1, channels), dtype), array((slots, heads, K, K), jnp.float32)
  i32 = jnp.int32
  rest = dict(
    qkv=array((batch, channels), dtype),
    b=array((batch, heads), dtype),
    a=array((batch, heads * K), dtype),
    conv_weight=array((channels, 1, WIDTH), jnp.float32),
    a_log=array((heads,), jnp.float32),
    dt_bias=array((heads, K), jnp.float32),
    query_start_loc=array((batch + 1,), i32),
    state_indices=array((batch,), i32),
    distribution=array((3,), i32),
    seq_lens=array((batch,), i32),
  )
  options = dict(
      conv_bias=None, n_kq=heads, n_v=heads, d_k=K, d_v=K, kernel_size=WIDTH, gate_lower_bound=-5.0,
      attention_mode=config.AttentionMode.KDA,
  )  # fmt: skip

  def step(pools, rest):
    return wrapper.fused_conv1d_gdn(conv_state=pools[0], recurrent_state=pools[1], **rest, **options)

  # tokamax asks the current mesh what chip it's on; name the one that's compiled for.
  with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
    return jax.jit(step, donate_argnums=0).lower(pools, rest), pools


def estimated_cycles(hlo: str) -> tuple[int, bool]:
  """The sum of the profile's cycles over the program, loop bodies times their trip counts.

  Returns:
    (cycles, whether every loop's trip count was known; if not, its body is counted once).
  """
  computations, calls, current = {}, [], None
  for line in hlo.splitlines():
    head = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line)
    if head:
      current = "ENTRY" if head[1] else head[2]
      computations[current] = 0
      continue
    found = re.search(r'estimated_cycles[\\":]+(\d+)', line)
    if found and int(found[1]) < 2**40:  # the profiler writes 2⁶³ − 1 where it knows nothing
      computations[current] += int(found[1])
    loop = re.search(r" while\(.*body=%?([\w.\-]+)", line)
    if loop:
      trips = re.search(r'known_trip_count[\\":{]+n[\\":]+(\d+)', line)
      calls.append((current, loop[1], int(trips[1]) if trips else None))

  def total(name):
    return computations[name] + sum((trips or 1) * total(body) for caller, body, trips in calls if caller == name)

  return total("ENTRY"), all(trips for *_, trips in calls)


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("chip")
  parser.add_argument("heads", type=int)
  parser.add_argument("batch", type=int)
  parser.add_argument("implementation", choices=("pallas", "reference", "tokamax"))
  args = parser.parse_args()
  arguments = aot.abstract_arguments(
    args.batch, args.heads, aot.one_device(args.chip), layers=LAYERS, slots=args.batch + 1, dtype=jnp.float32
  )
  if args.implementation == "tokamax":
    lowered, pools = tokamax(arguments)
  else:
    lowered, pools = ours(args.implementation, arguments)
  hlo = lowered.compile().as_text()
  cycles, exact = estimated_cycles(hlo)
  in_place = ("scatter", "dynamic-update-slice", "dynamic_update_slice")
  copies = [line for line in aot.pool_copies(hlo, *pools) if not any(word in line for word in in_place)]
  print(json.dumps(dict(cycles=cycles, loops_known=exact, pool_copies=len(copies))))


if __name__ == "__main__":
  main()
