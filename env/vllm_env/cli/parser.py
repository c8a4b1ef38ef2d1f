"""The parsers of the command line.

They use only the standard library, because ``--help`` must work before any tool is installed.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from vllm_env import __version__
from vllm_env.base.command import PROGRAM
from vllm_env.base.errors import UsageError, meant
from vllm_env.layout import LAYOUT_NAMES

from . import descriptions
from .base_parser import CommandParser, UsualHelp, add_flag, add_path, count, positive
from .mistakes import as_value_of, check_model_name, option_for, refuse_contradictions, refuse_empty

_MODEL = "the model's folder in it (default: vllm)"
# The options of the build that decide about no download, by destination.
_NOT_FOR_WHEELHOUSE = (
    "keep", "triton_git_url", "boost_url", "jobs", "layout", "model_repository", "model",
    "count", "smoke_run", "no_smoke_run", "smoke_model", "warm",
)  # fmt: skip


def parse(arguments: list[str]) -> tuple[str, argparse.Namespace]:
    """Return the subcommand and its options; ``--help`` and ``--version`` end the program.

    Raises:
        UsageError: an option or subcommand is wrong; the remedy names a similar one.
    """
    # Only a first word can be a subcommand. Words after it are for the options.
    name, *rest = arguments or ["build"]
    if name == "help":
        # Also `help verify`.
        words = [word for word in rest if not word.startswith("-")]
        arguments = [*words[:1], "--help"]
        name, *rest = arguments
    if name == "client":
        # The client has a parser of its own.
        options = _PARSERS[name]().parse_args([])
        options.arguments = rest
        return name, options
    refuse_empty(arguments)
    make = _PARSERS.get(name)
    # Without a subcommand, it is the build. The help of this parser lists the subcommands.
    if name.startswith("-"):
        name, rest, make = "build", arguments, build_parser
    if make is None:
        option = option_for(name)
        remedy = as_value_of(option, name) if option else meant(name, list(_PARSERS))
        raise UsageError(f"Unknown subcommand {name!r}.", remedy=remedy)
    options = make().parse_args(rest)
    # adopt has an empty name here if the user gave none, and takes that of SOURCE.
    if "model" in options and options.model:
        check_model_name(options.model)
    # export and serve take several names.
    for model in vars(options).get("models") or ():
        check_model_name(model)
    refuse_contradictions(options)
    return name, options


def build_parser(name: str = "", folder: str = "") -> CommandParser:
    """Return the parser of a build, or of a subcommand that takes the options of the build.

    Args:
        name: the name of a subcommand; without it, the help names all subcommands.
        folder: what the help calls the subcommand's argument, such as ``DIR``; "" if it has none.
    """
    words = (PROGRAM, name or "[SUBCOMMAND]", "[OPTION ...]", folder)
    parser = CommandParser(
        prog=f"{PROGRAM} {name}".strip(),
        usage=" ".join(filter(None, words)),
        # Without abbreviations: a script with --quie must not change its meaning with a new option.
        allow_abbrev=False,
        add_help=False,
        description=descriptions.BUILDS,
        epilog=descriptions.EXAMPLES if name else f"{descriptions.EXAMPLES}\n{_subcommands()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # 1) Which vLLM
    pins = parser.add_argument_group("Pin")
    pin = pins.add_mutually_exclusive_group()
    pin.add_argument("--vllm", metavar="X.Y.Z", help="this release (default: the profile's)")
    pin.add_argument(
        "--vllm-commit",
        metavar="SHA",
        help="or this commit, by its full SHA: its wheel, else built from git",
    )
    pin.add_argument("--vllm-wheel", metavar="PATH|URL", help="or this wheel")
    pin.add_argument(
        "--vllm-source", metavar="DIR", help="or this source tree, from which a wheel is built"
    )
    pins.add_argument(
        "--distribution", metavar="NAME", help="the name under which the registry has vLLM"
    )
    pins.add_argument(
        "--wheel-index", metavar="URL", help="base of vLLM's index of commits and CUDA variants"
    )
    pins.add_argument("--git-url", metavar="URL", help="git repository for --vllm-commit")
    add_path(pins, "--spec", "FILE", "another spec than env/vllm_env.toml")
    use = pins.add_mutually_exclusive_group()
    add_flag(use, "--locked", "use the lock as it is, or fail")
    add_flag(use, "--upgrade", "resolve again and write the lock next to the spec")
    add_path(pins, "--save", "FILE", "write this pin's spec to FILE (.toml), its lock next to it")
    # 2) What is with it
    _add_environment(parser.add_argument_group("Environment"))
    # 3) What loads it
    triton = parser.add_argument_group("Triton")
    server = triton.add_mutually_exclusive_group()
    add_path(
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
        help="the program that runs Python models. prebuilt: Triton's own; source: compiled here; "
        "auto (default): compiled only if Triton has none for this Python",
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
        type=count,
        default=0,
        help="compilers at once for --stub source (default: one a core)",
    )
    # 4) Where it goes
    output = parser.add_argument_group("Output")
    add_path(
        output, "--model-repository", "DIR", "where the model goes (default: model_repository)"
    )
    output.add_argument("--model", metavar="NAME", default="vllm", help=_MODEL)
    output.add_argument(
        "--layout",
        choices=LAYOUT_NAMES,
        default="parts",
        help="parts (default), which the first start unpacks on all cores; archive, one file; "
        "or directory, unpacked",
    )
    output.add_argument(
        "--count",
        metavar="N",
        type=positive,
        default=0,
        help="front ends of the engine, in config.pbtxt (default: what it has; in a new one 2 with "
        "the cuda profile, else 1)",
    )
    # 5) How this run behaves
    run = parser.add_argument_group("Run")
    add_flag(
        run,
        "--dry-run",
        "build nothing and write only to .tools/; "
        "say what would be done, the bytes to fetch and the space",
    )
    smoke = run.add_mutually_exclusive_group()
    add_flag(smoke, "--smoke-run", "serve and query the result also if nothing has changed")
    add_flag(smoke, "--no-smoke-run", "neither serve nor query the result")
    run.add_argument(
        "--smoke-model",
        metavar="MODEL",
        default="",
        help="serve this model in the smoke run, not the stand-in",
    )
    add_flag(
        run,
        "--warm",
        "load the model once with its own engine arguments and keep the caches that vLLM fills",
    )
    _add_common(run)
    # Both options of the help have one destination, which must not be in the parsed options.
    unset = argparse.SUPPRESS
    run.add_argument(
        "-h", "--help", action=UsualHelp, nargs=0, default=unset, help="the usual options"
    )
    run.add_argument("--help-all", dest="help", action="help", help="all options")
    run.add_argument("--version", action="version", version=f"vllm-env {__version__}")
    _add_network(parser.add_argument_group("Network"))
    if folder:
        parser.add_argument("folder", metavar=folder, type=Path)
    return parser


def _add_environment(group: argparse._ActionsContainer) -> None:
    """Add the options that determine the environment of the pinned vLLM."""
    group.add_argument(
        "--profile",
        choices=("cuda", "cpu"),
        help="default: cuda with --cuda or in a Triton container with a GPU, else cpu",
    )
    group.add_argument(
        "--cuda",
        metavar="X.Y",
        help="for an older driver: vLLM and torch for this CUDA version, such as 12.9",
    )
    group.add_argument(
        "--platform",
        choices=("linux/amd64", "linux/arm64"),
        help="for such machines (default: for those like this one); "
        "of another kind, only wheelhouse and --dry-run",
    )
    group.add_argument("--python", metavar="X.Y", help="Python of the environment")
    # ``with`` is a keyword of Python, so the destination has another name.
    group.add_argument(
        "--with",
        dest="packages",
        metavar="PACKAGE",
        action="append",
        default=[],
        help="a further package (repeatable)",
    )
    group.add_argument(
        "--keep",
        metavar="RULE",
        action="append",
        default=[],
        help="do not omit what RULE names, such as tests (repeatable)",
    )


def _subcommands() -> str:
    """Return the help's list of subcommands, each with the first sentence of its description."""
    lines = ["Subcommands:"]
    for name, make in _PARSERS.items():
        first, _, _ = " ".join((make().description or "").split()).partition(". ")
        lines.append(f"  {name:<12} {first.removesuffix('.')}")
    return "\n".join([*lines, "  help NAME    Prints the help of one of them"])


