"""The stub from source up to the compiler: real git on repositories of this machine, and a script in place of CMake.

With CMake and a compiler it is built in tests/integration/test_stub_source.py.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.git_organisation import make_organisation
from vllm_env.base.cache import Cache
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.network import Network
from vllm_env.base.workspace import Workspace
from vllm_env.triton.root import TritonRoot, rules_of
from vllm_env.triton.stub_source import (
    DEFAULT_GIT_URL,
    StubOptions,
    build_stub,
    check_branch,
    check_buildable,
    source_key,
    with_boost_url,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Build = Callable[[StubOptions], Path]

pytestmark = pytest.mark.long

_PYTHON = "3.11.7"
_BOOST = "https://a.example/1.79.0/source/boost_1_79_0.tar.gz"
# Notes its arguments, its variables and CMakeLists.txt, says something, and leaves a stub behind when it builds.
_CMAKE = """\
#!/usr/bin/env python3
import json, os, pathlib, sys
here, arguments = pathlib.Path(__file__).parent, sys.argv[1:]
kind = "build" if arguments[0] == "--build" else "configure"
call = {"arguments": arguments, "variables": dict(os.environ)}
if kind == "configure":
    call["lists"] = pathlib.Path(arguments[1], "CMakeLists.txt").read_text()
(here / f"{kind}.json").write_text(json.dumps(call))
print(f"{kind} says this")
print("[1/2] Building", flush=True)
if (here / f"fail-{kind}").exists():
    sys.exit((here / f"fail-{kind}").read_text())
if kind == "build" and not (here / "builds-nothing").exists():
    (pathlib.Path(arguments[1]) / "deep").mkdir(parents=True)
    (pathlib.Path(arguments[1]) / "deep/triton_python_backend_stub").write_text("a stub")
