"""The largest prefill chunk and context that fit together, by compiling them: a few compiles, each of minutes."""

import dataclasses
from collections.abc import Callable
from typing import Any

from MaxText.planning.capacity import Layout
from MaxText.planning.chip import GIB, HBM_BYTES
from MaxText.planning.compiling import Compiled, OutOfMemoryError
from MaxText.planning.ticker import ticking

_LARGEST_CHUNK = 65536
_CONTEXT_STEP = 16384


class Search:
  """Tries sizes with the compiler.

  Attributes:
    seconds: spent in compiles so far.
    tried: a line's worth of each compile: {"phase", "chunk", "context", "total_gib" or None where it doesn't fit}.
  """

  def __init__(
    self,
    compile_: Callable[[str, Any], Compiled],
    layout: Layout,
    size: Any,
    config: Any,
    say: Callable[[str], None],
  ):
    """Args: compile_ as `Plan.compile`; size the `Size` to start from; config says how many compiles it may take."""
    self._compile, self._layout, self._size, self._say = compile_, layout, size, say
    self._allowed = self._left = config.plan_search_compiles
    self._longest = config.max_position_embeddings
    self.seconds = 0.0
    self.tried: list[dict[str, Any]] = []

  def _try(self, phase: str, size: Any) -> Compiled | None:
    """A compiled program that fits a device, or None."""
    self._left -= 1
    what = f"search {self._allowed - self._left}/{self._allowed}: {phase}"
    what += f" chunk {size.chunk}" * (phase == "prefill") + f" beside {size.slots} × {size.context}"
    compiled = None
    try:
      with ticking(what):
        compiled = self._compile(phase, size)
      self.seconds += compiled.seconds
    except OutOfMemoryError:
      pass
    total = compiled.nbytes if compiled else None
    fits = total is not None and total <= HBM_BYTES
    self._say(f"{what}: {f'{total / GIB:.2f} GiB' if total else 'out of memory'}, {'fits' if fits else 'too large'}")
    self.tried.append(
      {"phase": phase, "chunk": size.chunk, "context": size.context, "total_gib": total / GIB if total else None}
    )
    return compiled if fits else None

  def run(self, start: Compiled) -> dict[str, Any]:
    """From a prefill program that fits: first the chunk at this context, then the context beside that chunk."""
    chunk, best = self._chunk(start)
    context, confirmed = self._context(dataclasses.replace(self._size, chunk=chunk), best)
    return {
      "slots": self._size.slots,
      "rows": self._size.rows,
      "chunk": chunk,
      "chunk_at_context": self._size.context,
      "context": context,
      "decode_confirmed": confirmed,
      "compiles": len(self.tried),
      "exhausted": self._left <= 0,
      "tried": self.tried,
    }

  def _chunk(self, start: Compiled) -> tuple[int, Compiled]:
    """The largest chunk of a power of two times the one given, by bisection."""
    ladder = [self._size.chunk]
    while ladder[-1] * 2 <= min(_LARGEST_CHUNK, self._size.context):
      ladder.append(ladder[-1] * 2)
    low, high, best = 0, len(ladder), start
    while high - low > 1 and self._left > 1:
      middle = (low + high) // 2
      found = self._try("prefill", dataclasses.replace(self._size, chunk=ladder[middle]))
      low, high, best = (middle, high, found) if found else (low, middle, best)
    return ladder[low], best

  def _context(self, size: Any, best: Compiled) -> tuple[int, bool]:
    """The largest context beside that chunk, guessed from the program's temporaries and confirmed by compiling."""
    beyond_state = best.nbytes - sum(self._layout.state(size.slots, size.context).values())
    longest = self._longest

    def room(context: int) -> int:
      return HBM_BYTES - beyond_state - sum(self._layout.state(size.slots, context).values())

    low, high = size.context, longest
    if room(high) >= 0:
      low = high
    while high - low > _CONTEXT_STEP:
      middle = (low + high) // 2
      low, high = (middle, high) if room(middle) >= 0 else (low, middle)
    guess = low if low == longest else max(size.context, low // _CONTEXT_STEP * _CONTEXT_STEP)
    while guess > size.context and self._left > 0:
      larger = dataclasses.replace(size, context=guess)
      if self._try("prefill", larger):
        return guess, self._left > 0 and self._try("decode", larger) is not None
      # The compiler's temporaries grow a little with the context.
      guess = max(size.context, int(guess * 0.97) // _CONTEXT_STEP * _CONTEXT_STEP)
    return size.context, False
