"""The module that imports JetStream: what it mends, and what it says where something doesn't fit."""

import importlib.metadata
import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from MaxText.errors import UserError
from MaxText.inference.jetstream import compat


def test_importing_the_orchestrator_leaves_the_root_logger_and_seqio_alone():
  code = """
import logging, sys
root = logging.getLogger()
root.setLevel(logging.ERROR)
handlers = list(root.handlers)
from MaxText.inference.jetstream import compat
compat.load_orchestrator()
assert root.level == logging.ERROR, root.level
assert root.handlers == handlers, root.handlers
assert "seqio" not in sys.modules and "seqio.vocabularies" not in sys.modules
assert "tensorflow" not in sys.modules
"""
  result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
  assert result.returncode == 0, result.stderr
  assert result.stdout == ""


def test_a_module_named_seqio_of_someone_else_stays(monkeypatch):
  theirs = type(sys)("seqio")
  monkeypatch.setitem(sys.modules, "seqio", theirs)
  compat.load("engine.token_utils")
  assert sys.modules["seqio"] is theirs


def test_delete_pytree_frees_every_array_of_a_tree():
  orchestrator = compat.load_orchestrator()
  tree = {"a": jnp.ones(3), "b": (jnp.zeros(2), None, 7)}
  orchestrator.delete_pytree(tree)
  assert tree["a"].is_deleted()
  assert tree["b"][0].is_deleted()


def test_the_root_logger_is_restored_in_this_process():
  level, handlers = logging.getLogger().level, list(logging.getLogger().handlers)
  sys.modules.pop("jetstream.core.orchestrator", None)
  # The metrics are registered once a process; the module alone is imported anew.
  compat.load_orchestrator()
  assert (logging.getLogger().level, logging.getLogger().handlers) == (level, handlers)


def test_another_version_is_named_where_something_breaks(monkeypatch):
  monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9.9")
  compat.load("engine.engine_api", "Engine")  # what works isn't complained about
  for module, name in (("engine.engine_api", "Gone"), ("core.gone", "x")):
    with pytest.raises(UserError, match=r"0\.2\.2 is what this was tested with, found 9\.9\.9"):
      compat.load(module, name)


def test_a_missing_package_names_the_extra(monkeypatch):
  def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, "version", missing)
  with pytest.raises(UserError, match="extra `serve`"):
    compat.load("engine.engine_api")


def test_jax_still_lacks_what_is_replaced():
  """When this fails, the replacement can go."""
  assert not hasattr(jax, "tree_map")
