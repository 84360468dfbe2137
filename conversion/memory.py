"""The C library's memory, told to keep what a conversion gives back."""

import ctypes

# glibc's numbers (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
  """Matrices are freed and asked for again by the thousand, tens of megabytes each. By default their pages go back to
  the system, which has to clear each one anew: a tenth of a conversion's time.

  Blocks up to 32 MB, the most that glibc takes here, come from one heap for all threads, which keeps up to half a
  gigabyte at its end. Larger ones are few and go back at once, so the peak stays what it was.
  """
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is None:
    return  # another C library, with rules of its own
  for parameter, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 32 * 2**20), (_TRIM_THRESHOLD, 512 * 2**20)):
    mallopt(parameter, value)
