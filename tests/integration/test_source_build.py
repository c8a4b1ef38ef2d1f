"""--vllm-source with a tree that behaves as vLLM's: its build unpacks a precompiled wheel's libraries into the tree."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import small_build
from support.patience import wait_for
from support.small_fixtures import workspace_in
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.network import Network, read_pip_config
from vllm_env.interpreter.find import find_interpreter
from vllm_env.lock.pins import resolve_pin
from vllm_env.lock.spec import Pin, Spec

if TYPE_CHECKING:
    from vllm_env.lock.pins import PinnedVllm

# A shell's background programs, and perhaps these tests, ignore it. A `preexec_fn` would abort where these tests have used gRPC.
_AS_IN_A_TERMINAL = """\
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
# As vLLM's setup.py of 0.33.0: it reads the variables when it is imported, writes into the tree, and checks for nvcc last.
_SETUP = """\
import os, sys, zipfile
from pathlib import Path
from setuptools import setup
from setuptools_scm import get_version

assert os.getcwd() == os.path.dirname(os.path.abspath(__file__))
if "bdist_wheel" in sys.argv:
    with open(os.environ["VLLM_TEST_BUILDS"], "a") as file:
        file.write(os.getcwd() + "\\n")
    if os.environ.get("VLLM_USE_PRECOMPILED") == "1":
        with zipfile.ZipFile(os.environ["VLLM_PRECOMPILED_WHEEL_LOCATION"]) as wheel:
            wheel.extract("vllm/_C.abi3.so", ".")
    Path("vllm/_built.py").write_text(f"python = {sys.version.split()[0]!r}\\ndevice = {os.getenv('VLLM_TARGET_DEVICE')!r}\\n")
    if pipe := os.environ.get("VLLM_TEST_PIPE"):
        open(pipe).read()
    if os.environ.get("VLLM_USE_PRECOMPILED") != "1":
        print("-- Detecting CXX compile features\\n" * 30)
        raise RuntimeError("CUDA_HOME is not set")
setup(version=get_version(write_to="vllm/_version.py"), package_data={"vllm": ["*.so"]})
if "bdist_wheel" in sys.argv:
    with open("vllm/__init__.py", "a") as file:
        file.write("# written in place\\n")
"""
_PYPROJECT = """\
[build-system]
requires = ["setuptools<9000", "setuptools-scm>=8"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
dynamic = ["version"]
[tool.setuptools]
packages = ["vllm"]
"""


def _make_tree(folder: Path, *, git: bool = False) -> Path:
    """Write a small vLLM whose version is in its history, or in the PKG-INFO of a source archive."""
    small_build.make_tree(folder)
    (folder / "setup.py").write_text(_SETUP)
    (folder / "pyproject.toml").write_text(_PYPROJECT)
    if not git:
        (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0\n")
        return folder
    (folder / ".gitignore").write_text("/vllm/_version.py\n*.so\n")
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "--message=A vLLM"], ["tag", "v0.99.0"]):
        subprocess.run(["git", "-C", folder, *command], check=True)
    return folder


def _state(tree: Path) -> dict[str, tuple[object, ...]]:
    """All that a write changes, and the bytes."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [tree, *tree.rglob("*")]:
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_mode, status.st_mtime_ns, status.st_ctime_ns, content)
    return found


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A release's wheel with a compiled library, named to the build."""
    file = tmp_path / "vllm-0.99.0-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("vllm/_C.abi3.so", "compiled")
    monkeypatch.setenv("VLLM_USE_PRECOMPILED", "1")
    monkeypatch.setenv("VLLM_PRECOMPILED_WHEEL_LOCATION", str(file))
    return file


