"""The parsers of the command line.

They use only the standard library, because ``--help`` must work before any tool is installed.
"""

import argparse
import difflib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from vllm_env import __version__
from vllm_env.base.errors import UsageError, meant
from vllm_env.layout import NAMES

from .mistakes import check_model_name, option_for, refuse_contradictions, refuse_empty

# argparse fills the lines of a description again, so it may have line breaks.
_DESCRIPTION = """\
Pins a vLLM, packs it with conda-pack, adds the stub that fits, and places both in a Triton model
repository that stock tritonserver loads. Without an argument it builds the default profile of
env/vllm_env.toml and proves it with a smoke run.
"""
# The parser names the subcommands itself: their table is in commands.py, which needs the tools.
_EPILOG = """\
Subcommands: build (the default), adopt, doctor, verify, inspect, unpack, wheelhouse, clean.
Each has --help.
"""
_REPOSITORY = "default: model_repository"
_ADOPTS = """\
Makes a model in the model repository from SOURCE, a model folder of Triton's own vLLM backend.
SOURCE is only read, and keeps the weights.
"""
_FILLS = """\
Fills DIR with all that a build with the same options downloads, for --offline --wheelhouse DIR.
The build's other options are accepted, and change nothing here.
"""
# The options of the build that decide about no download, by destination.
_NOT_FOR_WHEELHOUSE = (
    "keep", "triton_git_url", "boost_url", "jobs", "layout", "model_repository", "model",
    "count", "smoke_run", "no_smoke_run", "smoke_model", "warm",
)  # fmt: skip
_UNPACKS = """\
Makes the whole environment of a built model in DIR, which must be missing or empty. It is the same
for all layouts, and works in any place: for the workers of Ray, for example.
"""
_CLEANS = """\
Frees what killed builds and dead servers left behind, and the cache. Running servers keep theirs.
"""


class CommandParser(argparse.ArgumentParser):
    """Turn argparse's usage errors into ours, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a UsageError; for an unknown option, suggest another."""
        remedy = f"See {self.prog} --help."
        # argparse has no exception of its own for this, only the message.
        if unknown := re.match(r"unrecognized arguments: (--[\w-]+|\S+)", message):
            word = unknown[1]
            options = self._option_string_actions
            option = option_for(word)
            if option in options:
                remedy = f"Did you mean {option} {word}? {remedy}"
            for similar in difflib.get_close_matches(word, options, n=1):
                remedy = f"Did you mean {similar}? {remedy}"
        raise UsageError(f"{message[:1].upper()}{message[1:]}.", remedy=remedy)

    def set_help(self, helps: dict[str, str]) -> None:
        """Replace the help of options, by destination."""
        for action in self._actions:
            action.help = helps.get(action.dest, action.help)


def parse(arguments: list[str]) -> tuple[str, argparse.Namespace]:
    """Return the subcommand and its options; ``--help`` and ``--version`` end the program.

    Raises:
        UsageError: an option or subcommand is wrong; the remedy names a similar one.
    """
    refuse_empty(arguments)
    # Only a first word can be a subcommand. Words after it are for the options.
    name, *rest = arguments or ["build"]
    if name == "help":
        # Also `help verify`.
        name, *_ = *(word for word in rest if not word.startswith("-")), "build"
        rest = ["--help"]
    if name.startswith("-"):
        name, rest = "build", arguments
    if name not in _PARSERS:
        option = option_for(name)
        remedy = f"Did you mean {option} {name}?" if option else meant(name, list(_PARSERS))
        raise UsageError(f"Unknown subcommand {name!r}.", remedy=remedy)
    options = _PARSERS[name]().parse_args(rest)
    # Without --model, adopt takes the name of SOURCE.
    if "model" in options and options.model:
        check_model_name(options.model)
    refuse_contradictions(options)
    return name, options


