"""schemathesis on the OpenAPI description: no 5xx, and every answer is one that the description names."""

import os
import subprocess
import sys

import pytest
from _fake_core import FakeCore
from _http_face import serving

from MaxText.inference.openai.prompts import Face
from MaxText.inference.serving.requests import Finish, Token
from MaxText.inference.tokenizer import K3Tokenizer

TINY = "MaxText/assets/kimi-k3-tiny"
CHECKS = (
  "not_a_server_error",
  "status_code_conformance",
  "content_type_conformance",
  "response_schema_conformance",
  "negative_data_rejection",
  "unsupported_method",
)


@pytest.mark.long
def test_schemathesis_finds_nothing(request, tmp_path):
  tokenizer = K3Tokenizer.from_directory(request.config.rootpath / TINY)
  core = FakeCore(tokenizer.vocab_size, queue=1000)
  tokens = [Token(i, -0.5, ((i, -0.5),)) for i in tokenizer.encode("fine 日本")]
  core.script = lambda request: [*tokens, Finish("stop")]
  program = os.path.join(os.path.dirname(sys.executable), "schemathesis")
  options = ["--phases", "coverage,fuzzing", "--max-examples", "40", "--seed", "1", "--generation-database", "none"]
  with serving(Face(core, tokenizer)) as live:
    command = [program, "run", f"{live.url}/openapi.json", "--checks", ",".join(CHECKS), "--no-color", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path)
  assert result.returncode == 0, result.stdout
  assert "7 selected / 7 total" in result.stdout
  assert len(core.requests) > 50  # answered ones, not refusals alone
