"""Read the file with the prompts, and write the file with the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

SEPARATOR = "\n=========\n\n"


class ClientError(Exception):
    """The run cannot go on. The message names the input, the reason and the remedy."""


@dataclass(frozen=True)
class Prompt:
    """One prompt to send; ``request_id`` is unique within a run and counts from ``--offset``."""

    request_id: int
    text: str


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt; ``error`` is empty if the request succeeded."""

    prompt: Prompt
    text: str
    error: str = ""


def load_prompts(path: Path) -> tuple[str, ...]:
    """Return the lines of a UTF-8 file in their order, without line ends and blank lines.

    Raises:
        ClientError: the file cannot be read, is not UTF-8, or has no prompt.
    """
    try:
        # -sig: some editors write a byte order mark, which does not belong to the first prompt.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ClientError(
            f"cannot read the prompts in {path}: {reason}; "
            "name a text file with one prompt a line by --input-prompts"
        ) from error
    except UnicodeDecodeError as error:
        raise ClientError(
            f"cannot read the prompts in {path}: {error}; save the file as UTF-8"
        ) from error
    # splitlines() would also split at form feeds and at Unicode's separators, which a prompt may
    # contain.
    lines = [line.rstrip("\r") for line in text.split("\n")]
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise ClientError(f"{path} holds no prompt; write one prompt a line")
    return prompts


def number_prompts(lines: Sequence[str], *, iterations: int, offset: int) -> list[Prompt]:
    """Return the prompts ``iterations`` times, with numbers that count up from ``offset``."""
    return [Prompt(number, text) for number, text in enumerate([*lines] * iterations, offset)]


def check_writable(path: Path) -> None:
    """Check that ``path`` can be written, and leave it as it is.

    Raises:
        ClientError: the file cannot be written.
    """
    existed = path.exists()
    try:
        # Mode "a" keeps the results of an earlier run, in case this one fails.
        path.open("a", encoding="utf-8").close()
        if not existed:
            path.unlink()  # otherwise a run that fails would leave an empty file
    except OSError as error:
        raise _unwritable(path, error) from error


def store_results(path: Path, answers: Iterable[Answer]) -> None:
    """Write the text of each answer, followed by the separator.

    Raises:
        ClientError: the file cannot be written.
    """
    try:
        # The same bytes on every system: Windows would write "\r\n".
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
