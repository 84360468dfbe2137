"""Stop strings in a text that comes piece by piece."""

from collections.abc import Sequence


class StopStrings:
  """Passes text on up to the first stop string, and never a part of one.

  Characters are looked at one by one, so the result doesn't depend on where the pieces are cut. The stop string that
  is complete first ends the text; of several at once, the longest.

  Attributes:
    found: a stop string has come; further text is ignored.
  """

  def __init__(self, stops: Sequence[str]):
    """Args: stops: none of them empty."""
    self.found = False
    self._stops = [(stop, _borders(stop)) for stop in stops]
    self._matched = [0] * len(stops)  # of each stop string, how many characters the text so far ends in
    self._held = ""

  def push(self, text: str) -> str:
    """Takes text; returns what is certainly before any stop string."""
    if self.found or not self._stops:
      return "" if self.found else text
    text, seen = self._held + text, len(self._held)
    for end in range(seen, len(text)):
      for i, (stop, borders) in enumerate(self._stops):
        matched = self._matched[i]
        while matched and text[end] != stop[matched]:
          matched = borders[matched]
        self._matched[i] = matched + (text[end] == stop[matched])
      complete = [len(s) for (s, _), matched in zip(self._stops, self._matched, strict=True) if matched == len(s)]
      if complete:
        self.found, self._held = True, ""
        return text[: end + 1 - max(complete)]
    keep = len(text) - max(self._matched)
    self._held = text[keep:]
    return text[:keep]

  def flush(self) -> str:
    """Ends the text: returns what was held back."""
    rest, self._held = self._held, ""
    return rest


def _borders(stop: str) -> list[int]:
  """[i]: length of the longest proper prefix of stop[:i] that stop[:i] also ends in (Knuth, Morris and Pratt)."""
  borders = [0, 0]
  length = 0
  for char in stop[1:]:
    while length and char != stop[length]:
      length = borders[length]
    length += char == stop[length]
    borders.append(length)
  return borders
