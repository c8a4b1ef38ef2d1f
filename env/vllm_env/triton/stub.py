"""The stub: the program ``triton_python_backend_stub``, which embeds the environment's Python.

A stub works with one Python version, whose libpython it loads, and with one Triton release: the
layout of their shared memory changes between releases. The Triton root's own stub is used if it
fits; otherwise one is built (stub_source.py). Both kinds are checked before use: as an ELF file
against the libraries that it will load, and by starting it. A model for a Triton that is not here
gets no stub (elsewhere.py).
"""

import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vllm_env.base.cache import key_of, touch
from vllm_env.base.elf import read_dynamic_section
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import file_sha256, put_in_place
from vllm_env.base.process import run
from vllm_env.base.workspace import TOOLS, Workspace

from . import stub_source
from .elsewhere import SERVER_ORIGIN, check_python
from .root import STUB_LIBRARIES, STUB_NAME, TritonRoot
from .stub_source import StubOptions

StubMode = Literal["auto", "prebuilt", "source"]
# Raise it when make_self_starting() copies or patches differently.
_FORMAT = 2


@dataclass(frozen=True)
class Stub:
    """A stub for one Python and one Triton release.

    Attributes:
        path: the program; None for the server's own.
        python: the Python version, such as ``3.11``.
        release: the Triton release, such as ``24.10``.
        sha256: hexadecimal digest.
        size: bytes.
        origin: ``prebuilt``, ``source`` or ``server``.
        libraries: the folder ``stub_lib`` that belongs next to the program.
    """

    path: Path | None
    python: str
    release: str
    sha256: str
    size: int
    origin: str
    libraries: Path | None


@dataclass(frozen=True)
class StubChoice:
    """The stub that will be used.

    Attributes:
        triton: the Triton root.
        python: the full version (``3.11.7``).
        options: how to build it.
        prebuilt: a stub of the Triton root, which in a dry run need not exist yet; None if one will
            be built.
    """

    triton: TritonRoot
    python: str
    options: StubOptions
    prebuilt: Path | None = None

    @property
    def minor(self) -> str:
        """Return the Python version that the stub works with, such as ``3.11``."""
        return ".".join(self.python.split(".")[:2])

    @property
    def identity(self) -> str:
        """Return the stub's digest, or the key under which it will be built."""
        if self.triton.is_elsewhere:
            return f"{SERVER_ORIGIN} {self.triton.release}"
        if self.prebuilt:
            return file_sha256(self.prebuilt)
        return stub_source.source_key(self.triton.release, self.python, self.options)


def choose_stub(
    workspace: Workspace, triton: TritonRoot, python: str, mode: StubMode, options: StubOptions
) -> StubChoice:
    """Choose the stub for a full Python version (``3.11.7``) before anything slow starts.

    Raises:
        VllmEnvError: no stub fits, and none can be built.
    """
    choice = StubChoice(triton, python, options)
    if triton.is_elsewhere:
        check_python(triton, choice.minor)
        return choice
    if mode != "source" and choice.minor in triton.stubs:
        return replace(choice, prebuilt=triton.stubs[choice.minor])
    refusal = (
        f"--python {choice.minor}: the Triton {triton.release} in {triton.path} has no stub for it"
    )
    # By number: as texts, 3.9 would come after 3.10.
    versions = sorted(triton.stubs, key=lambda version: int(version.split(".")[1]))
    known = f"It has stubs for Python {', '.join(versions) or 'none'}."
    if mode == "prebuilt":
        raise VllmEnvError(
            f"{refusal}.",
            cause=known,
            remedy="Pick one of these with --python, or build one with --stub source.",
        )
    try:
        stub_source.check_buildable(workspace, triton.release, python, options)
    except VllmEnvError as error:
        # With --stub source the user has decided to build, and other Pythons are no remedy.
        if mode != "auto":
            raise
        raise VllmEnvError(
            f"{refusal}, and none can be built.",
            cause=f"{known} {error.what}",
            remedy=f"Pick one of these with --python. Or: {error.remedy}",
        ) from error
    return choice


def make_stub(workspace: Workspace, choice: StubChoice, prefix: Path) -> Stub:
    """Return the chosen stub, which is built if necessary, checked and started once in a prefix.

    Raises:
        VllmEnvError: the stub cannot be built, or a check fails.
    """
    release = choice.triton.release
    if choice.triton.is_elsewhere:
        return Stub(None, choice.minor, release, "", 0, SERVER_ORIGIN, libraries=None)
    path = choice.prebuilt or stub_source.build_stub(
        workspace, choice.triton, choice.python, prefix, choice.options
    )
    # A stub from the cache is checked again: the prefix may have other libraries.
    check_stub(path, choice.minor, choice.triton, prefix)
    path = make_self_starting(workspace, path, prefix, choice.triton.path / "lib")
    return Stub(
        path=path,
        python=choice.minor,
        release=release,
        sha256=file_sha256(path),
        size=path.stat().st_size,
        origin="prebuilt" if choice.prebuilt else "source",
        libraries=path.parent / STUB_LIBRARIES,
    )


