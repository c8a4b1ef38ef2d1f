"""client/client.py as a load tester: its shapes of load, its report, and what ends a run."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.client_run import CLIENT, SCHEMA, matches, run
from support.grpc_echo import EchoServer
from support.patience import LIMIT, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize(
    ("shape", "sent"),
    [
        (["--num-prompts", 7, "--max-concurrency", 2, "--num-warmups", 3], 7),
        (["--num-prompts", 9, "--request-rate", 1000, "--burstiness", 0.5], 9),
        (["--random-input-len", 4, "--random-prefix-len", 2, "--random-output-len", 6, "--num-prompts", 8], 8),
    ],
)
@pytest.mark.long
def test_load_shapes(prompts: Path, tmp_path: Path, shape: list[object], sent: int) -> None:
    """The report has what was sent, as its schema describes it; warm-ups are sent, too, but not counted."""
    if "--random-input-len" not in shape:
        shape = [*shape, "--input-prompts", prompts]
    with EchoServer() as server:
        done = run("-u", server.url, "-s", *shape, "--report", "report.json", "--plot", "run.svg", cwd=tmp_path)
        warmups = 3 if "--num-warmups" in shape else 0
        assert len(server.requests) == sent + warmups
        parameters = json.loads(server.requests[-1]["sampling_parameters"][4:])
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["sent"], report["completed"], report["failed"]) == (sent, sent, 0)
    assert "from the planned time" in done.stdout
    assert (tmp_path / "run.svg").read_text().startswith("<svg ")
    if "--random-input-len" in shape:
        assert (parameters["max_tokens"], parameters["ignore_eos"]) == (6, True)
        assert report["total_input_tokens"] > 8 * 6  # letters, for this server
    matches(report, SCHEMA)


@pytest.mark.long
def test_a_duration_ends_the_load(prompts: Path, tmp_path: Path) -> None:
    """As many requests as are due meanwhile, or fewer on a busy machine: none starts later."""
    with EchoServer() as server:
        flags = ["--duration", 1, "--request-rate", 10, "--report", "report.json", "--input-prompts", prompts]
        done = run("-u", server.url, "-s", *flags, cwd=tmp_path)
        asked = len(server.requests)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["sent"] == report["completed"] == asked
    assert 1 <= asked <= 10
    matches(report, SCHEMA)


@pytest.mark.long
def test_warm_ups_leave_the_other_prompts_new(tmp_path: Path) -> None:
    """They are the first prompt only: a prefix cache would hold what they have sent."""
    with EchoServer() as server:
        flags = ["--random-input-len", 4, "--num-warmups", 3, "--num-prompts", 2, "--max-concurrency", 1]
        done = run("-u", server.url, *flags, cwd=tmp_path)
        asked = [tensors["text_input"] for tensors in server.requests]
    assert done.returncode == 0, done.stderr
    assert asked == [asked[0]] * 4 + [asked[4]]
    assert asked[4] != asked[0]


@pytest.mark.long
def test_two_servers_get_the_same_requests_in_turns(prompts: Path, tmp_path: Path) -> None:
    """Twenty blocks each, in an order by lot; the slower one is found, and the results are the first one's."""
    order: list[str] = []

    def note(name: str, seconds: float) -> Callable[[int], float]:
        return lambda _: order.append(name) or seconds

    with EchoServer(note("first", 0.0)) as first, EchoServer(note("second", 0.05)) as second:
        flags = ["--versus", second.url, "--iterations", 20, "--max-concurrency", 2, "--report", "r.json"]
        done = run("-u", first.url, *flags, cwd=tmp_path)
        asked = [sorted(tensors["text_input"] for tensors in server.requests) for server in (first, second)]
    assert asked[0] == asked[1]
    pairs = [tuple(order[at : at + 4]) for at in range(0, 80, 4)]
    one_way = ("first", "first", "second", "second")
    assert set(pairs) == {one_way, one_way[::-1]}
    # if it alternated, no two neighbours were equal, and blocks of one server would always follow each other
    assert 5 <= sum(a == b for a, b in itertools.pairwise(pairs)) <= 14
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["completed"], report["versus"]["completed"], report["versus"]["blocks"]) == (40, 40, 20)
    assert report["versus"]["median_e2el_ms"]["low"] > 0
    assert report["versus"]["output_throughput"]["high"] < 0
    assert report["versus"]["median_tpot_ms"] is None  # whole answers have none
    assert len((tmp_path / "results.txt").read_text().split("\n\n=========\n\n")) == 41
    matches(report, SCHEMA)


