#!/usr/bin/env bash
# ./setup.sh                      make .venv here, with the locked packages and this project in it
# ./setup.sh decode [key=value…]  set up, then decode with the tiny model
# ./setup.sh test [pytest args]   set up, then test
#
# Wants Linux on x86-64 and CPython 3.12 or 3.13, looked for on PATH and under pyenv; K3_PYTHON=/path/to/python names
# another one. Run again, it only looks whether .venv is still the right one. Its own words go to stderr; stdout is the
# command's.
set -euo pipefail

root="$(CDPATH= cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
venv="$root/.venv"
stamp="$venv/setup-stamp" # written last: a .venv without it isn't finished
project_changed="pyproject.toml has changed" # the one reason that leaves the packages alone

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
  say "$*"
  exit 1
}

# The one question that decides whether an interpreter serves. A file named python3.12 proves nothing: pyenv's shims
# exist for versions that aren't switched on, and Debian's python3 comes without ensurepip.
# Prints "version base-folder executable" with tabs between, the executable being the one behind a venv.
probe() {
  "$1" -I - 2>/dev/null <<'PY'
import sys, sysconfig
import ensurepip, venv
if sys.implementation.name != "cpython" or sys.version_info[:2] not in ((3, 12), (3, 13)):
  sys.exit(1)
if sysconfig.get_config_var("Py_GIL_DISABLED"):
  sys.exit(1)
print("%d.%d.%d" % sys.version_info[:3], sys.base_prefix, sys._base_executable, sep="\t")
PY
}

find_python() {
  local candidate found
  if [[ -n "${K3_PYTHON:-}" ]]; then
    found="$(probe "$K3_PYTHON")" || fail "K3_PYTHON=$K3_PYTHON isn't a working CPython 3.12 or 3.13 with venv"
    printf '%s\n' "$found"
    return
  fi
  while IFS= read -r candidate; do
    if found="$(probe "$candidate")"; then
      printf '%s\n' "$found"
      return
    fi
  done < <(
    type -aP python3.12 python3.13 python3 python || true
    for candidate in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[23].*/bin/python; do
      [[ -x "$candidate" ]] && printf '%s\n' "$candidate"
    done
  )
  fail "no usable Python: install CPython 3.12 or 3.13 with its venv module" \
    "(Debian, Ubuntu: python3.12 and python3.12-venv; pyenv: pyenv install 3.12)"
}

digest() { cat -- "$@" | sha256sum | cut -d' ' -f1; }

# What a finished .venv was made of, a line each: its folder (a venv can't be moved), interpreter, packages, project.
wanted_stamp() {
  printf 'folder %s\npython %s\npackages %s\nproject %s\n' \
    "$venv" "$1" "$(digest "$root/requirements.lock")" "$(digest "$root/pyproject.toml")"
}

# Prints why .venv won't do, or nothing when it will.
what_is_missing() {
  local found line
  [[ -e "$venv" ]] || { echo "there is no .venv yet"; return; }
  [[ -f "$stamp" ]] || { echo "an earlier setup of .venv didn't finish"; return; }
  found="$(probe "$venv/bin/python")" || { echo "the Python behind .venv is gone"; return; }
  if [[ -n "${K3_PYTHON:-}" ]]; then
    found="$(find_python)" || exit 1
  fi
  while IFS= read -r line; do
    grep -qxF -- "$line" "$stamp" && continue
    case "$line" in
      folder*) echo "the project was moved or copied here with its .venv" ;;
      python*) echo "another Python than .venv's is wanted" ;;
      packages*) echo "requirements.lock has changed" ;;
      project*) echo "$project_changed" ;;
    esac
    return
  done < <(wanted_stamp "$(cut -f1,2 <<<"$found")")
}

