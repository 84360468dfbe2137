"""The drift of a float32 and of a bfloat16 KDA state against float64, over 2,000 decode steps on the CPU.

  PYTHONPATH=kernels:tests/kda_decode python -P bench/_kda_drift.py

Inputs are random. The gates have the scale of the KDA family's initialisation: A_log = log U(1, 16), and dt_bias the
inverse softplus of a dt log-uniform in [1e-3, 1e-1], with the lower bound −5 of K3. Most channels then keep more than
98% of their state a step, and some keep all of it, which is where rounding adds up.
"""

import functools

import jax
import jax.numpy as jnp
import kda_oracle
import numpy as np

from kda_decode import kda_decode

BATCH, HEADS, K, WIDTH, STEPS = 2, 3, 128, 4, 2000
WINDOWS = ((0, 10), (90, 110), (490, 510), (990, 1010), (1900, 2000))


def main():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), (HEADS, K)))
  options = dict(
    conv_weight=normal(3, WIDTH, HEADS, K) * 0.5,
    a_log=np.log(rng.uniform(1, 16, HEADS)).astype(np.float32),
    dt_bias=(dt + np.log(-np.expm1(-dt))).astype(np.float32),
    o_norm=np.ones(K, np.float32),
    gate_lower_bound=-5.0,
    norm_eps=1e-5,
  )
  slots = np.arange(BATCH, dtype=np.int32)
  step = jax.jit(
    functools.partial(kda_decode, layer=0, slots=slots, implementation="reference", **options),
    donate_argnames=("state", "conv_state"),
  )
  history = (1, BATCH, WIDTH - 1, 3, HEADS, K)
  pools = {d: (jnp.zeros((1, BATCH, HEADS, K, K), d), jnp.zeros(history)) for d in ("float32", "bfloat16")}
  exact = np.zeros((1, BATCH, HEADS, K, K)), np.zeros(history)
  mean_k = normal(BATCH, HEADS, K)
  errors = {d: [] for d in pools}

  def relative(x, y, axes):
    return np.sqrt(np.sum((np.asarray(x, np.float64) - y) ** 2, axes) / np.sum(y**2, axes))

  for _ in range(STEPS):
    inputs = {name: normal(BATCH, HEADS, K) for name in ("q", "v", "decay", "gate")}
    inputs |= dict(k=0.7 * normal(BATCH, HEADS, K) + mean_k, beta=normal(BATCH, HEADS))
    out, *exact = kda_oracle.decode_step(**inputs, state=exact[0], conv_state=exact[1], layer=0, slots=slots, **options)
    for dtype, (state, conv_state) in pools.items():
      got, *pools[dtype] = step(**inputs, state=state, conv_state=conv_state)
      errors[dtype].append((*(f(relative(got, out, -1)) for f in (np.mean, np.max)),
                            np.max(relative(pools[dtype][0], exact[0], (-2, -1)))))  # fmt: skip

  print("relative error against float64; steps: mean of outputs, largest output, largest state")
  for dtype, rows in errors.items():
    for first, last in WINDOWS:
      window = np.array(rows[first:last])
      mean, largest, state = window[:, 0].mean(), window[:, 1].max(), window[:, 2].max()
      print(f"{dtype:9} {first:5}–{last:<5} {mean:.1e} {largest:.1e} {state:.1e}")


if __name__ == "__main__":
  main()
