"""What the planner takes a device of TPU v7x to be. A chip is two devices."""

HBM_BYTES = int(94.7 * 2**30)  # usable
HBM_BANDWIDTH = 3.69e12  # bytes/s
BF16_FLOPS = 1153e12  # a second; products of two 8-bit floats run at twice that
# A collective of a few KiB takes some ten microseconds whatever it carries (measured by others).
COLLECTIVE_SECONDS = 10e-6
# As published, 1.2 TB/s a chip over all links and both directions; half of it a device's. A bound, not an expectation.
LINK_BANDWIDTH = 0.6e12  # bytes/s
GIB = 2**30
