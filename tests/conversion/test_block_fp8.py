"""MXFP4 into block-FP8, against float64 written from the formats' definitions, brute force and compressed-tensors."""

import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from conversion import block_fp8
from conversion.block_fp8 import Exactness
from MaxText import mxfp4, quantization

GOLDEN = Path(__file__).parents[1] / "golden" / "mxfp4" / "mxfp4.npz"
HALF, NEGATIVE_ZERO, SIX = 0x1, 0x8, 0x7  # codes of E2M1
SHAPES = ((1, 32), (128, 128), (136, 192), (300, 224))  # one group; a block; partial ones
E4M3FN = ml_dtypes.float8_e4m3fn


def rng(seed: int = 0) -> np.random.Generator:
  return np.random.default_rng(seed)


def e2m1(code: int) -> float:
  """Bit 3: sign; bits 2 and 1: exponent, bias 1; bit 0: mantissa. Exponent 0: subnormal."""
  exponent, mantissa = code >> 1 & 3, code & 1
  magnitude = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
  return -magnitude if code & 8 else magnitude


def e4m3(byte: int) -> float:
  """Bit 7: sign; bits 6 to 3: exponent, bias 7; three bits of mantissa. Exponent 0: subnormal; 0x7f: NaN."""
  exponent, mantissa = byte >> 3 & 15, byte & 7
  magnitude = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8
  magnitude = np.nan if byte & 127 == 127 else magnitude
  return -magnitude if byte & 128 else magnitude


E2M1 = np.array([e2m1(code) for code in range(16)])
E4M3 = np.array([e4m3(byte) for byte in range(256)])


def decode_source(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
  """[out, in] codes, [out, in / 32] biased exponents -> [out, in] float64."""
  return E2M1[codes] * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=1)


