"""client/client.py: its command line, its lines and its exit codes, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import client
from loadtest.options import build_parser, parse
from support.client_run import CLIENT, PROMPTS, run
from support.grpc_echo import EchoServer
from support.patience import LIMIT
from support.repositories import CHECKOUT

if TYPE_CHECKING:
    pass


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--url", "http://localhost:8001"], "without http://"),
        (["--url", "localhost:99999"], "host:port"),
        (["--url", "a..b:8000"], "host:port"),
        (["--url", f"{'a' * 64}:8000"], "host:port"),
        (["--url", "a@b:8000"], "host:port"),
        (["--url", "a?b:8000"], "host:port"),
        (["--iterations", "0"], "at least 1"),
        (["--stream-timeout", "-1"], "positive number of seconds"),
        (["--stream-timeout", "inf"], "positive number of seconds"),
        (["--request-rate", "nan"], "positive number"),
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
        (["--root-certificates", "/dev/null"], "need --ssl"),
        (["--ssl", "--root-certificates", "x.pem"], "argument --root-certificates: cannot read x.pem: No such file"),
        (["--plot", "run.png"], "is not an SVG file"),
        (["--versus", "localhost:9", "--duration", "5"], "give --num-prompts instead"),
        (["--versus-backend", "openai"], "need --versus"),
        (["--backend", "other"], "--backend"),
        (["--bogus"], "unrecognized arguments: --bogus; see"),
        (["--iteration", "10"], "unrecognized arguments: --iteration (did you mean --iterations?)"),
        (["--prompt", "Hello"], "(a prompt needs no flag)"),
        (["--sterming-mode"], "(did you mean --streaming-mode?)"),
        (["-s", "a", "--input-prompts", "x.txt"], "either on the command line or with --input-prompts"),
        (["a", "--random-input-len", "5"], "--random-input-len makes up the prompts"),
        (
            [str(CHECKOUT / "prompts.txt")],
            "prompts.txt is a file; name a file of prompts with --input-prompts",
        ),
        (["a", " "], "a prompt on the command line is empty"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_value(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad option value is usage, not a failure: exit 2 and one line with what is expected instead."""
    with pytest.raises(SystemExit) as stopped:
        client.main(arguments)
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert reason in shown.err
    assert shown.out == ""
    assert re.fullmatch(r"error: .+; see client\.py --help-all\n", shown.err)


@pytest.mark.parametrize("ask", ["-h", "--help", "--help-all"])
def test_the_help_has_first_what_a_newcomer_needs(ask: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help-all has the rest; the examples of both are accepted."""
    with pytest.raises(SystemExit) as stopped:
        client.main([ask])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    listed = set(re.findall(r"^  (?:-\w, |-\w [A-Z]+, )?(--[\w-]+)", out, re.MULTILINE))
    usual = {"--model", "--url", "--input-prompts", "--iterations", "--streaming-mode", "--max-concurrency", "--help-all"}
    assert listed >= usual
    every = {option for option in build_parser()._option_string_actions if option.startswith("--")}
    assert (listed == every) is (ask == "--help-all")
    assert len(listed) == len(every) or len(listed) < 15
    examples = re.findall(r"^  python3 client/client\.py (.+?)(?:   .*)?$", out, re.MULTILINE)
    assert len(examples) == 3
    for example in examples:
        parse(shlex.split(example))


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


@pytest.mark.parametrize(
    ("arguments", "prompts"),
    [
        (["The capital of France is"], ["The capital of France is"]),
        (["-s", "one", "--max-failures", "1", "-- two", "-v", "é"], ["one", "-- two", "é"]),
        (["--iterations", "2", "--header", "a=b", "--", "two"], ["two", "two"]),
        (["x" * 5000], ["x" * 5000]),
    ],
)
def test_prompts_on_the_command_line_are_asked(
    arguments: list[str], prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stand anywhere among the flags; each whole answer is printed, and no file of prompts is read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("not this one")
    with EchoServer() as server:
        assert client.main(["-u", server.url, *arguments]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "Loading inputs from the command line..."
    assert shown[2 : 2 + len(prompts)] == [f'"{text}" -> " {number}: {text}"' for number, text in enumerate(prompts)]
    assert shown[2 + len(prompts)].startswith(f"Requests: {len(prompts)} sent")
    assert len((tmp_path / "results.txt").read_text().split("\n\n=========\n\n")) == len(prompts) + 1


@pytest.mark.parametrize(("most", "code", "last"), [(0, 1, "FAIL: vLLM example"), (1, 0, "PASS: vLLM example")])
@pytest.mark.long
def test_so_many_failures_are_allowed(most: int, code: int, last: str, tmp_path: Path) -> None:
    """One of three fails."""
    (tmp_path / "prompts.txt").write_text("one\nplease fail\nthree\n")
    with EchoServer() as server:
        done = run("-u", server.url, "--max-failures", most, "--max-concurrency", 3, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, last)
    assert "3 sent, 2 answered, 1 failed (1 error from the model)" in done.stdout
    assert re.search(r"^E2EL: p50 [\d.]+ ms, p99 infinite with failures as infinite$", done.stdout, re.MULTILINE)


@pytest.mark.long
def test_the_samples_flags_reach_the_model(prompts: Path, tmp_path: Path) -> None:
    """--lora-name and --exclude-inputs-in-outputs; without the latter the prompt comes back, as in the sample."""
    with EchoServer() as server:
        run("-u", server.url, "-l", "doctor", "--exclude-inputs-in-outputs", cwd=tmp_path)
        run("-u", server.url, cwd=tmp_path)
        asked = server.requests
    assert [tensors.get("exclude_input_in_output") for tensors in asked] == [b"\1", b"\1", None, None]
    sampling = [json.loads(tensors["sampling_parameters"][4:]) for tensors in asked]
    assert [each.get("lora_name") for each in sampling] == ["doctor", "doctor", None, None]


@pytest.mark.long
def test_results_are_stored_if_nobody_reads_the_output(prompts: Path, tmp_path: Path) -> None:
    """As behind `| head -1`, which ends after the first line. It is no failure of the run."""
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
    assert (child.returncode, errors) == (0, "")
    assert (tmp_path / "results.txt").read_text().startswith(" 0: Hello, my name is\n")
    assert json.loads((tmp_path / "r.json").read_text())["completed"] == 2


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """An interpreter that has no tritonclient: a virtual environment with nothing in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return str(tmp_path / "bare" / "bin" / "python")


@pytest.mark.long
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


@pytest.mark.long
def test_python_without_tritonclient_and_no_tools_says_what_to_install(tmp_path: Path, bare_python: str) -> None:
    """A copy of the client elsewhere: the message names the interpreter and the package."""
    shutil.copytree(CLIENT.parent, tmp_path / "client", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    argv = [bare_python, str(tmp_path / "client" / "client.py")]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False, env={**os.environ})
    assert done.returncode == 2
    assert "pip install 'tritonclient[grpc]'" in done.stderr
    assert "Traceback" not in done.stderr
