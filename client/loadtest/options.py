"""The command line of the client."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from loadtest import option_values as values
from loadtest.option_conflicts import refuse_conflicts

if TYPE_CHECKING:
    from collections.abc import Sequence

BACKENDS = ("triton", "openai")
# By backend. The model "" is the first one of the server.
_URLS = {"triton": "localhost:8001", "openai": "localhost:8000"}
_MODELS = {"triton": "vllm", "openai": ""}
# Without a load shape, so many requests are in flight: vLLM's default max_num_seqs on most GPUs.
# More would only wait in the server's queue.
MAX_CONCURRENCY = 256
# As `vllm bench serve` has them.
_RANDOM_PROMPTS = 1000
RANDOM_OUTPUT_LEN = 128
# Whoever gives one of these wants to know more than the answers.
_LOAD_TEST = (
    *("max_concurrency", "request_rate", "duration", "num_prompts", "num_warmups", "cancel_rate"),
    *("random_input_len", "goodput", "metric_percentiles", "versus", "plot", "report"),
)
# What --help shows, by destination.
_USUAL = (
    *("model", "url", "input_prompts", "iterations", "streaming_mode", "verbose", "help"),
    *("max_concurrency", "duration", "report", "backend", "wait_ready"),
)
_EXAMPLES = """\
examples:
  python3 client/client.py "The capital of France is"
  python3 client/client.py --iterations 10                          prompts.txt, ten times
  python3 client/client.py -s --max-concurrency 32 --duration 60    measure, 32 at a time
"""


class _Parser(argparse.ArgumentParser):
    """Report a wrong command line in one line. argparse itself prints the whole usage first."""

    def error(self, message: str) -> NoReturn:
        """End with argparse's message and exit status 2; for an unknown option, suggest another."""
        # argparse has no exception of its own for this, only the message.
        if unknown := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            known = self._option_string_actions
            # With a lower cutoff, --bogus would get --verbose.
            similar = difflib.get_close_matches(unknown[1], known, n=1, cutoff=0.65)
            if unknown[1] == "--prompt":
                message += " (a prompt needs no flag)"
            elif similar:
                message += f" (did you mean {similar[0]}?)"
        self.exit(2, f"error: {message}; see {self.prog} --help-all\n")


class _UsualHelp(argparse.Action):
    """Print the help without the options that few people need; ``--help-all`` has them."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        """Print it and end the program."""
        for action in parser._actions:  # noqa: SLF001 - argparse has no public way
            if action.option_strings and action.dest not in _USUAL:
                action.help = argparse.SUPPRESS
        parser.print_help()
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(
        prog="client.py",
        usage="%(prog)s [OPTION ...] [PROMPT ...]",
        # A script with --iteration must not change its meaning with a new option.
        allow_abbrev=False,
        add_help=False,
        description="Asks a vLLM model to complete prompts, and measures the server: Triton, or\n"
        "vLLM's own.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_sample(parser)
    _add_load(parser)
    _add_measures(parser)
    _add_connection(parser)
    add = parser.add_argument_group("help").add_argument
    unset = argparse.SUPPRESS  # the options get no attribute for it
    add("-h", "--help", action=_UsualHelp, nargs=0, default=unset, help="the usual options")
    add("--help-all", dest="help", action="help", help="all options")
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, by default of ``sys.argv``.

    ``is_load_test`` is added: whether an option asks for more than the answers.

    Raises:
        SystemExit: an option is wrong, or two do not fit together. The exit status is 2.
    """
    parser = build_parser()
    # Prompts may stand before, between and after the flags.
    options = parser.parse_intermixed_args(arguments)
    refuse_conflicts(parser, options)
    options.is_load_test = any(
        getattr(options, name) != parser.get_default(name) for name in _LOAD_TEST
    )
    # Whoever types a prompt wants to read the whole answer.
    options.verbose |= bool(options.prompts) and not options.is_load_test
    options.goodput = dict(options.goodput)
    options.header = dict(options.header)
    _fill_in(options)
    return options


