"""The command line: call a command, print its result, and turn errors into messages and exit codes.

Exit codes: 0 done, 1 the build or a check failed, 2 wrong usage, 130 interrupted.
"""

import json
import sys
import traceback

from vllm_env.base.cache import give_cache
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.interrupts import take_interrupts
from vllm_env.base.report import Console, reporting_to
from vllm_env.build import BuildResult, build
from vllm_env.model.manifest import CACHE_NAME
from vllm_env.plan import UNKNOWN, Preview, preview
from vllm_env.sketch import BuildRequest

from .answers import answer_facts, answer_lines
from .commands import COMMANDS
from .forecast import forecast, print_forecast
from .next_steps import next_lines
from .options import open_workspace, request_of
from .parser import parse


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    # Before parsing, because the console also prints the parser's errors.
    console = Console(quiet="--quiet" in arguments, verbose="--verbose" in arguments)
    try:
        take_interrupts()
        with reporting_to(console):
            return _dispatch(arguments, console)
    except VllmEnvError as error:
        if console.verbose:
            traceback.print_exc()
        for line in error.lines():
            console.error(line)
        return error.exit_code
    except KeyboardInterrupt:
        console.error(
            "Interrupted. The model repository has its old set of files, or the complete new one."
        )
        # 128 + SIGINT, as a shell reports it.
        return 130
    # A bug shows its traceback. A full disk or a missing permission is no bug.
    except OSError as error:
        console.error(f"error: {error.strerror or error}: {error.filename or 'a file'}")
        if console.verbose:
            traceback.print_exc()
        return 1
    finally:
        # A dry run has written nothing to the cache.
        if "--dry-run" not in arguments:
            give_cache()


def _dispatch(arguments: list[str], console: Console) -> int:
    """Run the subcommand that the arguments name, or the build; return the exit code.

    Raises:
        VllmEnvError: the arguments are wrong, or the command failed.
    """
    name, options = parse(arguments)
    if name in COMMANDS:
        return COMMANDS[name](options, console)
    # First the request: a wrong option is reported before pip is asked for its configuration.
    request = request_of(options)
    workspace = open_workspace(options)
    if options.dry_run:
        known = preview(workspace, request)
        cost = forecast(workspace, known)
        print_forecast(_preview_facts(known), cost, as_json=options.json)
        return 0
    result = build(workspace, request)
    if options.json:
        console.result(json.dumps(_result_facts(result), indent=2))
    else:
        _print_result(result, request, console)
    return 0


def _result_facts(result: BuildResult) -> dict[str, object]:
    """Return the result of a build for ``--json``."""
    facts: dict[str, object] = {
        "model": str(result.model),
        "rebuilt": result.rebuilt,
        **answer_facts(result),
        "warm": None,
        "manifest": result.manifest.document(),
    }
    if warmed := result.warmed:
        facts["warm"] = {"folder": str(warmed.folder), "bytes": warmed.size}
    return facts


def _preview_facts(known: Preview) -> dict[str, object]:
    """Return what a dry run prints about a build, by name. What it cannot know is ``UNKNOWN``."""
    sketch = known.sketch
    request = sketch.request
    lock = known.lock
    prebuilt = known.stub.prebuilt
    stub = f"prebuilt, {prebuilt}" if prebuilt else "to be built from source"
    triton = f"{sketch.triton.release} in {sketch.triton.path}"
    if sketch.triton.is_elsewhere:
        triton = f"{sketch.triton.release}, not on this machine"
        stub = "the server's own"
    # A dry run does not install Triton.
    elif not sketch.triton.is_there:
        triton = f"{triton}, to be provisioned"
    facts: dict[str, object] = {
        "profile": sketch.spec.profile,
        "pin": str(sketch.spec.pin),
        "vllm": lock.vllm.requirement if lock else UNKNOWN,
        "vllm_wheel": _vllm_wheel(known),
        "python": lock.python if lock else sketch.spec.python,
        "conda_channel": lock.conda.channel if lock else UNKNOWN,
        "wheels": len(lock.wheels) if lock else UNKNOWN,
        "triton": triton,
        "stub": stub,
        "layout": request.layout.name,
        "key": known.key or UNKNOWN,
    }
    if sketch.unserved:
        facts["smoke_run"] = f"not served here: {sketch.unserved}"
    if request.warm:
        model = request.model_folder
        facts["warm"] = (
            f"load {model} once, with its own engine arguments, and fill {model / CACHE_NAME}"
        )
    return facts


def _vllm_wheel(known: Preview) -> str:
    """Return where a build takes the wheel of vLLM from, as far as a dry run can know it."""
    if known.lock is None:
        return known.forecast or UNKNOWN
    vllm = known.lock.vllm
    wheel = vllm.wheel
    # The index has a release's wheel. Its size is part of the bytes to fetch.
    if wheel is None:
        return "in the package registry"
    # This is the origin of a wheel that the user has named by its path (pins.py).
    place = "a file" if vllm.origin == f"wheel {wheel.name}" else "in the cache"
    return f"{place}, {wheel.stat().st_size} bytes"


def _print_result(result: BuildResult, request: BuildRequest, console: Console) -> None:
    """Print the result of a build for people: answers, the model, and the next commands."""
    for line in answer_lines(result):
        console.result(line)
    state = "built" if result.rebuilt else "unchanged"
    manifest = result.manifest
    versions = f"vLLM {manifest.vllm.version} for Triton {manifest.triton_release}"
    console.result(f"{result.model}: {state}, {versions}")
    if warmed := result.warmed:
        console.result(f"{warmed.folder}: {warmed.files} files, {warmed.size / 1e6:.0f} MB")
    for line in next_lines(result, request):
        console.result(line)