"""


@pytest.fixture
def triton(tmp_path: Path) -> TritonRoot:
    return TritonRoot(tmp_path / "triton", "24.10", rules_of("24.10"))


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> StubOptions:
    """An organisation with a branch of 24.10, whose CMakeLists.txt has Boost's address written into it."""
    lists = f"ExternalProject_Add(boostorg\n  URL {_BOOST}\n)\n"
    return StubOptions(git_url=make_organisation(tmp_path_factory.mktemp("git") / "organisation", None, lists=lists))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty cache, and git may be asked."""
    return Workspace(Cache(tmp_path / "cache"), Network())


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the packager's tools, with the script in place of CMake and what it notes."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "cmake").write_text(_CMAKE)
    (folder / "cmake").chmod(0o755)
    monkeypatch.setattr("vllm_env.triton.stub_source.TOOLS", folder)
    return folder


@pytest.fixture
def build(workspace: Workspace, triton: TritonRoot, tools: Path, tmp_path: Path) -> Build:
    """Builds the stub of 24.10 for a prefix ``env``, with the script in place of CMake."""
    return partial(build_stub, workspace, triton, _PYTHON, tmp_path / "env")


def _noted(tools: Path, kind: str) -> dict[str, Any]:
    return dict(json.loads((tools / f"{kind}.json").read_text()))


def _definitions(tools: Path) -> dict[str, str]:
    arguments = _noted(tools, "configure")["arguments"]
    pairs = (a.removeprefix("-D").partition("=") for a in arguments if a.startswith("-D"))
    return {name: value for name, _, value in pairs}


def test_the_boost_address_of_older_releases_is_replaced() -> None:
    """Up to 25.07 it is written into CMakeLists.txt, its hash stays; since then a CMake variable holds it."""
    old = f"ExternalProject_Add(boostorg\n  URL {_BOOST}\n  URL_HASH SHA256=27)"
    new = with_boost_url(old, "https://mirror.example/boost_1_79_0.tar.gz")
    assert "URL https://mirror.example/boost_1_79_0.tar.gz\n  URL_HASH SHA256=27)" in new
    assert "a.example" not in new
    variable = "URL ${TRITON_BOOST_URL}"
    assert with_boost_url(variable, "https://mirror.example/b") == variable


def test_another_organisation_or_python_is_another_stub() -> None:
    """What decides the bytes decides the key, so that no stub is reused for what it was not built for."""
    options = StubOptions("https://git.example/triton")
    keys = {
        source_key("24.10", "3.11.7", options),
        source_key("24.11", "3.11.7", options),
        source_key("24.10", "3.12.1", options),
        source_key("24.10", "3.11.8", options),
        source_key("24.10", "3.11.7", StubOptions()),
        source_key("24.10", "3.11.7", dataclasses.replace(options, gpu=True)),
        source_key("24.10", "3.11.7", dataclasses.replace(options, boost_url="https://mirror.example/boost.tar.gz")),
    }
    assert len(keys) == 7
    assert source_key("24.10", "3.11.7", dataclasses.replace(options, jobs=3)) in keys


@pytest.mark.parametrize(("program", "what"), [("git", "git"), ("c++", r"a C\+\+ compiler")])
def test_refuses_a_machine_that_lacks_a_program(
    program: str, what: str, options: StubOptions, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the program, the remedy the packages of Debian and Ubuntu."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in {"git", "c++"} - {program}:
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(VllmEnvError, match=f"{what} is missing") as caught:
        check_buildable(workspace, "24.10", _PYTHON, options)
    assert "apt-get install g++ git" in caught.value.remedy


def test_any_compiler_will_do(
    options: StubOptions, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """clang++ alone is one, and so is what CXX names; a CXX that is not there is not replaced by another one."""
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs/git").symlink_to(str(shutil.which("git")))
    compiler = tmp_path / "programs/clang++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent))
    monkeypatch.delenv("CXX", raising=False)
    check_buildable(workspace, "24.10", _PYTHON, options)
    compiler.rename(compiler.with_name("my-c++"))
    monkeypatch.setenv("CXX", "my-c++")
    check_buildable(workspace, "24.10", _PYTHON, options)
    compiler.with_name("my-c++").rename(compiler)
    with pytest.raises(VllmEnvError, match="compiler is missing"):
        check_buildable(workspace, "24.10", _PYTHON, options)


def test_finds_the_branch_or_a_tag_of_the_release(options: StubOptions, workspace: Workspace, tmp_path: Path) -> None:
    """A mirror may have the release as a tag."""
    check_branch(workspace, "24.10", options)
    mirror = shutil.copytree(options.git_url, tmp_path / "mirror")
    subprocess.run(["git", "-C", mirror / "python_backend.git", "tag", "r24.11", "r24.10"], check=True)
    check_branch(workspace, "24.11", StubOptions(str(mirror)))


def test_a_gpus_stub_and_a_mirror_of_boost(build: Build, options: StubOptions, tools: Path) -> None:
    """The mirror is named both ways: as the variable of newer releases, and in place of the address of older ones."""
    mirror = "https://mirror.example/boost_1_79_0.tar.gz"
    options = dataclasses.replace(options, gpu=True, boost_url=mirror)
    build(options)
    assert _definitions(tools)["TRITON_ENABLE_GPU"] == "ON"
    assert _definitions(tools)["TRITON_BOOST_URL"] == mirror
    assert f"URL {mirror}\n" in _noted(tools, "configure")["lists"]


def test_cmake_clones_from_the_same_mirror_and_asks_nobody(
    build: Build, options: StubOptions, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git replaces the public address, which older releases have written in; no password is asked for, no other Python met."""
    monkeypatch.setenv("VIRTUAL_ENV", "/another")
    monkeypatch.setenv("PYTHONPATH", "/another")
    build(options)
    for kind in ("configure", "build"):
        variables = _noted(tools, kind)["variables"]
        assert variables["GIT_TERMINAL_PROMPT"] == "0"
        assert {"VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH"}.isdisjoint(variables)
        address = f"{DEFAULT_GIT_URL}/common.git"
        git = ["git", "ls-remote", "--get-url", address]
        assert subprocess.check_output(git, env=variables, text=True).strip() == f"{options.git_url}/common.git"
