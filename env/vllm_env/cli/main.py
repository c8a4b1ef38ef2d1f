"""The command line: dispatches, prints results and turns errors into messages and exit codes; nothing else does.

Exit codes: 0 done, 1 the build or a check failed, 2 wrong usage, 130 interrupted.
"""

import dataclasses
import json
import signal
import sys
import traceback
from typing import NoReturn

from vllm_env.base.console import Console
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.workspace import PLACE
from vllm_env.build import BuildResult, build
from vllm_env.plan import BuildRequest, Plan
from vllm_env.publish.manifest import CACHE_NAME

from .commands import COMMANDS
from .options import build_parser, open_workspace, refuse_unknown_command, request_of


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
    for name, part in (("error", error.what), ("  why", error.cause), ("  fix", error.remedy)):
        if part:
            console.error(f"{name}: {part}")


def _dispatch(arguments: list[str], console: Console) -> int:
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]](arguments[1:], console)
    if arguments and arguments[0] == "build":
        arguments = arguments[1:]
    else:
        refuse_unknown_command(arguments, (*COMMANDS, "build"))
    options = build_parser().parse_args(arguments)
    request = request_of(options)
    result = build(open_workspace(console, options), request, dry_run=options.dry_run)
    if isinstance(result, Plan):
        _print_plan(result, request, console, as_json=options.json)
    elif options.json:
        console.result(json.dumps(_facts(result), indent=2))
    else:
        _print_result(result, request, console)
    return 0


def _facts(result: BuildResult) -> dict[str, object]:
    warmed, smoke = result.warmed, result.smoke
    return {
        "model": str(result.model),
        "rebuilt": result.rebuilt,
        "smoke_run": [{"prompt": prompt, "answer": answer} for prompt, answer in smoke.answers] if smoke else None,
        "warm": {"folder": str(warmed.folder), "bytes": warmed.size} if warmed else None,
        "manifest": dataclasses.asdict(result.manifest),
    }


def _print_plan(plan: Plan, request: BuildRequest, console: Console, *, as_json: bool) -> None:
    stub = plan.stub.prebuilt
    facts: dict[str, object] = {
        "profile": plan.spec.profile,
        "vllm": plan.lock.vllm.requirement,
        "python": plan.lock.python,
        "conda_channel": plan.lock.conda.channel,
        "wheels": len(plan.lock.wheels),
        "triton": f"{plan.triton.release} in {plan.triton.path}",
        "stub": f"{stub.origin}, {stub.path}" if stub else "to be built from source",
        "key": plan.key,
    }
    if request.warm:
        model = request.model_folder
        facts["warm"] = f"load {model} once, with its vllm_engine_args.json, and fill {model / CACHE_NAME}"
    if as_json:
        console.result(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        console.result(f"{name:<14} {value}")


def _print_result(result: BuildResult, request: BuildRequest, console: Console) -> None:
    if result.smoke:
        for prompt, answer in result.smoke.answers:
            console.result(f"{prompt!r} -> {answer!r}")
        console.result(result.smoke.client_lines[-1])
    state = "built" if result.rebuilt else "unchanged"
    binary = result.triton.binary
    shown = binary.relative_to(PLACE) if binary.is_relative_to(PLACE) else binary
    manifest = result.manifest
    console.result(f"{result.model}: {state}, vLLM {manifest.vllm.version} for Triton {manifest.triton_release}")
    if result.warmed:
        console.result(f"{result.warmed.folder}: {result.warmed.files} files, {result.warmed.size / 1e6:.0f} MB")
    console.result("Next:")
    console.result(f"  {shown} --model-store={request.repository}")
    console.result("  python3 client/client.py --iterations 10")
