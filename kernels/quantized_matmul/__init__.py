"""A grouped matrix product that reads quantised weights in place from a stack of all layers' matrices."""

from quantized_matmul.api import IMPLEMENTATIONS, grouped_matmul, stack_format

__all__ = ["IMPLEMENTATIONS", "grouped_matmul", "stack_format"]
