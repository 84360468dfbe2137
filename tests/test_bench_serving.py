"""The arithmetic of the serving benchmarks."""

import pytest

from bench.serve import percentiles
from bench.soak import Sample, growth


def test_percentiles_are_values_that_occur():
  # Of 200 values the 100th, the 180th and the 198th are the least that 50, 90 and 99 % don't exceed.
  assert percentiles([float(i) for i in range(200, 0, -1)]) == [100, 180, 198]
  assert percentiles([7.0]) == [7, 7, 7]


def test_growth_of_a_line_and_of_a_step_in_the_middle():
  minutes = [i / 10 for i in range(90)]
  # From a third's middle to the last one's: 6 minutes of 9, at 3 MiB a minute.
  assert growth([Sample(m, 100 + 3 * m, 9, 20) for m in minutes]) == pytest.approx((18, 3))
  assert growth([Sample(m, 100 + 5 * (i >= 45), 9, 20) for i, m in enumerate(minutes)])[0] == 5
  assert growth([Sample(m, 100, 9, 20) for m in minutes]) == pytest.approx((0, 0))
