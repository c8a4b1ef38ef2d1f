"""What a build may leave of its own folders in an environment, and what does not count."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.elf_files import make_library, make_program
from vllm_env.base.errors import VllmEnvError
from vllm_env.verify.leaked_paths import build_places, check_leaks, find_leaks

if TYPE_CHECKING:
    from pathlib import Path

PLACE = "/home/someone/.cache/vllm_env"


def test_finds_a_build_path_in_what_is_read_at_run_time(tmp_path: Path) -> None:
    """Scripts, sources, configuration, path files and bytecode are read at run time; each one is found."""
    names = ("bin/tool", "lib/a.py", "lib/b.pth", "lib/c.json", "lib/pyvenv.cfg", "lib/__pycache__/a.cpython-311.pyc")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\0\xff" + f"x{PLACE}/prefixes/y".encode())
    assert sorted(find_leaks(tmp_path, (PLACE,))) == sorted((name, PLACE) for name in names)
    with pytest.raises(VllmEnvError, match=rf"\({PLACE}\).* and 3 more"):
        check_leaks(tmp_path, (PLACE,))


def test_finds_a_build_path_in_the_run_path_of_a_program(tmp_path: Path) -> None:
    """A program that would look for its libraries where it was built is found."""
    make_program(tmp_path / "tool", (make_library(tmp_path, "libanswer.so"),), run_path=f"{PLACE}/lib")
    assert find_leaks(tmp_path, (PLACE,)) == [("tool", PLACE)]


def test_what_nothing_reads_does_not_count(tmp_path: Path) -> None:
    """Strings inside a program, run paths of what needs no library, records of installed files, and links are passed over."""
    make_program(tmp_path / "tool", (make_library(tmp_path, "libanswer.so"),), body=f'puts("{PLACE}"); return answer();')
    (tmp_path / "RECORD").write_text(f"{PLACE}/file,,\n")
    (tmp_path / "link").symlink_to(f"{PLACE}/file")
    check_leaks(tmp_path, (PLACE,))


def test_the_places_are_those_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache counts, a home that is somebody's counts, /root and a home out of a manual do not: sources name them."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert {str(tmp_path), "/home/someone"} <= set(build_places(tmp_path))
    for home in ("/root", "/home/user"):
        monkeypatch.setenv("HOME", home)
        assert home not in build_places(tmp_path)
