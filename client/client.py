#!/usr/bin/env python3
"""Asks a vLLM model served by Triton to complete the prompts of a file.

    python3 client/client.py --iterations 10

Exit codes: 0 if every request was answered, 1 if one failed or none could be sent, 2 for wrong
usage, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from progress_line import ProgressLine
from prompt_file import (
    Answer,
    ClientError,
    check_writable,
    load_prompts,
    number_prompts,
    store_results,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prompt_file import Prompt

# Greedy, so that the same prompt gives the same answer every time; the length is the tutorial's.
SAMPLING_PARAMETERS = {"temperature": 0, "max_tokens": 100}
TOOLS = Path(__file__).resolve().parent.parent / ".tools"
# Passed on to the next Python. It names those that were tried, so that none is started twice.
_TRIED = "VLLM_ENV_CLIENT_TRIED"
# An IPv6 address is in brackets, because it contains colons itself.
_HOST_AND_PORT = re.compile(r"(?P<host>[^\s/:]+|\[[0-9a-fA-F:.%]+\]):(?P<port>\d{1,5})")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the client with ``argv``, by default ``sys.argv[1:]``, and return the exit code."""
    flags = _parser().parse_args(argv)
    # An answer may contain characters that an ASCII terminal cannot show. In a test, stdout may be
    # another kind of stream.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        passed = _run(flags)
    except ClientError as error:
        print(f"error: {error}", file=sys.stderr)
        passed = False
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print("PASS: vLLM example" if passed else "FAIL: vLLM example", flush=True)
    return 0 if passed else 1


def _run(flags: argparse.Namespace) -> bool:
    print(f"Loading inputs from `{flags.input_prompts}`...", flush=True)
    lines = load_prompts(flags.input_prompts)
    prompts = number_prompts(lines, iterations=flags.iterations, offset=flags.offset)
    # Checked before anything is sent: answers that cannot be stored are not worth the wait.
    check_writable(flags.results_file)
    progress = ProgressLine(total=len(prompts), stream=sys.stderr)
    try:
        answers = _ask(flags, prompts, progress)
    finally:
        progress.clear()
    # Also after a failed request: the other answers are complete.
    print(f"Storing results into `{flags.results_file}`...", flush=True)
    store_results(flags.results_file, answers)
    if flags.verbose:
        _print_answers(answers)
    return _report_failures(answers)


def _ask(
    flags: argparse.Namespace, prompts: Sequence[Prompt], progress: ProgressLine
) -> list[Answer]:
    # Late, so that --help and wrong options work without tritonclient, and its absence is reported.
    try:
        from triton_stream import Session, ask_all
    except ImportError as error:
        raise ClientError(
            f"{sys.executable} cannot import {error.name}; pip install 'tritonclient[grpc]', "
            "or run ./gen_vllm_env.sh doctor. It makes an environment that the client finds."
        ) from error
    session = Session(
        url=flags.url,
        model=flags.model,
        streaming=flags.streaming_mode,
        stream_timeout=flags.stream_timeout,
        sampling_parameters=SAMPLING_PARAMETERS,
    )
    return asyncio.run(ask_all(session, prompts, progress.advance))


def _print_answers(answers: Sequence[Answer]) -> None:
    for answer in answers:
        print(f"{_quoted(answer.prompt.text)} -> {_quoted(answer.text)}")


def _report_failures(answers: Sequence[Answer]) -> bool:
    """Print each reason once, with its first request; return True if no request failed."""
    # A lost connection fails many requests for one reason. One line is enough to say so.
    failed: dict[str, list[Prompt]] = defaultdict(list)
    for answer in answers:
        if answer.error:
            failed[answer.error].append(answer.prompt)
    for reason, (first, *others) in failed.items():
        more = f" and {len(others)} more" if others else ""
        shown = first.text if len(first.text) <= 60 else f"{first.text[:57]}..."
        request = f"request {first.request_id} ({_quoted(shown)}){more}"
        print(f"error: {request}: {reason}", file=sys.stderr)
    return not failed


def _quoted(text: str) -> str:
    # JSON keeps an answer with line breaks on one line of output.
    return json.dumps(text, ensure_ascii=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="client.py",
        description="Asks a vLLM model served by Triton to complete the prompts of a file.",
    )
    add = parser.add_argument
    # The names and the letters are those of the client in Triton's vLLM tutorial.
    add("-m", "--model", default="vllm", help="name of the model (default: %(default)s)")
    add("-v", "--verbose", action="store_true", help="also print every answer")
    add(
        "-u",
        "--url",
        type=_url,
        default="localhost:8001",
        help="host:port of gRPC (default: %(default)s)",
    )
    add(
        "-t",
        "--stream-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="give up on a request after this (default: never)",
    )
    add(
        "--offset",
        type=int,
        default=0,
        metavar="N",
        help="number of the first request (default: %(default)s)",
    )
    add(
        "--input-prompts",
        type=Path,
        default=Path("prompts.txt"),
        metavar="FILE",
        help="one prompt a line (default: %(default)s)",
    )
    add(
        "--results-file",
        type=Path,
        default=Path("results.txt"),
        metavar="FILE",
        help="file for the answers (default: %(default)s)",
    )
    add(
        "--iterations",
        type=_count,
        default=1,
        metavar="N",
        help="times through the prompts (default: %(default)s)",
    )
    add(
        "-s",
        "--streaming-mode",
        action="store_true",
        help="receive each answer in pieces, as it is made",
    )
    return parser


def _url(text: str) -> str:
    match = _HOST_AND_PORT.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not host:port; give for example localhost:8001, without http://"
        )
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    # "nan" is a float, too. It fails every comparison.
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def _use_tools_environment() -> None:
    """Start again with a Python that the project has made, if this one lacks tritonclient."""
    try:
        import triton_stream  # noqa: F401
    except ImportError:
        tried = os.environ.get(_TRIED, "").split(os.pathsep)
        pythons = TOOLS.glob("venv*/bin/python")
        # The newest first. lstat(), because the link itself may lead nowhere.
        for path in sorted(pythons, key=lambda path: path.lstat().st_mtime, reverse=True):
            python = str(path)
            if python not in tried:
                tried.append(python)
                # A container may have made it, as a link to a program that is missing here.
                with contextlib.suppress(OSError):
                    environment = {**os.environ, _TRIED: os.pathsep.join(tried)}
                    arguments = [python, __file__, *sys.argv[1:]]
                    os.execve(python, arguments, environment)  # noqa: S606 - needs no shell


if __name__ == "__main__":
    try:
        _use_tools_environment()
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