# Runs pip in the venv, with all that it says going to a log and a few plain lines of progress coming out.
pip_install() {
  local log="$venv/setup.log" line fetched=0
  local large='(Downloading|Using cached) (.*/)?([^/ ]+)-[0-9][^/ ]* \(([0-9]{3,})(\.[0-9]+)? MB\)'
  PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 \
    "$venv/bin/python" -m pip --no-color install --progress-bar off "$@" </dev/null 2>&1 | tee "$log" |
    while IFS= read -r line; do
      if [[ "$line" == Collecting\ * || "$line" == Processing\ * ]]; then # the latter from a local wheel
        fetched=$((fetched + 1))
        ((fetched % 25)) || say "  $fetched packages fetched"
      elif [[ "$line" =~ $large ]]; then
        say "  fetching ${BASH_REMATCH[3]} (${BASH_REMATCH[4]} MB)"
      elif [[ "$line" == Installing\ collected* ]] && ((fetched > 1)); then
        say "  all $fetched fetched; installing them"
      fi
    done || {
    grep -i -A 5 error "$log" >&2 || tail -n 20 "$log" >&2
    fail "pip failed; all that it said is in $log"
  }
}

build() {
  local reason="$1" found version base executable started=$SECONDS
  [[ "$(uname -sm)" == "Linux x86_64" ]] || fail "libtpu wants Linux x86_64; this is $(uname -sm)"
  if [[ "$reason" == "$project_changed" ]]; then
    say "$reason: installing the project again"
    found="$(probe "$venv/bin/python")"
    rm -f -- "$stamp"
  else
    found="$(find_python)"
    say "$reason: making it with Python ${found%%$'\t'*} (a few minutes, 2 GB)"
  fi
  IFS=$'\t' read -r version base executable <<<"$found"
  if [[ "$reason" != "$project_changed" ]]; then
    rm -rf -- "$venv"
    "$executable" -m venv "$venv"
    # The lock names every package with its hash: nothing is resolved here, and nothing unlisted can come along.
    pip_install --no-deps --require-hashes --only-binary :all: -r "$root/requirements.lock"
  fi
  pip_install --no-deps --no-build-isolation --editable "$root"
  # google-jetstream lists packages that its server doesn't import, TensorFlow behind one of them: the lock has none.
  "$venv/bin/python" -m pip check >"$venv/setup.log" || true
  if grep -v -e '^google-jetstream .* requires .*, which is not installed\.$' -e '^No broken' "$venv/setup.log"; then
    fail "the locked packages don't fit together (above)"
  fi >&2
  wanted_stamp "$version"$'\t'"$base" >"$stamp.new"
  mv -- "$stamp.new" "$stamp"
  say "ready after $((SECONDS - started)) s"
}

set_up() {
  local missing
  missing="$(what_is_missing)" || exit 1
  [[ -n "$missing" ]] || return 0
  if command -v flock >/dev/null; then
    exec 9>>"$root/.venv.lock"
    flock -n 9 || { say "another setup is at work here; waiting for it"; flock 9; }
    missing="$(what_is_missing)" || exit 1
  fi
  [[ -z "$missing" ]] || build "$missing"
  exec 9>&-
}

main() {
  local command="${1:-}"
  [[ $# -eq 0 ]] || shift
  case "$command" in
    "")
      set_up
      say ".venv is ready: $("$venv/bin/python" --version) with the locked packages"
      ;;
    decode)
      set_up
      exec "$venv/bin/python" "$root/MaxText/decode.py" kimi-k3-tiny.yml "$@"
      ;;
    test)
      set_up
      cd -- "$root"
      # A file's tests stay together, for the sake of what they share.
      exec "$venv/bin/python" -m pytest -n 2 --dist loadfile "$@"
      ;;
    *)
      echo "usage: setup.sh [decode [key=value…] | test [pytest args]]" >&2
      exit 2
      ;;
  esac
}

# Sourced, it only defines its functions: tests/test_setup.py asks them one by one.
[[ "${BASH_SOURCE[0]}" != "$0" ]] || main "$@"
