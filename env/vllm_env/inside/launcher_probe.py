"""Prints what an interpreter that Triton starts finds in the environment.

It runs there as the text of ``python3 -c``. Its argument is a JSON object:

    modules: names of modules to import; those that do not exist are skipped.
    later: null, or what to import afterwards, each module for itself:
        as_cuda: whether vLLM takes its CUDA platform.
        modules: names; one that ends in ``.*`` stands for the modules of a package.
        seconds: the limit for each module. All together may take five times as long. So may the
            first ones; else this process is ended.

The answer is one line of its output, ``vllm_env-probe JSON``.
"""
# os.path, because the interpreter has loaded it anyway.
# ruff: noqa: PTH100, PTH110, PTH116, PTH118

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import pkgutil
import signal
import struct
import sys
import time
import traceback
from typing import Any

_PR_SET_PDEATHSIG = 1


def _import_failure(name: str) -> Any:
    """Import a module. Return None, or why it cannot be imported.

    The keys are those of ``failures`` in ``Started`` (verify/launcher_check.py).
    """
    try:
        importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - SystemExit is a failure, too
        # The error, then its cause, and so on.
        chain = [error]
        while chain[-1].__cause__ and chain[-1].__cause__ not in chain:
            chain.append(chain[-1].__cause__)
        absent = _absent_module(name, chain)
        owners = []
        if absent:
            # A distribution may have another name than its module: PIL is pillow's.
            top = absent.partition(".")[0]
            owners = importlib.metadata.packages_distributions().get(top, [top])
        # The last frame of a file. Those of importlib have names such as
        # "<frozen importlib._bootstrap>".
        frames = traceback.extract_tb(error.__traceback__)
        frame = [frame for frame in frames if not frame.filename.startswith("<")][-1]
        texts = ["".join(traceback.format_exception_only(link)).strip() for link in chain]
        return {
            "text": " <- ".join(texts)[-1000:],
            "place": f"{frame.filename}:{frame.lineno}",
            "absent": absent,
            "owners": owners,
        }
    return None


def _absent_module(name: str, chain: list[BaseException]) -> str:
    """Return the module that the import of ``name`` did not find; "" if nothing is missing.

    The result is also "" if a package is there and only lacks a module that another one imports:
    the two do not fit each other.

    Args:
        name: the module to import.
        chain: the error of the import, then its causes.
    """
    names = [link.name for link in chain if isinstance(link, ModuleNotFoundError) and link.name]
    if not names:
        return ""
    absent = names[0]
    # The module itself is missing, or a package that it is in.
    if f"{name}.".startswith(f"{absent}."):
        return absent
    top = absent.partition(".")[0]
    return "" if top in sys.modules or importlib.util.find_spec(top) else absent


def _use_cuda_platform(failures: dict[str, Any]) -> None:
    """Make vLLM use its CUDA platform without a GPU.

    Put the failure of each import, or None, into ``failures``.
    """
    failures["vllm.platforms"] = _import_failure("vllm.platforms")
    # vLLM asks these functions for the platform's class. Without a GPU, its own returns None.
    if platforms := sys.modules.get("vllm.platforms"):
        plugins = getattr(platforms, "builtin_platform_plugins", {})
        plugins["cuda"] = lambda: "vllm.platforms.cuda.CudaPlatform"
        failures["vllm.platforms.cuda"] = _import_failure("vllm.platforms.cuda")
    # Some modules decide by the capability what to import. 9.0 is that of an H100.
    if cuda := sys.modules.get("vllm.platforms.cuda"):
        capability = sys.modules["vllm.platforms.interface"].DeviceCapability(9, 0)
        cuda.CudaPlatform.get_device_capability = classmethod(
            lambda *_arguments, **_named: capability
        )


def _modules_named(name: str) -> list[str]:
    """Return the modules of a package for a name such as ``package.*``, else the name itself."""
    if not name.endswith(".*"):
        return [name]
    # find_spec() of a package inside another one would import the outer one.
    top, *inner = name.split(".")[:-1]
    spec = importlib.util.find_spec(top)
    places = (spec and spec.submodule_search_locations) or []
    folders = [os.path.join(place, *inner) for place in places]
    package = name.removesuffix("*")
    return [f"{package}{module.name}" for module in pkgutil.iter_modules(folders)]


