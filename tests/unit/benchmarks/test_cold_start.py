"""benchmarks/cold_start.py: a start that gets stuck or crashes is repeated, and the report says so."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Any

import pytest

from support import fake_tritonserver

if TYPE_CHECKING:
    from pathlib import Path

_SERVER = """\
#!/bin/sh
echo start >>"$HOME/../starts"
echo loading
[ -e "$HOME/cache" ] && echo "the home is not empty"
touch "$HOME/cache"
[ "$(wc -l <"$HOME/../starts")" -le 1 ] && {failure}
exec {command} "$@"
"""

# its last line is an hour old
_HANGS = '{ touch -d "1 hour ago" "$(readlink /proc/$$/fd/1)"; exec sleep 600; }'


@pytest.fixture
def cold_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    import cold_start

    async def ask(port: int) -> None:
        """The server is none that could answer."""

    monkeypatch.setattr(cold_start.BuiltTriton, "stall_limit_s", 1800.0)
    monkeypatch.setattr(cold_start, "ask", ask)
    return cold_start


def run(cold_start: Any, repository: Path, tmp_path: Path, *options: str) -> str:
    """Run the benchmark under the Triton of `tmp_path`; return its report."""
    out = tmp_path / "out" / "cold"
    given = ["--triton-root", str(tmp_path), "--work", str(tmp_path / "work"), "--out", str(out), *options]
    assert cold_start.main([f"archive={repository}", *given]) == 0
    (report,) = out.parent.glob("cold-*.md")
    return report.read_text()


def install(program: Path, text: str) -> None:
    """Put a server there."""
    program.parent.mkdir()
    program.write_text(text)
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("failure", "why"),
    [(_HANGS, "triton said nothing for 1800 s"), ("kill -ABRT $$", "triton ended with status -6")],
)
@pytest.mark.long
def test_a_start_that_fails_is_repeated(cold_start: Any, repository: Path, tmp_path: Path, failure: str, why: str) -> None:
    """With an empty home if it was to have one; its log is kept, and its time is not in the table."""
    install(tmp_path / "bin" / "tritonserver", _SERVER.format(failure=failure, command=fake_tritonserver.COMMAND))
    report = run(cold_start, repository, tmp_path, "--first-starts", "1", "--starts", "1")
    work = tmp_path / "work"
    assert f"- archive, start 1: repeated, because {why} before it was ready\n" in report
    assert (work / "starts").read_text().splitlines() == ["start"] * 3
    assert "loading" in (work / "archive-0.failed.log").read_text()
    assert "not empty" not in (work / "archive-0.log").read_text()
    assert "not empty" in (work / "archive-1.log").read_text()  # a later start finds what the first one has left
    assert "vLLM 0.32.0, torch 2.13.0+cpu" in report
    assert report.count("| archive | first |") == report.count("| archive | later |") == 1


@pytest.mark.long
def test_another_servers_name_ends_the_benchmark(
    cold_start: Any, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took a port while the model was loaded, and its figures would be in the report."""
    monkeypatch.setenv("FAKE_TRITON", "stranger")
    install(tmp_path / "bin" / "tritonserver", _SERVER.format(failure="true", command=fake_tritonserver.COMMAND))
    with pytest.raises(cold_start.StartFailedError, match="triton: another server answers on port"):
        run(cold_start, repository, tmp_path)


def test_a_start_that_fails_twice_ends_the_benchmark(cold_start: Any, repository: Path, tmp_path: Path) -> None:
    """A model that cannot be served is no fault of one start."""
    install(tmp_path / "bin" / "tritonserver", "#!/bin/sh\nexit 1\n")
    with pytest.raises(cold_start.StartFailedError, match="ended with status 1"):
        run(cold_start, repository, tmp_path)


def test_first_starts_have_an_empty_home_and_a_dropped_page_cache(
    cold_start: Any, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several of them, then later ones with what the last one left; the cache can be kept."""
    seen: list[tuple[str, int, bool]] = []
    dropped: list[list[Path]] = []

    def start_once(case: str, number: int, setting: Any, *, first: bool) -> Any:
        seen.append((case, number, first))
        return cold_start.Start(case, number, first, 10.0 + number, 12.0 + number, [])

    monkeypatch.setattr(cold_start, "start_once", start_once)
    monkeypatch.setattr(cold_start, "drop_page_cache", dropped.append)
    report = run(cold_start, repository, tmp_path, "--first-starts", "2", "--starts", "2")
    assert seen == [("archive", number, number < 2) for number in range(4)]
    assert dropped == [[repository, tmp_path]] * 2
    assert "page cache before first starts: dropped" in report
    assert "| archive | first | 10.5 (10.0-11.0) | 12.5 (12.0-13.0) | 1.00 |" in report
    assert "| archive | later | 12.5 (12.0-13.0) |" in report


def test_what_is_no_repository_is_refused(cold_start: Any, repository: Path, tmp_path: Path) -> None:
    """Before anything starts."""
    for given in (str(repository), "=", f"archive={tmp_path}"):
        with pytest.raises(SystemExit):
            cold_start.parse([given])


def resident(file: Path) -> bool:
    """Tell whether the page cache has a file's first page."""
    libc, state = ctypes.CDLL(None), (ctypes.c_ubyte * 1)()
    libc.mmap.restype = ctypes.c_void_p
    with file.open("rb") as opened:
        size, offset = ctypes.c_size_t(4096), ctypes.c_long(0)
        address = ctypes.c_void_p(libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, opened.fileno(), offset))
        assert libc.mincore(address, size, state) == 0
        libc.munmap(address, size)
    return bool(state[0] & 1)


def test_the_page_cache_is_dropped_file_by_file(cold_start: Any, disk_folder: Path) -> None:
    """Of all that is below the folders."""
    folder = disk_folder / "env"
    (folder / "lib").mkdir(parents=True)
    files = [folder / "a.so", folder / "lib/b.so"]
    for file in files:
        file.write_bytes(b"x" * 8192)
    assert all(map(resident, files))
    cold_start.drop_page_cache([folder])
    assert not any(map(resident, files))
