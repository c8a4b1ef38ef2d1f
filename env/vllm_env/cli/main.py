"""The command line: parses, calls, prints and exits; nothing else does any of these.

Exit codes: 0 done, 1 the build or a check failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vllm_env import __version__
from vllm_env.base.console import Console
from vllm_env.base.errors import CommandError, UsageError, VllmEnvError
from vllm_env.serve.warm import CACHE_NAME

if TYPE_CHECKING:
    from vllm_env.build import BuildRequest, BuildResult, Plan
    from vllm_env.triton.stub import StubOptions

_PINS = {"vllm": "release", "vllm_commit": "commit", "vllm_wheel": "wheel", "vllm_source": "source"}
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
    spec.add_argument(
        "--profile", choices=("cuda", "cpu"), help="default: cuda in a Triton container with a GPU, else cpu"
    )
    spec.add_argument("--python", metavar="X.Y", help="Python of the environment")
    spec.add_argument(
        "--with", dest="packages", metavar="PACKAGE", action="append", default=[], help="a further package (repeatable)"
    )
    spec.add_argument("--spec", metavar="FILE", type=Path, help="another spec than env/vllm_env.toml")
    spec.add_argument("--distribution", metavar="NAME", help="the name under which the registry has vLLM")
    spec.add_argument("--wheel-index", metavar="URL", help="base of the per-commit wheel index")
    spec.add_argument("--git-url", metavar="URL", help="git repository for --vllm-commit")
    spec.add_argument(
        "--keep", metavar="RULE", action="append", default=[], help="do not leave out what RULE names (repeatable)"
    )
    triton = parser.add_argument_group("Triton and the stub")
    triton.add_argument(
        "--triton-root",
        metavar="DIR",
        type=Path,
        help="default: /opt/tritonserver, else .triton/, provisioned from a wheel",
    )
    triton.add_argument(
        "--stub",
        choices=("auto", "prebuilt", "source"),
        default="auto",
        help="where the stub comes from (default: auto)",
    )
    triton.add_argument(
        "--triton-git-url", metavar="URL", help="git organisation with python_backend, for --stub source"
    )
    triton.add_argument("--boost-url", metavar="URL", help="where --stub source fetches Boost")
    triton.add_argument(
        "--jobs", metavar="N", type=int, default=0, help="compilers at once for --stub source (default: one a core)"
    )
    place = parser.add_argument_group("where and how to place it")
    place.add_argument(
        "--layout",
        choices=("archive", "directory"),
        default="archive",
        help="vllm_env.tar.gz (default), or unpacked, which starts faster",
    )
    place.add_argument("--model-repository", metavar="DIR", type=Path, help="default: model_repository")
    place.add_argument("--model", metavar="NAME", default="vllm", help="the model's folder in it (default: vllm)")
    lock = parser.add_argument_group("lock and network")
    lock.add_argument("--locked", action="store_true", help="use the lock as it is, or fail")
    lock.add_argument("--upgrade", action="store_true", help="resolve anew and write the lock beside the spec")
    lock.add_argument("--offline", action="store_true", help="touch no network")
    lock.add_argument("--wheelhouse", metavar="DIR", type=Path, help="take wheels from this folder only")
    run = parser.add_argument_group("the run")
    run.add_argument("--dry-run", action="store_true", help="say what would be done, and stop before the long work")
    run.add_argument("--no-smoke-run", action="store_true", help="do not serve the result and query it")
    run.add_argument(
        "--smoke-model", metavar="MODEL", default="", help="serve this model in the smoke run, not the stand-in"
    )
    run.add_argument(
        "--warm",
        action="store_true",
        help="load the model once with its own engine arguments and keep the caches that vLLM fills",
    )
    add_common(parser)
    parser.add_argument("--version", action="version", version=f"vllm-env {__version__}")
    return parser


class CommandParser(argparse.ArgumentParser):
    """Turns usage errors into ours, so that they read alike."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UsageError(f"{message[:1].upper()}{message[1:]}.", remedy=f"See {self.prog} --help.")


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that every subcommand has."""
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    output.add_argument("--quiet", action="store_true", help="no progress")
    output.add_argument("--verbose", action="store_true", help="details, and a traceback on failure")


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    console = Console(quiet="--quiet" in arguments, verbose="--verbose" in arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _dispatch(arguments, console)
    except VllmEnvError as error:
        _show(error, console)
        return error.exit_code
    except KeyboardInterrupt:
        console.error("Interrupted; the model repository holds the set that it held, or the new one, whole.")
        return 130
    except OSError as error:
        console.error(f"error: {error.strerror or error}: {error.filename or 'a file'}")
        if console.verbose:
            traceback.print_exc()
        return 1


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _show(error: VllmEnvError, console: Console) -> None:
    if console.verbose:
        console.error("".join(traceback.format_exception(error)))
    if isinstance(error, CommandError) and error.tail:
        console.error(error.tail)
    console.error(f"error: {error.what}")
    if error.cause:
        console.error(f"  why: {error.cause}")
    if error.remedy:
        console.error(f"  fix: {error.remedy}")


def _dispatch(arguments: list[str], console: Console) -> int:
    from . import commands

    if arguments and arguments[0] in commands.COMMANDS:
        return commands.COMMANDS[arguments[0]](arguments[1:], console)
    if arguments and arguments[0] == "build":
        arguments = arguments[1:]
    options = build_parser().parse_args(arguments)
    request = request_of(options)
    return _build(request, options, console)


def request_of(options: argparse.Namespace) -> BuildRequest:
    """Return what the options ask for, checked as far as they alone can tell."""
    from vllm_env.build import BuildRequest
    from vllm_env.lock.lock import LockOptions
    from vllm_env.lock.spec import Overrides, Pin

    given = [(option, value) for option in _PINS if (value := getattr(options, option))]
    if len(given) > 1:
        names = " and ".join("--" + option.replace("_", "-") for option, _ in given)
        raise UsageError(f"{names} were given, and only one vLLM can be pinned.", remedy="Keep one of them.")
    if options.locked and options.upgrade:
        raise UsageError("--locked and --upgrade contradict each other.", remedy="Keep one of them.")
    if options.wheelhouse and not options.wheelhouse.is_dir():
        raise UsageError(
            f"--wheelhouse {options.wheelhouse} is not a folder.", remedy="Fill one: ./gen_vllm_env.sh wheelhouse DIR."
        )
    if "/" in options.model or options.model in ("", ".", ".."):
        raise UsageError(f"--model {options.model!r} is not a model's name.", remedy="Give a name without slashes.")
    pin = Pin(_PINS[given[0][0]], given[0][1]) if given else None  # type: ignore[arg-type]
    defaults = BuildRequest()
    return BuildRequest(
        profile=options.profile,
        overrides=Overrides(
            pin, options.python, options.distribution, tuple(options.packages), options.wheel_index, options.git_url
        ),
        spec_file=options.spec,
        triton_root=options.triton_root,
        stub=options.stub,
        stub_options=_stub_options(options),
        layout=options.layout,
        repository=(options.model_repository or defaults.repository).absolute(),
        model=options.model,
        lock=LockOptions(options.locked, options.upgrade, options.offline, options.wheelhouse),
        keep=tuple(options.keep),
        smoke=not options.no_smoke_run,
        smoke_model=options.smoke_model,
        warm=options.warm,
    )


def _stub_options(options: argparse.Namespace) -> StubOptions:
    from vllm_env.triton.stub import StubOptions

    defaults = StubOptions.from_environment()
    return StubOptions(
        git_url=(options.triton_git_url or defaults.git_url).rstrip("/"),
        boost_url=options.boost_url or defaults.boost_url,
        jobs=options.jobs,
    )


def _build(request: BuildRequest, options: argparse.Namespace, console: Console) -> int:
    from vllm_env.build import Plan, build

    result = build(request, console, dry_run=options.dry_run)
    if isinstance(result, Plan):
        _print_plan(result, request, console, as_json=options.json)
    elif options.json:
        smoke = [{"prompt": p, "answer": a} for p, a in result.smoke.answers] if result.smoke else None
        console.result(
            json.dumps(
                {
                    "model": str(result.model),
                    "rebuilt": result.rebuilt,
                    "smoke_run": smoke,
                    "warm": {"folder": str(result.warmed.folder), "bytes": result.warmed.size}
                    if result.warmed
                    else None,
                    "manifest": json.loads(result.manifest.to_json()),
                },
                indent=2,
            )
        )
    else:
        _print_result(result, request, console)
    return 0


def _print_plan(plan: Plan, request: BuildRequest, console: Console, *, as_json: bool) -> None:
    facts = {
        "profile": plan.spec.profile,
        "vllm": plan.lock.vllm.requirement,
        "python": plan.lock.python,
        "conda_channel": plan.lock.conda.channel,
        "wheels": len(plan.lock.versions()),
        "triton": f"{plan.triton.release} in {plan.triton.path}",
        "stub": f"{plan.stub.origin}, {plan.stub.path}" if plan.stub else "to be built from source",
        "key": plan.key,
    }
    if request.warm:
        model = request.repository / request.model
        facts["warm"] = f"load {model} once, with its vllm_engine_args.json, and fill {model / CACHE_NAME}"
    if as_json:
        console.result(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        console.result(f"{name:<14} {value}")


def _print_result(result: BuildResult, request: BuildRequest, console: Console) -> None:
    from vllm_env.build import CHECKOUT

    if result.smoke:
        for prompt, answer in result.smoke.answers:
            console.result(f"{prompt!r} -> {answer!r}")
        console.result(result.smoke.client_lines[-1])
    state = "built" if result.rebuilt else "unchanged"
    vllm = result.manifest.vllm["version"]
    binary = result.triton.binary
    shown = binary.relative_to(CHECKOUT) if binary.is_relative_to(CHECKOUT) else binary
    console.result(f"{result.model}: {state}, vLLM {vllm} for Triton {result.manifest.triton_release}")
    if result.warmed:
        console.result(f"{result.warmed.folder}: {result.warmed.files} files, {result.warmed.size / 1e6:.0f} MB")
    console.result("Next:")
    console.result(f"  {shown} --model-store={request.repository}")
    console.result("  python3 client/client.py --iterations 10")