def decode_result(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Inputs first, as the conversion gives them -> [out, in] float64."""
  each = scales.astype(np.float64).repeat(128, 0).repeat(128, 1)[: values.shape[0], : values.shape[1]]
  return (E4M3[values.view(np.uint8)] * each).T


def nearest(x: np.ndarray) -> np.ndarray:
  """To the nearest finite e4m3 magnitude by search, ties to the even byte; keeps the sign."""
  grid = E4M3[:127]
  distance = np.abs(np.abs(x)[..., None] - grid)
  best = distance.min(axis=-1, keepdims=True)
  chosen = np.where(distance == best, np.arange(127) % 2, 2).argmin(axis=-1)
  return np.copysign(grid[chosen], x)


def pack(codes: np.ndarray) -> np.ndarray:
  return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
  """Equal, signs of zeros too."""
  return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def blocks(shape: tuple[int, int]):
  """(slices of [out, in], slices of [out, in / 32], output block, input block) of each block."""
  for i, output in enumerate(range(0, shape[0], 128)):
    for j, column in enumerate(range(0, shape[1], 128)):
      rows = slice(output, output + 128)
      yield (rows, slice(column, column + 128)), (rows, slice(column // 32, column // 32 + 4)), i, j


def spread_case(shape: tuple[int, int], spread: int, least: int = 110, seed: int = 0):
  """Random codes and scales, with both ends of the spread in each block and a 6 and a half in their groups."""
  generator = rng(seed)
  codes = generator.integers(0, 16, shape, dtype=np.uint8)
  scale = generator.integers(least, least + spread + 1, (shape[0], shape[1] // 32), dtype=np.uint8)
  for rows, groups, _, _ in blocks(shape):
    scale[groups][0, 0], codes[rows][0, :2] = least + spread, (SIX, HALF)
    if scale[groups].size > 1:
      scale[groups][-1, -1], codes[rows][-1, -2:] = least, (HALF, SIX)
  return codes, scale


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spread", [0, 13, 14])
def test_a_spread_of_up_to_14_is_exact(shape, spread):
  codes, scale = spread_case(shape, spread)
  values, scales, exactness = block_fp8.from_mxfp4(pack(codes), scale)
  outputs, inputs = shape
  counted = (-(-inputs // 128), -(-outputs // 128))
  assert (values.shape, values.dtype) == ((inputs, outputs), E4M3FN) and values.flags.c_contiguous
  assert (scales.shape, scales.dtype) == (counted, np.float32) and scales.flags.c_contiguous
  assert exactness == Exactness(elements=codes.size, blocks=scales.size)
  source = decode_source(codes, scale)
  assert same_bits(decode_result(values, scales), source)
  assert same_bits(np.ascontiguousarray(block_fp8.decode(values, scales).T), mxfp4.unpack(pack(codes), scale))
  for _, groups, i, j in blocks(shape):
    assert scales[j, i] == 2.0 ** (int(scale[groups].max()) - 127 - 6)


@pytest.mark.parametrize("spread", [0, 14, 17])
def test_the_released_orientation_is_the_transpose(spread):
  codes, scale = spread_case((136, 192), spread)
  values, scales, exactness = block_fp8.from_mxfp4(pack(codes), scale)
  released = block_fp8.from_mxfp4(pack(codes), scale, inputs_first=False)
  assert same_bits(released[0], np.ascontiguousarray(values.T)) and released[0].flags.c_contiguous
  assert same_bits(released[1], np.ascontiguousarray(scales.T)) and released[2] == exactness
  assert same_bits(block_fp8.decode(*released[:2]), np.ascontiguousarray(block_fp8.decode(values, scales).T))


def test_it_fits_where_the_checkpoint_reader_quantises():
  """As `checkpoint.load` fills `BlockFP8`: scales spread to the values' shape, then picked run by run."""
  codes, scale = spread_case((136, 192), 14)
  values, scales, _ = block_fp8.from_mxfp4(pack(codes), scale)
  every = tuple(slice(None, None, run) for run in quantization.runs(quantization.BlockFP8, values.shape))
  picked = quantization.spread_scales(scales, values.shape)[every]
  held = quantization.BlockFP8(jnp.asarray(values), jnp.asarray(picked))
  np.testing.assert_array_equal(quantization.dequantize(held, jnp.float32), mxfp4.unpack(pack(codes), scale).T)


def test_at_15_odd_multiples_of_a_half_are_lost_and_nothing_else():
  codes = np.zeros((2, 32), np.uint8)
  codes[0], codes[1, 0] = np.arange(32) % 16, SIX
  scale = np.array([[100], [115]], np.uint8)
  values, scales, exactness = block_fp8.from_mxfp4(pack(codes), scale)
  assert scales[0, 0] == 2.0 ** (115 - 127 - 6)
  unit = 2.0 ** (100 - 127)
  expected = decode_source(codes, scale)
  # ±½ lies between 0 and 1, ±1½ between 1 and 2: both are ties, and the even neighbours are ±0 and ±2.
  for code, rounded in ((1, 0.0), (3, 2.0), (9, -0.0), (11, -2.0)):
    expected[codes == code] = rounded * unit
  expected[1, 0] = 6 * 2.0 ** (115 - 127)
  assert same_bits(decode_result(values, scales), expected)
  assert exactness == Exactness(64, 8, 1, 1, unit / 2, 1.0)


def test_up_to_14_the_scale_follows_from_exponents_alone():
  codes = np.full((3, 32), HALF, np.uint8)
  codes[2] = 0  # a group of zeros, far away
  for spread in range(15):
    _, scales, exactness = block_fp8.from_mxfp4(pack(codes), np.array([[110], [110 + spread], [0]], np.uint8))
    assert scales[0, 0] == 2.0 ** (110 + spread - 127 - 6) and exactness.inexact_elements == 0


def test_beyond_14_a_block_is_exact_where_its_values_allow():
  def lost(low: list[int], high: list[int], spread: int) -> int:
    """Of a block whose least group holds the codes `low`, and its largest `high`."""
    codes = np.zeros((2, 32), np.uint8)
    codes[0, : len(low)], codes[1, : len(high)] = low, high
    values, scales, exactness = block_fp8.from_mxfp4(pack(codes), np.array([[90], [90 + spread]], np.uint8))
    equal = decode_result(values, scales) == decode_source(codes, np.array([[90], [90 + spread]]))
    assert exactness.inexact_elements == np.count_nonzero(~equal)
    return exactness.inexact_elements

  assert lost([2, 10, 7], [SIX], 15) == 0  # 1, −1, 6: no halves
  assert lost([4, 14, 7], [SIX], 16) == 0 and lost([2, 14, 7], [SIX], 16) == 1  # 2, −4, 6; then a 1
  assert lost([6, 14], [SIX], 17) == 0 and lost([7, 14], [SIX], 17) == 1  # ±4; then a 6
  assert lost([1, 3], [5, 13], 15) == 0 and lost([1, 3], [5, 6], 15) == 2  # up to 3; then a 4
  assert lost([1, 11], [1, 9], 17) == 0 and lost([1, 11], [1, 9], 18) == 2  # halves at both ends: a spread of 17
  assert lost([6], [9], 20) == 0 and lost([6], [9], 21) == 1


@pytest.mark.parametrize("spread", [15, 16, 17, 19, 24, 40, 253])
@pytest.mark.parametrize("allowed", [range(16), (0, 8, 1, 2, 4), (0, 6, 8, 12)])
def test_scale_and_counts_are_those_of_brute_force(spread, allowed):
  """Every power of two is tried as the scale of each block, each element is rounded by search."""
  shape = (132, 160)
  generator = rng(spread)
  codes = generator.choice(np.array(allowed, np.uint8), shape) * (generator.random(shape) < 0.05)
  # Few groups, so that the extremes differ from block to block.
  codes[2:128] = 0
  scale = generator.integers(0, spread + 1, (shape[0], shape[1] // 32), dtype=np.uint8)
  values, scales, exactness = block_fp8.from_mxfp4(pack(codes), scale)
  source, decoded = decode_source(codes, scale), decode_result(values, scales)
  inexact_blocks = 0
  for part, _, i, j in blocks(shape):
    block = source[part]
    unflushed = 2.0 ** np.arange(-126, 128)
    fitting = [s for s in unflushed if np.abs(block).max() <= 448 * s]
    exact = any((nearest(block / s) * s == block).all() for s in fitting[:30])
    assert exact == (decoded[part] == block).all()
    assert same_bits(decoded[part].copy(), nearest(block / scales[j, i]) * scales[j, i])
    if not exact:
      assert scales[j, i] == fitting[0]
    inexact_blocks += not exact
  errors = np.abs(decoded - source)
  relative = errors[source != 0] / np.abs(source[source != 0])
  assert exactness == Exactness(
    codes.size, np.count_nonzero(errors), scales.size, inexact_blocks, errors.max(), relative.max(initial=0)
  )


def test_no_value_overflows_and_the_largest_are_kept():
  codes, scale = spread_case((256, 256), 60, least=60)
  values, scales, exactness = block_fp8.from_mxfp4(pack(codes), scale)
  source, decoded = decode_source(codes, scale), decode_result(values, scales)
  assert np.isfinite(decoded).all() and exactness.inexact_elements > 0
  for part, _, _, _ in blocks(codes.shape):
    near = np.abs(source[part]) >= np.abs(source[part]).max() * 2.0**-14
    assert near.any() and (decoded[part] == source[part])[near].all()


def test_minus_zero_keeps_its_sign():
  codes = np.full((1, 64), NEGATIVE_ZERO, np.uint8)
  codes[0, 0] = SIX
  values, scales, exactness = block_fp8.from_mxfp4(pack(codes), np.array([[127, 0]], np.uint8))
  assert (values.view(np.uint8)[1:] == 0x80).all() and exactness.inexact_elements == 0
  decoded = block_fp8.decode(values, scales)
  assert decoded[0] == 6 and np.signbit(decoded[1:]).all() and not decoded[1:].any()


@pytest.mark.parametrize("zero", [0, NEGATIVE_ZERO])
@pytest.mark.parametrize("extreme", [0, 254])
def test_groups_of_zeros_dont_set_the_scale(zero, extreme):
  codes, scale = spread_case((136, 192), 14)
  before = block_fp8.from_mxfp4(pack(codes), scale)
  codes[1:5, 32:64], scale[1:5, 1] = zero, extreme
  values, scales, exactness = block_fp8.from_mxfp4(pack(codes), scale)
  assert same_bits(scales, before[1]) and exactness == before[2] and exactness.inexact_elements == 0
  assert same_bits(decode_result(values, scales), decode_source(codes, scale))


def test_a_block_of_zeros_has_scale_one():
  codes, scale = spread_case((136, 192), 3)
  codes[:128, 128:], scale[:128, 4:] = NEGATIVE_ZERO, rng().integers(0, 255, (128, 2))
  codes[128:, 128:] = 0
  values, scales, exactness = block_fp8.from_mxfp4(pack(codes), scale)
  assert (scales[1] == 1).all() and (scales[0] == 2.0 ** (113 - 127 - 6)).all() and exactness.inexact_blocks == 0
  assert same_bits(decode_result(values, scales), decode_source(codes, scale))


def test_the_ends_of_the_range():
  """Byte 0 is 2^−127, exact with a scale that is a normal number; 6 · 2^127 is exact though float32 can't hold it."""
  codes = (np.arange(64, dtype=np.uint8) % 16).reshape(1, 64)
  for least in range(20):
    for scale in ([[0, least]], [[least, least]], [[least, min(least + 14, 254)]]):
      scale = np.array(scale, np.uint8)
      values, scales, exactness = block_fp8.from_mxfp4(pack(codes), scale)
      assert scales[0, 0] == 2.0 ** max(int(scale.max()) - 127 - 6, -126)  # never below float32's normal numbers
      assert (exactness.inexact_elements == 0) == (np.ptp(scale) <= 14)
      if not exactness.inexact_elements:
        assert same_bits(decode_result(values, scales), decode_source(codes, scale))
        assert same_bits(block_fp8.decode(values, scales).T.copy(), mxfp4.unpack(pack(codes), scale))
  scale = np.array([[240, 254]], np.uint8)
  values, scales, exactness = block_fp8.from_mxfp4(pack(codes), scale)
  assert exactness.inexact_elements == 0 and same_bits(decode_result(values, scales), decode_source(codes, scale))
  with np.errstate(over="ignore"):
    expected = decode_source(codes, scale).astype(np.float32)
  assert np.isinf(expected).any() and same_bits(block_fp8.decode(values, scales).T.copy(), expected)


def test_a_scale_that_is_nan_is_refused_by_place_even_over_zeros():
  packed, scale = np.zeros((200, 32), np.uint8), np.full((200, 2), 127, np.uint8)
  scale[150, 1] = 255
  with pytest.raises(ValueError, match=r"255.* NaN, at \[150, 1\]: output 150, inputs 32 to 63 \(1 in all\)"):
    block_fp8.from_mxfp4(packed, scale)


def test_other_dtypes_and_shapes_are_refused():
  packed, scale = np.zeros((2, 32), np.uint8), np.zeros((2, 2), np.uint8)
  for bad in (packed[:1], packed[:, :16], packed[:, :31], packed[0], packed[:0]):
    with pytest.raises(ValueError, match="belong together"):
      block_fp8.from_mxfp4(bad, scale[:0] if not len(bad) else scale)
  with pytest.raises(ValueError, match="uint8, not int8"):
    block_fp8.from_mxfp4(packed.view(np.int8), scale)
  values, scales, _ = block_fp8.from_mxfp4(packed, scale)
  for bad in (
    (values, scales[0]),
    (values.view(np.uint8), scales),
    (values, scales.astype(np.float64)),
    (values[0],) * 2,
  ):
    with pytest.raises(ValueError, match="block-FP8"):
      block_fp8.decode(*bad)


def test_views_and_read_only_memory_are_taken():
  """As slices of a larger, unaligned buffer, which is what a mapped shard is."""
  codes, scale = spread_case((136, 192), 14)
  buffer = np.zeros(pack(codes).size + 1, np.uint8)
  unaligned = buffer[1:].reshape(136, 96)
  unaligned[:] = pack(codes)
  buffer.flags.writeable = unaligned.flags.writeable = False
  expected = block_fp8.from_mxfp4(pack(codes), scale)
  for packed in (unaligned, np.asfortranarray(unaligned), np.repeat(unaligned, 2, axis=0)[::2]):
    values, scales, _ = block_fp8.from_mxfp4(packed, scale)
    assert same_bits(values, expected[0]) and same_bits(scales, expected[1])


def test_memory_is_the_result_and_of_each_block_little():
  packed = rng().integers(0, 256, (2048, 256), dtype=np.uint8)
  scale = rng(1).integers(100, 130, (2048, 16), dtype=np.uint8)  # wide: the longer way
  tracemalloc.start()
  values, _, _ = block_fp8.from_mxfp4(packed, scale)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < values.nbytes + 16 * 128 * values.shape[0]


@pytest.mark.parametrize("case", ["spread0", "spread13", "spread14", "spread15", "spread17", "lowest", "highest"])
def test_it_agrees_with_compressed_tensors(case):
  """Their decoded bfloat16 (exact) against ours: bit for bit where nothing is lost, else all but what is counted."""
  with np.load(GOLDEN) as golden:
    packed, scale, bits = (golden[f"{case}_{name}"] for name in ("packed", "scale", "bfloat16"))
  theirs = bits.view(ml_dtypes.bfloat16).astype(np.float32)
  assert same_bits(mxfp4.unpack(packed, scale), theirs)
  values, scales, exactness = block_fp8.from_mxfp4(packed, scale, inputs_first=False)
  differing = block_fp8.decode(values, scales).view(np.uint32) != theirs.view(np.uint32)
  assert np.count_nonzero(differing) == exactness.inexact_elements
  assert (exactness.inexact_elements > 0) == (case in ("spread15", "spread17"))
  assert (theirs == 0).any() and np.signbit(theirs[theirs == 0]).any()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shape", [(136, 200), (5, 7), (256, 128)])
def test_plain_floats_are_quantised_as_the_loader_does(dtype, shape):
  matrix = (rng().standard_normal(shape) * 0.02).astype(dtype)
  matrix[0, :3] = 0
  matrix[1, 0] = -0.0
  values, scales, exactness = block_fp8.from_float(matrix)
  # As the loader quantises the transpose, and as it quantises the matrix itself.
  turned = quantization.quantize_block_fp8(matrix.astype(np.float32).T)
  assert same_bits(values.T.copy(), np.asarray(turned[0])) and same_bits(scales.T.copy(), np.asarray(turned[1]))
  expected = quantization.quantize_block_fp8(matrix.astype(np.float32))
  assert same_bits(values, expected[0]) and same_bits(scales, expected[1])
  source = matrix.astype(np.float64)
  errors = np.abs(block_fp8.decode(values, scales) - source)
  relative = errors[source != 0] / np.abs(source[source != 0])
  bad = sum(errors[part].any() for part, _, _, _ in blocks(shape))
  assert exactness == Exactness(matrix.size, np.count_nonzero(errors), scales.size, bad, errors.max(), relative.max())


def test_blocks_too_small_for_a_normal_scale_become_zeros_and_are_counted():
  matrix = np.ones((1, 384), np.float32)
  matrix[0, 128:256], matrix[0, 256:] = -1e-40, 0
  values, scales, exactness = block_fp8.from_float(matrix)
  assert (values[:, :128].astype(np.float32) == 448).all() and not values[:, 128:].astype(np.float32).any()
  assert scales[0].tolist() == [np.float32(1 / 448), 1, 1]
  assert exactness == Exactness(384, 128, 3, 1, float(np.float32(1e-40)), 1.0)


def test_plain_matrices_of_other_kinds_are_refused():
  for bad in (np.zeros((2, 2)), np.zeros((2, 2), np.int8), np.zeros(4, np.float32), np.zeros((0, 4), np.float32)):
    with pytest.raises(ValueError, match="wanted"):
      block_fp8.from_float(bad)
  for value in (np.nan, np.inf):
    matrix = np.zeros((200, 8), np.float32)
    matrix[130, 5] = value
    with pytest.raises(ValueError, match=f"{value} at output 130, input 5"):
      block_fp8.from_float(matrix)


def test_exactness_adds_up():
  total = sum([Exactness(10, 2, 1, 1, 0.5, 0.25), Exactness(5, 0, 1), Exactness(1, 1, 1, 1, 0.125, 1.0)], Exactness())
  assert total == Exactness(16, 3, 3, 2, 0.5, 1.0)
