"""Runs inside the environment, as the text of ``python3 -c``: prints what an interpreter started by Triton finds there.

Its argument is a JSON list of the modules to import; one line of its output, ``vllm_env-probe JSON``, is the answer.
"""

import importlib
import importlib.util
import json
import os
import sys


def _spec_of(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _file_of(module: object) -> str:
    """Return a module's file, or an empty string: torch has objects among the modules whose ``__file__`` is none."""
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and os.path.exists(file) else ""  # noqa: PTH110 - os.path is loaded anyway


def _is_stale(module: object) -> bool:
    """Tell whether a module's bytecode does not fit its source, so that each start would compile it again."""
    source, cached = _file_of(module), getattr(module, "__cached__", None)
    if not source.endswith(".py") or not isinstance(cached, str):
        return False
    try:
        with open(cached, "rb") as stream:
            head = stream.read(16)
    except OSError:
        return True
    status = os.stat(source)  # noqa: PTH116 - what the import system does
    if int.from_bytes(head[4:8], "little") != 0:  # checked by hash, not by time
        return False
    times = [int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF]
    return times != [int.from_bytes(head[8:12], "little"), int.from_bytes(head[12:16], "little")]


def main() -> None:
    """Import, look around and print."""
    with open(os.devnull) as stream:
        encoding = stream.encoding
    environment = dict(os.environ)
    wanted = [name for name in json.loads(sys.argv[1]) if _spec_of(name)]
    imported = {name: importlib.import_module(name) for name in wanted}
    modules = [m for m in list(sys.modules.values()) if _file_of(m)]
    answer = {
        "encoding": encoding,
        "prefix": sys.prefix,
        "path": sys.path,
        "environment": environment,
        "imported": {
            name: [_file_of(module), str(getattr(module, "__version__", ""))]
            for name, module in imported.items()
        },
        "files": sorted({os.path.abspath(_file_of(m)) for m in modules}),  # noqa: PTH100
        "stale": sorted(m.__name__ for m in modules if _is_stale(m)),
    }
    sys.stdout.write(f"\nvllm_env-probe {json.dumps(answer)}\n")


main()
