"""The command line of the client."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.record import REQUEST_TIMES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# An IPv6 address is in brackets, because it contains colons itself.
_HOST_AND_PORT = re.compile(r"(?P<host>[^\s/:]+|\[[0-9a-fA-F:.%]+\]):(?P<port>\d{1,5})")
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


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        prog="client.py",
        description="Asks a vLLM model served by Triton to complete prompts, and measures it.",
    )
    _add_sample(parser)
    _add_load(parser)
    _add_measures(parser)
    _add_connection(parser)
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, by default of ``sys.argv``.

    Raises:
        SystemExit: an option is wrong, or two do not fit together. The exit status is 2.
    """
    parser = build_parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    options.is_load_test = any(
        getattr(options, name) != parser.get_default(name) for name in _LOAD_TEST
    )
    options.goodput = dict(options.goodput)
    options.header = dict(options.header)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    given = options.input_prompts is not None or options.iterations is not None
    made_up = options.random_input_len is not None
    goals = {name for name, _ in options.goodput}
    certificates = (options.root_certificates, options.private_key, options.certificate_chain)
    # Whether it is the case, and what to do about it.
    conflicts = (
        (
            options.iterations is not None and options.num_prompts is not None,
            "give either --iterations or --num-prompts",
        ),
        (
            not made_up and (options.random_output_len or options.random_prefix_len),
            "--random-output-len and --random-prefix-len need --random-input-len",
        ),
        (made_up and given, "--random-input-len makes up the prompts: give --num-prompts instead"),
        (
            options.cancel_rate and not options.streaming_mode,
            "--cancel-rate needs --streaming-mode: it counts the pieces of an answer",
        ),
        (
            options.versus and options.duration,
            "--versus compares equal numbers of requests: give --num-prompts instead",
        ),
        (
            options.burstiness != 1 and options.request_rate == math.inf,
            "--burstiness needs --request-rate",
        ),
        (
            goals & {"ttft", "tpot"} and not options.streaming_mode,
            "goals for ttft and tpot need --streaming-mode: a whole answer has neither",
        ),
        (
            (options.private_key is None) != (options.certificate_chain is None),
            "give --private-key and --certificate-chain together",
        ),
        (any(certificates) and not options.ssl, "certificates need --ssl"),
    )
    for is_so, message in conflicts:
        if is_so:
            parser.error(message)


def request_count(options: argparse.Namespace, prompts: int | None) -> int | None:
    """Return the number of requests; None if only the duration limits it.

    Args:
        options: the options.
        prompts: number of prompts in the file; None if they are made up.
    """
    count: int | None = options.num_prompts
    if count is None and prompts is not None and (options.iterations or not options.duration):
        count = prompts * (options.iterations or 1)
    if count is None and not options.duration:
        count = _RANDOM_PROMPTS
    if options.duration and options.request_rate != math.inf:
        due = max(1, round(options.duration * options.request_rate))
        count = due if count is None else min(due, count)
    return count


def _add_sample(parser: argparse.ArgumentParser) -> None:
    # The names and the letters are those of the client in Triton's vLLM tutorial.
    add = parser.add_argument_group("requests").add_argument
    add("-m", "--model", default="vllm", help="name of the model (default: %(default)s)")
    add("-v", "--verbose", action="store_true", help="print every answer")
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
    add("--iterations", type=_count, metavar="N", help="times through the prompts (default: 1)")
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
        type=_whole,
        default=0,
        metavar="N",
        help="PASS if at most so many requests failed (default: %(default)s)",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load", "names as in `vllm bench serve`").add_argument
    add(
        "--max-concurrency",
        type=_count,
        metavar="N",
        help=f"most requests in flight (default: {MAX_CONCURRENCY}, with --request-rate no limit)",
    )
    add(
        "--request-rate",
        type=_positive,
        default=math.inf,
        metavar="R",
        help="requests due per second, whether earlier ones have ended or not "
        "(default: inf, the next one when an earlier one has ended)",
    )
    add(
        "--burstiness",
        type=_positive,
        default=1.0,
        metavar="B",
        help="1: Poisson arrivals; less: bursts; more: even (default: %(default)g)",
    )
    add("--duration", type=_seconds, metavar="SECONDS", help="no request starts later")
    add("--num-prompts", type=_count, metavar="N", help="number of requests")
    add(
        "--num-warmups",
        type=_whole,
        default=0,
        metavar="N",
        help="requests before the measurement (default: %(default)s)",
    )
    add(
        "--cancel-rate",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="share of the requests that are given up after 1 to 16 pieces (default: %(default)g)",
    )
    add("--seed", type=_whole, default=0, metavar="N", help="of all that is random here")
    add("--random-input-len", type=_count, metavar="N", help="prompts of N random words")
    add(
        "--random-output-len",
        type=_count,
        metavar="N",
        help=f"tokens of each answer to random words (default: {RANDOM_OUTPUT_LEN})",
    )
    add(
        "--random-prefix-len",
        type=_whole,
        default=0,
        metavar="N",
        help="random words with which all prompts begin (default: %(default)s)",
    )


