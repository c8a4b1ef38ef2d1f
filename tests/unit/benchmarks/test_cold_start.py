"""benchmarks/cold_start.py: a start that gets stuck or crashes is repeated, and the report says so."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from support.repositories import CHECKOUT

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
    monkeypatch.syspath_prepend(CHECKOUT / "benchmarks")
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
    done = cold_start.start("archive", 0, tmp_path, setting, 100, notes)
    assert [done.ready_s] == ready
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
        cold_start.start("archive", 0, tmp_path, setting, 100, [])


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