def _fill_in(options: argparse.Namespace) -> None:
    """Set the addresses and models that are not given. They depend on the kind of a server."""
    backend = options.backend
    options.url = options.url or _URLS[backend]
    options.versus_backend = options.versus_backend or backend
    # A model's name on one kind of server means nothing to the other kind.
    if options.versus_backend == backend:
        options.versus_model = options.versus_model or options.model
    options.versus_model = options.versus_model or _MODELS[options.versus_backend]
    options.model = options.model or _MODELS[backend]


def request_count(options: argparse.Namespace, prompts: int | None) -> int | None:
    """Return the number of requests; None if only the duration limits it.

    Args:
        options: the options.
        prompts: number of prompts that are given; None if they are made up.
    """
    count: int | None = options.num_prompts
    # Each prompt once, unless only the duration limits the run.
    if count is None and prompts is not None and (options.iterations or not options.duration):
        count = prompts * (options.iterations or 1)
    # Prompts that are made up have no number of their own.
    if count is None and not options.duration:
        count = _RANDOM_PROMPTS
    # In an open loop, the duration says how many requests are due.
    if options.duration and options.request_rate != math.inf:
        due = max(1, round(options.duration * options.request_rate))
        count = due if count is None else min(due, count)
    return count


def _add_sample(parser: argparse.ArgumentParser) -> None:
    """Add the options about the prompts, the answers and the server.

    Those that the client in Triton's vLLM tutorial has, too, have its names and letters.
    """
    add = parser.add_argument_group("requests").add_argument
    add(
        "prompts",
        nargs="*",
        default=[],
        metavar="PROMPT",
        help="ask this, and print the whole answer (default: the prompts of a file)",
    )
    add(
        "-m",
        "--model",
        help="name of the model (default: vllm; with --backend openai the server's first)",
    )
    add("-v", "--verbose", action="store_true", help="print every answer")
    add(
        "-u",
        "--url",
        type=values.url,
        help="host:port of gRPC (default: localhost:8001), "
        "with --backend openai of HTTP (default: localhost:8000)",
    )
    add(
        "-t",
        "--stream-timeout",
        type=values.seconds,
        metavar="SECONDS",
        help="give up on a request after this (default: never)",
    )
    add(
        "--offset",
        type=int,
        default=0,
        metavar="N",
        help="id of the first request (default: %(default)s)",
    )
    add(
        "--input-prompts",
        type=Path,
        metavar="FILE",
        help="one prompt a line, or JSONL with prompt or messages, images and parameters "
        "(default: prompts.txt here, else the project's)",
    )
    add(
        "--results-file",
        type=Path,
        default=Path("results.txt"),
        metavar="FILE",
        help="file for the answers (default: %(default)s)",
    )
    add(
        "--results-format",
        choices=("txt", "jsonl"),
        default="txt",
        help="txt: the texts, in the order of the prompts; "
        "jsonl: each record as soon as its request has ended (default: %(default)s)",
    )
    add(
        "--iterations",
        type=values.count,
        metavar="N",
        help="times through the prompts (default: 1)",
    )
    add(
        "-s",
        "--streaming-mode",
        action="store_true",
        help="receive each answer in pieces, as it is made",
    )
    add(
        "--exclude-inputs-in-outputs",
        action="store_true",
        help="leave the prompt out of the answer; in a stream it never comes back",
    )
    add("-l", "--lora-name", metavar="NAME", help="LoRA adapter for all requests")
    add(
        "--max-failures",
        type=values.whole,
        default=0,
        metavar="N",
        help="PASS if at most so many requests failed (default: %(default)s)",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how many requests are sent, and when."""
    add = parser.add_argument_group("load", "names as in `vllm bench serve`").add_argument
    add(
        "--max-concurrency",
        type=values.count,
        metavar="N",
        help=f"most requests in flight (default: {MAX_CONCURRENCY}, with --request-rate no limit)",
    )
    add(
        "--request-rate",
        type=values.positive,
        default=math.inf,
        metavar="R",
        help="requests due per second, whether earlier ones have ended or not "
        "(default: inf, the next one when an earlier one has ended)",
    )
    add(
        "--burstiness",
        type=values.positive,
        default=1.0,
        metavar="B",
        help="1: Poisson arrivals; less: bursts; more: even (default: %(default)g)",
    )
    add("--duration", type=values.seconds, metavar="SECONDS", help="no request starts later")
    add("--num-prompts", type=values.count, metavar="N", help="number of requests")
    add(
        "--num-warmups",
        type=values.whole,
        default=0,
        metavar="N",
        help="requests before the measurement (default: %(default)s)",
    )
    add(
        "--cancel-rate",
        type=values.share,
        default=0.0,
        metavar="SHARE",
        help="share of the requests that are given up after 1 to 16 pieces (default: %(default)g)",
    )
    add("--seed", type=values.whole, default=0, metavar="N", help="of all that is random here")
    add("--random-input-len", type=values.count, metavar="N", help="prompts of N random words")
    add(
        "--random-output-len",
        type=values.count,
        metavar="N",
        help=f"tokens of each answer to random words (default: {RANDOM_OUTPUT_LEN})",
    )
    add(
        "--random-prefix-len",
        type=values.whole,
        default=0,
        metavar="N",
        help="random words with which all prompts begin (default: %(default)s)",
    )


def _add_measures(parser: argparse.ArgumentParser) -> None:
    """Add the options about the figures of a run and their files."""
    add = parser.add_argument_group("figures").add_argument
    add(
        "--goodput",
        nargs="+",
        action="extend",
        type=values.goal,
        default=[],
        metavar="NAME:MS",
        help="count the answers that reach goals, such as ttft:200 tpot:20 e2el:3000",
    )
    add(
        "--metric-percentiles",
        type=values.percents,
        default=(99.0,),
        metavar="P,P",
        help="percentiles in addition to the median (default: 99)",
    )
    add(
        "--versus",
        type=values.url,
        metavar="URL",
        help="send the same requests, headers and key to a second server in turns, "
        "and compare the two",
    )
    add("--versus-backend", choices=BACKENDS, help="its kind (default: that of --backend)")
    add(
        "--versus-model",
        metavar="MODEL",
        help="its model (default: --model if both servers are of one kind, else as for --model)",
    )
    add(
        "--plot", type=values.picture, metavar="FILE.svg", help="draw latencies and speed over time"
    )
    add("--report", type=Path, metavar="FILE", help="write the figures as JSON")


def _add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how the server is reached."""
    add = parser.add_argument_group("connection").add_argument
    add(
        "--backend",
        choices=BACKENDS,
        default="triton",
        help="triton: Triton's gRPC; openai: vLLM's own server, which needs aiohttp and gets the "
        "key in OPENAI_API_KEY (default: %(default)s)",
    )
    add(
        "--header",
        nargs="+",
        action="extend",
        type=values.header,
        default=[],
        metavar="KEY=VALUE",
        help="send these headers with each request",
    )
    add("--ssl", action="store_true", help="use TLS")
    add(
        "--root-certificates",
        type=values.pem,
        metavar="FILE",
        help="PEM file (default: the system's)",
    )
    add("--private-key", type=values.pem, metavar="FILE", help="PEM file")
    add("--certificate-chain", type=values.pem, metavar="FILE", help="PEM file")
    add(
        "--wait-ready",
        type=values.seconds,
        default=0.0,
        metavar="SECONDS",
        help="wait so long for server and model",
    )
    add(
        "--reconnect",
        type=values.seconds,
        default=0.0,
        metavar="SECONDS",
        help="after a lost connection, wait so long for the server before the next request",
    )
