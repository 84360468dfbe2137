"""The peer of convert.py: compressed-tensors and torch, in an environment of their own (bench/README.md).

`python requantize_peer.py DIRECTORY COUNT REPEATS` reads the packed pairs of COUNT matrices, decodes each with
compressed-tensors' MXFP4 compressor and puts it into block-FP8 with torch: a 128×128 block's largest magnitude is 448,
as DeepSeek's checkpoints have it. Nothing is written or digested. The cores are shared in the way that is fastest here:
by torch's threads within an operation, or by several matrices at a time. One JSON object on stdout: seconds of each
round, bytes of the results, that way, versions.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import compressed_tensors
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors import safe_open

BLOCK = 128


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
  """[out, in], multiples of 128 -> e4m3 of the same shape, scales float32 [out / 128, in / 128]."""
  out, inputs = weight.shape
  blocks = weight.float().view(out // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
  # No magnitudes and quotients of their own: that takes two thirds of the time.
  largest = torch.maximum(blocks.amax(dim=(1, 3), keepdim=True), -blocks.amin(dim=(1, 3), keepdim=True))
  scales = torch.where(largest > 0, largest / 448.0, 1.0)
  values = blocks.div_(scales).to(torch.float8_e4m3fn).view(out, inputs)
  return values, scales[:, 0, :, 0]


def main() -> None:
  directory, count, repeats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
  pairs = []
  for file in sorted(os.listdir(directory)):
    if file.endswith(".safetensors") and len(pairs) < count:
      with safe_open(os.path.join(directory, file), "pt") as f:
        stems = [name.removesuffix("_packed") for name in f.keys() if name.endswith(".weight_packed")]  # noqa: SIM118
        for stem in stems[: count - len(pairs)]:
          if f"{stem}_scale" in f.keys():  # noqa: SIM118
            pairs.append(
              {"weight_packed": f.get_tensor(f"{stem}_packed"), "weight_scale": f.get_tensor(f"{stem}_scale")}
            )
  scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])

  def one(pair: dict[str, torch.Tensor]) -> int:
    with torch.inference_mode():
      values, scales = quantize(MXFP4PackedCompressor.decompress(dict(pair), scheme)["weight"])
    return values.numel() + 4 * scales.numel()

  def run(some: list, threads: int, at_once: int) -> tuple[float, int]:
    torch.set_num_threads(threads)
    with ThreadPoolExecutor(at_once) as pool:
      started = time.perf_counter()
      nbytes = sum(pool.map(one, some))
      return time.perf_counter() - started, nbytes

  cores = len(os.sched_getaffinity(0))
  run(pairs[:2], 1, 1)
  # A pair of figures each: torch's threads, matrices at a time.
  way = min({(1, 1), (cores, 1), (1, cores)}, key=lambda way: min(run(pairs, *way) for _ in range(2)))
  rounds = [run(pairs, *way) for _ in range(repeats)]
  print(
    json.dumps(
      {
        "seconds": [seconds for seconds, _ in rounds],
        "nbytes": rounds[0][1],
        "way": f"{way[0]} threads of torch's, {way[1]} matrices at a time",
        "versions": {"torch": torch.__version__, "compressed-tensors": compressed_tensors.__version__},
      }
    )
  )


if __name__ == "__main__":
  main()
