"""Which stub is planned: the Triton root's, or one to be built, or a refusal before the long work."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support.elf_files import make_library, make_program
from support.git_organisation import make_organisation
from support.small_fixtures import workspace_in
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.network import Network, NetworkError
from vllm_env.triton.root import STUB_LIBRARIES, STUB_NAME, TritonRoot, rules_of
from vllm_env.triton.stub import choose_stub, make_stub
from vllm_env.triton.stub_source import StubOptions, source_key

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.base.workspace import Workspace
    from vllm_env.triton.stub import StubMode

pytestmark = pytest.mark.long


@pytest.fixture
def triton(tmp_path: Path) -> TritonRoot:
    """A root with a stub for 3.11, which needs a library of the root's, too."""
    library = make_library(tmp_path / "env" / "lib", "libpython3.11.so.1.0")
    own = make_library(tmp_path / "triton" / "lib", "libcudart-09529672.so.12", symbol="unused")
    stub = make_program(tmp_path / "triton" / "stub", (library, own), body="return answer() == 42 ? 1 : 3;")
    return TritonRoot(tmp_path / "triton", "24.10", rules_of("24.10"), {"3.11": stub})


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> StubOptions:
    """An organisation with a branch of 24.10."""
    return StubOptions(git_url=make_organisation(tmp_path_factory.mktemp("git") / "organisation", None))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty cache, and git may be asked."""
    return workspace_in(tmp_path / "cache", Network())


@pytest.fixture
def offline(tmp_path: Path) -> Workspace:
    """The same cache, with --offline."""
    return workspace_in(tmp_path / "cache")


@pytest.fixture
def no_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with neither git nor a C++ compiler; the last parameter of a test, since the others need them."""
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))
    monkeypatch.setenv("CXX", str(tmp_path / "no-programs/c++"))


@pytest.mark.parametrize("mode", ["auto", "prebuilt"])
def test_takes_the_roots_own_stub(
    mode: StubMode, triton: TritonRoot, options: StubOptions, workspace: Workspace, tmp_path: Path
) -> None:
    """A stub that fits is planned, checked and started; the root's stays as it is."""
    plan = choose_stub(workspace, triton, "3.11.7", mode, options)
    assert plan.prebuilt == triton.stubs["3.11"]
    before = triton.stubs["3.11"].read_bytes()
    stub = make_stub(workspace, plan, tmp_path / "env")
    assert (stub.origin, stub.release, stub.python) == ("prebuilt", "24.10", "3.11")
    assert stub.path
    assert (stub.sha256, stub.size) == (file_sha256(stub.path), stub.path.stat().st_size)
    assert triton.stubs["3.11"].read_bytes() == before


def test_a_stub_starts_without_the_environments_libraries(
    triton: TritonRoot, options: StubOptions, workspace: Workspace, tmp_path: Path
) -> None:
    """tritonserver tries it so, wherever the model's folder is, and changes its mode at another status than 1."""
    plan = choose_stub(workspace, triton, "3.11.7", "auto", options)
    stub = make_stub(workspace, plan, tmp_path / "env")
    model = tmp_path / "elsewhere"
    model.mkdir()
    shutil.copy(stub.path, model)
    shutil.copytree(stub.libraries, model / STUB_LIBRARIES)
    (tmp_path / "env" / "lib").rename(tmp_path / "env" / "gone")
    (tmp_path / "triton" / "lib").rename(tmp_path / "triton" / "gone")
    assert subprocess.run([triton.stubs["3.11"]], check=False, capture_output=True).returncode != 1
    assert subprocess.run([model / STUB_NAME], check=False, env={}).returncode == 1
    # with Triton's LD_LIBRARY_PATH, the environment's own libpython comes first
    other = make_library(tmp_path / "other", "libpython3.11.so.1.0", body="return 7;")
    assert subprocess.run([model / STUB_NAME], check=False, env={"LD_LIBRARY_PATH": str(other.parent)}).returncode == 3


