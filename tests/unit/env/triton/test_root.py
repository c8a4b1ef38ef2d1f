"""The table of releases, the release of a server version, and what is read from a Triton root."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.elf_files import make_library, make_program
from vllm_env.base.errors import UsageError, VllmEnvError
from vllm_env.triton.root import NEWEST_KNOWN, RELEASES, STUB_NAME, is_known, open_root, release_of_server, rules_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("release", "python", "numpy", "activates", "secure"),
    [
        ("23.04", "3.8", "numpy<2", True, False),
        ("23.05", "3.10", "numpy<2", True, False),
        ("24.10", "3.10", "numpy<2", True, False),
        ("24.11", "3.12", "", True, False),
        ("25.07", "3.12", "", True, False),
        ("25.08", "3.12", "", False, False),
        ("26.05", "3.12", "", False, False),
        ("26.06", "3.12", "", False, True),
    ],
)
def test_rules_change_at_the_right_releases(
    release: str, python: str, numpy: str, activates: bool, secure: bool
) -> None:
    """On both sides of each border: the container's Python, NumPy's bound, activation and the extraction's rules."""
    rules = rules_of(release)
    assert (rules.python, rules.numpy_bound, rules.activates, rules.secure_extraction) == (
        python,
        numpy,
        activates,
        secure,
    )
    assert is_known(release)


def test_an_unknown_release_takes_the_nearest_row_and_is_told_apart() -> None:
    """A newer release has the newest row, an older one the oldest, and both are unknown, so that a note can say it."""
    assert rules_of("27.01") == RELEASES[-1]
    assert rules_of("22.12") == RELEASES[0]
    assert not is_known("27.01")
    assert not is_known("22.12")
    assert is_known(NEWEST_KNOWN)


def test_the_table_is_in_order() -> None:
    """rules_of() takes the last row that is not newer, which only works on sorted rows."""
    since = [tuple(map(int, row.since.split("."))) for row in RELEASES]
    assert since == sorted(since)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.51.0", "24.10"),
        ("2.52.0", "24.11"),
        ("2.54.0", "25.01"),
        ("2.41.0", "23.12"),
        ("2.59.1", "25.07"),
        ("2.60.0", "25.08"),
        ("2.69.0", "26.05"),
    ],
)
def test_release_of_a_server_version(version: str, release: str) -> None:
    """A server that only says its own version is placed among the monthly releases, across the turn of the year."""
    assert release_of_server(version) == release


def test_a_server_older_than_the_table_is_refused() -> None:
    """A release that nothing is known about is refused with the oldest that works."""
    with pytest.raises(VllmEnvError, match=r"23\.01"):
        release_of_server("2.10.0")


def _root(folder: Path) -> Path:
    for name in ("bin/tritonserver", "backends/python/libtriton_python.so"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_opens_a_root_with_its_stubs(tmp_path: Path) -> None:
    """The release comes from the root, and each stub is known by the libpython it needs, wherever it lies."""
    root = _root(tmp_path / "triton")
    (root / "TRITON_VERSION").write_text("2.60.0\n")
    for place, python in (("backends/python", "3.12"), ("python_backend_stubs/3.11", "3.11")):
        library = make_library(tmp_path / "lib", f"libpython{python}.so.1.0")
        make_program(root / place / STUB_NAME, (library,))
    triton = open_root(root)
    assert (triton.release, triton.rules.since) == ("25.08", "25.08")
    assert triton.stubs == {
        "3.12": root / "backends/python" / STUB_NAME,
        "3.11": root / "python_backend_stubs/3.11" / STUB_NAME,
    }


def test_the_release_may_come_from_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's root has no file that says it; NVIDIA_TRITON_SERVER_VERSION does, and without it the remedy names it."""
    root = _root(tmp_path)
    for name in ("NVIDIA_TRITON_SERVER_VERSION", "TRITON_VERSION", "TRITON_SERVER_VERSION"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="Set NVIDIA_TRITON_SERVER_VERSION"):
        open_root(root)
    monkeypatch.setenv("NVIDIA_TRITON_SERVER_VERSION", "26.06")
    assert open_root(root).release == "26.06"


def test_a_folder_without_a_server_is_refused(tmp_path: Path) -> None:
    """What is not a Triton root is refused by what it lacks."""
    with pytest.raises(UsageError, match="has no bin/tritonserver"):
        open_root(tmp_path)