def build_parser() -> CommandParser:
    """Return the parser of the build, the default subcommand."""
    # Without abbreviations: a script with --quie must not change its meaning with a new option.
    parser = CommandParser(
        prog="gen_vllm_env.sh", allow_abbrev=False, description=_DESCRIPTION, epilog=_EPILOG
    )
    # 1) What the environment contains
    pins = parser.add_argument_group("what to pin (one; default: the profile's)")
    pin = pins.add_mutually_exclusive_group()
    pin.add_argument("--vllm", metavar="X.Y.Z", help="a release")
    pin.add_argument(
        "--vllm-commit",
        metavar="SHA",
        help="a commit, by its full SHA: its wheel, else built from git",
    )
    pin.add_argument("--vllm-wheel", metavar="PATH|URL", help="a wheel")
    pin.add_argument(
        "--vllm-source", metavar="DIR", help="a source tree, from which a wheel is built"
    )
    spec = parser.add_argument_group("the rest of the spec")
    spec.add_argument(
        "--profile",
        choices=("cuda", "cpu"),
        help="default: cuda in a Triton container with a GPU, else cpu",
    )
    spec.add_argument("--python", metavar="X.Y", help="Python of the environment")
    # ``with`` is a keyword of Python, so the destination has another name.
    spec.add_argument(
        "--with",
        dest="packages",
        metavar="PACKAGE",
        action="append",
        default=[],
        help="a further package (repeatable)",
    )
    _add_path(spec, "--spec", "FILE", "another spec than env/vllm_env.toml")
    spec.add_argument(
        "--distribution", metavar="NAME", help="the name under which the registry has vLLM"
    )
    spec.add_argument("--wheel-index", metavar="URL", help="base of the per-commit wheel index")
    spec.add_argument("--git-url", metavar="URL", help="git repository for --vllm-commit")
    spec.add_argument(
        "--keep",
        metavar="RULE",
        action="append",
        default=[],
        help="do not omit what RULE names (repeatable)",
    )
    # 2) What loads it
    triton = parser.add_argument_group("Triton and the stub")
    server = triton.add_mutually_exclusive_group()
    _add_path(
        server,
        "--triton-root",
        "DIR",
        "default: /opt/tritonserver, else .triton/, provisioned from a wheel",
    )
    server.add_argument(
        "--triton-release",
        metavar="YY.MM",
        help="build for this release, 24.11 or newer, which is not on this machine",
    )
    triton.add_argument(
        "--stub",
        choices=("auto", "prebuilt", "source"),
        default="auto",
        help="where the stub comes from (default: auto)",
    )
    triton.add_argument(
        "--triton-git-url",
        metavar="URL",
        help="git organisation with python_backend, for --stub source",
    )
    triton.add_argument("--boost-url", metavar="URL", help="where --stub source fetches Boost")
    triton.add_argument(
        "--jobs",
        metavar="N",
        type=_count,
        default=0,
        help="compilers at once for --stub source (default: one a core)",
    )
    # 3) Where it goes
    place = parser.add_argument_group("where and how to place it")
    place.add_argument(
        "--layout",
        choices=NAMES,
        default="parts",
        help="parts (default), which the first start unpacks on all cores; archive, one file; "
        "or directory, unpacked",
    )
    _add_path(place, "--model-repository", "DIR", _REPOSITORY)
    place.add_argument(
        "--model", metavar="NAME", default="vllm", help="the model's folder in it (default: vllm)"
    )
    place.add_argument(
        "--count",
        metavar="N",
        type=_positive,
        default=0,
        help="front ends of the engine, in config.pbtxt (default: what it has; in a new one 2 with "
        "the cuda profile, else 1)",
    )
    lock = parser.add_argument_group("lock")
    use = lock.add_mutually_exclusive_group()
    _add_flag(use, "--locked", "use the lock as it is, or fail")
    _add_flag(use, "--upgrade", "resolve again and write the lock next to the spec")
    _add_path(lock, "--save", "FILE", "write this pin's spec to FILE (.toml), its lock next to it")
    # 4) How this run behaves
    run = parser.add_argument_group("the run")
    _add_flag(
        run,
        "--dry-run",
        "build nothing and write only to .tools/; "
        "say what would be done, the bytes to fetch and the space",
    )
    smoke = run.add_mutually_exclusive_group()
    _add_flag(smoke, "--smoke-run", "serve and query the result also if nothing has changed")
    _add_flag(smoke, "--no-smoke-run", "neither serve nor query the result")
    run.add_argument(
        "--smoke-model",
        metavar="MODEL",
        default="",
        help="serve this model in the smoke run, not the stand-in",
    )
    _add_flag(
        run,
        "--warm",
        "load the model once with its own engine arguments and keep the caches that vLLM fills",
    )
    _add_common(parser)
    parser.add_argument("--version", action="version", version=f"vllm-env {__version__}")
    return parser


