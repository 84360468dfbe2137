"""The kernel compiled for real TPUs by their compiler, on this machine: K3's shapes, and no copy of a stack.

The widths are those of a device of 32 or 64. No compile here has weights: a stack of all layers is a shape.
"""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import pytest

from quantized_matmul import aot
from quantized_matmul.formats import Form

DENSE = (
    (7168, 1152), (7168, 384), (384, 7168), (7168, 3584), (3584, 7168), (7168, 112), (112, 7168), (7168, 1536),
    (1536, 576), (192, 7168), (7168, 2112), (1056, 7168),
)  # fmt: skip
EXPERTS = ((3584, 6144), (3072, 3584))
MOE_LAYERS = 92


def compile_and_check(chip, form, rows, groups, inputs, outputs, *, layers=MOE_LAYERS, dtype=jnp.bfloat16, **options):
  arguments = aot.abstract_arguments(
    form, rows, groups, inputs, outputs, aot.one_device(chip), layers=layers, dtype=dtype
  )
  compiled = aot.lower(arguments, in_loop=True, **options).compile()
  assert not aot.stack_copies(compiled.as_text(), *arguments[1:3])
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * rows * (inputs + outputs) * 4 + (1 << 20)
  values = arguments[1]
  bits = groups * inputs * outputs * jax.dtypes.itemsize_bits(values.dtype)
  assert compiled.cost_analysis()["bytes accessed"] >= bits / 8


@pytest.mark.parametrize("form", (Form.BLOCK_FP8, Form.MXFP4))
def test_decode_experts(form):
  compile_and_check("tpu7x", form, 1024, 14 if form is Form.BLOCK_FP8 else 28, 3072, 3584)


@pytest.mark.compile
@pytest.mark.parametrize("rows", (1024, 2048, 8192))
@pytest.mark.parametrize("inputs,outputs", EXPERTS)
def test_experts(inputs, outputs, rows):
  compile_and_check("tpu7x", Form.BLOCK_FP8, rows, 14, inputs, outputs)
  if rows != 2048:  # cut as 8192 are
    compile_and_check("tpu7x", Form.MXFP4, rows, 28, inputs, outputs)
    compile_and_check("v6e", Form.BLOCK_FP8, rows, 14, inputs, outputs)


@pytest.mark.compile
@pytest.mark.parametrize("inputs,outputs", DENSE)
def test_dense(inputs, outputs):
  for rows in (32, 64, 512, 8192):
    compile_and_check("tpu7x", Form.BLOCK_FP8, rows, 1, inputs, outputs)
  compile_and_check("v6e", Form.BLOCK_FP8, 64, 1, inputs, outputs)


@pytest.mark.compile
@pytest.mark.parametrize("chip", ("tpu7x", "v6e"))
def test_other_arguments(chip):
  """Plain weights, float32 activations, float32 results, a row count that isn't a multiple of anything."""
  compile_and_check(chip, Form.PLAIN, 100, 3, 512, 640)
  compile_and_check(chip, Form.PLAIN, 64, 1, 200, 72)
  for dtype in (jnp.bfloat16, jnp.float32):
    compile_and_check(chip, Form.BLOCK_FP8, 100, 3, 512, 640, dtype=dtype, out_dtype=jnp.float32)
  if chip == "tpu7x":
    compile_and_check(chip, Form.MXFP4, 100, 3, 480, 640, dtype=jnp.float32, out_dtype=jnp.float32)
  compile_and_check(chip, Form.BLOCK_FP8, 16384, 1, 7168, 1536)


def test_v6e_has_no_float4():
  """Said before the compiler does, wherever the mesh tells the chip."""
  arguments = aot.abstract_arguments(Form.MXFP4, 64, 2, 512, 512, aot.one_device("v6e"), layers=2, dtype=jnp.bfloat16)
  with pytest.raises(ValueError, match=r"TPU v6 lite has no float4_e2m1fn.*block-FP8"):
    aot.lower(arguments)


def test_a_copy_would_be_seen():
  """The search for copies finds the one that XLA makes when a stack's layout is left to it."""
  arguments = aot.abstract_arguments(
    Form.BLOCK_FP8, 64, 1, 1536, 576, aot.one_device("tpu7x"), layers=3, dtype=jnp.bfloat16, formatted=False
  )
  hlo = aot.lower(arguments, in_loop=True).compile().as_text()
  assert any(" copy(" in line for line in aot.stack_copies(hlo, arguments[1]))
