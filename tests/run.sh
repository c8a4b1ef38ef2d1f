#!/usr/bin/env bash
# Lint, types, and all tests that need no GPU: tests/run.sh [pytest's arguments]
# Makes its own environment in .tools/tests; needs Python 3.10 or newer, a compiler and the package registries.
# The tests work on a copy of the checkout in .tools/test-data, with a home and caches of its own (support/own_place.py).
#   tests/run.sh --fast         short unit tests, the contract with the pinned vLLM, one real answer if an environment is built
#   tests/run.sh --slow         everything, about two hours
#   tests/run.sh tests/clients  coding agents and users' packages, installed from the registries of npm and Python; part of --slow
#   tests/run.sh --no-lint …    tests only
#   VLLM_ENV_TEST_TRITON_ROOT=DIR tests/run.sh tests/e2e   on another Triton: builds for its release and serves with it
set -euo pipefail

root=$(CDPATH= cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)
tools=$root/.tools/tests
data=$root/.tools/test-data
if [[ $data == *[!A-Za-z0-9_@%+=:,./-]* ]]; then  # Triton 24.10 can use no unpacked environment there (triton/root.py)
  data=${XDG_CACHE_HOME:-$HOME/.cache}/vllm_env_tests/$(printf %s "$root" | cksum | cut -d ' ' -f 1)
fi
data=$(realpath -m -- "${VLLM_ENV_TEST_DATA:-$data}")
lock=$root/tests/requirements.txt
cd "$root"

# an activated environment may be the very one that is made here; its own Python makes it
PYTHON=$("${PYTHON:-python3}" -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))')
"$PYTHON" -B env/bootstrap.py --environment "$tools" "$lock"
export PYTHON PATH=$tools/bin:$PATH  # the builds of tests share the builder's tools with the user

if [[ ${1:-} != --no-lint ]]; then
  ruff check .
  ruff format --check .
  mypy
  PYTHONPATH=env:model_repository/vllm/1 lint-imports --no-logo --cache-dir .tools/import-linter
else
  shift
fi
workers=5  # on two cores: servers wait more than they work; a later -n0 gives one process, as --pdb needs it
if [[ ${1:-} == --fast ]]; then
  shift
  workers=3  # unit tests wait less
  set -- -m "not long" tests/unit tests/contract tests/hostile/test_admission.py tests/e2e/test_one_answer.py "$@"
fi
[[ $# -gt 0 && -f ${1%%::*} ]] && workers=0  # five would spend more time on their own start than on one file
exec "$PYTHON" -B tests/support/own_place.py "$root" "$data" python -m pytest -o "cache_dir=$data/pytest" --numprocesses "$workers" "$@"
