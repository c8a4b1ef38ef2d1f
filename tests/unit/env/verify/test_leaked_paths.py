"""What a build may leave of its own folders in an environment, and what does not count."""

from __future__ import annotations

import marshal
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
        (tmp_path / name).write_bytes(b"\0\xff" + f"x={PLACE}/prefixes/y".encode())
    assert sorted(find_leaks(tmp_path, (PLACE,))) == sorted((name, PLACE) for name in names)
    with pytest.raises(VllmEnvError, match=rf"\({PLACE}\).* and 3 more"):
        check_leaks(tmp_path, (PLACE,))


@pytest.mark.parametrize(
    "text",
    ["/usr/src/linux", "foo/src", "$ORIGIN/src", "/srcs", "/src-2/a", "/src.d/a", "name/src/a", "my-I/src"],
)
def test_part_of_another_path_is_no_leak(tmp_path: Path, text: str) -> None:
    """A checkout at /src is not found in /usr/src, nor is a cache at /x in foo/xylophone."""
    for name in ("a.py", "a.pyc"):
        (tmp_path / name).write_text(f"see {text} and foo/xylophone, /xylophone")
    (tmp_path / "b.pyc").write_bytes(marshal.dumps(f"{text}"))
    (tmp_path / "c.pyc").write_bytes(marshal.dumps("/xylophone"))
    assert find_leaks(tmp_path, ("/src", "/x")) == []


@pytest.mark.parametrize(
    "text",
    [
        "/src",
        "/src/a",
        "'/src'",
        "in /src.",
        "-I/src/include",
        "A='-L/src'",
        "file:///src/a",
        "/bin:/src:/lib",
        "@/src",
    ],
)
def test_a_short_place_is_found_as_a_path_of_its_own(tmp_path: Path, text: str) -> None:
    """At the begin or end of a file, in lists, URLs and the flags of compilers."""
    (tmp_path / "a.cfg").write_text(f"x {text}")
    (tmp_path / "b.cfg").write_text(f"x\n {text}\n")
    assert {file for file, _ in find_leaks(tmp_path, ("/src",))} == {"a.cfg", "b.cfg"}


@pytest.mark.parametrize("length", [4, 5, 45, 46, 48, 57, 65, 90, 95, 97, 120, 122, 255, 256, 300])
def test_strings_in_bytecode_are_found_whatever_their_length(tmp_path: Path, length: int) -> None:
    """The length stands before the string as a byte, which may be a letter, and what follows is another's type."""
    text = "/src" if length == 4 else "/src/".ljust(length, "a")
    for name, value in (("a.pyc", (text, None)), ("b.pyc", (text.encode(), "é", text))):
        (tmp_path / name).write_bytes(marshal.dumps(value))
    assert sorted(find_leaks(tmp_path, ("/src",))) == [("a.pyc", "/src"), ("b.pyc", "/src")]


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
    """The cache counts, and where tools keep files in a home; a home itself does not: sources name /home/alex."""
    monkeypatch.setenv("HOME", "/home/alex")
    assert {str(tmp_path), "/home/alex/.cache", "/home/alex/.local"} <= set(build_places(tmp_path))
    for home in ("/home/alex", "/root", "/home/user"):
        monkeypatch.setenv("HOME", home)
        assert home not in build_places(tmp_path)
    assert "/home/user/.cache" not in build_places(tmp_path)
