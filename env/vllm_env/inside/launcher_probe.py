"""Prints what an interpreter that Triton starts finds in the environment.

It runs there as the text of ``python3 -c``. Its argument is a JSON list of modules to import. The
answer is one line of its output, ``vllm_env-probe JSON``.
"""
# os.path, because the interpreter has loaded it anyway.
# ruff: noqa: PTH100, PTH110, PTH116

import importlib
import importlib.util
import json
import os
import struct
import sys


def _exists(name: str) -> bool:
    # find_spec() imports the parents of a submodule, and one of them may be missing.
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


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
    # The encoding and the variables are those before an import: a module may change them.
    with open(os.devnull) as stream:
        encoding = stream.encoding
    environment = dict(os.environ)
    names = [name for name in json.loads(sys.argv[1]) if _exists(name)]
    imported = {}
    for name in names:
        module = importlib.import_module(name)
        imported[name] = [_file_of(module), str(getattr(module, "__version__", ""))]
    modules = [module for module in list(sys.modules.values()) if _file_of(module)]
    answer = {
        "encoding": encoding,
        "prefix": sys.prefix,
        "path": sys.path,
        "environment": environment,
        "imported": imported,
        "files": sorted({os.path.abspath(_file_of(module)) for module in modules}),
        "stale": sorted(module.__name__ for module in modules if _is_stale(module)),
    }
    sys.stdout.write(f"\nvllm_env-probe {json.dumps(answer)}\n")


main()
