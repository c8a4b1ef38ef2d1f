"""What makes a stub unfit, shown on programs that a compiler has just made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.elf_files import make_library, make_program
from vllm_env.base.errors import VllmEnvError
from vllm_env.triton.root import TritonRoot, rules_of
from vllm_env.triton.stub import check_stub

if TYPE_CHECKING:
    from pathlib import Path

USAGE = 'fprintf(stderr, "Expected 9 arguments, found 1 arguments.\\n"); return answer() == 42 ? 1 : 3;'


@pytest.fixture
def triton(tmp_path: Path) -> TritonRoot:
    return TritonRoot(tmp_path / "triton", "24.10", rules_of("24.10"))


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    make_library(tmp_path / "env" / "lib", "libpython3.11.so.1.0")
    return tmp_path / "env"


def test_accepts_a_stub_that_starts_with_the_environments_python(environment: Path, triton: TritonRoot) -> None:
    """A program that finds its libpython in env/lib and asks for arguments is what tritonserver can start."""
    stub = make_program(environment.parent / "stub", (environment / "lib/libpython3.11.so.1.0",), body=USAGE)
    check_stub(stub, "3.11", triton, environment)


def test_refuses_another_python(environment: Path, triton: TritonRoot) -> None:
    """A stub of another minor version is refused by both names, before it is started."""
    library = make_library(environment.parent / "other", "libpython3.12.so.1.0")
    stub = make_program(environment.parent / "stub", (library,), body=USAGE)
    with pytest.raises(VllmEnvError, match=r"needs libpython3\.12\.so\.1\.0, the environment has Python 3\.11"):
        check_stub(stub, "3.11", triton, environment)


def test_refuses_a_stub_that_needs_a_newer_libstdcxx(environment: Path, triton: TritonRoot) -> None:
    """The environment's libstdc++ wins over the system's, and ld.so names it if it is too old."""
    newer = make_library(environment.parent / "newer", "libstdc++.so.6", "GLIBCXX_3.4.99")
    make_library(environment / "lib", "libstdc++.so.6", "GLIBCXX_3.4.20")
    stub = make_program(environment.parent / "stub", (newer, environment / "lib/libpython3.11.so.1.0"), body=USAGE)
    with pytest.raises(VllmEnvError, match=r"/env/lib/libstdc\+\+\.so\.6: version `GLIBCXX_3\.4\.99' not found.*too old"):
        check_stub(stub, "3.11", triton, environment)


def test_refuses_a_stub_whose_library_is_missing(environment: Path, triton: TritonRoot) -> None:
    """What the dynamic loader cannot find is named, though nothing in the file was wrong."""
    gone = make_library(environment.parent / "gone", "libgone.so.1", symbol="unused")
    stub = make_program(environment.parent / "stub", (environment / "lib/libpython3.11.so.1.0", gone), body=USAGE)
    with pytest.raises(VllmEnvError, match=r"does not start \(status 127\).*libgone\.so\.1: cannot open shared object file"):
        check_stub(stub, "3.11", triton, environment)


def test_refuses_a_program_that_is_no_stub(environment: Path, triton: TritonRoot) -> None:
    """A program that ends well without arguments is not the stub; tritonserver itself looks for status 1."""
    stub = make_program(environment.parent / "stub", (environment / "lib/libpython3.11.so.1.0",), body="return 0;")
    with pytest.raises(VllmEnvError, match=r"status 0.*not a stub"):
        check_stub(stub, "3.11", triton, environment)
