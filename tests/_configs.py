"""Configurations that are read, and refused."""

import pytest

from MaxText.configs.k3_config import initialize
from MaxText.errors import UserError


def read(*argv):
  return initialize(["test", *argv])


def refused(*argv):
  """The one line that these arguments are refused with."""
  with pytest.raises(UserError) as caught:
    read(*argv)
  message = str(caught.value)
  assert message and "\n" not in message and len(message) < 400, message
  return message