def _add_measures(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("figures").add_argument
    add(
        "--goodput",
        nargs="+",
        action="extend",
        type=_goal,
        default=[],
        metavar="NAME:MS",
        help="count the answers that reach goals, such as ttft:200 tpot:20 e2el:3000",
    )
    add(
        "--metric-percentiles",
        type=_percents,
        default=(99.0,),
        metavar="P,P",
        help="percentiles in addition to the median (default: 99)",
    )
    add(
        "--versus",
        type=_url,
        metavar="URL",
        help="send the same requests to a second server in turns, and compare the two",
    )
    add("--plot", type=_picture, metavar="FILE.svg", help="draw latencies and speed over time")
    add("--report", type=Path, metavar="FILE", help="write the figures as JSON")


def _add_connection(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("connection").add_argument
    add(
        "--header",
        nargs="+",
        action="extend",
        type=_header,
        default=[],
        metavar="KEY=VALUE",
        help="send these headers with each request",
    )
    add("--ssl", action="store_true", help="use TLS")
    add("--root-certificates", type=Path, metavar="FILE", help="PEM file (default: the system's)")
    add("--private-key", type=Path, metavar="FILE", help="PEM file")
    add("--certificate-chain", type=Path, metavar="FILE", help="PEM file")
    add(
        "--wait-ready",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="wait so long for server and model",
    )
    add(
        "--reconnect",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="after a lost connection, wait so long for the server before the next request",
    )


def _url(text: str) -> str:
    match = _HOST_AND_PORT.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not host:port; give for example localhost:8001, without http://"
        )
    return text


def _picture(text: str) -> Path:
    if not text.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} is not an SVG file; give for example run.svg")
    return Path(text)


def _header(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    # gRPC's metadata has lower-case keys of these characters only, and ASCII values.
    valid = re.fullmatch(r"[0-9A-Za-z_.-]+", key) and re.fullmatch(r"[ -~]*", value)
    # gRPC takes bytes for keys that end so.
    if not equals or not valid or key.lower().endswith("-bin"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a header; give for example authorization=secret"
        )
    return key.lower(), value


def _goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    milliseconds = _number(limit)
    if name not in REQUEST_TIMES or milliseconds is None or not 0 <= milliseconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a goal; give for example ttft:200 (ms), of {', '.join(REQUEST_TIMES)}"
        )
    return name, milliseconds


def _percents(text: str) -> tuple[float, ...]:
    found = [_number(part) for part in text.split(",")]
    numbers = tuple(number for number in found if number is not None and 0 < number <= 100)
    if len(numbers) != len(found):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of percentiles; give for example 90,99"
        )
    return numbers


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    # "nan" is a float, too. It fails every comparison.
    return None if math.isnan(number) else number


def _whole_number(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        # isdecimal() is also true for digits of other scripts, which int() takes.
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return convert


_whole = _whole_number(0)
_count = _whole_number(1)


def _positive(text: str) -> float:
    number = _number(text)
    if number is None or number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def _seconds(text: str) -> float:
    number = _number(text)
    if number is None or not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return number


def _share(text: str) -> float:
    number = _number(text)
    if number is None or not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return number
