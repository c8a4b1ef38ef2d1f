"""client/client.py: its command line, its lines and its exit codes, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import client
import loadtest
from loadtest import samples
from loadtest.measures import Measures
from loadtest.options import parse
from loadtest.overhead import Overhead
from loadtest.record import Outcome, Record, Request
from loadtest.report import figures_of, summary
from loadtest.run import Result
from loadtest.versus import Comparison
from support.grpc_echo import EchoServer
from support.patience import LIMIT, wait_for
from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from collections.abc import Callable

CLIENT = Path(client.__file__)
SCHEMA = json.loads(Path(loadtest.__file__).with_name("report.schema.json").read_text("utf-8"))
PROMPTS = "Hello, my name is\nThe capital of France is\n"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text(PROMPTS)
    return path


def run(*arguments: object, cwd: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    argv = [python, str(CLIENT), *map(str, arguments)]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--url", "http://localhost:8001"], "without http://"),
        (["--url", "localhost:99999"], "host:port"),
        (["--iterations", "0"], "at least 1"),
        (["--stream-timeout", "-1"], "positive number of seconds"),
        (["--stream-timeout", "nan"], "positive number of seconds"),
        (["--request-rate", "-1"], "positive number"),
        (["--burstiness", "2"], "--burstiness needs --request-rate"),
        (["--cancel-rate", "2"], "share from 0 to 1"),
        (["--cancel-rate", "0.1"], "--cancel-rate needs --streaming-mode"),
        (["--goodput", "itl:5"], "not a goal"),
        (["--goodput", "e2el:inf"], "not a goal"),
        (["--goodput", "ttft:5"], "need --streaming-mode"),
        (["--metric-percentiles", "99,101"], "not a list of percentiles"),
        (["--header", "a b"], "not a header"),
        (["--header", "a=\n"], "not a header"),
        (["--header", "a-Bin=1"], "not a header"),
        (["--random-output-len", "5"], "need --random-input-len"),
        (["--random-input-len", "5", "--iterations", "2"], "give --num-prompts"),
        (["--iterations", "2", "--num-prompts", "5"], "either --iterations or --num-prompts"),
        (["--root-certificates", "x.pem"], "need --ssl"),
        (["--plot", "run.png"], "is not an SVG file"),
        (["--versus", "localhost:9", "--duration", "5"], "give --num-prompts instead"),
        (["--bogus"], "--bogus"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_value(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad option value is usage, not a failure: exit 2 and what is expected instead."""
    with pytest.raises(SystemExit) as stopped:
        client.main(arguments)
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), (b"", "holds no prompt"), (b"\n \n", "holds no prompt"), (b"\xff\xfe\xfa", "UTF-8")],
)
def test_bad_prompts_file_fails_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, reason: str
) -> None:
    """A missing, empty or undecodable file gives exit 2, the FAIL line and a message with file and reason."""
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    assert client.main(["--input-prompts", str(path), "--results-file", str(tmp_path / "r")]) == 2
    shown = capsys.readouterr()
    assert shown.out.endswith("FAIL: vLLM example\n")
    assert reason in shown.err
    assert str(path) in shown.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--results-file", "prompts.txt"],
        ["--input-prompts", "link.txt", "--report", "prompts.txt"],
        ["--results-file", "new.svg", "--plot", "./new.svg"],
        ["--report", "results.txt"],
    ],
)
def test_no_file_overwrites_another(
    prompts: Path, arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two flags that name the same file are refused before it is touched; devices are not."""
    monkeypatch.chdir(prompts.parent)
    (prompts.parent / "link.txt").symlink_to(prompts)
    assert client.main(["--url", "127.0.0.1:1", *arguments]) == 2
    assert f"and {arguments[-2]} are the same file, {arguments[-1].removeprefix('./')}; name" in capsys.readouterr().err
    assert client.main(["--url", "127.0.0.1:1", "--results-file", "/dev/null", "--report", "/dev/null"]) == 1
    assert prompts.read_text() == PROMPTS


def test_flags_with_several_values_may_be_repeated() -> None:
    """The values are added up."""
    options = parse(["-s", "--header", "A=1", "--header", "b=2", "c=3", "--goodput", "ttft:1", "--goodput", "e2el:2"])
    assert options.header == {"a": "1", "b": "2", "c": "3"}
    assert options.goodput == {"ttft": 1.0, "e2el": 2.0}


@pytest.mark.parametrize("flag", ["--results-file", "--report", "--plot"])
def test_unwritable_results_file_fails_before_any_request(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    """Nobody waits for answers that cannot be stored: no server is even asked for."""
    results = tmp_path / "missing" / "results.svg"
    others = ["--results-file", str(tmp_path / "results.txt")] if flag != "--results-file" else []
    assert client.main(["--input-prompts", str(prompts), *others, flag, str(results)]) == 1
    assert f"cannot write {results}: No such file or directory; name another file with {flag}" in capsys.readouterr().err


def test_unreachable_server_fails_and_says_where(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing listens on port 1: exit 1, the address in the message, no results file left behind."""
    results = tmp_path / "results.txt"
    argv = ["--url", "127.0.0.1:1", "--input-prompts", str(prompts), "--results-file", str(results)]
    assert client.main(argv) == 1
    shown = capsys.readouterr()
    assert "no Triton server answers at 127.0.0.1:1" in shown.err
    assert "Traceback" not in shown.err
    assert not results.exists()


def test_results_are_in_the_order_of_the_prompts(prompts: Path, tmp_path: Path) -> None:
    """The server answers later requests first; the file still has prompt after prompt, iteration after iteration."""
    with EchoServer(delay=lambda number: 0.2 if number == 5 else 0.0) as server:
        done = run("-u", server.url, "--iterations", 3, "--offset", 5, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["Loading inputs from `prompts.txt`...", "Storing results into `results.txt`..."]
    assert lines[-1] == "PASS: vLLM example"
    assert (done.returncode, done.stderr) == (0, "")
    entries = (tmp_path / "results.txt").read_text().split("\n\n=========\n\n")
    assert entries == [*(f" {5 + n}: {text}" for n, text in enumerate(PROMPTS.splitlines() * 3)), ""]


@pytest.mark.parametrize("mode", [[], ["-s"]])
def test_the_summary_says_what_happened(prompts: Path, tmp_path: Path, mode: list[str]) -> None:
    """The first answers, the number of requests, speed, and the times that the answers have."""
    with EchoServer() as server:
        done = run("-u", server.url, "--iterations", 5, *mode, cwd=tmp_path)
    answers, rest = done.stdout.splitlines()[2:5], "\n".join(done.stdout.splitlines()[5:-1])
    assert answers[1] == '"The capital of France is" -> " 1: The capital of France is"'
    assert re.search(r"^Requests: 10 sent, 10 answered, in \d+\.\d\d s$", rest, re.MULTILINE)
    assert re.search(r"^Throughput: [\d,]+ output tokens/s \(245 tokens\), [\d.e+]+ requests/s$", rest, re.MULTILINE)
    assert re.search(r"^E2EL: p50 [\d.]+ ms, p99 [\d.]+ ms$", rest, re.MULTILINE)
    assert bool(re.search(r"^TTFT: p50 [\d.]+ ms, p99 [\d.]+ ms\nTPOT: p50 [\d.]+ ms", rest, re.MULTILINE)) == bool(mode)
    assert ("need --streaming-mode" in rest) != bool(mode)


def test_a_server_that_does_not_count_tokens_has_no_figures_in_tokens(prompts: Path, tmp_path: Path) -> None:
    """As older ones of the official backend; the other figures are there."""
    with EchoServer(lacking=["return_num_output_tokens"]) as server:
        done = run("-u", server.url, "-s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Throughput: [\d.e+]+ requests/s; this server does not count tokens$", done.stdout, re.MULTILINE)
    assert "TTFT: p50" in done.stdout
    assert "TPOT" not in done.stdout


def test_prompts_of_the_checkout_are_asked_from_any_folder(tmp_path: Path) -> None:
    """The tutorial's command works where there is no prompts.txt."""
    with EchoServer() as server:
        done = run("-u", server.url, cwd=tmp_path)
    assert done.stdout.startswith(f"Loading inputs from `{CHECKOUT / 'prompts.txt'}`...")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("most", "code", "last"), [(0, 1, "FAIL: vLLM example"), (1, 0, "PASS: vLLM example")])
def test_so_many_failures_are_allowed(most: int, code: int, last: str, tmp_path: Path) -> None:
    """One of three fails."""
    (tmp_path / "prompts.txt").write_text("one\nplease fail\nthree\n")
    with EchoServer() as server:
        done = run("-u", server.url, "--max-failures", most, "--max-concurrency", 3, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, last)
    assert "3 sent, 2 answered, 1 failed (1 error from the model)" in done.stdout
    assert re.search(r"^E2EL: p50 [\d.]+ ms, p99 infinite with failures as infinite$", done.stdout, re.MULTILINE)


def test_the_samples_flags_reach_the_model(prompts: Path, tmp_path: Path) -> None:
    """--lora-name and --exclude-inputs-in-outputs; without the latter the prompt comes back, as in the sample."""
    with EchoServer() as server:
        run("-u", server.url, "-l", "doctor", "--exclude-inputs-in-outputs", cwd=tmp_path)
        run("-u", server.url, cwd=tmp_path)
        asked = server.requests
    assert [tensors.get("exclude_input_in_output") for tensors in asked] == [b"\1", b"\1", None, None]
    sampling = [json.loads(tensors["sampling_parameters"][4:]) for tensors in asked]
    assert [each.get("lora_name") for each in sampling] == ["doctor", "doctor", None, None]


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
        (["--duration", 0.05, "--request-rate", 200], 10),
        (["--random-input-len", 4, "--random-prefix-len", 2, "--random-output-len", 6, "--num-prompts", 8], 8),
    ],
)
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


