"""setup.sh, the lock file and pyproject.toml, without a network and without building an environment.

setup.sh only defines its functions when it is sourced, so they are asked here one by one, in a copy of the project's
files in a temporary folder.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def normal(name):
  return re.sub(r"[-_.]+", "-", name).lower()


def locked():
  """{package: (version, number of hashes)} of the lock file, whose every line must be a pin, a hash or a comment."""
  packages, name = {}, None
  for line in (ROOT / "requirements.lock").read_text().splitlines():
    if pin := re.fullmatch(r"([a-z0-9-]+)==([^ ;]+) \\", line):
      name = pin[1]
      assert name not in packages, f"{name} is locked twice"
      packages[name] = (pin[2], 0)
    elif HASH.fullmatch(line.strip(" \\")):
      packages[name] = (packages[name][0], packages[name][1] + 1)
    else:
      assert line.lstrip().startswith("#"), f"unexpected line in requirements.lock: {line!r}"
  return packages


@pytest.fixture
def project():
  return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_direct_dependencies_are_pinned_to_the_locked_versions(project):
  extras = project["project"]["optional-dependencies"]
  direct = project["project"]["dependencies"] + extras["dev"] + project["build-system"]["requires"]
  packages = locked()
  for requirement in direct:
    pin = re.fullmatch(r"([A-Za-z0-9._-]+)==([^ ;]+)", requirement)
    assert pin, f"{requirement!r} isn't pinned to one version"
    assert packages[normal(pin[1])][0] == pin[2], f"{requirement} is locked at {packages[normal(pin[1])][0]}"


def test_every_locked_package_has_hashes():
  packages = locked()
  assert len(packages) > 100
  assert [name for name, (_, hashes) in packages.items() if not hashes] == []


def test_the_lock_brings_no_pytorch_and_no_cuda():
  assert [name for name in locked() if re.match(r"torch|nvidia-|triton|jax-cuda|tensorflow$", name)] == []


@pytest.mark.parametrize(
  "name", ["pyproject.toml", "requirements.lock", "setup.sh", ".ci/run", ".pre-commit-config.yaml", ".gitignore"]
)
def test_no_host_name_or_index_option_is_committed(name):
  text = (ROOT / name).read_text()
  assert not re.search(r"https?:|git\+|\b[a-z0-9-]+\.(com|org|io|net|dev|ai)\b", text)
  assert not re.search(r"--(extra-)?index-url|--find-links|--trusted-host|--proxy", text)


# --- setup.sh --------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
  """A copy of what setup.sh reads, in a folder with a space in its name."""
  folder = tmp_path / "a checkout"
  folder.mkdir()
  for name in ("setup.sh", "pyproject.toml", "requirements.lock"):
    shutil.copy(ROOT / name, folder)
  return folder


def bash(checkout, script, **environment):
  """Sources the checkout's setup.sh from another folder and runs `script`."""
  env = {k: v for k, v in os.environ.items() if k not in ("K3_PYTHON", "VIRTUAL_ENV")} | environment
  env["PIP_NO_INDEX"] = "1"  # nothing here is to install anything; if it tries, it fails at once
  command = ["bash", "-c", f'source "$1"\n{script}', "bash", str(checkout / "setup.sh")]
  return subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def finished_venv(checkout):
  """A .venv that looks finished: an interpreter and a stamp, with no packages."""
  (checkout / ".venv/bin").mkdir(parents=True)
  (checkout / ".venv/bin/python").symlink_to(sys.executable)
  made = bash(checkout, 'wanted_stamp "$(probe "$venv/bin/python" | cut -f1,2)" >"$stamp"')
  assert made.returncode == 0, made.stderr


def missing(checkout, **environment):
  return bash(checkout, "what_is_missing", **environment).stdout.strip()


def test_a_finished_venv_needs_nothing(checkout):
  assert missing(checkout) == "there is no .venv yet"
  finished_venv(checkout)
  assert missing(checkout) == ""


def test_a_half_finished_venv_is_seen(checkout):
  finished_venv(checkout)
  (checkout / ".venv/setup-stamp").unlink()
  assert missing(checkout) == "an earlier setup of .venv didn't finish"


