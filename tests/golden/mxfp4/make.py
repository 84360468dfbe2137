"""Makes mxfp4.npz: what compressed-tensors' own MXFP4 compressor decodes. Not run by the tests; see README.md.

Each case is a packed matrix, its scales and the bfloat16 result as bits. The cases differ in how far the exponents of
the scales spread in each 128×128 block.
"""

from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme

CASES = {  # name: (out, in, exponents' spread, least biased exponent)
  "spread0": (24, 64, 0, 120),
  "spread13": (24, 160, 13, 110),
  "spread14": (136, 160, 14, 110),
  "spread15": (24, 160, 15, 110),
  "spread17": (136, 160, 17, 100),
  "lowest": (24, 64, 14, 1),
  "highest": (24, 64, 14, 238),  # up to 252: beyond, 6 overflows
}


def codes(generator: np.random.Generator, out: int, inputs: int, spread: int, least: int):
  """Packed bytes [out, in / 2] and scales [out, in / 32], both uint8."""
  packed = generator.integers(0, 256, (out, inputs // 2), dtype=np.uint8)
  scale = generator.integers(least, least + spread + 1, (out, inputs // 32), dtype=np.uint8)
  for row in range(0, out, 128):  # both ends of the spread, in every block
    scale[row, ::4], scale[row + 1, ::4] = least, least + spread
  packed[3, :16], packed[4, :16], packed[5, :16] = 0x00, 0x88, 0x80  # groups of zeros: +0, −0, both …
  scale[3:6, 0] = 200, 3, 254  # … far from the others' exponents
  return packed, scale


def main() -> None:
  generator, arrays = np.random.default_rng(5), {}
  scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
  for name, case in CASES.items():
    packed, scale = codes(generator, *case)
    state = {"weight_packed": torch.from_numpy(packed), "weight_scale": torch.from_numpy(scale)}
    weight = MXFP4PackedCompressor.decompress(state, scheme)["weight"]
    assert weight.dtype == torch.bfloat16
    arrays |= {
      f"{name}_packed": packed,
      f"{name}_scale": scale,
      f"{name}_bfloat16": weight.view(torch.uint16).numpy(),
    }
  np.savez_compressed(Path(__file__).with_name("mxfp4.npz"), **arrays)


if __name__ == "__main__":
  main()