def make_self_starting(workspace: Workspace, stub: Path, environment: Path, shipped: Path) -> Path:
    """Return a copy of a stub, in the cache, that starts even without LD_LIBRARY_PATH.

    It finds its libraries in ``stub_lib`` next to it.

    Args:
        workspace: for the cache.
        stub: the program, which fits the environment.
        environment: the folder that contains ``lib``.
        shipped: the libraries of the stub's Triton. The stubs of the wheel ``nvidia-pytriton`` need
            a libcudart that is only there, and under a name that only this wheel has.
    """
    # Before each real start, tritonserver starts the stub without arguments and without the
    # environment's libraries, and expects status 1 (stub_launcher.cc). At any other status it
    # assumes that the file is not executable, and sets its mode to 0100. In a read-only repository,
    # or if another user owns the file, that fails, and so does the load: "Failed to give execute
    # permission".
    section = read_dynamic_section(stub)
    assert section  # noqa: S101 - check_stub() has read it
    # 1) Choose the libraries: the environment's libpython, and those that Triton ships.
    python = next(environment / "lib" / n for n in section.needed if n.startswith("libpython"))
    others = (shipped / name for name in section.needed if name != python.name)
    libraries = [python, *(file for file in others if file.is_file())]
    # 2) Look in the cache.
    key = key_of(_FORMAT, file_sha256(stub), *map(file_sha256, libraries))
    target = workspace.cache.path("stubs", key)
    if (target / STUB_NAME).is_file():
        touch(target)
        return target / STUB_NAME
    # 3) Make the copy. It keeps the folders that the original searches, but not those relative to
    # the original's own place.
    former = [f for f in section.runpath or section.rpath if not f.startswith("$ORIGIN")]
    with workspace.cache.staging() as staging:
        entry = staging / "done"
        _copy_with_libraries(stub, libraries, former, entry)
        put_in_place(entry, target)
    return target / STUB_NAME


def _copy_with_libraries(
    stub: Path, libraries: list[Path], more_folders: list[str], entry: Path
) -> None:
    """Copy a stub into a new folder ``entry``, and let it search the libraries next to it.

    Args:
        stub: the program.
        libraries: the files for ``stub_lib``.
        more_folders: folders that the copy searches before ``stub_lib``.
        entry: the folder.
    """
    (entry / STUB_LIBRARIES).mkdir(parents=True)
    for library in libraries:
        shutil.copy(library, entry / STUB_LIBRARIES)
    copy = entry / STUB_NAME
    shutil.copyfile(stub, copy)
    copy.chmod(0o755)
    # patchelf writes a RUNPATH, which comes after LD_LIBRARY_PATH. So at the real start, for which
    # tritonserver sets that variable, the environment's own libpython is found first.
    run_path = ":".join([*more_folders, f"$ORIGIN/{STUB_LIBRARIES}"])
    command = [TOOLS / "patchelf", "--set-rpath", run_path, copy]
    run(command, what="let the stub find its libraries")


def check_stub(stub: Path, python: str, triton: TritonRoot, environment: Path) -> None:
    """Raise a VllmEnvError if a stub would not start in an environment with this Python (``3.11``).

    Args:
        stub: the program.
        python: the environment's Python version, such as ``3.11``.
        triton: the Triton root, whose libraries the stub may need.
        environment: the folder that contains ``bin`` and ``lib``.
    """
    section = read_dynamic_section(stub)
    if section is None:
        raise VllmEnvError(
            f"The stub {stub} is not a dynamic ELF program.", remedy="Use --stub source."
        )
    libraries = (name for name in section.needed if name.startswith("libpython"))
    library = next(libraries, "no libpython")
    fits = library.startswith(f"libpython{python}.")
    if not fits or not (environment / "lib" / library).exists():
        raise VllmEnvError(
            f"The stub {stub} needs {library}, the environment has Python {python}.",
            cause="A stub loads the libpython that it was built for from the environment's lib/.",
            remedy="Use the --python that it was built for, or --stub source.",
        )
    start_stub(stub, triton, environment)


def start_stub(stub: Path, triton: TritonRoot, environment: Path) -> None:
    """Start a stub without arguments.

    Raises:
        VllmEnvError: it does not print its usage and end with status 1, as stubs do.
    """
    # As Triton sets it: the environment's libraries come first.
    inherited = os.environ.get("LD_LIBRARY_PATH", "")
    folders = [str(environment / "lib"), str(triton.path / "lib"), *inherited.split(":")]
    # An empty entry would mean the working folder.
    path = ":".join(filter(None, folders))
    # Only the stub gets the environment's libraries. They may not fit bash.
    script = 'LD_LIBRARY_PATH=$1 "$2"; printf "\\nstatus %s\\n" $?'
    output = run(["bash", "-c", script, "bash", path, stub], what=f"start the stub {stub}")
    *lines, status = output.strip().splitlines()
    # ld.so, too, ends with status 1 if a library lacks the version of a symbol.
    refused = re.search(r"error while loading shared libraries|version `\S+' not found", output)
    if status == "status 1" and not refused:
        return
    cause = "It is not a stub of the Python backend, or is damaged."
    if refused:
        cause = "A library that it needs is missing or too old here."
    answer = " ".join(lines)[-300:] or "it printed nothing"
    raise VllmEnvError(
        f"The stub {stub} does not start ({status}): {answer}",
        cause=cause,
        remedy="Build one here: --stub source.",
    )
