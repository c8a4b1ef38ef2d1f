"""Mistakes on the command line that argparse does not see, and what the user likely meant.

It uses only the standard library, like the parsers.
"""

import argparse
import contextlib
import re
from pathlib import Path

from vllm_env.base.errors import UsageError

_VALUES = {
    "--vllm": "a version",
    "--vllm-commit": "a commit",
    "--vllm-wheel": "a wheel",
    "--vllm-source": "a source tree",
    "--model-repository": "a model repository",
}


def check_model_name(name: str) -> None:
    """Raise a UsageError unless a model's folder in the model repository can have this name."""
    if "/" not in name and name not in ("", ".", ".."):
        return
    cause = ""
    remedy = "Give a name without slashes."
    # It may be the path of a model's folder, or a model's name in the hub, such as ORG/NAME.
    path = Path(name)
    is_model = False
    # No file has a name of 300 letters.
    with contextlib.suppress(OSError):
        is_model = (path / "config.pbtxt").is_file()
    if is_model:
        remedy = f"Write --model-repository {path.parent} --model {path.name}."
    elif path.name not in ("", ".", ".."):
        cause = "--model names the model's folder in the model repository, not weights."
        remedy = (
            f'Omit --model, and name the weights after the build: "model": "{name}" '
            "in model_repository/vllm/vllm_engine_args.json."
        )
    raise UsageError(f"--model {name!r} is not a model's name.", cause=cause, remedy=remedy)


def refuse_empty(arguments: list[str]) -> None:
    """Raise a UsageError if an argument or the value of an option is empty."""
    # An empty value, as of a shell variable that is not set, would count as no option at all. It is
    # an argument of its own (``--model ""``), or the rest of one (``--model=``).
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if argument and not re.fullmatch(r"--[\w-]+=", argument):
            continue
        # ``--model`` of ``--model=``, else the argument before the empty one.
        option = argument[:-1] or before
        what = f"The value of {option}" if option.startswith("--") else "An argument"
        raise UsageError(f"{what} is empty.", remedy="Give a value, or omit the option.")


def refuse_contradictions(options: argparse.Namespace) -> None:
    """Raise a UsageError if one option would make another one have no effect."""
    # Not all subcommands have these options, so they are looked up with get().
    values = vars(options)
    # The options without effect, by the option that causes this.
    unused: dict[str, tuple[str, ...]] = {}
    if values.get("no_smoke_run"):
        unused["--no-smoke-run"] = ("smoke_model",)
    if values.get("stub") == "prebuilt":
        unused["--stub prebuilt"] = ("triton_git_url", "boost_url", "jobs")
    for option, names in unused.items():
        for name in filter(values.get, names):
            raise UsageError(
                f"--{name.replace('_', '-')} has no effect with {option}.",
                remedy="Omit one of them.",
            )


def option_for(word: str) -> str:
    """Return the option of the build for which a word is likely the value, or an empty string."""
    path = Path(word)
    if path.suffix == ".whl":
        return "--vllm-wheel"
    if re.fullmatch(r"v?\d+(\.\w+)+", word):
        return "--vllm"
    if re.fullmatch(r"[0-9a-f]{7,40}", word):
        return "--vllm-commit"
    # No file has a name of 300 letters.
    with contextlib.suppress(OSError):
        if (path / "vllm" / "__init__.py").is_file():
            return "--vllm-source"
        if any(path.glob("*/config.pbtxt")):
            return "--model-repository"
    return ""


def as_value_of(option: str, word: str) -> str:
    """Return a remedy: the option with the value that was given without it."""
    return f"For {_VALUES[option]}: {option} {word}."
