"""Writes Kimi K3's released checkpoint without its tensors: every header at full size, in sparse files.

`python scripts/skeleton_checkpoint.py DIR [key=value …]`: 96 shards whose headers hold all 497,220 tensors of the
release (names, shapes, dtypes) and whose data is one hole; an index; a config.json that reads back to kimi-k3.yml. It
looks like 1.56 TB and takes some 135 MB. For trying what reads headers, or plans, without the download.

What lies in which shard, and in what order, is not the release's: tensors are spread by name and size, as
MaxText/checkpoint_writer.py does it. The names of vision tensors are those of the released index as public ports cite
them, and their shapes follow from the released vision_config (no biases; MoonViT-V2's sizes).
"""

import json
import math
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from MaxText import checkpoint_writer, mxfp4
from MaxText.checkpoint import INDEX
from MaxText.configs.k3_config import initialize
from MaxText.configs.resolve import model_config
from MaxText.errors import UserError, exit_on_user_error
from MaxText.models import kimi_k3
from MaxText.weights import WeightTree, is_stack

SHARDS = 96
_PREFIX = "language_model."
_BYTES = {"U8": 1, "BF16": 2, "F32": 4}
_TOKEN_IDS = {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}

# MoonViT-V2: layers, hidden size, width of q, k and v each, MLP, patch, side of the position table, patches merged.
_VISION_LAYERS, _VISION, _QKV, _VISION_MLP, _PATCH, _SIDE, _MERGED = 27, 1024, 1536, 4096, 14, 64, 4


class Header(NamedTuple):
  """A tensor as a header describes it."""

  name: str
  dtype: str
  shape: tuple[int, ...]

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * _BYTES[self.dtype]


def text_headers(tree: WeightTree) -> Iterator[Header]:
  """Every tensor that a model declares, as the release stores it: packed sources as their pairs."""
  for stack in jax.tree.leaves(tree, is_leaf=is_stack):
    dtype = "F32" if stack.weight.float32 else "BF16"
    for prefix in stack.prefixes:
      for source in stack.weight.sources:
        name = f"{_PREFIX}{prefix}{source.name}"
        if source.packed:
          out, inputs = source.shape
          yield Header(f"{name}.weight_packed", "U8", (out, inputs // 2))
          yield Header(f"{name}.weight_scale", "U8", (out, inputs // mxfp4.GROUP))
        else:
          yield Header(name + source.suffix, dtype, source.shape)


def vision_headers(text_size: int) -> Iterator[Header]:
  """The 168 tensors of the vision tower and its projector.

  Args:
    text_size: hidden size of the text model.
  """
  d, merged = _VISION, _VISION * _MERGED
  shapes = {
    "vision_tower.patch_embed.proj": (d, 3, _PATCH, _PATCH),
    "vision_tower.patch_embed.pos_emb": (_SIDE, _SIDE, d),
    "vision_tower.encoder.final_layernorm": (d,),
    "mm_projector.proj.0": (merged, merged),
    "mm_projector.proj.2": (text_size, merged),
    "mm_projector.post_norm": (text_size,),
  }
  for i in range(_VISION_LAYERS):
    block = f"vision_tower.encoder.blocks.{i}."
    shapes |= {f"{block}norm0": (d,), f"{block}norm1": (d,)}
    shapes |= {f"{block}wqkv": (3 * _QKV, d), f"{block}wo": (d, _QKV)}
    shapes |= {f"{block}mlp.fc0": (_VISION_MLP, d), f"{block}mlp.fc1": (d, _VISION_MLP)}
  for name, shape in shapes.items():
    yield Header(f"{name}.weight", "BF16", shape)


def write_shard(path: str, headers: Sequence[Header]) -> None:
  """A safetensors file whose data is a hole."""
  # As safetensors orders them: wide dtypes first, so that each is aligned.
  described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for header in sorted(headers, key=lambda h: (-_BYTES[h.dtype], h.name)):
    begin, end = end, end + header.nbytes
    described[header.name] = {"dtype": header.dtype, "shape": header.shape, "data_offsets": [begin, end]}
  text = json.dumps(described, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  with open(path, "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text)
    f.truncate(8 + len(text) + end)


def write(directory: str, overrides: Sequence[str] = (), shards: int = SHARDS) -> tuple[int, int]:
  """Writes a whole skeleton.

  Args:
    overrides: `key=value` of `K3Config` on top of kimi-k3.yml.
    shards: files to spread the tensors over, by size, in the order of their names.

  Returns:
    (tensors, their bytes).

  Raises:
    UserError: bad overrides, or the directory can't be written.
  """
  config = initialize(["skeleton", "kimi-k3.yml", *overrides])
  tree = kimi_k3.weight_tree(model_config(config, "cpu"))
  every = sorted([*text_headers(tree), *vision_headers(config.emb_dim)])
  total = sum(header.nbytes for header in every)
  try:
    # A checkpoint of no tensors: its config.json is what is wanted, its empty index is replaced below.
    checkpoint_writer.write(directory, {}, {}, config, _TOKEN_IDS, shards=0)
    files: list[list[Header]] = [[] for _ in range(shards)]
    seen, where = 0, {}
    for header in every:
      place = min(seen * shards // total, shards - 1)
      files[place].append(header)
      where[header.name] = f"model-{place + 1:05d}-of-{shards:06d}.safetensors"
      seen += header.nbytes
    for held in files:
      if held:
        write_shard(os.path.join(directory, where[held[0].name]), held)
    with open(os.path.join(directory, INDEX), "w", encoding="utf-8") as f:
      json.dump({"metadata": {"total_size": total}, "weight_map": where}, f, indent=0)
  except OSError as error:
    raise UserError(f"{error.filename or directory}: {error.strerror}") from error
  return len(every), total


def fill_experts(directory: str, seed: int = 0) -> int:
  """Gives the packed experts of a skeleton random values; everything else stays zero.

  Exponents of the scales spread over 7, as those of trained weights about do, so that block-FP8 holds them exactly.

  Returns:
    Bytes written.
  """
  generator, written = np.random.default_rng(seed), 0
  for file in sorted(os.listdir(directory)):
    if not file.endswith(".safetensors"):
      continue
    with open(os.path.join(directory, file), "r+b") as f:
      (length,) = struct.unpack("<Q", f.read(8))
      header = json.loads(f.read(length))
      for name, entry in header.items():
        if name.endswith((".weight_packed", ".weight_scale")):
          begin, end = entry["data_offsets"]
          f.seek(8 + length + begin)
          if name.endswith("_scale"):
            f.write(generator.integers(117, 125, end - begin, np.uint8).tobytes())
          else:
            f.write(generator.bytes(end - begin))
          written += end - begin
  return written


def main(argv: Sequence[str]) -> None:
  if len(argv) < 2 or "=" in argv[1]:
    raise UserError("usage: python scripts/skeleton_checkpoint.py DIR [key=value …]")
  tensors, total = write(argv[1], argv[2:])
  files = [entry.stat() for entry in os.scandir(argv[1])]
  apparent, real = sum(f.st_size for f in files), sum(f.st_blocks * 512 for f in files)
  print(f"{argv[1]}: {tensors:,} tensors of {total:,} bytes; files of {apparent:,} bytes take {real:,}")


if __name__ == "__main__":
  exit_on_user_error(main, sys.argv)
