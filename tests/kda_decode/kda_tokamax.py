"""tokamax's float64 KDA recurrence as an oracle. The only file here that imports tokamax's private modules."""

import importlib.metadata

import numpy as np

VERSION = "0.0.17"


def load():
  """tokamax's reference function.

  Raises:
    RuntimeError: another version is installed than the one whose private module this file was written for.
  """
  found = importlib.metadata.version("tokamax")
  if found != VERSION:
    raise RuntimeError(
      f"tokamax {found} is installed; tests/kda_decode/kda_tokamax.py uses a private module of {VERSION}. Check that"
      " kda_attention_ref still has the same meaning, then change VERSION."
    )
  from tokamax._src.ops.causal_conv1d_gated_delta_rule import kda_attention_test

  return kda_attention_test.kda_attention_ref


def read_outs(
  reference, q, k, v, decay, beta, state, conv_state, slots, *, conv_weight, a_log, dt_bias, gate_lower_bound
):
  """One decode token of every row, all of them active, on the pools of one layer.

  Args:
    reference: of `load`.
    state: [S, H, K, V]; conv_state: [S, W-1, 3, H, K]; the rest as in `kda_decode`.

  Returns:
    (o [B, H, V] before norm and gate, state, conv_state).
  """
  batch, heads, key_dim = q.shape
  width = conv_weight.shape[1]
  channels = 3 * heads * key_dim
  (new_conv, new_state), out = reference(
    qkv=np.stack([q, k, v], axis=1).reshape(batch, channels),
    b=beta,
    a=decay.reshape(batch, heads * key_dim),
    conv_state=conv_state.reshape(-1, width - 1, channels),
    recurrent_state=state,
    conv_weight=conv_weight.transpose(0, 2, 3, 1).reshape(channels, 1, width),
    conv_bias=None,
    a_log=a_log,
    dt_bias=dt_bias,
    query_start_loc=np.arange(batch + 1),
    state_indices=slots,
    distribution=np.full(3, batch),
    seq_lens=np.full(batch, 10),  # longer than the one token, so that the pools hold a past
    n_kq=heads,
    n_v=heads,
    d_k=key_dim,
    d_v=key_dim,
    kernel_size=width,
    gate_lower_bound=gate_lower_bound,
  )
  return out.reshape(batch, heads, key_dim), np.asarray(new_state), np.asarray(new_conv).reshape(conv_state.shape)
