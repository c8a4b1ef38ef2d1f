"""Choose how vLLM compiles at run time.

It can use the container's compilers or the environment's own. Without either, it must not compile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from triton_vllm.base.protocols import Log

OWN_COMPILER = "vllm-env-cc"
"""The environment's own C compiler, next to its interpreter."""
_EAGER_ARGUMENTS = ("enforce_eager", "compilation_config")
_FIRST_USE_S = 120.0  # for the first use of the environment's own compiler


@dataclass(frozen=True)
class Compilers:
    """How to start vLLM where the operator has not chosen.

    Attributes:
        arguments: engine arguments to add.
        variables: environment variables to set.
        notes: lines for the log.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def drop_missing(environment: MutableMapping[str, str], log: Log) -> None:
    """Remove CC and CXX if they name no program.

    Images set them and leave the compiler out (seen: CC=/opt/gcc/bin/gcc). Triton's kernel compiler
    and torch take the name as it is, and the load would fail.
    """
    for name in ("CC", "CXX"):
        value = environment.get(name)
        if value is None:
            continue
        # Options may follow the program.
        program = value.split(maxsplit=1)[:1]
        if not program or not _finds((program[0],), environment.get("PATH", os.defpath)):
            del environment[name]
            log.warning(f"{name}={value} is not used: there is no such program")


def choose(
    engine_args: Mapping[str, Any], environment: Mapping[str, str], prefix: Path, *, on_cpu: bool
) -> Compilers:
    """Return the settings that avoid each compiler that is missing.

    Args:
        engine_args: the operator's arguments. If they choose eager or compiled execution, none is
            added.
        environment: the process's variables. CC and CXX are kept.
        prefix: the environment's folder.
        on_cpu: whether vLLM runs on a CPU.
    """
    path = environment.get("PATH", os.defpath)
    if on_cpu:
        has_cpp = "CXX" in environment or _finds(("g++", "clang++", "c++"), path)
        # The C++ code that torch.compile writes includes Python.h.
        has_headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
        if (has_cpp and has_headers) or any(name in engine_args for name in _EAGER_ARGUMENTS):
            return Compilers()
        note = "no C++ compiler or no Python.h here: models run eagerly (enforce_eager)"
        return Compilers(arguments={"enforce_eager": True}, notes=(note,))
    variables: dict[str, str] = {}
    notes = []
    # Triton's kernel compiler compiles a launcher in C for each kernel, even with enforce_eager
    # (triton/runtime/build.py: CC, gcc or clang).
    if "CC" not in environment and not _finds(("gcc", "clang"), path):
        own = prefix / "bin" / OWN_COMPILER
        if own.is_file():
            variables["CC"] = str(own)
            notes.append(
                f"no C compiler here: GPU kernels are compiled with the environment's own, CC={own}"
            )
        else:
            notes.append(
                "no C compiler here, which GPU kernels need: "
                "install gcc, or build with --with ziglang"
            )
    return Compilers(variables=variables, notes=tuple(notes))


def warm_up(compiler: str, folder: Path) -> threading.Thread:
    """Let the environment's own compiler fill its cache in a thread, and return the thread.

    At its first use on a machine it compiles its own libraries, which takes 5 s of a core. Triton's
    kernel compiler needs it only when the engine has started. If it fails, that one says why.

    Args:
        compiler: the program.
        folder: a folder for its files, which the caller removes.
    """
    # The variables of now: the caller goes on to set others.
    arguments = (compiler, folder, dict(os.environ))
    thread = threading.Thread(
        target=_compile_nothing, args=arguments, name="vllm_env-compiler", daemon=True
    )
    thread.start()
    return thread


def _compile_nothing(compiler: str, folder: Path, environment: dict[str, str]) -> None:
    source = folder / "empty.c"
    # As Triton's kernel compiler calls it: with another level, it would make other libraries.
    options = ["-O3", "-shared", "-fPIC", "-o", str(folder / "empty.so")]
    with suppress(OSError, subprocess.SubprocessError):
        source.touch()
        subprocess.run(
            [compiler, *options, str(source)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_FIRST_USE_S,
            check=False,
        )


def _finds(programs: tuple[str, ...], path: str) -> bool:
    return any(shutil.which(name, path=path) for name in programs)
