"""The one module that imports JetStream: what its package gets wrong beside today's JAX is put right here.

google-jetstream 0.2.2 is the newest on a registry; its repository is archived. Three things need care: it imports
seqio, and with it TensorFlow, for two names that are never used here; it calls `jax.tree_map`, which is gone; and its
orchestrator sets the root logger to DEBUG, with a handler on stdout.
"""

import contextlib
import importlib
import importlib.metadata
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax

from MaxText.errors import UserError

TESTED = "0.2.2"
_PACKAGE = "google-jetstream"


def version() -> str:
  """The installed version of google-jetstream.

  Raises:
    UserError: it isn't installed.
  """
  try:
    return importlib.metadata.version(_PACKAGE)
  except importlib.metadata.PackageNotFoundError:
    raise UserError(
      f"{_PACKAGE} isn't installed: JetStream's protocol needs the extra `serve` (./setup.sh installs it)"
    ) from None


@contextlib.contextmanager
def _without_seqio() -> Iterator[None]:
  """Inside, `seqio.vocabularies` is a module with the two names that JetStream's own tokenizers would subclass."""
  package, vocabularies = types.ModuleType("seqio"), types.ModuleType("seqio.vocabularies")
  vocabularies.Vocabulary = type("Vocabulary", (), {})
  vocabularies.SentencePieceVocabulary = type("SentencePieceVocabulary", (), {})
  package.vocabularies = vocabularies
  names = {"seqio": package, "seqio.vocabularies": vocabularies}
  before = {name: sys.modules.get(name) for name in names}
  sys.modules.update(names)
  try:
    yield
  finally:
    for name, module in before.items():
      if module is None:
        del sys.modules[name]
      else:
        sys.modules[name] = module


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
  """Level and handlers of the root logger are afterwards what they were."""
  root = logging.getLogger()
  level, handlers = root.level, list(root.handlers)
  try:
    yield
  finally:
    root.setLevel(level)
    root.handlers[:] = handlers


def load(module: str, *names: str) -> Any:
  """Imports a module of JetStream's.

  Args:
    module: its name below `jetstream`, such as "engine.engine_api".
    names: what is used of it.

  Raises:
    UserError: the package is missing, can't be imported, or lacks one of the names.
  """
  found = version()
  told = f"{_PACKAGE} {TESTED} is what this was tested with, found {found}"
  try:
    with _without_seqio(), _root_logger_kept():
      loaded = importlib.import_module(f"jetstream.{module}")
  except Exception as error:  # whatever another version's import raises
    raise UserError(f"jetstream.{module} can't be imported ({error!r}); {told}") from error
  missing = [name for name in names if not hasattr(loaded, name)]
  if missing:
    raise UserError(f"jetstream.{module} has no {', '.join(missing)}; {told}")
  return loaded


def delete_pytree(tree: Any) -> None:
  """Frees a pytree's arrays: JetStream's function of that name, without `jax.tree_map`."""
  for leaf in jax.tree.leaves(tree):
    if isinstance(leaf, jax.Array):
      leaf.delete()


def load_orchestrator() -> Any:
  """JetStream's own orchestrator, fit to run with this JAX. The server here doesn't use it: it has a core of its own.

  It stays what it is otherwise: an exception in one of its threads ends the process with SIGKILL.
  """
  orchestrator = load("core.orchestrator", "Driver", "LLMOrchestrator", "ActiveRequest", "delete_pytree")
  orchestrator.delete_pytree = delete_pytree
  return orchestrator


engine_api = load("engine.engine_api", "Engine", "ResultTokens")
token_utils = load("engine.token_utils", "pad_tokens")
tokenizer_api = load("engine.tokenizer_api", "Tokenizer")
tokenizer_pb2 = load("engine.tokenizer_pb2", "TokenizerParameters")
jetstream_pb2 = load("core.proto.jetstream_pb2", "DecodeRequest", "DecodeResponse", "HealthCheckResponse")
jetstream_pb2_grpc = load(
  "core.proto.jetstream_pb2_grpc",
  "OrchestratorServicer",
  "OrchestratorStub",
  "add_OrchestratorServicer_to_server",
)
