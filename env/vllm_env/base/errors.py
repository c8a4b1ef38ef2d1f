"""The errors of the packager.

    VllmEnvError            exit 1: a build or a check failed
    ├── UsageError          exit 2: the command line or the spec is wrong
    └── CommandError        exit 1: a program that a stage ran failed

Each error has three texts: ``what`` failed, the likely ``cause`` and the next step (``remedy``).
"""

import difflib
from collections.abc import Iterable

from .command import COMMAND

SPACE_REMEDY = (
    f"Free some space ({COMMAND} clean), "
    "or point VLLM_ENV_CACHE and TMPDIR to a larger file system."
)
REBUILD_REMEDY = f"Build it again: {COMMAND}, with the options of its build."


class VllmEnvError(Exception):
    """A build or a check failed. The command line ends with ``exit_code``."""

    exit_code = 1

    def __init__(self, what: str, *, cause: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.cause, self.remedy) if part)

    def lines(self) -> list[str]:
        """Return the three texts as the user reads them, one per line."""
        # Names of equal length, so that the texts begin in one column.
        parts = {"error": self.what, "  why": self.cause, "  fix": self.remedy}
        return [f"{name}: {part}" for name, part in parts.items() if part]


class UsageError(VllmEnvError):
    """An option, an argument or the spec file is wrong. No work has begun."""

    # argparse ends with the same code.
    exit_code = 2


class CommandError(VllmEnvError):
    """A program failed or did not start; ``tail`` holds the last lines that it printed."""

    def __init__(self, what: str, *, tail: str = "", cause: str = "", remedy: str = "") -> None:
        super().__init__(what, cause=cause, remedy=remedy)
        self.tail = tail

    def lines(self) -> list[str]:
        """Return the last lines of the program, then the three texts."""
        return [*self.tail.splitlines(), *super().lines()]


def meant(word: str, known: Iterable[str]) -> str:
    """Return a remedy: the known word that is most similar to ``word``, else all known words."""
    words = list(known)
    similar = difflib.get_close_matches(word, words, n=1)
    return f"Did you mean {similar[0]}?" if similar else f"There are: {', '.join(words)}."
