"""The options: their parsers, and what they ask for as a request and a workspace."""

import argparse
import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn, get_args

from vllm_env import __version__
from vllm_env.base.cache import Cache, cache_root
from vllm_env.base.console import Console
from vllm_env.base.errors import UsageError
from vllm_env.base.network import Network
from vllm_env.base.pip_config import read_pip_config
from vllm_env.base.workspace import Workspace
from vllm_env.lock.lock import LockOptions
from vllm_env.lock.spec import PIN_OPTIONS, Overrides, Pin
from vllm_env.plan import BuildRequest, Layout
from vllm_env.prefix.prune import RULES
from vllm_env.triton.stub import StubMode
from vllm_env.triton.stub_source import StubOptions

_DESCRIPTION = """\
Pins a vLLM, packs it with conda-pack, adds the stub that fits, and places both in a Triton model repository that stock
tritonserver loads. Without an argument it builds the default profile of env/vllm_env.toml and proves it with a smoke run.
"""
_EPILOG = "Subcommands: build (the default), doctor, verify, inspect, wheelhouse, clean; each has --help."


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the build, which is what runs without a subcommand."""
    parser = CommandParser(prog="gen_vllm_env.sh", allow_abbrev=False, description=_DESCRIPTION, epilog=_EPILOG)
    pin = parser.add_argument_group("what to pin (exactly one; default: the profile's)")
    pin.add_argument("--vllm", metavar="X.Y.Z", help="a release")
    pin.add_argument("--vllm-commit", metavar="SHA", help="a commit, by its full SHA: its wheel, else built from git")
    pin.add_argument("--vllm-wheel", metavar="PATH|URL", help="a wheel")
    pin.add_argument("--vllm-source", metavar="DIR", help="a source tree, from which a wheel is built")
    spec = parser.add_argument_group("the rest of the spec")
    spec.add_argument("--profile", choices=("cuda", "cpu"), help="default: cuda in a Triton container with a GPU, else cpu")
    spec.add_argument("--python", metavar="X.Y", help="Python of the environment")
    further = "a further package (repeatable)"
    spec.add_argument("--with", dest="packages", metavar="PACKAGE", action="append", default=[], help=further)
    spec.add_argument("--spec", metavar="FILE", type=Path, help="another spec than env/vllm_env.toml")
    spec.add_argument("--distribution", metavar="NAME", help="the name under which the registry has vLLM")
    spec.add_argument("--wheel-index", metavar="URL", help="base of the per-commit wheel index")
    spec.add_argument("--git-url", metavar="URL", help="git repository for --vllm-commit")
    spec.add_argument("--keep", metavar="RULE", action="append", default=[], help="do not omit what RULE names (repeatable)")
    triton = parser.add_argument_group("Triton and the stub")
    root_help = "default: /opt/tritonserver, else .triton/, provisioned from a wheel"
    triton.add_argument("--triton-root", metavar="DIR", type=Path, help=root_help)
    triton.add_argument("--stub", choices=get_args(StubMode), default="auto", help="where the stub comes from (default: auto)")
    triton.add_argument("--triton-git-url", metavar="URL", help="git organisation with python_backend, for --stub source")
    triton.add_argument("--boost-url", metavar="URL", help="where --stub source fetches Boost")
    jobs_help = "compilers at once for --stub source (default: one a core)"
    triton.add_argument("--jobs", metavar="N", type=int, default=0, help=jobs_help)
    place = parser.add_argument_group("where and how to place it")
    layout_help = "vllm_env.tar.gz (default), or unpacked, which starts faster"
    place.add_argument("--layout", choices=get_args(Layout), default="archive", help=layout_help)
    place.add_argument("--model-repository", metavar="DIR", type=Path, help="default: model_repository")
    place.add_argument("--model", metavar="NAME", default="vllm", help="the model's folder in it (default: vllm)")
    lock = parser.add_argument_group("lock and network")
    lock.add_argument("--locked", action="store_true", help="use the lock as it is, or fail")
    lock.add_argument("--upgrade", action="store_true", help="resolve again and write the lock beside the spec")
    lock.add_argument("--save", metavar="FILE", type=Path, help="write this pin's spec to FILE (.toml), its lock beside it")
    lock.add_argument("--offline", action="store_true", help="touch no network")
    lock.add_argument("--wheelhouse", metavar="DIR", type=Path, help="take wheels from this folder only")
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="build nothing; say what would be done, the bytes to fetch, the space and the time",
    )
    run.add_argument("--no-smoke-run", action="store_true", help="do not serve the result and query it")
    run.add_argument("--smoke-model", metavar="MODEL", default="", help="serve this model in the smoke run, not the stand-in")
    warm_help = "load the model once with its own engine arguments and keep the caches that vLLM fills"
    run.add_argument("--warm", action="store_true", help=warm_help)
    add_common(parser)
    parser.add_argument("--version", action="version", version=f"vllm-env {__version__}")
    return parser


class CommandParser(argparse.ArgumentParser):
    """Turns usage errors into ours, so that they read alike."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print, with the option that an unknown one may have meant."""
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        near = difflib.get_close_matches(unknown[1], self._option_string_actions, 1) if unknown else []
        remedy = f"Did you mean {near[0]}? See {self.prog} --help." if near else f"See {self.prog} --help."
        raise UsageError(f"{message[:1].upper()}{message[1:]}.", remedy=remedy)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that every subcommand has."""
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    output.add_argument("--quiet", action="store_true", help="no progress")
    output.add_argument("--verbose", action="store_true", help="details, and a traceback on failure")


def request_of(options: argparse.Namespace) -> BuildRequest:
    """Return what the options ask for, checked as far as they alone can tell."""
    named = {kind: getattr(options, option[2:].replace("-", "_")) for kind, option in PIN_OPTIONS.items()}
    pins = [Pin(kind, value) for kind, value in named.items() if value]
    if len(pins) > 1:
        names = " and ".join(PIN_OPTIONS[pin.kind] for pin in pins)
        raise UsageError(f"{names} were given, and only one vLLM can be pinned.", remedy="Keep one of them.")
    if options.locked and options.upgrade:
        raise UsageError("--locked and --upgrade contradict each other.", remedy="Keep one of them.")
    if options.wheelhouse and not options.wheelhouse.is_dir():
        remedy = "Fill one: ./gen_vllm_env.sh wheelhouse DIR."
        raise UsageError(f"--wheelhouse {options.wheelhouse} is not a folder.", remedy=remedy)
    if "/" in options.model or options.model in ("", ".", ".."):
        raise UsageError(f"--model {options.model!r} is not a model's name.", remedy="Give a name without slashes.")
    rules = [rule.name for rule in RULES]
    for name in (name for name in options.keep if name not in rules):
        raise UsageError(f"--keep {name} names no rule.", remedy=_meant(name, rules))
    pin, packages = next(iter(pins), None), tuple(options.packages)
    return BuildRequest(
        profile=options.profile,
        overrides=Overrides(pin, options.python, options.distribution, packages, options.wheel_index, options.git_url),
        spec_file=options.spec,
        triton_root=options.triton_root,
        stub=options.stub,
        stub_options=_stub_options(options),
        layout=options.layout,
        repository=(options.model_repository or BuildRequest.repository).absolute(),
        model=options.model,
        lock=LockOptions(options.locked, options.upgrade, options.save, may_build=not options.dry_run),
        keep=tuple(options.keep),
        smoke=not options.no_smoke_run,
        smoke_model=options.smoke_model,
        warm=options.warm,
    )


def _stub_options(options: argparse.Namespace) -> StubOptions:
    defaults = StubOptions.from_environment()
    git_url = (options.triton_git_url or defaults.git_url).rstrip("/")
    return StubOptions(git_url, options.boost_url or defaults.boost_url, options.jobs)


def refuse_unknown_command(arguments: list[str], known: Iterable[str]) -> None:
    """Refuse a first argument that looks like a subcommand and is none with a UsageError that names the nearest one."""
    if arguments and not arguments[0].startswith("-"):
        raise UsageError(f"Unknown subcommand {arguments[0]!r}.", remedy=_meant(arguments[0], list(known)))


def _meant(given: str, known: list[str]) -> str:
    near = difflib.get_close_matches(given, known, 1)
    return f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}."


def open_workspace(console: Console, options: argparse.Namespace | None = None) -> Workspace:
    """Return the workspace of a run: the user's cache, pip's configuration, and the network as the options allow it."""
    offline, wheelhouse = getattr(options, "offline", False), getattr(options, "wheelhouse", None)
    network = Network(read_pip_config(), offline, wheelhouse, os.environ.get("VLLM_ENV_TORCH_INDEX", ""))
    return Workspace(Cache(cache_root()), network, console)