@pytest.mark.parametrize(("lacking", "mode"), [((), []), (("return_num_output_tokens",), ["-s"])])
@pytest.mark.long
def test_what_the_answers_do_not_have_is_null(prompts: Path, tmp_path: Path, lacking: tuple[str, ...], mode: list[str]) -> None:
    """A whole answer has no first token, and without token counts there is no TPOT; neither in the report nor in the picture."""
    with EchoServer(lacking=lacking) as server:
        flags = ["--num-prompts", 40, "--report", "r.json", "--plot", "r.svg", "--versus", server.url]
        done = run("-u", server.url, *mode, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    matches(report, SCHEMA)
    groups = (report, report["from_planned_time"], report["with_failures"], report["versus"])
    found = {name: value for group in groups for name, value in group.items()}
    absent = ("tpot",) if mode else ("ttft", "tpot", "itl")
    for name, value in found.items():
        if name.endswith("_ms") and name != "versus":
            assert (value is None) == any(f"_{time}_" in name for time in absent), name
    assert (report["output_throughput"] is None) == bool(lacking)
    assert (report["total_output_tokens"] is None) == bool(lacking)
    assert "TPOT p50" not in done.stdout
    assert ("TTFT p50" in done.stdout) == (bool(mode) and "No verdict" not in done.stdout)  # of a client on a busy machine
    picture = (tmp_path / "r.svg").read_text()
    assert ">E2EL<" in picture
    assert (">TTFT<" in picture) == bool(mode)
    assert ">TPOT<" not in picture


@pytest.mark.long
def test_an_interrupt_reports_what_was_answered(prompts: Path, tmp_path: Path) -> None:
    """Ctrl-C once: nothing more is sent, the answers so far are stored, and each sent request has an outcome."""
    with EchoServer(delay=lambda number: 0.0 if number < 5 else 600.0) as server:
        argv = [
            sys.executable,
            str(CLIENT),
            "-u",
            server.url,
            "--iterations",
            "50",
            "--max-concurrency",
            "4",
            "--report",
            "r.json",
        ]
        child = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        wait_for(lambda: len(server.streamed) == 9, "four requests that wait")
        child.send_signal(signal.SIGINT)
        output, errors = child.communicate(timeout=LIMIT)
    assert child.returncode == 130
    assert errors.strip() == "interrupted"
    assert "Requests: 9 sent, 5 answered, 4 cancelled" in output
    assert json.loads((tmp_path / "r.json").read_text())["interrupted"] is True
    texts = (tmp_path / "results.txt").read_text().split("\n\n=========\n\n")
    assert [text.partition(":")[0] for text in texts] == [" 0", " 1", " 2", " 3", " 4", "", "", "", "", ""]


@pytest.mark.long
def test_a_server_that_restarts_loses_what_was_under_way(prompts: Path, tmp_path: Path) -> None:
    """Every sent request is answered or failed; with --reconnect the rest waits for the server and is answered."""
    with EchoServer(delay=lambda number: 0.0 if number < 6 else 600.0) as server:
        port = server.url.rpartition(":")[2]
        flags = ["--iterations", "20", "--max-concurrency", "2", "--reconnect", "60", "--report", "r.json"]
        argv = [sys.executable, str(CLIENT), "-u", server.url, *flags]
        child = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        wait_for(lambda: len(server.streamed) == 8, "two requests that wait")
    with EchoServer(port=int(port)):
        _, errors = child.communicate(timeout=LIMIT)
    assert child.returncode == 1
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["sent"] == report["completed"] + report["failed"] == 40
    assert report["failed"] == report["failures"]["connection"] == 2, errors
    assert "was lost" in errors


@pytest.mark.long
def test_a_server_that_stays_away_ends_the_run_with_a_report(prompts: Path, tmp_path: Path) -> None:
    """What happened until then: the answers are stored, each sent request has an outcome, and the reason is said."""
    with EchoServer(delay=lambda number: 0.0 if number < 6 else 600.0) as server:
        flags = ["--iterations", "20", "--max-concurrency", "2", "--reconnect", "0.5", "--report", "r.json"]
        argv = [sys.executable, str(CLIENT), "-u", server.url, *flags]
        child = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        wait_for(lambda: len(server.streamed) == 8, "two requests that wait")
    output, errors = child.communicate(timeout=LIMIT)
    assert child.returncode == 1
    assert "Requests: 8 sent, 6 answered, 2 failed (2 connection)" in output
    assert output.endswith("FAIL: vLLM example\n")
    assert errors.splitlines()[-1].startswith("error: the connection was lost, and after 0.5 s (--reconnect) no Triton server")
    report = json.loads((tmp_path / "r.json").read_text())
    matches(report, SCHEMA)
    assert (report["sent"], report["completed"], report["interrupted"]) == (8, 6, False)
    assert report["server_gone"].startswith("the connection was lost")
    assert (tmp_path / "results.txt").read_text().startswith(" 0: Hello")