def matches(value: Any, schema: dict[str, Any]) -> None:
    """Check a value against a schema, as far as this project's schema goes."""
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": int | float,
        "boolean": bool,
        "null": type(None),
    }
    names = schema.get("type", list(kinds))
    assert any(isinstance(value, kinds[name]) for name in ([names] if isinstance(names, str) else names)), (value, schema)
    if isinstance(value, dict) and "properties" in schema:
        assert set(schema.get("required", ())) <= set(value)
        patterns = schema.get("patternProperties", {})
        for name, inner in value.items():
            found = [schema["properties"][name]] if name in schema["properties"] else []
            found += [each for pattern, each in patterns.items() if re.search(pattern, name)]
            assert found, f"{name} is not in the schema"
            for each in found:
                matches(inner, each)


def test_warm_ups_leave_the_other_prompts_new(tmp_path: Path) -> None:
    """They are the first prompt only: a prefix cache would hold what they have sent."""
    with EchoServer() as server:
        flags = ["--random-input-len", 4, "--num-warmups", 3, "--num-prompts", 2, "--max-concurrency", 1]
        done = run("-u", server.url, *flags, cwd=tmp_path)
        asked = [tensors["text_input"] for tensors in server.requests]
    assert done.returncode == 0, done.stderr
    assert asked == [asked[0]] * 4 + [asked[4]]
    assert asked[4] != asked[0]


