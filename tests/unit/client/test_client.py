"""client/client.py: its command line, its lines and its exit codes, as a user runs it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import client
from support.grpc_echo import EchoServer
from support.patience import LIMIT, wait_for

CLIENT = Path(client.__file__)
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
    """A missing, empty or undecodable file gives exit 1, the FAIL line and a message with file and reason."""
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    assert client.main(["--input-prompts", str(path), "--results-file", str(tmp_path / "r")]) == 1
    shown = capsys.readouterr()
    assert shown.out.endswith("FAIL: vLLM example\n")
    assert reason in shown.err
    assert str(path) in shown.err


def test_unwritable_results_file_fails_before_any_request(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits for answers that cannot be stored: no server is even asked for."""
    results = tmp_path / "missing" / "results.txt"
    assert client.main(["--input-prompts", str(prompts), "--results-file", str(results)]) == 1
    assert f"cannot write the results to {results}: No such file" in capsys.readouterr().err


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
    assert done.stdout.splitlines() == [
        "Loading inputs from `prompts.txt`...",
        "Storing results into `results.txt`...",
        "PASS: vLLM example",
    ]
    assert (done.returncode, done.stderr) == (0, "")
    entries = (tmp_path / "results.txt").read_text().split("\n\n=========\n\n")
    assert entries == [*(f" {5 + n}: {text}" for n, text in enumerate(PROMPTS.splitlines() * 3)), ""]


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