def _import_all(names: list[str], answers: Any) -> None:
    """Import modules in a child process; send the failure of each, or None, to its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for name in names:
        answers.send(_import_failure(name))


def _import_in_children(names: list[str], seconds: float, failures: dict[str, Any]) -> None:
    """Import modules in children; put the failure of each, or None, into ``failures``.

    Args:
        names: the modules. The list is empty afterwards.
        seconds: the limit for each module. All together may take five times as long.
        failures: receives the results, by the module's name.
    """
    context = multiprocessing.get_context("fork")
    ends = time.monotonic() + 5 * seconds
    # After a failure, a new child imports the rest: a half imported module would make others fail.
    while names:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_import_all, args=(names, sender))
        child.start()
        # Only the child has the pipe's other end now, so its end shows here as an EOFError.
        sender.close()
        failure: dict[str, Any] | None = None
        while names and not failure:
            try:
                left = ends - time.monotonic()
                in_time = receiver.poll(max(0.0, min(seconds, left)))
                failure = receiver.recv() if in_time else {"slow": True}
            # The module has ended the child.
            except EOFError:
                child.join()
                code = child.exitcode or 0
                end = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                text = f"the process ended with {end}"
                failure = {"text": text, "place": "", "absent": "", "owners": []}
            failures[names.pop(0)] = failure
        child.kill()
        child.join()


def _exists(name: str) -> bool:
    """Return whether there is a module of this name.

    Raises:
        ModuleNotFoundError: a parent of the module exists, and imports a module that is missing.
    """
    # find_spec() fails for an imported module without __spec__.
    if name in sys.modules:
        return True
    # find_spec() imports the parents of a submodule.
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        missing = error.name
        if name == missing or name.startswith(f"{missing}."):
            return False
        raise


def _file_of(module: object) -> str:
    """Return a module's file, or an empty string if it has none."""
    # torch puts objects into sys.modules whose ``__file__`` is not a path.
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and os.path.exists(file) else ""


def _is_stale(module: object) -> bool:
    """Return whether a module's bytecode does not fit its source: each start compiles it again."""
    source = _file_of(module)
    cached = getattr(module, "__cached__", None)
    if not source.endswith(".py") or not isinstance(cached, str):
        return False
    try:
        with open(cached, "rb") as stream:
            # The head of bytecode (PEP 552): magic number, flags, and the source's time and size.
            _, flags, time, size = struct.unpack("<4I", stream.read(16))
    except (OSError, struct.error):
        return True
    status = os.stat(source)
    expected = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    # With other flags than 0, a hash takes the place of time and size.
    return flags == 0 and (time, size) != expected


def main() -> None:
    """Import the modules and print the answer."""
    # 1) The encoding and the variables are those before an import: a module may change them.
    with open(os.devnull) as stream:
        encoding = stream.encoding
    environment = dict(os.environ)
    question = json.loads(sys.argv[1])
    later = question["later"]
    failures: dict[str, Any] = {}
    as_cuda = bool(later) and later["as_cuda"]
    if later:
        # The signal ends this process if the first imports take too long.
        signal.alarm(int(5 * later["seconds"]))
    # 2) Import what a start imports.
    imported = {}
    for name in question["modules"]:
        if name == "vllm" and as_cuda:
            _use_cuda_platform(failures)
        if not _exists(name):
            continue
        # Without a GPU, this one may fail with the CUDA platform. Without ``absent``, only a
        # missing device is an excuse, and not a missing package.
        if as_cuda and name.startswith("vllm.") and (failure := _import_failure(name)):
            failures[name] = {**failure, "absent": ""}
            continue
        module = importlib.import_module(name)
        imported[name] = [_file_of(module), str(getattr(module, "__version__", ""))]
    signal.alarm(0)
    modules = [module for module in list(sys.modules.values()) if _file_of(module)]
    # 3) Import the others in children. They begin with the modules of this process.
    if later:
        names = [name for pattern in later["modules"] for name in _modules_named(pattern)]
        _import_in_children(names, later["seconds"], failures)
    answer = {
        "encoding": encoding,
        "prefix": sys.prefix,
        "path": sys.path,
        "environment": environment,
        "imported": imported,
        "files": sorted({os.path.abspath(_file_of(module)) for module in modules}),
        "stale": sorted(module.__name__ for module in modules if _is_stale(module)),
        "failures": {name: failure for name, failure in failures.items() if failure},
    }
    sys.stdout.write(f"\nvllm_env-probe {json.dumps(answer)}\n")


main()
