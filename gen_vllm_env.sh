#!/usr/bin/env bash
# Builds a Triton model repository with the vLLM you pin; see --help and README.md.
# This makes the builder's own virtual environment in .tools/venv, once per lock and interpreter, and runs it.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
tools=$root/.tools/venv
lock=$root/env/requirements.txt
python=${PYTHON:-python3}

fail() {
  printf 'error: %s\n  fix: %s\n' "$1" "$2" >&2
  exit 1
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
  fail "$python is not Python 3.10 or newer." "Install one, or name it: PYTHON=/path/to/python3 $0"
stamp=$("$python" -c 'import hashlib, sys; print(sys.executable, sys.version.split()[0], hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$lock")

mkdir -p "$root/.tools"
exec 9>"$root/.tools/lock"
flock 9 # two builds at once make the tools once
if [[ ! -x $tools/bin/python || $(cat "$tools/.stamp" 2>/dev/null) != "$stamp" ]]; then
  printf 'tools      … into %s\n' "$tools" >&2
  "$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip." "Install it (apt-get install python3-pip)."
  "$python" -m venv --clear --without-pip "$tools" || fail "$python cannot make a virtual environment." "Install its venv module (apt-get install python3-venv)."
  # this machine's pip installs into it, so that its configuration counts, from the lock with its hashes
  "$python" -m pip --python "$tools/bin/python" install -qq --no-input --require-hashes --requirement "$lock" >&2 ||
    fail "The tools in $lock could not be installed." "Check that the package registry answers (pip config list)."
  printf '%s\n' "$stamp" >"$tools/.stamp"
fi
PYTHONPATH=$root/env exec "$tools/bin/python" -m vllm_env "$@" 9>&-
