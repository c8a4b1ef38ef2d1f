"""Runs inside the environment, as the text of ``python3 -c``: imports modules one after another and prints how each ended.

Its argument is a JSON object: ``profile``, ``modules`` (a name that ends in ``.*`` stands for a package's own modules) and
``seconds`` for each, of which all together get five times as many. One line of its output, ``vllm_env-probe JSON``, is the
answer: null or a failure by module. vLLM is imported here, the others in a forked process, which is ended after a failure
and followed by another one: what is half imported would make the next ones fail.
"""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import pkgutil
import signal
import sys
import time
import traceback
from typing import Any

_PR_SET_PDEATHSIG = 1


def _failure(name: str) -> Any:
    """Import a module; return None or what it raised: the last lines, where, and which module there is not at all."""
    try:
        importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - SystemExit is a failure too
        chain = [error]
        while chain[-1].__cause__ and chain[-1].__cause__ not in chain:
            chain.append(chain[-1].__cause__)
        absent = next((e.name for e in chain if isinstance(e, ModuleNotFoundError) and e.name), "")
        top = absent.partition(".")[0]
        if (
            absent
            and not f"{name}.".startswith(f"{absent}.")
            and (top in sys.modules or importlib.util.find_spec(top))
        ):
            absent = ""  # a package that is there lacks a module that another one asks for
        frame = [
            f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")
        ][-1]  # not importlib's
        text = " <- ".join("".join(traceback.format_exception_only(e)).strip() for e in chain)
        owners = (
            importlib.metadata.packages_distributions().get(top, [top]) if absent else []
        )  # PIL is pillow's
        return {
            "text": text[-1000:],
            "place": f"{frame.filename}:{frame.lineno}",
            "absent": absent,
            "owners": owners,
        }
    return None


def _take_cuda(answers: dict[str, Any]) -> None:
    """Make vLLM take its CUDA platform, of a GPU with capability 9.0, on which some of its modules decide what to import."""
    answers["vllm.platforms"] = _failure("vllm.platforms")
    if platforms := sys.modules.get("vllm.platforms"):
        plugins = getattr(platforms, "builtin_platform_plugins", {})
        plugins["cuda"] = lambda: "vllm.platforms.cuda.CudaPlatform"
        answers["vllm.platforms.cuda"] = _failure("vllm.platforms.cuda")
    if cuda := sys.modules.get("vllm.platforms.cuda"):
        capability = sys.modules["vllm.platforms.interface"].DeviceCapability(9, 0)
        cuda.CudaPlatform.get_device_capability = classmethod(
            lambda *_arguments, **_named: capability
        )


def _expanded(name: str) -> list[str]:
    if not name.endswith(".*"):
        return [name]
    top, *inner = name.split(".")[:-1]
    spec = importlib.util.find_spec(top)
    folders = [
        os.path.join(place, *inner)  # noqa: PTH118
        for place in (spec.submodule_search_locations if spec else None) or ()
    ]
    return [f"{name[:-1]}{module.name}" for module in pkgutil.iter_modules(folders)]


def _import_all(names: list[str], answers: Any) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for name in names:
        answers.send(_failure(name))


def _import_in_children(names: list[str], seconds: float, answers: dict[str, Any]) -> None:
    context, ends = multiprocessing.get_context("fork"), time.monotonic() + 5 * seconds
    while names:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_import_all, args=(names, sender))
        child.start()
        sender.close()
        failure: dict[str, Any] | None = None
        while names and not failure:
            try:
                in_time = receiver.poll(max(0.0, min(seconds, ends - time.monotonic())))
                failure = receiver.recv() if in_time else {"slow": True}
            except EOFError:
                child.join()
                code = child.exitcode or 0
                end = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                failure = {
                    "text": f"the process ended with {end}",
                    "place": "",
                    "absent": "",
                    "owners": [],
                }
            answers[names.pop(0)] = failure
        child.kill()
        child.join()


def main() -> None:
    """Import and print."""
    job = json.loads(sys.argv[1])
    answers: dict[str, Any] = {}
    signal.alarm(int(5 * job["seconds"]))  # ends this process
    if job["profile"] == "cuda":
        _take_cuda(answers)
    answers["vllm.v1.engine.async_llm"] = _failure("vllm.v1.engine.async_llm")
    signal.alarm(0)
    _import_in_children(
        [name for pattern in job["modules"] for name in _expanded(pattern)], job["seconds"], answers
    )
    sys.stdout.write(f"\nvllm_env-probe {json.dumps(answers)}\n")


main()