def test_a_stub_is_copied_once(triton: TritonRoot, options: StubOptions, workspace: Workspace, tmp_path: Path) -> None:
    """Another libpython gives another copy."""
    plan = choose_stub(workspace, triton, "3.11.7", "auto", options)
    stub = make_stub(workspace, plan, tmp_path / "env")
    assert stub.path
    made = stub.path.stat().st_mtime_ns
    assert make_stub(workspace, plan, tmp_path / "env") == stub
    assert stub.path.stat().st_mtime_ns == made
    make_library(tmp_path / "env" / "lib", "libpython3.11.so.1.0", debug=True)
    assert make_stub(workspace, plan, tmp_path / "env").path != stub.path


def test_the_roots_own_stub_is_checked_before_it_is_used(
    triton: TritonRoot, options: StubOptions, workspace: Workspace, tmp_path: Path
) -> None:
    """A root whose stub does not start in the environment is refused, although the plan was made with it."""
    plan = choose_stub(workspace, triton, "3.11.7", "auto", options)
    with pytest.raises(VllmEnvError, match=r"needs libpython3\.11"):
        make_stub(workspace, plan, tmp_path / "another-env")


def test_prebuilt_alone_refuses_and_names_what_there_is(triton: TritonRoot, options: StubOptions, workspace: Workspace) -> None:
    """--stub prebuilt never builds; the message names the versions for which there is a stub."""
    with pytest.raises(VllmEnvError, match=r"--python 3\.12: .*no stub for it.*for Python 3\.11\..*--stub source"):
        choose_stub(workspace, triton, "3.12.1", "prebuilt", options)


def test_refuses_early_what_cannot_be_built(
    triton: TritonRoot, options: StubOptions, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler the plan ends with the packages to install and the Pythons that need none."""
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.raises(VllmEnvError, match=r"a C\+\+ compiler is missing") as caught:
        choose_stub(workspace, triton, "3.12.1", "auto", options)
    assert "--python 3.12:" in caught.value.what
    assert "g++" in caught.value.remedy
    assert "for Python 3.11" in caught.value.cause


def test_offline_refuses_to_ask_git_by_name(triton: TritonRoot, options: StubOptions, offline: Workspace) -> None:
    """--offline is named with the branch and the repository that would have been asked, and so are the stubs there are."""
    refusal = rf"--offline: cannot look for branch r24\.10 in {options.git_url}/python_backend\.git"
    with pytest.raises(NetworkError, match=refusal) as caught:
        choose_stub(offline, triton, "3.11.7", "source", options)
    assert "omit --offline" in caught.value.remedy
    with pytest.raises(VllmEnvError, match=refusal) as caught_auto:
        choose_stub(offline, triton, "3.12.1", "auto", options)
    assert "for Python 3.11" in caught_auto.value.cause
    assert "omit --offline" in caught_auto.value.remedy


def test_a_stub_in_the_cache_is_planned_without_git_and_network(
    triton: TritonRoot, options: StubOptions, offline: Workspace, no_tools: None
) -> None:
    """What was built once can be used on a machine that could not build it; for another Python it is still refused."""
    _put_into_cache(offline, triton, "3.11.7", options)
    plan = choose_stub(offline, triton, "3.11.7", "source", options)
    assert plan.prebuilt is None
    assert plan.identity == source_key("24.10", "3.11.7", options)
    with pytest.raises(VllmEnvError, match="git is missing"):
        choose_stub(offline, triton, "3.11.8", "source", options)
    with pytest.raises(VllmEnvError, match="git is missing"):
        choose_stub(offline, replace(triton, release="24.09"), "3.11.7", "source", options)


def _put_into_cache(workspace: Workspace, triton: TritonRoot, python: str, options: StubOptions) -> Path:
    """Place the root's own stub where one built from source would lie."""
    cached = workspace.cache.path("stubs", source_key(triton.release, python, options), STUB_NAME)
    cached.parent.mkdir(parents=True)
    triton.stubs["3.11"].rename(cached)
    return cached


def test_a_stub_that_will_be_built_is_told_from_one_that_is_there(
    triton: TritonRoot, options: StubOptions, workspace: Workspace
) -> None:
    """The plan's key changes with where the stub comes from, so that --stub source does not pass for up to date."""
    own = choose_stub(workspace, triton, "3.11.7", "auto", options)
    built = choose_stub(workspace, triton, "3.11.7", "source", options)
    assert own.identity != built.identity
    assert own.prebuilt is not None
    assert own.identity == file_sha256(own.prebuilt)
