"""benchmarks/cold_start.py: a start that gets stuck or crashes is repeated, and the report says so."""

from __future__ import annotations

import ctypes
import mmap
import sys
import venv
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_SERVER = """\
#!/bin/sh
echo start >>"$HOME/../starts"
echo loading
[ -e "$HOME/cache" ] && echo "the home is not empty"
touch "$HOME/cache"
[ "$(wc -l <"$HOME/../starts")" -le 1 ] && {failure}
for option; do case $option in --http-port=*) port=${{option#*=}} ;; esac; done
mkdir -p v2/health && touch v2/health/ready
exec {python} -m http.server --bind 127.0.0.1 "$port"
"""

# its last line is an hour old
_HANGS = '{ touch -d "1 hour ago" "$(readlink /proc/$$/fd/1)"; exec sleep 600; }'


@pytest.fixture
def cold_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    import cold_start

    monkeypatch.setattr(cold_start.PreparedTriton, "stall_limit_s", 1800.0)
    monkeypatch.setattr(cold_start, "ask", lambda *_: None)
    return cold_start


@pytest.mark.parametrize(
    ("failure", "why"),
    [(_HANGS, "triton said nothing for 1800 s"), ("kill -ABRT $$", "triton ended with status -6")],
)
def test_a_start_that_fails_is_repeated(
    cold_start: Any, tmp_path: Path, failure: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty home if it was to have one; its log is kept, and its time is not in the table."""
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    program.write_text(_SERVER.format(failure=failure, python=sys.executable))
    program.chmod(0o755)
    variables = cold_start.fresh_home(tmp_path / "home")
    setting = cold_start.Setting(tmp_path, tmp_path, tmp_path, {}, variables, tmp_path)
    notes: list[str] = []
    start, ready = cold_start.PreparedTriton.start, []
    monkeypatch.setattr(cold_start.PreparedTriton, "start", lambda server: ready.append(start(server)) or ready[-1])
    done = cold_start.start("archive", 0, tmp_path, setting, 100, notes, first=True)
    assert [done.ready_s] == ready
    assert done.first
    assert notes == [f"archive, start 1: repeated, because {why} before it was ready"]
    assert (tmp_path / "starts").read_text().splitlines() == ["start"] * 2
    assert "loading" in (tmp_path / "archive-0-failed.log").read_text()
    assert "not empty" not in (tmp_path / "archive-0.log").read_text()


def test_a_start_that_fails_twice_ends_the_benchmark(cold_start: Any, tmp_path: Path) -> None:
    """A model that cannot be served is no fault of one start."""
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    setting = cold_start.Setting(tmp_path, tmp_path, tmp_path, {}, cold_start.fresh_home(tmp_path / "home"), tmp_path)
    with pytest.raises(cold_start.StartFailedError, match="ended with status 1"):
        cold_start.start("archive", 0, tmp_path, setting, 100, [], first=True)


def test_parts_are_served_from_their_own_repository(cold_start: Any, tmp_path: Path) -> None:
    """With the small archive and the folder beside it, and not with the other repository's archive."""
    for name in ("whole", "parts"):
        model = tmp_path / name / "vllm"
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(
            'parameters: { key: "EXECUTION_ENV_PATH" value: { string_value: "$$TRITON_MODEL_DIRECTORY/vllm_env.tar.gz" } }'
        )
        (model / "vllm_env.tar.gz").write_text(name)
    (tmp_path / "parts/vllm/vllm_env.parts").mkdir()
    (tmp_path / "parts/vllm/vllm_env.parts/000.tar.gz").write_text("part")
    options = cold_start.parse(
        ["--repository", str(tmp_path / "whole"), "--parts", str(tmp_path / "parts"), "--cases", "parts", "archive"]
    )
    for case, expected in (("parts", "parts"), ("archive", "whole")):
        model = cold_start.prepare(case, options, tmp_path / "work", {}) / "vllm"
        assert (model / "vllm_env.tar.gz").read_text() == expected
        assert (model / "vllm_env.parts" / "000.tar.gz").exists() == (case == "parts")
    with pytest.raises(SystemExit):
        cold_start.parse(["--cases", "parts"])


def test_first_starts_have_an_empty_home_and_a_dropped_page_cache(
    cold_start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several of them, then later ones with what the last one left; the report says how the cache was dropped."""
    seen: list[tuple[int, bool, bool]] = []
    dropped: list[object] = []

    def start(case: str, number: int, store: Path, setting: Any, vocabulary: int, notes: list[str], *, first: bool) -> Any:
        kept = cold_start.Path(setting.variables["HOME"]) / "cache"
        seen.append((number, first, kept.exists()))
        kept.touch()
        return cold_start.Start(case, number, first, 10.0 + number, 12.0 + number, [])

    monkeypatch.setattr(cold_start, "start", start)
    monkeypatch.setattr(cold_start.page_cache, "drop", lambda places: dropped.append(places) or "dropped, all of it")
    options = cold_start.parse(["--first-starts", "2", "--starts", "2", "--out", str(tmp_path / "out" / "cold")])
    run = cold_start.Report(options.out, cold_start.machine.Machine(*["-"] * 10), "command", [])
    cold_start.start_all(options, {"archive": tmp_path / "store"}, tmp_path, {}, run)
    assert seen == [(0, True, False), (1, True, False), (2, False, True), (3, False, True)]
    assert len(dropped) == 2
    assert run.notes == ["page cache before first starts: dropped, all of it"]
    assert run.stem
    text = run.stem.with_name(f"{run.stem.name}.md").read_text()
    assert "| archive | first | 10.5 (10.0-11.0) | 12.5 (12.0-13.0) | 1.00 |" in text
    assert "| archive | later | 12.5 (12.0-13.0) |" in text


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


def test_a_page_cache_that_may_not_be_dropped_is_dropped_file_by_file(cold_start: Any, disk_folder: Path) -> None:
    """And the report says so; where the whole machine's may be, that is asked for."""
    folder = disk_folder / "env"
    (folder / "lib").mkdir(parents=True)
    for name in ("a.so", "lib/b.so"):
        (folder / name).write_bytes(b"x" * 8192)
    files = [folder / "a.so", folder / "lib/b.so"]
    assert all(map(resident, files))
    said = cold_start.page_cache.drop([folder], control=disk_folder / "missing" / "drop_caches")
    assert said == "dropped for 2 files one by one (drop_caches: No such file or directory)"
    assert not any(map(resident, files))
    control = disk_folder / "drop_caches"
    control.touch()
    assert cold_start.page_cache.drop([folder], control=control) == "dropped, the whole machine's"
    assert control.read_text() == "3\n"


def test_only_pip_compiles_what_it_installs(tmp_path: Path) -> None:
    """What distinguishes the two baselines, with the real installers."""
    pytest.importorskip("rattler")
    from harness import baseline_prefix

    wheel = tmp_path / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("small/__init__.py", "x = 1\n")
        archive.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        archive.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("small-1.0.dist-info/RECORD", "")
    for by_pip in (False, True):
        prefix = tmp_path / f"prefix-{by_pip}"
        venv.create(prefix)
        baseline_prefix.install(prefix / "bin" / "python", [wheel], by_pip=by_pip)
        assert len(list(prefix.rglob("small/__init__.py"))) == 1
        assert len(list(prefix.rglob("small/**/*.pyc"))) == by_pip
