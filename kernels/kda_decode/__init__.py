"""The single-step decode of Kimi Delta Attention: one fused op, as a Pallas TPU kernel and as plain jnp."""

from kda_decode.api import IMPLEMENTATIONS, kda_decode, pool_format

__all__ = ["IMPLEMENTATIONS", "kda_decode", "pool_format"]
