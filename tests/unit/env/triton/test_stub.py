"""Which stub is planned: the Triton root's, or one to be built, or a refusal before the long work."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from support.elf_files import make_library, make_program
from vllm_env.base.errors import VllmEnvError
from vllm_env.triton.root import TritonRoot, rules_of
from vllm_env.triton.stub import StubOptions, make_stub, plan_stub, stub_identity
from vllm_env.triton.stub_source import DEFAULT_GIT_URL, with_boost_url

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def triton(tmp_path: Path) -> TritonRoot:
    """A root with a stub for 3.11."""
    library = make_library(tmp_path / "env" / "lib", "libpython3.11.so.1.0")
    stub = make_program(tmp_path / "triton" / "stub", (library,), body="return answer() == 42 ? 1 : 3;")
    return TritonRoot(tmp_path / "triton", "24.10", rules_of("24.10"), {"3.11": stub})


@pytest.fixture
def options(tmp_path: Path) -> StubOptions:
    """An organisation with a branch of 24.10 and nothing in it."""
    work = tmp_path / "work"
    commit = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "commit", "-q", "--allow-empty", "-m", "x"]
    subprocess.run(["git", "init", "-q", "-b", "r24.10", work], check=True)
    subprocess.run(["git", "-C", work, *commit], check=True)
    subprocess.run(["git", "clone", "-q", "--bare", work, tmp_path / "org" / "python_backend.git"], check=True)
    return StubOptions(git_url=str(tmp_path / "org"))


@pytest.mark.parametrize("mode", ["auto", "prebuilt"])
def test_takes_the_roots_own_stub(mode: str, triton: TritonRoot, options: StubOptions, tmp_path: Path) -> None:
    """A stub that fits is planned, checked and started, and not copied."""
    planned = plan_stub(triton, "3.11", mode, options)
    assert planned is not None
    assert (planned.origin, planned.release, planned.path) == ("prebuilt", "24.10", triton.stubs["3.11"])
    assert make_stub(planned, triton, tmp_path / "env", "3.11.7", tmp_path / "cache", options) == planned


def test_prebuilt_alone_refuses_and_names_what_there_is(triton: TritonRoot, options: StubOptions) -> None:
    """--stub prebuilt never builds; the message names the versions for which there is a stub."""
    with pytest.raises(VllmEnvError, match=r"--python 3\.12.*no stub for it.*for Python 3\.11\..*--stub source"):
        plan_stub(triton, "3.12", "prebuilt", options)


def test_builds_where_none_fits_or_where_it_is_asked_for(triton: TritonRoot, options: StubOptions) -> None:
    """auto builds for a Python that the root has no stub for; source builds although it has one."""
    assert plan_stub(triton, "3.12", "auto", options) is None
    assert plan_stub(triton, "3.11", "source", options) is None


def test_refuses_early_what_cannot_be_built(
    triton: TritonRoot, options: StubOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler the plan ends with the packages to install and the Pythons that need none."""
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.raises(VllmEnvError, match=r"a C\+\+ compiler is missing") as caught:
        plan_stub(triton, "3.12", "auto", options)
    assert "g++" in caught.value.remedy
    assert "for Python 3.11" in caught.value.cause


def test_a_stub_that_will_be_built_is_told_from_one_that_is_there(triton: TritonRoot, options: StubOptions) -> None:
    """The plan's key changes with where the stub comes from, so that --stub source does not pass for up to date."""
    planned = plan_stub(triton, "3.11", "auto", options)
    assert stub_identity(planned, triton, "3.11.7", options) != stub_identity(None, triton, "3.11.7", options)


def test_mirrors_come_from_options_or_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option wins over its variable, and without both it is the public organisation."""
    monkeypatch.delenv("TRITON_GIT_URL", raising=False)
    monkeypatch.delenv("TRITON_BOOST_URL", raising=False)
    assert StubOptions.from_environment().git_url == DEFAULT_GIT_URL
    monkeypatch.setenv("TRITON_GIT_URL", "https://git.example/triton/")
    monkeypatch.setenv("TRITON_BOOST_URL", "https://mirror.example/boost.tar.gz")
    assert StubOptions.from_environment() == StubOptions(
        "https://git.example/triton", "https://mirror.example/boost.tar.gz"
    )
    assert StubOptions.from_environment("/srv/git").git_url == "/srv/git"


def test_the_boost_address_of_older_releases_is_replaced() -> None:
    """Up to 25.07 it is written into CMakeLists.txt, its hash stays; since then a CMake variable holds it."""
    old = (
        "ExternalProject_Add(boostorg\n  URL https://a.example/1.79.0/source/boost_1_79_0.tar.gz\n  URL_HASH SHA256=27)"
    )
    new = with_boost_url(old, "https://mirror.example/boost_1_79_0.tar.gz")
    assert "URL https://mirror.example/boost_1_79_0.tar.gz\n  URL_HASH SHA256=27)" in new
    assert "a.example" not in new
    variable = "URL ${TRITON_BOOST_URL}"
    assert with_boost_url(variable, "https://mirror.example/b") == variable
