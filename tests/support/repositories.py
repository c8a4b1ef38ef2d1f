"""Where the tests' Triton root, built repository and interpreter come from.

By default the real ``gen_vllm_env.sh`` builds them. Three variables take what is there already, for work on a part; a fourth,
``VLLM_ENV_TEST_ENGINE_ARGUMENTS`` (`serving.py`), is for GPUs:

    VLLM_ENV_TEST_REPOSITORY    a model repository built before
    VLLM_ENV_TEST_ENVIRONMENT   an unpacked environment: serves the working tree's model with it, builds nothing
    VLLM_ENV_TEST_TRITON_ROOT   a Triton root; the default is /opt/tritonserver, else .triton of this checkout

This checkout is a copy of the user's where ``tests/run.sh`` started the tests (`own_place.py`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from support.once import once
from support.own_place import mirror
from vllm_env.base.cache import Cache
from vllm_env.base.locks import locked
from vllm_env.base.network import Network, read_pip_config
from vllm_env.base.workspace import Workspace
from vllm_env.sketch import PROVISIONED, installed_triton
from vllm_env.triton.provision import provision
from vllm_env.triton.root import STUB_NAME, open_root

CHECKOUT = Path(__file__).resolve().parents[2]
BUILD_SECONDS = 1200
DAY = 24 * 3600


def triton_root() -> Path:
    """Return the Triton root to test with; it may not be there before the first build provisions it."""
    named = os.environ.get("VLLM_ENV_TEST_TRITON_ROOT")
    if named:
        return Path(named).resolve()
    installed = Path("/opt/tritonserver")
    return installed if (installed / "bin" / "tritonserver").is_file() else CHECKOUT / ".triton"


def triton_options() -> tuple[str, ...]:
    """Return the options of a build for the Triton to test with, if a variable names one."""
    return ("--triton-root", str(triton_root())) if "VLLM_ENV_TEST_TRITON_ROOT" in os.environ else ()


def serves_since(release: str) -> bool:
    """Return whether these tests serve with this release of Triton, such as "26.03", or with a later one."""
    return open_root(triton_root()).release >= release


def ensure_triton() -> None:
    """See that there is a Triton, for builds with caches of their own would provision that of the checkout at the same time."""

    def make(folder: Path) -> Path:
        if installed_triton() is None:
            provision(Workspace(Cache(folder), Network(read_pip_config())), PROVISIONED)
        return folder

    once("triton", make)


def run_build(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the real ``gen_vllm_env.sh``; its status is the caller's matter."""
    builds = not arguments or arguments[0].startswith("-")
    argv = [str(CHECKOUT / "gen_vllm_env.sh"), *arguments, *(triton_options() if builds else ())]
    return subprocess.run(argv, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)


def build(repository: Path) -> Path:
    """Return a model repository with a complete model ``vllm``, built into ``repository`` unless a variable says so.

    Raises:
        RuntimeError: the build failed; the message holds what it printed.
    """
    ready = os.environ.get("VLLM_ENV_TEST_REPOSITORY")
    if ready:
        return Path(ready).resolve()
    if "VLLM_ENV_TEST_TRITON_ROOT" not in os.environ:
        ensure_triton()
    environment = os.environ.get("VLLM_ENV_TEST_ENVIRONMENT")
    if environment:
        return assemble(repository, Path(environment).resolve())
    done = run_build("--no-smoke-run", "--model-repository", str(repository))
    if done.returncode != 0:
        raise RuntimeError(f"gen_vllm_env.sh ended with {done.returncode}:\n{done.stderr[-4000:]}{done.stdout[-1000:]}")
    return repository


def assemble(repository: Path, environment: Path) -> Path:
    """Return a repository with the working tree's model on an unpacked environment."""
    source = CHECKOUT / "model_repository" / "vllm"
    model = repository / "vllm"
    shutil.copytree(source, model, ignore=shutil.ignore_patterns("__pycache__", "vllm_env*", "vllm_cache", "triton_python*"))
    shutil.copy(source / "vllm_engine_args.example.json", model / "vllm_engine_args.json")
    # the Triton root's own stub is for its container's Python; with another the server never becomes ready
    python = next(environment.glob("lib/python3.*")).name.removeprefix("python")
    stub = open_root(triton_root()).stubs.get(python)
    if stub:
        shutil.copy(stub, model / STUB_NAME)
    point_to_environment(model, environment)
    return repository


def point_to_environment(model: Path, environment: Path) -> None:
    """Make a model's ``config.pbtxt`` name an unpacked environment, which starts faster than an archive."""
    config = model / "config.pbtxt"
    text = config.read_text(encoding="utf-8")
    changed, count = re.subn(r'(EXECUTION_ENV_PATH"\s+value: *\{ *string_value: *")[^"]+', rf"\g<1>{environment}", text)
    if count != 1:
        raise RuntimeError(f"{config} names no EXECUTION_ENV_PATH")
    config.write_text(changed, encoding="utf-8")


def data_folder() -> Path:
    """Return the folder with what runs leave to later ones."""
    return Path(os.environ.get("VLLM_ENV_TEST_DATA", CHECKOUT / ".tools" / "test-data")).absolute()


def unpacked_environment(model: Path) -> Path:
    """Return the environment of a built model as a folder; it is unpacked once, by the packager, and kept for later runs."""
    text = (model / "config.pbtxt").read_text(encoding="utf-8")
    named = re.search(r'EXECUTION_ENV_PATH"\s+value: *\{ *string_value: *"([^"]+)"', text)
    if named is None:
        raise RuntimeError(f"{model}/config.pbtxt names no EXECUTION_ENV_PATH")
    path = Path(named[1].replace("$$TRITON_MODEL_DIRECTORY", str(model)))
    if path.is_dir():
        return path
    manifest = json.loads((model / "vllm_env.json").read_text(encoding="utf-8"))
    place = data_folder() / "environments" / manifest["key"]
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place.parent, lambda: None):
        if not place.is_dir():
            for other in place.parent.iterdir():
                if other.name == "staging" or time.time() - other.stat().st_mtime > DAY:
                    shutil.rmtree(other)
            staging = place.with_name("staging")
            done = run_build("unpack", str(staging), "--model-repository", str(model.parent), "--model", model.name)
            if done.returncode != 0:
                raise RuntimeError(f"unpack ended with {done.returncode}:\n{done.stderr[-4000:]}")
            staging.rename(place)
        os.utime(place)
    return place


def copied_checkout(folder: Path) -> Path:
    """Return a copy of this checkout without what is built, which a build may write in: its tools are those of the checkout."""
    tools = CHECKOUT / ".tools"
    tools.mkdir(exist_ok=True)
    mirror(CHECKOUT, folder)
    (folder / ".tools").symlink_to(tools)
    return folder


def client_command(*arguments: str) -> list[str]:
    """Return the command line of ``client/client.py`` under the interpreter that runs the tests."""
    return [sys.executable, str(CHECKOUT / "client" / "client.py"), *arguments]
