#!/usr/bin/env python3
"""Asks a vLLM model served by Triton to complete prompts, and measures the answers.

    python3 client/client.py "The capital of France is"
    python3 client/client.py --iterations 10

Exit codes: 0 if at most ``--max-failures`` requests failed. 1 if more failed or none could be sent.
2 for wrong flags, for wrong contents of an input file, and if a module or a program that a flag
needs is missing. 130 after an interrupt.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.errors import ClientError, InputError
from loadtest.options import parse, request_count
from loadtest.prompts import Prompt, RepeatedPrompts, find_prompts, load_prompts
from loadtest.random_prompts import RandomPrompts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from loadtest.prompts import PromptSource
    from loadtest.run import Result

TOOLS = Path(__file__).resolve().parent.parent / ".tools"
# Passed on to the next Python. It names those that were tried, so that none is started twice.
_TRIED = "VLLM_ENV_CLIENT_TRIED"
# Characters of an answer in the summary.
_SHOWN = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Run the client with ``argv``, by default ``sys.argv[1:]``, and return the exit code."""
    options = parse(argv)
    # An answer may contain characters that an ASCII terminal cannot show. In a test, stdout may be
    # another kind of stream.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(options)
    except ClientError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        code = 130
    if code == 130:
        print("interrupted", file=sys.stderr)
    else:
        _say("FAIL: vLLM example" if code else "PASS: vLLM example")
    return code


def _say(*lines: str) -> None:
    """Print lines. If nobody reads them any more, as behind ``| head -1``, the run goes on."""
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        # Python would complain about what it still has to write at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(options: argparse.Namespace) -> int:
    """Do what the command line asks for, and return the exit code.

    Raises:
        ClientError: the run is not possible, or the server has not come back.
    """
    # 1) The prompts
    _check_files(options)
    prompts, count = _load_prompts(options)
    # 2) The requests
    result = _send(options, prompts, count)
    # 3) The results, also after a failed request: the other answers are complete
    if result.texts and options.results_format == "txt":
        result.texts.write(options.results_file)
    figures = _store_figures(options, result)
    _say(f"Storing results into `{options.results_file}`...")
    _show(options, prompts, result, figures)
    if result.texts:
        result.texts.close()
    if result.interrupted:
        return 130
    if result.gone:
        raise ClientError(result.gone)
    failed = result.measures.failed
    if result.comparison:
        failed += result.comparison.second.failed
    return 0 if failed <= options.max_failures else 1


def _check_files(options: argparse.Namespace) -> None:
    """Check that no file would overwrite another one.

    Raises:
        InputError: two flags name the same file.
    """
    files = {
        "--input-prompts": None
        if options.random_input_len or options.prompts
        else find_prompts(options.input_prompts),
        "--results-file": options.results_file,
        "--report": options.report,
        "--plot": options.plot,
    }
    seen: dict[Path, str] = {}
    for flag, path in files.items():
        if path is None:
            continue
        # Path.exists() would raise an error if a folder may not be read. That is no error yet.
        is_there = os.path.exists(path)  # noqa: PTH110
        # Several flags may name /dev/null.
        is_device = is_there and not path.is_file()
        if is_device:
            continue
        place = Path(os.path.realpath(path))
        if place in seen:
            raise InputError(
                f"{seen[place]} and {flag} are the same file, {path}; name another with {flag}"
            )
        seen[place] = flag


def _load_prompts(options: argparse.Namespace) -> tuple[PromptSource, int | None]:
    """Say where the prompts come from; return them, and the number of requests if it is known.

    Raises:
        InputError: the file with the prompts cannot be read, or is wrong.
    """
    if options.random_input_len:
        _say(f"Loading inputs from random words (seed {options.seed})...")
        made_up = RandomPrompts(
            words=options.random_input_len,
            prefix_words=options.random_prefix_len,
            seed=options.seed,
        )
        return made_up, request_count(options, None)
    if options.prompts:
        _say("Loading inputs from the command line...")
        given = tuple(Prompt(text) for text in options.prompts)
        return RepeatedPrompts(given), request_count(options, len(given))
    path = find_prompts(options.input_prompts)
    _say(f"Loading inputs from `{path}`...")
    prompts = load_prompts(path)
    return RepeatedPrompts(prompts), request_count(options, len(prompts))