def _add_flag(group: argparse._ActionsContainer, option: str, meaning: str) -> None:
    group.add_argument(option, action="store_true", help=meaning)


def _add_path(group: argparse._ActionsContainer, option: str, metavar: str, meaning: str) -> None:
    group.add_argument(option, metavar=metavar, type=Path, help=meaning)


def _count(text: str) -> int:
    # int() takes "-1" and "1_000", too.
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def _positive(text: str) -> int:
    count = _count(text)
    if not count:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return count


def _add_common(parser: CommandParser) -> None:
    # Every subcommand takes these: the bootstrap, which all pass through, may have to fetch tools.
    network = parser.add_argument_group("network")
    _add_flag(network, "--offline", "touch no network")
    _add_path(network, "--wheelhouse", "DIR", "take wheels, tools and Triton from this folder only")
    output = parser.add_argument_group("output")
    _add_flag(output, "--json", "the result as JSON on stdout")
    _add_flag(output, "--quiet", "no progress")
    _add_flag(output, "--verbose", "details, and a traceback on failure")


def _named(name: str, description: str) -> CommandParser:
    parser = CommandParser(
        prog=f"gen_vllm_env.sh {name}", allow_abbrev=False, description=description
    )
    _add_common(parser)
    return parser


def _of_model(name: str, description: str) -> CommandParser:
    parser = _named(name, description)
    _add_path(parser, "--model-repository", "DIR", _REPOSITORY)
    parser.add_argument("--model", metavar="NAME", default="vllm", help="default: vllm")
    return parser


def _clean() -> CommandParser:
    parser = _named("clean", _CLEANS)
    _add_flag(parser, "--dry-run", "list it only")
    _add_flag(parser, "--keep-cache", "leave the cache as it is")
    return parser


def _unpack() -> CommandParser:
    parser = _of_model("unpack", _UNPACKS)
    parser.add_argument("folder", metavar="DIR", type=Path)
    return parser


def _doctor() -> CommandParser:
    parser = _named("doctor", "Says what this machine can do.")
    _add_path(parser, "--triton-root", "DIR", "default: as for the build")
    parser.add_argument("--profile", choices=("cuda", "cpu"), help="default: as for the build")
    return parser


def _like_build(name: str, folder: str, description: str) -> CommandParser:
    parser = build_parser()
    parser.prog = f"gen_vllm_env.sh {name}"
    parser.epilog = ""
    parser.description = description
    parser.add_argument("folder", metavar=folder, type=Path)
    return parser


def _adopt() -> CommandParser:
    parser = _like_build("adopt", "SOURCE", _ADOPTS)
    parser.set_help(
        {
            "model": "default: the name of SOURCE",
            "count": argparse.SUPPRESS,
            "dry_run": "show what would be made of SOURCE, and build nothing",
        }
    )
    # adopt takes the name of SOURCE if the user gave none, so "vllm" cannot be the default.
    parser.set_defaults(model="")
    return parser


def _wheelhouse() -> CommandParser:
    parser = _like_build("wheelhouse", "DIR", _FILLS)
    parser.set_help(dict.fromkeys(_NOT_FOR_WHEELHOUSE, argparse.SUPPRESS))
    # argparse of Python 3.11 fails to write it if both of two exclusive options are hidden.
    parser.usage = "%(prog)s [OPTION ...] DIR"
    return parser


_PARSERS: dict[str, Callable[[], CommandParser]] = {
    "adopt": _adopt,
    "doctor": _doctor,
    "inspect": partial(_of_model, "inspect", "Prints what a built model holds."),
    "verify": partial(
        _of_model, "verify", "Checks a built repository as the build does before it publishes."
    ),
    "unpack": _unpack,
    "clean": _clean,
    "wheelhouse": _wheelhouse,
    "build": build_parser,
}
