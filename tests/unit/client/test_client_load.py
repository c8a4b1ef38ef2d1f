"""client/client.py as a load tester: its shapes of load, its report, and what ends a run."""

from __future__ import annotations

import itertools
import json
import re
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


@pytest.mark.long
def test_records_as_json_lines(prompts: Path, tmp_path: Path) -> None:
    """Each as soon as it has ended, with its index: the first request waits until the second one's record is there."""
    results = tmp_path / "results.txt"

    def delay(number: int) -> float:
        if number == 0:
            wait_for(lambda: results.is_file() and results.read_text().endswith("\n"), "the record of the second request")
        return 0.0

    with EchoServer(delay) as server:
        done = run("-u", server.url, "-s", "--results-format", "jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [record["index"] for record in records] == [1, 0]
    assert records[1]["completions"] == [" 0: Hello, my name is"]
    assert len(records[1]["times"]) == records[1]["output_tokens"] == 21


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
def test_a_goal_for_tpot_needs_a_server_that_counts_tokens(prompts: Path, tmp_path: Path) -> None:
    """Otherwise every answer would be good. Nothing is sent."""
    with EchoServer(lacking=("return_num_output_tokens",)) as server:
        done = run("-u", server.url, "-s", "--goodput", "tpot:20", "--num-warmups", 1, cwd=tmp_path)
        assert server.streamed == []
    assert done.returncode == 1
    assert done.stderr.startswith("error: the model 'vllm' does not count tokens, and a goal for tpot (--goodput) needs them")


@pytest.mark.long
def test_failures_of_the_second_server_are_named(prompts: Path, tmp_path: Path) -> None:
    """With its address and the reason."""

    def break_down(_: int) -> float:
        raise ValueError("on fire")

    with EchoServer() as first, EchoServer(break_down) as second:
        done = run("-u", first.url, "--versus", second.url, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(rf'^error: request \d \(".*"\) and 1 more: {second.url}: .*on fire$', done.stderr, re.MULTILINE)


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
def test_an_error_of_the_client_ends_the_run_at_once(tmp_path: Path) -> None:
    """The disk is full for the first answer: the requests under way are cancelled, and no other is sent."""
    (tmp_path / "prompts.txt").write_text("\n".join(["x" * (2 << 20), *["y"] * 40]))
    with EchoServer(delay=lambda number: 600.0 if number else 0.0) as server:
        argv = [sys.executable, str(CLIENT), "-u", server.url, "--max-concurrency", "4"]
        limited = ["sh", "-c", 'ulimit -f 1000; exec "$@"', "sh", *argv]
        done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert len(server.streamed) <= 4
    assert done.returncode == 1
    assert done.stderr == "error: cannot write .: File too large; name another file with --results-file\n"


@pytest.mark.long
def test_an_interrupt_of_the_warm_up_ends_the_client(prompts: Path, tmp_path: Path) -> None:
    """As Ctrl-C at any other time; there is nothing to report."""
    with EchoServer(delay=lambda _: 600.0) as server:
        argv = [sys.executable, str(CLIENT), "-u", server.url, "--num-warmups", "2"]
        child = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        wait_for(lambda: len(server.streamed) == 2, "the warm-up")
        child.send_signal(signal.SIGINT)
        output, errors = child.communicate(timeout=LIMIT)
    assert (child.returncode, errors.strip()) == (130, "interrupted")
    assert output == "Loading inputs from `prompts.txt`...\n"


@pytest.mark.long
def test_an_interrupt_in_turns_counts_the_time_of_the_block(prompts: Path, tmp_path: Path) -> None:
    """Ctrl-C in the first block: its answers took the time that the block has taken so far."""
    with EchoServer(delay=lambda number: 600.0 * (number == 1)) as server:
        flags = ["--versus", server.url, "--iterations", "40", "--max-concurrency", "2", "--report", "r.json"]
        flags += ["--seed", "1"]  # the first block is the first server's
        argv = [sys.executable, str(CLIENT), "-u", server.url, *flags]
        child = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        wait_for(lambda: len(server.streamed) == 4, "the block but for its second request")
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=LIMIT)
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["sent"] == 4
    assert report["completed"] == pytest.approx(report["request_throughput"] * report["duration"])
    assert report["duration"] > 0


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