def _add_common(group: argparse._ActionsContainer) -> None:
    add_flag(group, "--json", "the result as JSON on stdout")
    add_flag(group, "--quiet", "no progress")
    add_flag(group, "--verbose", "details, and a traceback on failure")


def _add_network(group: argparse._ActionsContainer) -> None:
    add_flag(group, "--offline", "touch no network")
    add_path(group, "--wheelhouse", "DIR", "take wheels, tools and Triton from this folder only")


def _subcommand(name: str, description: str) -> CommandParser:
    """Return the parser of a subcommand, with the options that all of them take."""
    parser = CommandParser(prog=f"{PROGRAM} {name}", allow_abbrev=False, description=description)
    parser.options_of_build = build_parser("build").options
    # Every subcommand takes them: the bootstrap, which all pass through, may have to fetch tools.
    # Of these, only doctor uses them itself.
    _add_network(parser)
    if name != "doctor":
        parser.set_help(dict.fromkeys(("offline", "wheelhouse"), argparse.SUPPRESS))
    _add_common(parser)
    return parser


def _subcommand_of_model(name: str, description: str) -> CommandParser:
    """Return the parser of a subcommand that reads one built model."""
    parser = _subcommand(name, description)
    add_path(parser, "--model-repository", "DIR", "where the model is (default: model_repository)")
    parser.add_argument("--model", metavar="NAME", default="vllm", help=_MODEL)
    return parser