def test_two_servers_get_the_same_requests_in_turns(prompts: Path, tmp_path: Path) -> None:
    """Twenty blocks each, the order changes; the slower one is found, and the results are the first one's."""
    order: list[str] = []

    def note(name: str, seconds: float) -> Callable[[int], float]:
        return lambda _: order.append(name) or seconds

    with EchoServer(note("first", 0.0)) as first, EchoServer(note("second", 0.05)) as second:
        flags = ["--versus", second.url, "--iterations", 20, "--max-concurrency", 2, "--report", "r.json"]
        done = run("-u", first.url, *flags, cwd=tmp_path)
        asked = [sorted(tensors["text_input"] for tensors in server.requests) for server in (first, second)]
    assert asked[0] == asked[1]
    assert order == [name for block in range(20) for name in (["first"] * 2 + ["second"] * 2)[:: 1 if block % 2 == 0 else -1]]
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["completed"], report["versus"]["completed"], report["versus"]["blocks"]) == (40, 40, 20)
    assert report["versus"]["median_e2el_ms"]["low"] > 0
    assert report["versus"]["output_throughput"]["high"] < 0
    assert report["versus"]["median_tpot_ms"] is None  # whole answers have none
    assert len((tmp_path / "results.txt").read_text().split("\n\n=========\n\n")) == 41
    matches(report, SCHEMA)


