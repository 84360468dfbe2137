"""The last step of a conversion: tensors.jsonl, config.json and small files, and then the manifest, last of all."""

import hashlib
import importlib.metadata
import json
import os
from typing import Any

from conversion import journal, report
from conversion.headers import HeaderCheckpoint, read_json
from conversion.inspect import CONFIG
from conversion.options import Options
from conversion.source import encode
from MaxText.checkpoint import INDEX
from MaxText.converted.manifest import MANIFEST, TENSORS, WORK, Manifest
from MaxText.errors import UserError

# What goes along with the weights. No code: a checkpoint's Python files describe the released layout.
_SMALL = (".json", ".model", ".jinja", ".txt", ".md")
_NAMES = ("LICENSE", "NOTICE")
_MOST = 64 * 2**20  # bytes of a small file


def stamp(
  checkpoint: HeaderCheckpoint, directory: str, options: Options, source: dict[str, Any], arrays: dict[str, Any]
) -> Manifest:
  """Completes DST, all of whose tensors are in place.

  Args:
    arrays: of the manifest.
    source: `source.identity`.
  """
  tally = report.Tally()
  digest = hashlib.sha256()
  lines = _tensor_lines(os.path.join(directory, WORK), tally)
  text = "".join(f"{line}\n" for line in lines)
  digest.update(text.encode())
  journal.write_file(os.path.join(directory, TENSORS), text)
  config = read_json(checkpoint.directory, CONFIG)
  set_quantization(config, _plain_modules(lines) if options.layout == "hf" else [], options)
  journal.write_file(os.path.join(directory, CONFIG), json.dumps(config, indent=2) + "\n")
  _copy_small(checkpoint.directory, directory)
  manifest = Manifest(
    **options.result,
    tensors=len(lines),
    tensors_sha256=digest.hexdigest(),
    nbytes=tally.nbytes,
    exactness=tally.to_json(),
    arrays=arrays,
    source={
      "path": os.path.realpath(checkpoint.directory),
      "config_sha256": source["config_sha256"],
      "index_sha256": source["index_sha256"],
    },
    tool={
      "kimi-k3-maxtext": importlib.metadata.version("kimi-k3-maxtext"),
      "tensorstore": importlib.metadata.version("tensorstore"),
    },
  )
  journal.sync_directory(directory)
  journal.write_file(os.path.join(directory, MANIFEST), json.dumps(manifest.to_json(), indent=2) + "\n")
  return manifest


def _tensor_lines(work: str, tally: "report.Tally") -> list[str]:
  """Lines of tensors.jsonl, sorted by name."""
  named = {record["name"]: encode(record) for _, records in journal.read(work) for record in records}
  lines = [named[name] for name in sorted(named)]
  for line in lines:  # in this order, as sums of floats depend on it
    tally.add(json.loads(line))
  return lines


def _plain_modules(lines: list[str]) -> list[str]:
  """Modules whose matrices other engines must not expect in FP8."""
  plain = []
  for line in lines:
    record = json.loads(line)
    name = record["name"]
    if name.endswith(".weight") and len(record["shape"]) == 2 and record["dtype"] != "F8_E4M3":
      plain.append(name.removesuffix(".weight"))
  return plain


def set_quantization(config: dict[str, Any], plain: list[str], options: Options) -> None:
  """Rewrites what a config.json says of its weights' format.

  Args:
    config: changed in place. The release puts `quantization_config` into its `text_config`.
    plain: modules whose matrices aren't in FP8.
  """
  text = config.get("text_config")
  holders = [node for node in (config, text) if isinstance(node, dict) and "quantization_config" in node]
  if options.layout == "hf" and options.weight_format == "mxfp4":
    return
  for node in holders:
    del node["quantization_config"]
  if options.layout == "hf" and options.weight_format == "block_fp8":
    (holders[-1] if holders else config)["quantization_config"] = {
      "quant_method": "fp8",
      "fmt": "e4m3",
      "weight_block_size": [128, 128],
      "activation_scheme": "dynamic",
      "modules_to_not_convert": plain,
    }


def _copy_small(source: str, directory: str) -> None:
  """Tokenizer, generation_config.json and the like."""
  for entry in sorted(os.scandir(source), key=lambda e: e.name):
    small = entry.name.endswith(_SMALL) or entry.name.startswith(_NAMES)
    if not small or entry.name in (CONFIG, INDEX, MANIFEST, TENSORS) or not entry.is_file():
      continue
    if entry.stat().st_size > _MOST or os.path.commonpath([os.path.realpath(entry.path), source_root(source)]) != (
      source_root(source)
    ):
      raise UserError(f"{entry.path} is no small file of the checkpoint itself; take it away, or copy what it links to")
    with open(entry.path, "rb") as f:
      content = f.read()
    path = os.path.join(directory, entry.name)
    with open(f"{path}.partial", "wb") as f:
      f.write(content)
      f.flush()
      os.fsync(f.fileno())
    os.rename(f"{path}.partial", path)


def source_root(source: str) -> str:
  return os.path.realpath(source)