def _send(options: argparse.Namespace, prompts: PromptSource, count: int | None) -> Result:
    """Send the requests, and return what happened.

    Args:
        options: the command line.
        prompts: the prompts.
        count: number of requests; None if only the duration limits it.

    Raises:
        InputError: a module is missing.
        ClientError: there is no such server or no such model, or a file cannot be written.
    """
    with _report_missing_modules():
        from loadtest.answers import check_writable
        from loadtest.backends import client_for
        from loadtest.run import run

        # This imports what each kind of server needs.
        for backend in (options.backend, options.versus_backend):
            client_for(backend)
    # Checked before anything is sent: answers that cannot be stored are not worth the wait.
    check_writable(options.results_file, "--results-file")
    if options.report:
        check_writable(options.report, "--report")
    if options.plot:
        check_writable(options.plot, "--plot")
    return run(options, prompts, count)


@contextlib.contextmanager
def _report_missing_modules() -> Iterator[None]:
    """Raise ``InputError`` if the block cannot import a module.

    The imports are late, so that ``--help`` works without the module.
    """
    try:
        yield
    except ImportError as error:
        raise InputError(
            f"{sys.executable} cannot import {error.name}; pip install 'tritonclient[grpc]' numpy, "
            "or run ./gen_vllm_env.sh doctor. It makes an environment that the client finds."
        ) from error


def _store_figures(options: argparse.Namespace, result: Result) -> dict[str, Any]:
    """Write the report and the plot if the command line names their files; return the figures.

    Raises:
        ClientError: a file cannot be written.
    """
    # Late, as in _send: with --help, no module of loadtest is needed.
    from loadtest.report import figures_of, write_plot, write_report

    figures = figures_of(options, result)
    if options.report:
        write_report(options.report, figures)
    if options.plot:
        write_plot(options.plot, options, result)
    return figures


def _show(
    options: argparse.Namespace,
    prompts: PromptSource,
    result: Result,
    figures: dict[str, Any],
) -> None:
    """Print the answers, the figures and the reasons of failures."""
    from loadtest.report import summary

    # 1) Answers
    # All of them, or the beginnings of the first ones. Without the prompt, if an answer repeats it.
    if options.verbose and result.texts:
        for prompt, text in zip(prompts, result.texts.texts(), strict=False):
            _say(f"{_quoted(prompt.text)} -> {_quoted(text.removeprefix(prompt.text))}")
    elif not options.is_load_test:
        for _, record in sorted(result.first.items()):
            asked = record.request.prompt
            answer = _shortened(record.text.removeprefix(asked))
            _say(f"{_quoted(_shortened(asked))} -> {_quoted(answer)}")
    # 2) Figures
    _say(*summary(options, figures))
    # 3) Failures. A lost connection fails many requests for one reason: one line is enough.
    for reason, (record, count) in result.reasons.items():
        number = options.offset + record.request.index
        more = f" and {count - 1} more" if count > 1 else ""
        shown = _quoted(_shortened(record.request.prompt))
        print(f"error: request {number} ({shown}){more}: {reason}", file=sys.stderr)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _quoted(text: str) -> str:
    # JSON keeps an answer with line breaks on one line of output.
    return json.dumps(text, ensure_ascii=False)


def _use_tools_environment() -> None:
    """Start again with a Python that the project has made, if this one lacks tritonclient."""
    try:
        import tritonclient.grpc  # noqa: F401
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
        asked = parse(None)
        if "triton" in (asked.backend, asked.versus_backend):
            _use_tools_environment()
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
