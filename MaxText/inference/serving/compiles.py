"""Counts compilations: after its start a server may have none."""

import jax.monitoring

_COMPILED = "/jax/core/compile/backend_compile_duration"


class CompileCount:
  """How many programs JAX has compiled in this process since `start`, until `stop`."""

  def __init__(self):
    self.count = 0

  def start(self) -> "CompileCount":
    jax.monitoring.register_event_duration_secs_listener(self._hear)
    return self

  def stop(self) -> None:
    jax.monitoring.unregister_event_duration_listener(self._hear)

  def _hear(self, event: str, seconds: float, **_) -> None:
    self.count += event == _COMPILED
