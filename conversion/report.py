"""What a conversion did, in numbers: by what was done to a tensor, how many, and what was lost."""

from dataclasses import asdict, dataclass, field
from typing import Any

from conversion import pieces
from conversion.block_fp8 import Exactness
from conversion.journal import Record
from MaxText.converted.manifest import Manifest


@dataclass
class Tally:
  """Sums over the tensors of a conversion.

  Attributes:
    nbytes: of all tensors, scales included.
    methods: what was done -> (tensors, what was lost).
  """

  nbytes: int = 0
  methods: dict[str, tuple[int, Exactness]] = field(default_factory=dict)

  def add(self, record: Record) -> None:
    self.nbytes += record["nbytes"]
    if record["exactness"] is not None:
      count, sums = self.methods.get(record["method"], (0, Exactness()))
      self.methods[record["method"]] = (count + 1, sums + Exactness(**record["exactness"]))

  def to_json(self) -> dict[str, Any]:
    return {method: {"tensors": n} | asdict(sums) for method, (n, sums) in sorted(self.methods.items())}


def describe(directory: str, manifest: Manifest) -> str:
  """The report, as lines for a person."""
  lines = [
    f"{directory} is finished: {manifest.tensors:,} tensors, {manifest.nbytes:,} bytes ({manifest.nbytes / 1e9:,.2f} "
    f"GB), weight_format={manifest.weight_format} scope={manifest.scope} layout={manifest.layout}"
  ]
  for method, found in manifest.exactness.items():
    found = dict(found)
    count, exactness = found.pop("tensors"), Exactness(**found)
    text = f"  {method}: {count:,} tensors"
    if exactness.blocks:
      text += f", {exactness.blocks:,} blocks ({exactness.inexact_blocks:,} inexact)"
    text += f", {exactness.elements:,} elements, {exactness.inexact_elements:,} of them inexact"
    if exactness.inexact_elements:
      text += f", by up to {exactness.largest_absolute_error:.3g}"
    if method == pieces.ROUNDED:
      text += f"; relative error of the whole (root mean square) {exactness.relative_error:.2e}"
    lines.append(text)
  if manifest.layout == "maxtext":
    lines.append("  vision tensors, if the source has any, are left out: the text model doesn't read them")
  return "\n".join(lines)