@pytest.mark.parametrize(("lacking", "mode"), [((), []), (("return_num_output_tokens",), ["-s"])])
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
    assert ("TTFT p50" in done.stdout) == bool(mode)
    picture = (tmp_path / "r.svg").read_text()
    assert ">E2EL<" in picture
    assert (">TTFT<" in picture) == bool(mode)
    assert ">TPOT<" not in picture


def test_a_goal_for_tpot_needs_a_server_that_counts_tokens(prompts: Path, tmp_path: Path) -> None:
    """Otherwise every answer would be good. Nothing is sent."""
    with EchoServer(lacking=("return_num_output_tokens",)) as server:
        done = run("-u", server.url, "-s", "--goodput", "tpot:20", "--num-warmups", 1, cwd=tmp_path)
        assert server.streamed == []
    assert done.returncode == 1
    assert done.stderr.startswith("error: the model 'vllm' does not count tokens, and a goal for tpot (--goodput) needs them")


def test_results_are_stored_if_nobody_reads_the_output(prompts: Path, tmp_path: Path) -> None:
    """As behind `| head -1`, which ends after the first line."""
    read = threading.Event()

    def delay(_: int) -> float:
        read.wait(LIMIT)
        return 0.0

    with EchoServer(delay) as server:
        argv = [sys.executable, str(CLIENT), "-u", server.url, "--report", "r.json"]
        child = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout
        assert child.stderr
        assert child.stdout.readline().startswith("Loading inputs")
        child.stdout.close()
        read.set()
        errors = child.stderr.read()
        child.wait(LIMIT)
    assert (child.returncode, errors) == (1, "")
    assert (tmp_path / "results.txt").read_text().startswith(" 0: Hello, my name is\n")
    assert json.loads((tmp_path / "r.json").read_text())["completed"] == 2


def test_a_bottleneck_gives_no_verdict() -> None:
    """Figures that the client has spoiled do not say whether the server reached the goals."""
    options = parse(["-s", "--goodput", "ttft:200"])
    measures = Measures(options.goodput)
    request = Request(0, "", {}, stream=True)
    measures.add(Record(request, due=0.0, sent=0.0, times=[0.1], output_tokens=1, outcome=Outcome.ANSWERED))
    for late, verdict in ((0.001, 0.5), (0.05, None)):
        watched = Overhead(cpu=0.1)
        watched.lag.extend([late] * 10)
        figures = figures_of(options, Result(1, tokens_counted=True, measures=measures, overhead=watched, duration=2.0))
        assert figures["request_goodput"] == verdict
        assert ("no verdict" in "".join(summary(options, figures))) == (verdict is None)
    assert Overhead(cpu=0.99).reasons() == ["it used 99% of a core"]
    assert Overhead(cpu=0.5).reasons() == []


