"""KDA's decode step in float64 numpy, written from the formulas of Kimi K3, row by row and head by head.

`mutation` plants one error that a kernel could have. Every mutation must be told apart by the tests.
"""

import numpy as np

MUTATIONS = (
  "transposed_state",
  "eps_on_mean",
  "decay_after_correction",
  "output_from_old_state",
  "clamped_slot",
)


def sigmoid(x):
  return np.exp(-np.logaddexp(0.0, -x))


def decode_step(
    q, k, v, decay, beta, gate, state, conv_state, layer, slots, *, conv_weight, a_log, dt_bias, o_norm,
    gate_lower_bound, norm_eps, mutation=None,
):  # fmt: skip
  """One step; arguments as `kda_decode.kda_decode`, numpy arrays of any float dtype.

  Returns:
    (out [B, H, V], state, conv_state), new float64 arrays.
  """
  assert mutation is None or mutation in MUTATIONS, mutation
  q, k, v, decay, beta, gate, conv_weight, a_log, dt_bias, o_norm = (
    np.asarray(x, np.float64) for x in (q, k, v, decay, beta, gate, conv_weight, a_log, dt_bias, o_norm)
  )
  state, conv_state = np.array(state, np.float64), np.array(conv_state, np.float64)
  out = np.zeros(v.shape)
  for b, slot in enumerate(np.asarray(slots)):
    if slot < 0:
      if mutation != "clamped_slot":
        continue
      slot = 0
    x = np.stack([q[b], k[b], v[b]])  # [3, H, K]
    history = conv_state[layer, slot]  # [W-1, 3, H, K]
    window = np.concatenate([history, x[None]])
    conv_state[layer, slot] = window[1:]
    y = np.einsum("cwhk,wchk->chk", conv_weight, window)
    y = y * sigmoid(y)
    for h in range(q.shape[1]):
      out[b, h], state[layer, slot, h] = _head(
          *y[:, h], decay[b, h] + dt_bias[h], np.exp(a_log[h]), sigmoid(beta[b, h]), state[layer, slot, h],
          gate_lower_bound, mutation,
      )  # fmt: skip
      mean = np.mean(out[b, h] ** 2)
      out[b, h] *= o_norm * sigmoid(gate[b, h]) / np.sqrt(mean + norm_eps)
  return out, state, conv_state


def _head(q, k, v, raw_decay, rate, beta, s, bound, mutation):
  """One head: q, k, raw_decay [K], v [V], s [K, V] → (o [V], new s)."""
  over = q.shape[0] if mutation == "eps_on_mean" else 1
  q = q / np.sqrt(np.sum(q * q) / over + 1e-6) / np.sqrt(over) * q.shape[0] ** -0.5
  k = k / np.sqrt(np.sum(k * k) / over + 1e-6) / np.sqrt(over)
  g = -rate * np.logaddexp(0.0, raw_decay) if bound is None else bound * sigmoid(rate * raw_decay)
  if mutation == "transposed_state":
    s = s.T
  decayed = np.exp(g)[:, None] * s
  if mutation == "decay_after_correction":
    new = np.exp(g)[:, None] * (s + beta * np.outer(k, v - s.T @ k))
  else:
    new = decayed + beta * np.outer(k, v - decayed.T @ k)
  o = (decayed if mutation == "output_from_old_state" else new).T @ q
  return o, new.T if mutation == "transposed_state" else new