def _clean_parser() -> CommandParser:
    parser = _subcommand("clean", descriptions.CLEANS)
    add_flag(parser, "--dry-run", "list it only")
    add_flag(parser, "--keep-cache", "leave the cache as it is")
    return parser


def _unpack_parser() -> CommandParser:
    parser = _subcommand_of_model("unpack", descriptions.UNPACKS)
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder for it")
    return parser


def _export_parser() -> CommandParser:
    """Return the parser of ``export``, which takes several models."""
    parser = _subcommand("export", descriptions.EXPORTS)
    parser.add_argument(
        "--oci",
        metavar="DIR",
        type=Path,
        required=True,
        help="the folder for the image, missing or empty",
    )
    add_path(
        parser, "--model-repository", "DIR", "where the models are (default: model_repository)"
    )
    parser.add_argument(
        "--model",
        dest="models",
        metavar="NAME",
        action="append",
        help="a model's folder in it (default: vllm; repeatable)",
    )
    parser.add_argument(
        "--compression",
        choices=("gzip", "zstd"),
        default="gzip",
        help="gzip (default), which everything reads; zstd is a fifth smaller",
    )
    parser.add_argument("--tag", metavar="TAG", help="the image's tag (default: vLLM's version)")
    return parser


def _doctor_parser() -> CommandParser:
    """Return the parser of ``doctor``, which takes few options of the build."""
    parser = _subcommand("doctor", "Says what this machine can do.")
    add_path(parser, "--triton-root", "DIR", "default: as for the build")
    parser.add_argument("--profile", choices=("cuda", "cpu"), help="default: as for the build")
    parser.add_argument("--cuda", metavar="X.Y", help="as for the build")
    add_flag(
        parser,
        "--audit",
        "also look up the default lock's wheels in a database of advisories (pip-audit)",
    )
    return parser


def _serve_parser() -> CommandParser:
    """Return the parser of ``serve``; ``arguments`` gets what follows two dashes."""
    parser = _subcommand("serve", descriptions.SERVES)
    add_path(
        parser, "--model-repository", "DIR", "where the models are (default: model_repository)"
    )
    parser.add_argument(
        "--model",
        dest="models",
        metavar="NAME",
        action="append",
        help="load only this model (repeatable; default: all)",
    )
    add_path(parser, "--triton-root", "DIR", "default: as for the build")
    parser.add_argument(
        "arguments", metavar="-- OPTION", nargs="*", help="options of tritonserver itself"
    )
    return parser


def _adopt_parser() -> CommandParser:
    """Return the parser of ``adopt``: the build's, with a help of its own."""
    parser = build_parser("adopt", "SOURCE")
    parser.description, parser.epilog = descriptions.ADOPTS, ""
    parser.set_help(
        {
            "folder": "the model folder to read",
            "model": "default: the name of SOURCE",
            "count": argparse.SUPPRESS,
            "dry_run": "show what would be made of SOURCE, and build nothing",
        }
    )
    # adopt takes the name of SOURCE if the user gave none, so "vllm" cannot be the default.
    parser.set_defaults(model="")
    return parser


def _wheelhouse_parser() -> CommandParser:
    """Return the parser of ``wheelhouse``: the build's; the help hides what has no effect."""
    parser = build_parser("wheelhouse", "DIR")
    parser.description, parser.epilog = descriptions.FILLS, ""
    hidden = dict.fromkeys(_NOT_FOR_WHEELHOUSE, argparse.SUPPRESS)
    parser.set_help({"folder": "the folder to fill", **hidden})
    return parser


_PARSERS: dict[str, Callable[[], CommandParser]] = {
    "build": partial(build_parser, "build"),
    "doctor": _doctor_parser,
    "verify": partial(
        _subcommand_of_model,
        "verify",
        "Checks a built model as the build does before it publishes.",
    ),
    "inspect": partial(_subcommand_of_model, "inspect", "Prints what a built model holds."),
    "serve": _serve_parser,
    "client": partial(_subcommand, "client", descriptions.ASKS),
    "adopt": _adopt_parser,
    "unpack": _unpack_parser,
    "export": _export_parser,
    "wheelhouse": _wheelhouse_parser,
    "clean": _clean_parser,
}