@pytest.mark.parametrize("flags", [["--plot", "a.svg"], ["-s", "--cancel-rate", "0.1"], ["--metric-percentiles", "90"]])
def test_who_asks_for_figures_gets_them(flags: list[str]) -> None:
    """With the client's own part, and from the planned time."""
    assert parse(flags).is_load_test
    assert not parse(["-s", "--metric-percentiles", "99"]).is_load_test


def test_a_bottleneck_is_named_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """And percentiles from a histogram, too, whatever was asked for."""
    monkeypatch.setattr(samples, "EXACT_LIMIT", 2)
    options = parse(["-s"])
    measures = Measures()
    for _ in range(3):
        request = Request(0, "", {}, stream=True)
        measures.add(Record(request, due=0.0, sent=0.0, times=[0.1], output_tokens=1, outcome=Outcome.ANSWERED))
    result = Result(3, tokens_counted=True, measures=measures, overhead=Overhead(cpu=0.99), duration=2.0)
    lines = summary(options, figures_of(options, result))
    assert "TTFT, E2EL: percentiles from a histogram, with an error of at most 1 %" in lines
    assert "The client was the bottleneck: it used 99% of a core" in lines


def test_a_comparison_says_how_many_pairs_it_used() -> None:
    """Blocks without answers have no figure, and one pair has no interval."""
    options = parse(["-s", "--versus", "b:1"])
    measures = Measures()
    request = Request(0, "", {}, stream=True)
    measures.add(Record(request, due=0.0, sent=0.0, times=[0.1, 0.2], output_tokens=2, outcome=Outcome.ANSWERED))
    figures = measures.figures(1.0)
    empty = Measures().figures(1.0)
    for pairs, line in (
        ([(figures, figures)] * 2, r"TTFT p50: \+0.0% \(95 % interval \+0.0% to \+0.0%\)"),
        ([(figures, figures)] * 2 + [(figures, empty)], r"TTFT p50: .*to \+0.0%, 2 of 3 pairs\)"),
        ([(figures, figures), (figures, empty)], "TTFT p50: no difference, too few pairs of blocks have this figure"),
    ):
        result = Result(1, tokens_counted=True, measures=measures, overhead=Overhead(), duration=1.0)
        result.comparison = Comparison("b:1", pairs)
        lines = summary(options, figures_of(options, result))
        assert any(re.fullmatch(line, each) for each in lines), lines


def test_failures_of_the_second_server_are_named(prompts: Path, tmp_path: Path) -> None:
    """With its address and the reason."""

    def break_down(_: int) -> float:
        raise ValueError("on fire")

    with EchoServer() as first, EchoServer(break_down) as second:
        done = run("-u", first.url, "--versus", second.url, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(rf'^error: request \d \(".*"\) and 1 more: {second.url}: .*on fire$', done.stderr, re.MULTILINE)


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


def test_an_interrupt_in_turns_counts_the_time_of_the_block(prompts: Path, tmp_path: Path) -> None:
    """Ctrl-C in the first block: its answers took the time that the block has taken so far."""
    with EchoServer(delay=lambda number: 600.0 * (number == 1)) as server:
        flags = ["--versus", server.url, "--iterations", "40", "--max-concurrency", "2", "--report", "r.json"]
        argv = [sys.executable, str(CLIENT), "-u", server.url, *flags]
        child = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        wait_for(lambda: len(server.streamed) == 4, "the block but for its second request")
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=LIMIT)
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["sent"] == 4
    assert report["completed"] == pytest.approx(report["request_throughput"] * report["duration"])
    assert report["duration"] > 0


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


