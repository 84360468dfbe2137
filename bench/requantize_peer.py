"""The peer of convert.py: compressed-tensors and torch, in an environment of their own (bench/README.md).

`python requantize_peer.py DIRECTORY COUNT REPEATS` reads the packed pairs of COUNT matrices, decodes each with
compressed-tensors' MXFP4 compressor and puts it into block-FP8 with torch: a 128×128 block's largest magnitude is 448,
as DeepSeek's checkpoints have it. Nothing is written or digested. One JSON object on stdout: seconds of each round with
the threads that were fastest here, bytes of the results, versions.
"""

import json
import os
import sys
import time

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
  largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
  scales = torch.where(largest > 0, largest / 448.0, 1.0)
  values = (blocks / scales).to(torch.float8_e4m3fn).view(out, inputs)
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

  def run(some: list) -> tuple[float, int]:
    started, nbytes = time.perf_counter(), 0
    for pair in some:
      values, scales = quantize(MXFP4PackedCompressor.decompress(dict(pair), scheme)["weight"])
      nbytes += values.numel() + 4 * scales.numel()
    return time.perf_counter() - started, nbytes

  fastest, threads = None, 0
  with torch.inference_mode():
    for candidate in sorted({1, len(os.sched_getaffinity(0))}):
      torch.set_num_threads(candidate)
      run(pairs[:1])
      seconds, _ = run(pairs[:3])
      if fastest is None or seconds < fastest:
        fastest, threads = seconds, candidate
    torch.set_num_threads(threads)
    rounds = [run(pairs) for _ in range(repeats)]
  print(
    json.dumps(
      {
        "seconds": [seconds for seconds, _ in rounds],
        "nbytes": rounds[0][1],
        "threads": threads,
        "versions": {"torch": torch.__version__, "compressed-tensors": compressed_tensors.__version__},
      }
    )
  )


if __name__ == "__main__":
  main()
