"""Start an environment's interpreter as Triton's launcher starts the stub, and check where it finds its modules.

There are two generations of the launcher (src/stub_launcher.cc). Up to 25.07, bash sources ``bin/activate``. Since 25.08, an
environment gets only PATH, LD_LIBRARY_PATH and VIRTUAL_ENV. The interpreter inside the stub does not configure the locale.
A stand-alone interpreter does, unless an option forbids it.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_env import inside
from vllm_env.base.errors import REBUILD, CommandError, VllmEnvError
from vllm_env.base.process import run
from vllm_env.base.workspace import Workspace
from vllm_env.triton.root import rules_of

from .tree_rules import Expected, is_same_version

_PROBE = inside.FOLDER / "launcher_probe.py"
_MARK = "vllm_env-probe "
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
# These have the same effect as initialising Python without configuring the locale (PEP 538 and 540 off, C locale).
_AS_EMBEDDED = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
# The probe must not change the environment, and must see the bytecode as it was packed.
_QUIET = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class Started:
    """The probe's findings in an interpreter of the environment; ``imported`` has file and version by module name."""

    encoding: str
    prefix: str
    path: Sequence[str]
    environment: Mapping[str, str]
    imported: Mapping[str, Sequence[str]]
    files: Sequence[str]
    stale: Sequence[str]


def start(
    workspace: Workspace, environment: Path, modules: tuple[str, ...], *, activates: bool
) -> Started:
    """Start the environment's interpreter as one generation of the launcher does, and import modules in it.

    A broken NumPy lies in a folder of PYTHONPATH and in the user's site, so an import from there is noticed.

    Raises:
        VllmEnvError: the interpreter does not start, or an import fails; the error has its last lines of output.
    """
    with workspace.cache.staging() as scratch:
        foreign, home = scratch / "foreign", scratch / "home"
        python = next(iter(sorted(environment.glob("lib/python3.*"))), environment).name
        for folder in (foreign, home / ".local" / "lib" / python / "site-packages"):
            folder.mkdir(parents=True)
            (folder / "numpy.py").write_text(
                "raise ImportError('a numpy from outside the environment')\n"
            )
        variables = {"HOME": str(home), "PYTHONPATH": str(foreign)}
        what = (
            f"start the environment as Triton {'up to 25.07' if activates else 'since 25.08'} does"
        )
        try:
            return Started(
                **ask(environment, _PROBE, modules, variables, activates=activates, what=what)
            )
        except CommandError as error:
            raise _explained(error) from error


def ask(
    environment: Path,
    probe: Path,
    question: Any,
    variables: Mapping[str, str],
    *,
    activates: bool,
    what: str,
) -> dict[str, Any]:
    """Run a probe in the environment's interpreter, started as one generation of the launcher does; return its answer.

    The probe gets ``question`` as JSON. Its variables are ``variables`` and none of this process; HOME is its working folder.

    Raises:
        CommandError: the probe does not start, or fails; the error has its last lines of output.
    """
    program = ["python3", "-c", probe.read_text("utf-8"), json.dumps(question)]
    output = run(
        _command(environment, variables, program, activates=activates),
        what=what,
        cwd=Path(variables["HOME"]),
        remedy="A package breaks the import: pin another version of it (--with PACKAGE==VERSION), or of vLLM.",
    )
    line = next((line for line in reversed(output.splitlines()) if line.startswith(_MARK)), None)
    if line is None:
        raise CommandError(
            "The environment's interpreter ended without an answer.",
            tail=output[-4000:],
            remedy=REBUILD,
        )
    answer: dict[str, Any] = json.loads(line[len(_MARK) :])
    return answer


def _command(
    environment: Path, variables: Mapping[str, str], program: list[str], *, activates: bool
) -> list[str]:
    """Return the command line that clears this process's variables; the program is found through PATH."""
    given = {"PATH": _SYSTEM_PATH, **_AS_EMBEDDED, **_QUIET, **variables}
    library = environment / "lib"
    if activates:
        sourced = f"source {shlex.quote(f'{environment}/bin/activate')}"
        text = f"{sourced} && exec env LD_LIBRARY_PATH={shlex.quote(str(library))}:$LD_LIBRARY_PATH {shlex.join(program)}"
        program = ["bash", "-c", text]
    else:
        libraries = ":".join([str(library), *filter(None, [given.get("LD_LIBRARY_PATH")])])
        given |= {
            "PATH": f"{environment}/bin:{_SYSTEM_PATH}",
            "LD_LIBRARY_PATH": libraries,
            "VIRTUAL_ENV": str(environment),
        }
    return ["env", "-i", *(f"{name}={value}" for name, value in given.items()), *program]


def _explained(error: CommandError) -> CommandError:
    reasons = (
        ("UnicodeDecodeError", "The embedded interpreter decodes files as ASCII: 00_vllm_env.pth did not run.", REBUILD),
        ("outside the environment", "PYTHONPATH or the user's site shadow it: 00_vllm_env.pth did not run.", REBUILD),
        ("GLIBC", "A library needs a newer C or C++ library than there is.", "Build it in the container that will serve it."),
    )  # fmt: skip
    for sign, cause, remedy in reasons:
        if sign in error.tail:
            return CommandError(error.what, tail=error.tail, cause=cause, remedy=remedy)
    return error


def judge(started: Started, environment: Path, expected: Expected) -> None:
    """Check whether the findings in an interpreter would cause errors under Triton.

    Raises:
        VllmEnvError: names the rule and the remedy.
    """
    if started.encoding.upper().replace("_", "-") != "UTF-8":
        raise VllmEnvError(
            f"The environment's interpreter reads files as {started.encoding} under Triton.",
            cause="The stub does not configure the locale, and 00_vllm_env.pth in site-packages did not mend it.",
            remedy=REBUILD,
        )
    outside = [p for p in started.path if p and not _is_inside(p, environment)]
    outside += [f for f in started.files if not _is_inside(f, environment)]
    if outside or not _is_inside(started.prefix, environment):
        raise VllmEnvError(
            f"The environment looks outside of itself: {', '.join((outside or [started.prefix])[:3])}.",
            cause="PYTHONPATH, the user's site or another Python would shadow what is pinned here.",
            remedy=REBUILD,
        )
    for name, (file, version) in started.imported.items():
        locked = expected.versions.get(name)
        if name in ("numpy", "torch") and locked and not is_same_version(version, locked):
            raise VllmEnvError(
                f"{name} is {version}, the lock has {locked}.",
                cause=f"Imported from {file}.",
                remedy=REBUILD,
            )


def _is_inside(path: str, environment: Path) -> bool:
    return Path(path).resolve().is_relative_to(environment.resolve())


def check_start(workspace: Workspace, environment: Path, expected: Expected) -> Started:
    """Import vLLM as the release's launcher would, and return the findings.

    Raises:
        VllmEnvError: an import fails, or a module comes from outside the environment, or its version is not the lock's.
    """
    activates = rules_of(expected.release).activates
    asked = tuple(name for name in ("numpy", "torch") if name in expected.versions)
    started = start(
        workspace, environment, (*asked, "vllm", "vllm.v1.engine.async_llm"), activates=activates
    )
    judge(started, environment, expected)
    if "vllm" not in started.imported:
        raise VllmEnvError(
            "The environment has no module vllm.", remedy="Pin a distribution that has one."
        )
    return started