@pytest.mark.parametrize("mode", [[], ["-s"]])
def test_pieces_of_a_streamed_answer_are_joined(prompts: Path, tmp_path: Path, mode: list[str]) -> None:
    """With -s the answer comes in pieces and is the same text; the server sees the flag as the tensor `stream`."""
    with EchoServer() as server:
        done = run("-u", server.url, "--verbose", *mode, cwd=tmp_path)
        assert server.streamed == [bool(mode)] * 2
    assert done.returncode == 0
    assert '"The capital of France is" -> " 1: The capital of France is"' in done.stdout.splitlines()


def test_failed_request_fails_the_run_and_is_named(tmp_path: Path) -> None:
    """One of three fails: exit 1 and FAIL; stderr says which and why; the answers of the others are stored."""
    (tmp_path / "prompts.txt").write_text("one\nplease fail\nthree\n")
    with EchoServer() as server:
        done = run("-u", server.url, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "FAIL: vLLM example"
    assert done.stderr == 'error: request 1 ("please fail"): told to fail\n'
    assert "1 failed (1 error from the model)" in done.stdout
    assert (tmp_path / "results.txt").read_text().startswith(" 0: one\n\n=========\n\n\n\n=========\n\n 2: three\n")


def test_slow_answer_is_given_up_after_the_stream_timeout(prompts: Path, tmp_path: Path) -> None:
    """--stream-timeout ends the wait, and the message names the option."""
    with EchoServer(delay=lambda number: 600.0 * number) as server:
        done = run("-u", server.url, "-t", "0.5", cwd=tmp_path)
    assert done.returncode == 1
    given_up = 'request 1 ("The capital of France is"): no complete answer within 0.5 s (--stream-timeout)\n'
    assert given_up in done.stderr  # so may request 0 be, on a slow machine


def test_interrupt_ends_with_130_and_no_traceback(prompts: Path, tmp_path: Path) -> None:
    """Ctrl-C while requests are under way."""
    with EchoServer(delay=lambda _: 600.0) as server:
        argv = [sys.executable, str(CLIENT), "-u", server.url]
        child = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        wait_for(lambda: server.streamed, "the first request")
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=LIMIT)
    assert child.returncode == 130
    assert errors.strip() == "interrupted"


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """An interpreter that has no tritonclient: a virtual environment with nothing in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return str(tmp_path / "bare" / "bin" / "python")


def test_python_without_tritonclient_uses_the_tools_environment(tmp_path: Path, bare_python: str) -> None:
    """In a checkout with a working .tools/venv*, any python3 runs the client: the newest that works."""
    shutil.copytree(CLIENT.parent, tmp_path / "client", ignore=shutil.ignore_patterns("__pycache__"))
    tools = tmp_path / ".tools" / "venv-3.99" / "bin"
    tools.mkdir(parents=True)
    for name, target in (("venv", "/nonexistent/python3"), ("venv-3.10", bare_python)):
        (tmp_path / ".tools" / name / "bin").mkdir(parents=True)
        (tmp_path / ".tools" / name / "bin/python").symlink_to(target)
    (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "python").chmod(0o755)
    older = tmp_path / ".tools" / "venv-3.10-older" / "bin" / "python"
    older.parent.mkdir(parents=True)
    older.write_text(f'#!/bin/sh\necho older >&2\nexec "{sys.executable}" "$@"\n')
    older.chmod(0o755)
    os.utime(older, (1, 1))
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    with EchoServer() as server:
        argv = [bare_python, str(tmp_path / "client" / "client.py"), "-u", server.url]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == ""
    assert done.stdout.endswith("PASS: vLLM example\n")


def test_python_without_tritonclient_and_no_tools_says_what_to_install(tmp_path: Path, bare_python: str) -> None:
    """A copy of the client elsewhere: the message names the interpreter and the package."""
    shutil.copytree(CLIENT.parent, tmp_path / "client", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    argv = [bare_python, str(tmp_path / "client" / "client.py")]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False, env={**os.environ})
    assert done.returncode == 1
    assert "pip install 'tritonclient[grpc]'" in done.stderr
    assert "Traceback" not in done.stderr
