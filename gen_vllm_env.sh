#!/usr/bin/env bash
# Builds a Triton model repository with the vLLM you pin; see --help and README.md.
# Finds a Python; env/bootstrap.py makes the packager's own virtual environment in .tools/ and runs the packager in it.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"  # sh gen_vllm_env.sh
trap 'exit 130' INT
set -euo pipefail

root=$(CDPATH= cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)
python=${PYTHON:-python3}

# bash forgets a Ctrl-C if the program that it waits for ends well. So this one ends without Python's slow exit.
if ! "$python" -c 'import os, sys; os._exit(sys.version_info < (3, 10))' 2>/dev/null; then
  fault='is not Python 3.10 or newer'
  command -v -- "$python" >/dev/null || fault='does not exist or is not executable'
  printf 'error: %s %s.\n  fix: Install Python 3.10 or newer, or name it: PYTHON=/path/to/python3 %s\n' "$python" "$fault" "$0" >&2
  exit 1
fi
# A Ctrl-C while Python starts and imports would print a traceback. Blocked, it waits until bootstrap.py takes it.
# The env of coreutils before 8.31 cannot do that.
start=()
if [[ $(env --help 2>/dev/null) == *--block-signal* ]]; then
  start=(env --block-signal=INT)
fi
exec ${start[@]+"${start[@]}"} "$python" -B "$root/env/bootstrap.py" "$@"
