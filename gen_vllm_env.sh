#!/usr/bin/env bash
# Builds a Triton model repository with the vLLM you pin; see --help and README.md.
# Finds a Python; env/bootstrap.py makes the packager's own virtual environment in .tools/ and runs the packager in it.
set -euo pipefail

root=$(CDPATH= cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  printf 'error: %s is not Python 3.10 or newer.\n  fix: Install one, or name it: PYTHON=/path/to/python3 %s\n' "$python" "$0" >&2
  exit 1
fi
exec "$python" -B "$root/env/bootstrap.py" "$@"
