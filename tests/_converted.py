"""What tests of converted checkpoints share: the tiny model's, each converted once a run, and values in numpy."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from _models import mesh_of_one

from conversion import convert
from MaxText import checkpoint, weights
from MaxText.configs.k3_config import initialize
from MaxText.configs.resolve import model_config
from MaxText.converted import loading
from MaxText.errors import UserError
from MaxText.models import kimi_k3
from MaxText.quantization import Quantized

SOURCE = Path(checkpoint.ASSETS) / "kimi-k3-tiny"

_known: dict[tuple[str, ...], Path] = {}


def converted(tmp_path_factory, weight_format: str, scope: str = "experts", layout: str = "maxtext") -> Path:
  """The tiny model in a format; a test that changes it makes a copy."""
  key = weight_format, scope, layout
  if key not in _known:
    directory = tmp_path_factory.mktemp("-".join(key)) / "checkpoint"
    convert.main(["convert", str(SOURCE), str(directory), *map("=".join, zip(_KEYS, key, strict=True))])
    _known[key] = directory
  return _known[key]


_KEYS = ("weight_format", "scope", "layout")


def settings(directory, *overrides):
  return initialize(["test", "kimi-k3-tiny.yml", f"load_parameters_path={directory}", *overrides])


def load(directory, *overrides):
  """(configuration, parameters) on one device."""
  config = settings(directory, *overrides)
  cfg = model_config(config, "cpu", mesh_of_one())
  tree = kimi_k3.weight_tree(cfg)
  shardings = weights.shardings(tree, mesh_of_one(), config.logical_axis_rules, cfg.storage)
  return cfg, loading.load_parameters(str(directory), cfg, tree, weights.formats(shardings))


def decoded(params):
  """float32 values of a tree of parameters, quantised or plain: value · scale, one after the other."""

  def one(leaf):
    if not isinstance(leaf, Quantized):
      return np.asarray(leaf, np.float32)
    values, scales = np.asarray(leaf.values), np.asarray(leaf.scales)
    if scales.dtype == np.uint8:
      scales = scales.view(ml_dtypes.float8_e8m0fnu)
    scales = scales.astype(np.float32)
    for axis in (-2, -1):
      scales = np.repeat(scales, values.shape[axis] // scales.shape[axis], axis)
    return values.astype(np.float32) * scales

  return jax.tree.map(one, params, is_leaf=lambda leaf: isinstance(leaf, Quantized))


def assert_equal(ours, theirs):
  """Two trees, element by element."""
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def refused(call, *culprits):
  """`call` fails with one line that names all of `culprits`."""
  with pytest.raises(UserError) as caught:
    call()
  message = str(caught.value)
  assert "\n" not in message
  for culprit in culprits:
    assert str(culprit) in message, message
