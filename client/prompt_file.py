"""Prompts in, results out: the two text files of the client, and the values that travel between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

SEPARATOR = "\n=========\n\n"


class ClientError(Exception):
    """The run cannot go on; the message names the input, the reason and the remedy."""


@dataclass(frozen=True)
class Prompt:
    """One request to be: ``request_id`` is unique within a run and counts from ``--offset``."""

    request_id: int
    text: str


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt; ``error`` is empty when the request succeeded."""

    prompt: Prompt
    text: str
    error: str = ""


def load_prompts(path: Path) -> tuple[str, ...]:
    """Return the lines of a UTF-8 file, in order, without line ends and without blank lines.

    Raises:
        ClientError: the file cannot be read, is not UTF-8, or holds no prompt.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ClientError(
            f"cannot read the prompts in {path}: {reason}; name a text file, one prompt a line, with --input-prompts"
        ) from error
    except UnicodeDecodeError as error:
        raise ClientError(
            f"cannot read the prompts in {path}: {error}; save the file as UTF-8"
        ) from error
    # not splitlines(): it also splits at form feeds and Unicode separators, which a prompt may contain
    lines = tuple(line.rstrip("\r") for line in text.split("\n"))
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise ClientError(f"{path} holds no prompt; write one prompt a line")
    return prompts


def number_prompts(lines: Sequence[str], *, iterations: int, offset: int) -> list[Prompt]:
    """Repeat the prompts ``iterations`` times; ids count up from ``offset`` over all of them."""
    return [
        Prompt(offset + number, text)
        for number, text in enumerate(text for _ in range(iterations) for text in lines)
    ]


def check_writable(path: Path) -> None:
    """Raise ClientError if ``path`` cannot be written; what it holds stays until the results are there."""
    existed = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if not existed:
            path.unlink()  # no empty file stays when the run fails before there are results
    except OSError as error:
        raise _unwritable(path, error) from error


def store_results(path: Path, answers: Iterable[Answer]) -> None:
    """Write each answer's text and the separator, in the order given.

    Raises:
        ClientError: the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8", newline="\n") as file:
            for answer in answers:
                file.write(f"{answer.text}\n{SEPARATOR}")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ClientError:
    reason = error.strerror or str(error)
    return ClientError(
        f"cannot write the results to {path}: {reason}; name another file with --results-file"
    )
