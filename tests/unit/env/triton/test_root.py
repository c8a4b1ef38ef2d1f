"""The table of releases, the release of a server version, and what is read from a Triton root."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.elf_files import make_library, make_program
from vllm_env.base.errors import UsageError, VllmEnvError
from vllm_env.triton.root import (
    NEWEST_KNOWN,
    RELEASES,
    STUB_NAME,
    backend_arguments,
    is_known,
    open_root,
    release_of_server,
    rules_of,
)


@pytest.mark.parametrize(
    ("release", "python", "glibc", "numpy", "activates", "secure"),
    [
        ("23.04", "3.8", 31, "numpy<2", True, False),
        ("23.05", "3.10", 35, "numpy<2", True, False),
        ("24.10", "3.10", 35, "numpy<2", True, False),
        ("24.11", "3.12", 39, "", True, False),
        ("25.07", "3.12", 39, "", True, False),
        ("25.08", "3.12", 39, "", False, False),
        ("26.05", "3.12", 39, "", False, False),
        ("26.06", "3.12", 39, "", False, True),
    ],
)
def test_rules_change_at_the_right_releases(
    release: str, python: str, glibc: int, numpy: str, activates: bool, secure: bool
) -> None:
    """On both sides of each border: the container's Python and C library, NumPy's bound, activation, the extraction's rules."""
    rules = rules_of(release)
    found = (rules.python, rules.glibc, rules.numpy_bound, rules.activates, rules.secure_extraction)
    assert found == (python, glibc, numpy, activates, secure)
    assert is_known(release)


def test_an_unknown_release_takes_the_nearest_row_and_is_told_apart() -> None:
    """A newer release has the newest row, an older one the oldest, and both are unknown, so that a note can say it."""
    assert rules_of("26.11") == rules_of("27.01") == RELEASES[-1]
    assert not is_known("26.11")  # its sources could not be read
    assert rules_of("22.12") == RELEASES[0]
    assert not is_known("27.01")
    assert not is_known("22.12")
    assert is_known(NEWEST_KNOWN)


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
        ("2.71.0", "26.07"),
        ("2.71.0dev", "26.07"),  # built from sources
        ("2.75.0", "26.11"),
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


@pytest.fixture
def container_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root that stands for /opt/tritonserver, without a file that tells its release, and none of a container's variables."""
    for name in ("NVIDIA_TRITON_SERVER_VERSION", "TRITON_VERSION", "TRITON_SERVER_VERSION"):
        monkeypatch.delenv(name, raising=False)
    root = _root(tmp_path / "opt/tritonserver")
    monkeypatch.setattr("vllm_env.triton.root.CONTAINER_ROOT", root)
    return root


@pytest.mark.parametrize(
    ("name", "value", "release"),
    [
        ("NVIDIA_TRITON_SERVER_VERSION", "26.06", "26.06"),
        ("TRITON_VERSION", "2.59.1", "25.07"),
        ("TRITON_SERVER_VERSION", "2.60.0", "25.08"),
    ],
)
def test_the_release_may_come_from_the_container(
    container_root: Path, name: str, value: str, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its root need not have a file that says it; a variable does, and without one the message names variable and file."""
    with pytest.raises(UsageError, match=r"no TRITON_VERSION file.*NVIDIA_TRITON_SERVER_VERSION.*is not set") as caught:
        open_root(container_root)
    assert str(container_root / "RELEASE") in caught.value.remedy
    monkeypatch.setenv(name, value)
    assert open_root(container_root).release == release


def test_the_containers_variables_say_nothing_of_another_root(
    container_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Triton that a user has mounted into a container is not of the container's release; its own files tell."""
    monkeypatch.setenv("NVIDIA_TRITON_SERVER_VERSION", "26.06")
    monkeypatch.setenv("TRITON_VERSION", "2.60.0")
    monkeypatch.setenv("TRITON_SERVER_VERSION", "2.60.0")
    root = _root(tmp_path / "mounted")
    with pytest.raises(UsageError, match="no TRITON_VERSION file") as caught:
        open_root(root)
    assert "NVIDIA_TRITON_SERVER_VERSION" not in str(caught.value)
    assert f"into {root}/RELEASE" in caught.value.remedy
    (root / "TRITON_VERSION").write_text("2.51.0\n")
    assert open_root(root).release == "24.10"
    (root / "RELEASE").write_text("24.09\n")
    assert open_root(root).release == "24.09"


def test_a_server_is_told_where_its_backends_are(container_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it looks in /opt/tritonserver; the launcher of a provisioned root says it itself."""
    assert backend_arguments(container_root / "bin" / "tritonserver") == []
    root = _root(tmp_path / "mounted")
    monkeypatch.chdir(tmp_path)
    for program in (root / "bin" / "tritonserver", Path("mounted/bin/tritonserver")):
        assert backend_arguments(program) == [f"--backend-directory={root}/backends"]
    (root / "libexec").mkdir()
    (root / "libexec" / "tritonserver").touch()
    assert backend_arguments(root / "bin" / "tritonserver") == []
    assert backend_arguments(tmp_path / "bin" / "tritonserver") == []  # a wrapper, which belongs to no root


def test_a_folder_without_a_server_is_refused(tmp_path: Path) -> None:
    """What is not a Triton root is refused by what it lacks."""
    with pytest.raises(UsageError, match="has no bin/tritonserver"):
        open_root(tmp_path)
