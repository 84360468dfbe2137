"""Makes this folder's helper modules importable by its tests, whatever pytest's import mode."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
