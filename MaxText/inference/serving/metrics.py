"""What the core counts and how long its requests take, for Prometheus. Both faces' requests are in it."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from MaxText.inference.serving.core import Snapshot

_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Timed(Protocol):
  """A request that is over; see `ticket.Ticket`. Times of one clock, in seconds."""

  tokens: int
  submitted: float
  first_token: float | None
  ended: float


class Source(Protocol):
  """What is measured."""

  def snapshot(self) -> Snapshot | None:
    """None: there is nothing to measure yet."""
    ...


class Metrics:
  """Attributes: registry: of its own, with nothing of other libraries in it."""

  def __init__(self, source: Source):
    self.registry = CollectorRegistry()
    self.registry.register(_Counted(source))
    self._first_token = Histogram(
      "k3_time_to_first_token_seconds",
      "From a request's acceptance to its first token.",
      buckets=_FIRST_TOKEN_SECONDS,
      registry=self.registry,
    )
    self._token = Histogram(
      "k3_time_per_output_token_seconds",
      "Mean time from token to token of a request, after its first.",
      buckets=_TOKEN_SECONDS,
      registry=self.registry,
    )

  def observe(self, request: Timed) -> None:
    """Takes the times of a request that is over; from any thread."""
    if request.first_token is None:
      return
    self._first_token.observe(request.first_token - request.submitted)
    if request.tokens > 1:
      self._token.observe((request.ended - request.first_token) / (request.tokens - 1))


class _Counted(Collector):
  def __init__(self, source: Source):
    self._source = source

  def describe(self) -> list[Metric]:
    return []  # or the registry would collect once to see what there is

  def collect(self) -> Iterator[Metric]:
    numbers = self._source.snapshot()
    if numbers is None:
      return
    yield GaugeMetricFamily("k3_requests_waiting", "Requests without a slot.", numbers.waiting)
    yield GaugeMetricFamily("k3_slots", "Sequences that are served at a time.", numbers.slots)
    yield GaugeMetricFamily("k3_slots_in_use", "Sequences that are being served.", numbers.slots_in_use)
    yield GaugeMetricFamily("k3_cache_bytes", "Size of the decode cache, on all devices together.", numbers.cache_bytes)
    yield CounterMetricFamily("k3_prompt_tokens", "Tokens of accepted prompts.", numbers.tokens_in)
    yield CounterMetricFamily("k3_generated_tokens", "Tokens of answers.", numbers.tokens_out)
    finished = CounterMetricFamily(
      "k3_requests_finished", "Requests that are over, by how they ended.", labels=["reason"]
    )
    for reason, count in sorted(numbers.finished.items()):
      finished.add_metric([reason], count)
    yield finished
