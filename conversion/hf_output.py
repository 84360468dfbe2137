"""Writes the Hugging Face layout: safetensors in DeepSeek's block-FP8 convention. To be done."""

from MaxText.errors import UserError


class HfOutput:
  """See `pieces.Output`."""

  def __init__(self, *_):
    raise UserError("layout=hf isn't there yet; use layout=maxtext")