@pytest.fixture
def builds(small_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which each build of the tree leaves a line with its folder; the cache has an interpreter."""
    assert small_cache == tmp_path / "cache"
    monkeypatch.setenv("VLLM_TEST_BUILDS", str(tmp_path / "builds"))
    return tmp_path / "builds"


def _resolve(tree: Path, *, offline: bool = False, python: str = "3.11", profile: str = "cuda") -> PinnedVllm:
    spec = Spec(profile, Pin("source", str(tree)), "vllm", python)
    return resolve_pin(workspace_in(tree.parent / "cache", Network(read_pip_config(), offline)), spec)


def _read(pinned: PinnedVllm, name: str) -> str:
    assert pinned.wheel
    with zipfile.ZipFile(pinned.wheel) as archive:
        return archive.read(name).decode()


def test_a_tree_stays_as_it_is_and_is_built_once(parts: Path, builds: Path, tmp_path: Path) -> None:
    """The wheel has the changed line, the libraries and the version; the same again is no build, also after a failed one."""
    tree = _make_tree(tmp_path / "tree")
    (tree / "vllm" / "fork.py").write_text("line = 'of the fork'\n")
    before = _state(tree)
    first = _resolve(tree)
    assert _read(first, "vllm/fork.py") == "line = 'of the fork'\n"
    assert _read(first, "vllm/_C.abi3.so") == "compiled"
    assert "vllm-0.99.0-" in first.requirement
    # a build that fails leaves nothing behind, neither in the tree nor in the cache
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_USE_PRECOMPILED")
        with pytest.raises(VllmEnvError) as caught:
            _resolve(tree)
    log = tmp_path / "cache" / "wheel-build.log"
    assert "no working nvcc" in caught.value.cause
    assert str(log) in caught.value.remedy
    assert "Detecting CXX" not in "\n".join(caught.value.lines())
    assert "Detecting CXX" in log.read_text()
    # no third build
    assert _resolve(tree) == _resolve(tree, offline=True) == first
    assert len(builds.read_text().splitlines()) == 2
    # other parts: another wheel
    with zipfile.ZipFile(parts, "w") as archive:
        archive.writestr("vllm/_C.abi3.so", "compiled again")
    assert _read(_resolve(tree), "vllm/_C.abi3.so") == "compiled again"
    assert _state(tree) == before
    assert list((tmp_path / "cache" / "build").iterdir()) == []
    assert not any(Path(line).exists() for line in builds.read_text().splitlines())


@pytest.mark.usefixtures("parts", "builds")
def test_a_clean_checkout_has_its_commit_and_tag(tmp_path: Path) -> None:
    """setuptools-scm finds both in the copy."""
    tree = _make_tree(tmp_path / "tree", git=True)
    before = _state(tree)
    pinned = _resolve(tree)
    assert pinned.commit == small_build.head(tree)
    assert "vllm-0.99.0-" in pinned.requirement
    assert _state(tree) == before


@pytest.mark.usefixtures("parts", "builds")
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_it_is_built_with_the_environments_interpreter(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PATH has no Python at all; uv would fetch one, or ask a network for it. The cpu profile builds for a CPU."""
    try:
        interpreter = find_interpreter(python)
    except VllmEnvError as missing:
        pytest.skip(missing.what)
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for program in Path(folder).iterdir():
            if not program.name.startswith("python") and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    monkeypatch.setenv("PATH", str(programs))
    # where uv would look for one that it has fetched
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "none"))
    tree = _make_tree(tmp_path / "tree")
    built = _read(_resolve(tree, python=python, profile="cpu"), "vllm/_built.py")
    assert f"python = '{interpreter.version}'" in built
    assert "device = 'cpu'" in built


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_build_leaves_the_tree_as_it_is(
    number: signal.Signals, builds: Path, small_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real command, in the middle of the tree's build: the copy is gone; after SIGKILL `clean` removes it."""
    tree = _make_tree(tmp_path / "tree")
    before = _state(tree)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("VLLM_TEST_PIPE", str(tmp_path / "pipe"))
    spec = small_build.make_spec(tmp_path / "spec", tree)
    environment = small_build.environment(small_cache)
    output = tmp_path / "output"
    with (
        output.open("w") as file,
        subprocess.Popen(
            [sys.executable, "-c", _AS_IN_A_TERMINAL, *small_build.command(tmp_path / "models", "--spec", spec)],
            env=environment,
            stderr=file,
        ) as running,
    ):

        def builds_now() -> bool:
            assert running.poll() is None, output.read_text()
            return builds.is_file() and Path(builds.read_text().strip(), "vllm/_built.py").is_file()

        wait_for(builds_now, lambda: f"the build, after {output.read_text()}")
        running.send_signal(number)
        running.wait(timeout=60)
    copy = Path(builds.read_text().strip())
    assert _state(tree) == before
    if number == signal.SIGKILL:
        command = [sys.executable, "-m", "vllm_env", "clean", "--keep-cache"]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        wait_for(lambda: not _reads(tmp_path / "pipe"), "the end of what uv started")
    else:
        assert running.returncode == 130, output.read_text()
    assert not copy.exists()
    assert list((small_cache / "build").iterdir()) == []
    assert not list(small_cache.glob("wheels/*/*.whl"))


def _reads(pipe: Path) -> bool:
    """Return whether a process waits for a pipe; it then goes on."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
