"""The values of the command line's options: each function takes the text and returns the value.

All raise ``argparse.ArgumentTypeError`` with a valid example.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.record import REQUEST_TIMES

if TYPE_CHECKING:
    from collections.abc import Callable

# Labels of at most 63 characters; a name in a container network may have an underscore. An IPv6
# address is in brackets, because it contains colons itself.
_HOST_AND_PORT = re.compile(
    r"([0-9A-Za-z_-]{1,63}(\.[0-9A-Za-z_-]{1,63})*\.?|\[[0-9a-fA-F:.%]+\]):(?P<port>[0-9]{1,5})"
)


def url(text: str) -> str:
    """Return ``host:port``; an IPv6 address is in brackets."""
    match = _HOST_AND_PORT.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not host:port; give for example localhost:8001, without http://"
        )
    return text


def pem(text: str) -> Path:
    """Return the path of a file that can be read."""
    try:
        Path(text).open("rb").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot read {text}: {error.strerror}; name a PEM file"
        ) from error
    return Path(text)


def picture(text: str) -> Path:
    """Return the path of an SVG file."""
    if not text.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} is not an SVG file; give for example run.svg")
    return Path(text)


def header(text: str) -> tuple[str, str]:
    """Return key and value of ``KEY=VALUE``. The key is in lower case."""
    key, equals, value = text.partition("=")
    # gRPC's metadata has lower-case keys of these characters only, and ASCII values.
    valid = re.fullmatch(r"[0-9A-Za-z_.-]+", key) and re.fullmatch(r"[ -~]*", value)
    # gRPC takes bytes for keys that end so.
    if not equals or not valid or key.lower().endswith("-bin"):
        # The value may be a secret.
        shown = f"{key}=…" if equals else "a text without ="
        raise argparse.ArgumentTypeError(
            f"{shown} is not a header; give for example authorization=secret"
        )
    return key.lower(), value


def goal(text: str) -> tuple[str, float]:
    """Return the name and the limit (ms) of ``NAME:MS``. The name is one of ``REQUEST_TIMES``."""
    name, _, limit = text.partition(":")
    milliseconds = _number(limit)
    if name not in REQUEST_TIMES or milliseconds is None or not 0 <= milliseconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a goal; give for example ttft:200 (ms), of {', '.join(REQUEST_TIMES)}"
        )
    return name, milliseconds


def percents(text: str) -> tuple[float, ...]:
    """Return the percentiles of a list with commas: above 0, at most 100."""
    found = [_number(part) for part in text.split(",")]
    numbers = tuple(number for number in found if number is not None and 0 < number <= 100)
    if len(numbers) != len(found):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of percentiles; give for example 90,99"
        )
    return numbers


def _number(text: str) -> float | None:
    """Return a number, which may be infinite; None if the text is no number."""
    try:
        number = float(text)
    except ValueError:
        return None
    # "nan" is a float, too. It fails every comparison.
    return None if math.isnan(number) else number


def _whole_number(least: int) -> Callable[[str], int]:
    """Return a function that reads a whole number of at least ``least``."""

    def convert(text: str) -> int:
        # isdecimal() is also true for digits of other scripts, which int() takes.
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return convert


whole = _whole_number(0)
count = _whole_number(1)


def positive(text: str) -> float:
    """Return a positive number, which may be infinite."""
    number = _number(text)
    if number is None or number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def seconds(text: str) -> float:
    """Return a positive number of seconds."""
    number = _number(text)
    if number is None or not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return number


def share(text: str) -> float:
    """Return a share from 0 to 1."""
    number = _number(text)
    if number is None or not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return number
