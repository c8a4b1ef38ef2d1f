"""Serves a built model with other engine arguments, on free ports, from a temporary copy."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.namespaces import with_mounts
from support.repositories import point_to_environment
from support.starts import TRITON, note_start
from vllm_env.serve.server import Launch, TritonServer
from vllm_env.serve.smoke import copy_model, set_arguments
from vllm_env.triton.root import backend_arguments

Serve = Callable[..., AbstractContextManager[TritonServer]]
MORE_ARGUMENTS = json.loads(os.environ.get("VLLM_ENV_TEST_ENGINE_ARGUMENTS", "{}"))
"""Engine arguments of this machine for all models: on a GPU a share of its memory for each of the servers that run at once."""
KV_BYTES = 256 << 20
"""Of an engine's KV cache, for four of the longest sequences. With a GiB for each, servers that run at once fill the memory."""
CPU_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": KV_BYTES, **MORE_ARGUMENTS
}  # fmt: skip
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""For engine arguments that do not name the KV cache's size; see `variables_for`."""
EXPLICIT = "--model-control-mode=explicit"  # of tritonserver: it loads what it is told to load
STALL_SECONDS = 240.0  # a model that loads says so every 15 s; only an archive that the server extracts is silent for longer
READY_SECONDS = 800.0  # below the limit of a test; on a machine with other work a start may take minutes


@dataclass(frozen=True)
class Parts:
    """What a server is made of: the program, the built model, its unpacked environment, a model for the engine.

    ``engine`` is False for an environment whose vLLM has none (`support.engineless`).
    """

    binary: Path
    model: Path
    environment: Path
    standin: Path
    engine: bool = True


def variables_for(engine_args: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a CPU run: without the KV cache's size, which goes before the argument, if that is given."""
    given = "kv_cache_memory_bytes" in engine_args
    return {name: value for name, value in CPU_ENVIRONMENT.items() if not (given and name == "VLLM_CPU_KVCACHE_SPACE")}


def is_cuda(environment: Path) -> bool:
    """Return whether a built environment is one for CUDA."""
    return any(environment.glob("lib/python*/site-packages/nvidia"))


def behind(parts: Parts, folder: Path, script: str, *words: object) -> Parts:
    """Return parts whose server is started by a shell script, in a mount namespace of its own.

    Args:
        parts: what to serve.
        folder: gets the program that runs the script.
        script: begins with ``words`` as its arguments and ends with the command that follows them.
        words: the script's own arguments.
    """
    program = folder / "tritonserver"
    server = [str(parts.binary), *backend_arguments(parts.binary)]
    argv = [*with_mounts(), "sh", "-ec", script, "sh", *map(str, words), *server]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n')
    program.chmod(0o755)
    return dataclasses.replace(parts, binary=program)


def in_small_place(parts: Parts, place: str, folder: Path, size: str) -> Parts:
    """Return parts whose server finds a small file system of its own.

    Args:
        parts: what to serve.
        place: where the file system is, as the shell has it.
        folder: gets the program that mounts it.
        size: its size, as mount has it; further options may follow after a comma.
    """
    return behind(parts, folder, f'mount -t tmpfs -o size={size} tmpfs {place}; exec "$@"')


def fill(file: Path) -> None:
    """Leave no byte of a file system, made by ``in_small_place``."""
    assert shutil.disk_usage(file.parent).total <= 1 << 26, f"{file.parent} is not the small one"
    with file.open("wb", buffering=0) as sink:
        for size in (1 << 20, 1 << 12):
            try:
                while sink.write(bytes(size)):
                    pass
            except OSError:
                continue


@contextmanager
def serve(
    parts: Parts,
    engine_args: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    arguments: tuple[str, ...] = (),
    as_built: bool = False,
    prepare: Callable[[Path], None] | None = None,
    ready_timeout: float = READY_SECONDS,
) -> Iterator[TritonServer]:
    """Serve a copy of the built model and yield the server when it is ready.

    Args:
        parts: what to serve.
        engine_args: added to those of the stand-in on CPU; None removes one.
        environment: variables for the server, added to those of a run on CPU.
        arguments: more arguments for tritonserver.
        as_built: keep the EXECUTION_ENV_PATH of the built model, where it is an archive that the server extracts.
        prepare: called with the copied model's folder before the server starts.
        ready_timeout: seconds until the server must be ready.
    """
    chosen = {"model": str(parts.standin), **CPU_ARGUMENTS, **(engine_args or {})}
    folder = Path(tempfile.mkdtemp(prefix="vllm_env_test_"))
    try:
        model = folder / "models" / "vllm"
        copy_model(parts.model, model)
        set_arguments(model, {name: value for name, value in chosen.items() if value is not None})
        if not as_built:
            point_to_environment(model, parts.environment)
        if prepare:
            prepare(model)
        loads = EXPLICIT not in arguments or any(one.startswith("--load-model") for one in arguments)
        note_start(TRITON, engine_args, engine=loads and parts.engine)
        with TritonServer(
            parts.binary,
            model.parent,
            log=folder / "server.log",
            launch=Launch({**variables_for(chosen), **(environment or {})}, arguments, ready_timeout, STALL_SECONDS),
        ) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)
