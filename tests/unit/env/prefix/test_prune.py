"""What is left out, by which rule, and how it is turned off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.elf_files import make_library
from vllm_env.prefix.prune import prune, rules_for

if TYPE_CHECKING:
    from pathlib import Path

_SITE = "lib/python3.11/site-packages"
_KEPT = (
    "bin/python", "lib/libpython3.11.so.1.0", "lib/libiomp5.so", f"{_SITE}/numpy/core/a.so", f"{_SITE}/torch/testing/a.py",
    f"{_SITE}/pkg/contest.py", f"{_SITE}/tests.py", f"{_SITE}/torch/include/a.h", "include/python3.11/Python.h",
    f"{_SITE}/torch/bin/torch_shm_manager", f"{_SITE}/pkg/bin/test_tool",
    f"{_SITE}/ziglang/lib/std/tests/a.zig", f"{_SITE}/ziglang/lib/libc/include/generic-glibc/a.h",
    f"{_SITE}/ziglang/lib/libc/include/x86-linux-any/a.h",
)  # fmt: skip
_LEFT_OUT = {
    "static-libraries": f"{_SITE}/torch/lib/libx.a",
    "debug-symbols": "lib/libx.so.debug",
    "tests": f"{_SITE}/numpy/core/tests/test_a.py",
    "test-programs": f"{_SITE}/torch/bin/test_api",
    "intel-offload": "lib/libomptarget.so",
    "other-targets": f"{_SITE}/ziglang/lib/libc/include/aarch64-linux-gnu/a.h",
    "pkg-config": "lib/pkgconfig/a.pc",
    "manuals": "share/man/man1/a.1",
}


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A prefix with a file for each rule and files that must stay."""
    for name in (*_KEPT, *_LEFT_OUT.values()):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"0123456789")
    return tmp_path


def _files(prefix: Path) -> set[str]:
    return {p.relative_to(prefix).as_posix() for p in prefix.rglob("*") if p.is_file()}


def test_rules_take_what_they_name_and_nothing_else(prefix: Path) -> None:
    """The interpreter, libraries, headers and look-alikes stay."""
    prune(prefix, rules_for("cpu", ()))
    assert _files(prefix) == set(_KEPT)


@pytest.mark.parametrize("rule", _LEFT_OUT)
def test_keep_turns_one_rule_off(prefix: Path, rule: str) -> None:
    """--keep NAME leaves that rule's files and no others."""
    prune(prefix, rules_for("cpu", (rule,)))
    assert _files(prefix) == {*_KEPT, _LEFT_OUT[rule]}


def test_profiles_have_rules_of_their_own(prefix: Path) -> None:
    """What a CPU cannot use may be needed on a GPU."""
    prune(prefix, rules_for("cuda", ()))
    assert (prefix / _LEFT_OUT["intel-offload"]).exists()


def test_a_link_is_removed_and_not_what_it_points_to(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder named `tests` may be a link out of the prefix."""
    outside = tmp_path_factory.mktemp("outside")
    (outside / "file").touch()
    (prefix / _SITE / "pkg/tests").symlink_to(outside)
    prune(prefix, rules_for("cpu", ()))
    assert (outside / "file").exists()
    assert not (prefix / _SITE / "pkg/tests").is_symlink()


@pytest.mark.long
def test_symbols_are_taken_out_of_a_library_that_stays(tmp_path: Path) -> None:
    """--keep symbols leaves it; the rule that removes a file comes first."""
    kept, gone = tmp_path / "lib/libanswer.so.1", tmp_path / "lib/libanswer.so.debug"
    make_library(tmp_path / "lib", "libanswer.so.1", debug=True)
    gone.write_bytes(kept.read_bytes())
    before = kept.stat().st_size
    prune(tmp_path, rules_for("cpu", ("symbols",)))
    assert kept.stat().st_size == before
    assert not gone.exists()
    prune(tmp_path, rules_for("cpu", ()))
    assert kept.stat().st_size < before
