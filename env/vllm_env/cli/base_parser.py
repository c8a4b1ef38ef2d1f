"""What the parsers of all subcommands share: errors, help, and kinds of options.

It uses only the standard library, like the parsers.
"""

import argparse
import difflib
import re
from collections.abc import Container
from pathlib import Path
from typing import NoReturn

from vllm_env.base.errors import UsageError

from .mistakes import as_value_of, option_for

# Options less similar than this are not what the user meant: --json for --jobs.
_MIN_SIMILARITY = 0.7
# What --help shows of the build's many options, by destination.
_USUAL_OPTIONS = (
    "vllm", "vllm_commit", "vllm_wheel", "vllm_source", "profile", "triton_release",
    "model_repository", "dry_run", "help", "version",
)  # fmt: skip


class CommandParser(argparse.ArgumentParser):
    """Turn argparse's usage errors into ours, so that all errors look alike."""

    options_of_build: Container[str] = ()
    """The options that a subcommand without them knows as the build's."""

    @property
    def options(self) -> Container[str]:
        """Return the names of all options."""
        return self._option_string_actions

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a UsageError; for an unknown option, suggest another."""
        known = self._option_string_actions
        remedy = f"See {self.prog} {'--help-all' if '--help-all' in known else '--help'}."
        # argparse has no exception of its own for this, only the message.
        if unknown := re.match(r"unrecognized arguments: (--[\w-]+|\S+)", message):
            word = unknown[1]
            # A value that lacks its option: a version, a path of a wheel and so on.
            option = option_for(word)
            if option in known:
                remedy = f"{as_value_of(option, word)} {remedy}"
            elif word in self.options_of_build:
                remedy = f"It is an option of the build. {remedy}"
            else:
                for similar in difflib.get_close_matches(word, known, n=1, cutoff=_MIN_SIMILARITY):
                    remedy = f"Did you mean {similar}? {remedy}"
        raise UsageError(f"{message[:1].upper()}{message[1:]}.", remedy=remedy)

    def set_help(self, helps: dict[str, str]) -> None:
        """Replace the help of options, by destination."""
        for action in self._actions:
            action.help = helps.get(action.dest, action.help)


class UsualHelp(argparse.Action):
    """Print the help without the options that few people need; ``--help-all`` has them."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        """Print it and end the program."""
        # The program ends here, so the parser need not keep the help that this hides.
        for action in parser._actions:  # noqa: SLF001 - argparse has no public way
            if action.option_strings and action.dest not in _USUAL_OPTIONS:
                action.help = argparse.SUPPRESS
        parser.print_help()
        parser.exit()


def add_flag(group: argparse._ActionsContainer, option: str, meaning: str) -> None:
    """Add an option without a value."""
    group.add_argument(option, action="store_true", help=meaning)


def add_path(group: argparse._ActionsContainer, option: str, metavar: str, meaning: str) -> None:
    """Add an option whose value is a path."""
    group.add_argument(option, metavar=metavar, type=Path, help=meaning)


def count(text: str) -> int:
    """Return the number of 0 or more that a text is."""
    # int() takes "-1" and "1_000", too.
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def positive(text: str) -> int:
    """Return the number of 1 or more that a text is."""
    if not count(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)