def test_a_venv_without_its_python_is_seen(checkout):
  finished_venv(checkout)
  (checkout / ".venv/bin/python").unlink()
  assert missing(checkout) == "the Python behind .venv is gone"


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_a_changed_file_is_seen(checkout, name):
  finished_venv(checkout)
  with (checkout / name).open("a") as file:
    file.write("# changed\n")
  assert missing(checkout) == f"{name} has changed"


def test_a_moved_checkout_is_seen(checkout):
  finished_venv(checkout)
  moved = checkout.rename(checkout.with_name("moved"))
  assert missing(moved) == "the project was moved or copied here with its .venv"


def test_a_wish_for_a_python_that_does_not_work_is_an_error(checkout):
  finished_venv(checkout)
  asked = bash(checkout, "what_is_missing", K3_PYTHON="/no/such/python")
  assert asked.returncode == 1
  assert asked.stderr.strip() == "setup: K3_PYTHON=/no/such/python isn't a working CPython 3.12 or 3.13 with venv"


@pytest.fixture
def machine(tmp_path):
  """A machine without Python: its PATH holds the tools that setup.sh uses and shims that fail, its home is empty."""
  tools = tmp_path / "bin"
  tools.mkdir()
  for tool in ("bash", "cat", "cut", "dirname", "flock", "grep", "sha256sum", "uname"):
    (tools / tool).symlink_to(shutil.which(tool))
  for name in ("python3.12", "python3.13", "python3"):
    (tools / name).write_text(f"#!/bin/sh\necho 'pyenv: {name}: command not found' >&2\nexit 127\n")
    (tools / name).chmod(0o755)
  home = tmp_path / "home"
  home.mkdir()
  return {"PATH": str(tools), "HOME": str(home), "PYENV_ROOT": str(home / ".pyenv")}


def test_without_python_one_line_says_what_to_install(checkout, machine):
  set_up = bash(checkout, "main", **machine)
  assert set_up.returncode == 1
  assert len(set_up.stderr.splitlines()) == 1
  assert re.search(r"install CPython 3\.12 or 3\.13", set_up.stderr)
  assert not (checkout / ".venv").exists()


def test_a_python_under_pyenv_is_found_behind_failing_shims(checkout, machine):
  behind = subprocess.run(
    [sys.executable, "-c", "import sys; print(sys._base_executable)"], capture_output=True, text=True
  )
  shelf = Path(machine["PYENV_ROOT"]) / "versions/3.12.99/bin"
  shelf.mkdir(parents=True)
  (shelf / "python").write_text(f'#!/bin/sh\nexec "{behind.stdout.strip()}" "$@"\n')
  (shelf / "python").chmod(0o755)
  found = bash(checkout, "find_python", **machine)
  assert found.returncode == 0, found.stderr
  version, base, executable = found.stdout.strip().split("\t")
  assert version == "{}.{}.{}".format(*sys.version_info)
  assert base == sys.base_prefix
  assert executable == behind.stdout.strip()


def test_an_unknown_command_is_a_usage_error(checkout):
  ran = subprocess.run([checkout / "setup.sh", "bake"], capture_output=True, text=True, timeout=60)
  assert ran.returncode == 2
  assert ran.stderr.startswith("usage: ")


# --- conftest.py -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "outcome"), [([], "1 passed, 2 deselected"), (["--run-compile"], "3 passed")])
def test_compile_checks_run_only_when_asked_for(tmp_path, options, outcome):
  shutil.copy(ROOT / "tests/conftest.py", tmp_path)
  shutil.copy(ROOT / "pyproject.toml", tmp_path)
  (tmp_path / "test_two.py").write_text(
    "import pytest\n\ndef test_short(): pass\n\n@pytest.mark.compile\ndef test_compiled(): pass\n\n"
    "@pytest.mark.long\ndef test_long(): pass\n"
  )
  command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_two.py", *options]
  ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
  assert outcome in ran.stdout.splitlines()[-1], ran.stdout + ran.stderr
