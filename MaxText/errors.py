"""Errors that a person caused and can mend: shown as one line, never as a traceback."""

import os
import sys
from collections.abc import Callable, Sequence


class UserError(ValueError):
  """Bad input: its text is one clear line that names the culprit, what is possible and what to do."""


def exit_on_user_error(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> None:
  """Runs `main(argv)`; a `UserError` becomes one line on stderr and exit status 2.

  Anything else that goes wrong is a defect of ours and keeps its traceback. Of several processes all end together, and
  the first one says why.
  """
  from MaxText import distributed  # which raises UserErrors itself

  try:
    main(argv)
    sys.stdout.flush()
    distributed.finish()
  except UserError as error:
    distributed.end(2, f"error: {' '.join(str(error).split())}")
  except KeyboardInterrupt:
    distributed.end(130, "interrupted")
  except BrokenPipeError:
    # The reader went away (`… | head`): point stdout at nothing, so that Python's own flush at exit stays quiet.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    distributed.end(1, "")
  except Exception as error:
    if not distributed.several():
      raise
    distributed.crash(error)
