"""Start an environment's interpreter as Triton's launcher starts the stub, and judge its answers.

There are two generations of the launcher (src/stub_launcher.cc). Up to 25.07, bash sources
``bin/activate``. Since 25.08, an environment gets only PATH, LD_LIBRARY_PATH and VIRTUAL_ENV.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_env import inside
from vllm_env.base.errors import REBUILD_REMEDY, CommandError, VllmEnvError
from vllm_env.base.process import run
from vllm_env.base.workspace import Workspace

from .tree_rules import Expected, is_same_version

_PROBE = inside.FOLDER / "launcher_probe.py"
_MARK = "vllm_env-probe "
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_VARIABLES = {
    "PATH": _SYSTEM_PATH,
    # The interpreter inside the stub does not configure the locale. A stand-alone interpreter
    # does, unless these forbid it (PEP 538 and 540 off, C locale).
    "LC_ALL": "C",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONUTF8": "0",
    # The probe must not change the environment, and must see the bytecode as it was packed.
    "PYTHONDONTWRITEBYTECODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# A text in the probe's output, the cause that it shows, and the remedy.
_REASONS = (
    (
        "UnicodeDecodeError",
        "The embedded interpreter decodes files as ASCII: 00_vllm_env.pth did not run.",
        REBUILD_REMEDY,
    ),
    (
        "outside the environment",
        "PYTHONPATH or the user's site shadow it: 00_vllm_env.pth did not run.",
        REBUILD_REMEDY,
    ),
    (
        "GLIBC",
        "A library needs a newer C or C++ library than this machine has.",
        "Build it in the container that will serve it.",
    ),
)


@dataclass(frozen=True)
class Later:
    """Modules to import after those of a start, each for itself.

    Attributes:
        as_cuda: whether vLLM takes its CUDA platform, with or without a GPU.
        modules: names; one that ends in ``.*`` stands for the modules of a package.
        seconds: the time for each module.
        variables: what the interpreter gets for them.
    """

    as_cuda: bool
    modules: tuple[str, ...]
    seconds: float
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Started:
    """The probe's findings in an interpreter of the environment.

    Attributes:
        encoding: the encoding of a file that is opened without one.
        prefix: ``sys.prefix``.
        path: ``sys.path``.
        environment: the variables of the process.
        imported: file and version by module name.
        files: the files of all imported modules.
        stale: the names of the modules whose bytecode does not fit their source.
        failures: why later modules could not be imported, by name: ``text``, ``place`` (file and
            line), ``absent`` (the missing module) and ``owners`` (distributions that have such a
            module). Or only ``slow``: the import took too long.
    """

    encoding: str
    prefix: str
    path: Sequence[str]
    environment: Mapping[str, str]
    imported: Mapping[str, Sequence[str]]
    files: Sequence[str]
    stale: Sequence[str]
    failures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def start(
    workspace: Workspace,
    environment: Path,
    modules: tuple[str, ...],
    *,
    activates: bool,
    later: Later | None = None,
) -> Started:
    """Start the environment's interpreter as Triton's stub launcher does, and import modules there.

    Args:
        workspace: the cache.
        environment: the unpacked environment.
        modules: imported one after another. Those that do not exist are skipped.
        activates: whether it is a launcher up to 25.07, which sources ``bin/activate``.
        later: imported afterwards.

    Raises:
        VllmEnvError: the interpreter does not start, or an import fails; the error has its last
            lines of output.
    """
    with workspace.cache.staging() as scratch:
        foreign = scratch / "foreign"
        home = scratch / "home"
        # 1) Put a broken NumPy into a folder of PYTHONPATH and into the user's site, so that an
        # import from there is noticed. The user's site is named after the interpreter. Do not take
        # the name from a folder of lib: conda also makes a link lib/python3.1.
        python = (environment / "bin" / "python").resolve().name
        for folder in (foreign, home / ".local" / "lib" / python / "site-packages"):
            folder.mkdir(parents=True)
            numpy = "raise ImportError('a numpy from outside the environment')\n"
            (folder / "numpy.py").write_text(numpy)
        # 2) Start the interpreter.
        variables = {"HOME": str(home), "PYTHONPATH": str(foreign)}
        if later:
            variables |= later.variables
        question = {"modules": modules, "later": later and asdict(later)}
        releases = "up to 25.07" if activates else "since 25.08"
        what = f"start the environment as Triton {releases} does"
        try:
            answer = _run_probe(environment, question, variables, activates=activates, what=what)
        except CommandError as error:
            raise _with_cause(error) from error
    return Started(**answer)


def _run_probe(
    environment: Path,
    question: Mapping[str, Any],
    variables: Mapping[str, str],
    *,
    activates: bool,
    what: str,
) -> dict[str, Any]:
    """Run the probe in the environment's interpreter, and return its answer.

    Args:
        environment: the unpacked environment.
        question: the probe gets it as JSON.
        variables: the probe gets these and none of this process; HOME is its working folder.
        activates: whether this generation of the launcher sources ``bin/activate``.
        what: the purpose, for the error message.

    Raises:
        CommandError: the probe does not start, or fails; the error has its last lines of output.
    """
    program = ["python3", "-c", _PROBE.read_text("utf-8"), json.dumps(question)]
    output = run(
        _command(environment, variables, program, activates=activates),
        what=what,
        cwd=Path(variables["HOME"]),
        remedy=(
            "A package breaks the import: pin another version of it (--with PACKAGE==VERSION), "
            "or of vLLM."
        ),
    )
    # Imported modules may print, too.
    for line in reversed(output.splitlines()):
        if line.startswith(_MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return answer
    raise CommandError(
        "The environment's interpreter ended without an answer.",
        tail=output[-4000:],
        remedy=REBUILD_REMEDY,
    )


def _command(
    environment: Path, variables: Mapping[str, str], program: list[str], *, activates: bool
) -> list[str]:
    """Return the command line that starts ``program`` as a generation of the launcher does.

    It clears this process's variables, and finds the program in PATH. The arguments are those of
    :func:`_run_probe`.
    """
    variables = {**_VARIABLES, **variables}
    library = f"{environment}/lib"
    # Both generations put the environment's lib/ first into LD_LIBRARY_PATH.
    if activates:
        script = (
            f"source {shlex.quote(f'{environment}/bin/activate')} && "
            f"exec env LD_LIBRARY_PATH={shlex.quote(library)}:$LD_LIBRARY_PATH "
            f"{shlex.join(program)}"
        )
        program = ["bash", "-c", script]
    else:
        # An empty entry would stand for the working folder.
        libraries = filter(None, (library, variables.get("LD_LIBRARY_PATH")))
        variables |= {
            "PATH": f"{environment}/bin:{_SYSTEM_PATH}",
            "LD_LIBRARY_PATH": ":".join(libraries),
            "VIRTUAL_ENV": str(environment),
        }
    return ["env", "-i", *(f"{name}={value}" for name, value in variables.items()), *program]


def _with_cause(error: CommandError) -> CommandError:
    """Return an error of the probe with the cause that its output shows, or else unchanged."""
    for sign, cause, remedy in _REASONS:
        if sign in error.tail:
            return CommandError(error.what, tail=error.tail, cause=cause, remedy=remedy)
    return error


def judge(started: Started, environment: Path, versions: Mapping[str, str]) -> None:
    """Check whether the findings in an interpreter would cause errors under Triton.

    Args:
        started: the findings.
        environment: the unpacked environment.
        versions: the locked versions by normalised name.

    Raises:
        VllmEnvError: names the rule and the remedy.
    """
    # 1) The encoding. With ASCII, `import torch` fails with a UnicodeDecodeError.
    if started.encoding.upper().replace("_", "-") != "UTF-8":
        raise VllmEnvError(
            f"The environment's interpreter reads files as {started.encoding} under Triton.",
            cause=(
                "The stub does not configure the locale, "
                "and 00_vllm_env.pth in site-packages did not do it either."
            ),
            remedy=REBUILD_REMEDY,
        )
    # 2) The paths. An empty entry of sys.path, which is the working folder, does not count.
    paths = (*filter(None, started.path), *started.files, started.prefix)
    outside = [path for path in paths if not _is_inside(path, environment)]
    if outside:
        raise VllmEnvError(
            f"The environment looks outside of itself: {', '.join(outside[:3])}.",
            cause="PYTHONPATH, the user's site or another Python would shadow the pinned packages.",
            remedy=REBUILD_REMEDY,
        )
    # 3) The versions. vLLM's own version may differ from its distribution's version.
    for name, (file, version) in started.imported.items():
        locked = versions.get(name) if name in ("numpy", "torch") else None
        if locked and not is_same_version(version, locked):
            raise VllmEnvError(
                f"{name} is {version}, the lock has {locked}.",
                cause=f"Imported from {file}.",
                remedy=REBUILD_REMEDY,
            )


def _is_inside(path: str, environment: Path) -> bool:
    return Path(path).resolve().is_relative_to(environment.resolve())


def check_start(
    workspace: Workspace, environment: Path, expected: Expected, later: Later | None = None
) -> Started:
    """Import vLLM as the release's launcher would, then the later modules; return the findings.

    Raises:
        VllmEnvError: an import fails, or a module comes from outside the environment, or its
            version is not the lock's.
    """
    arrays = tuple(name for name in ("numpy", "torch") if name in expected.versions)
    modules = (*arrays, "vllm", "vllm.v1.engine.async_llm")
    started = start(workspace, environment, modules, activates=expected.activates, later=later)
    judge(started, environment, expected.versions)
    # The probe skips modules that do not exist.
    if "vllm" not in started.imported:
        raise VllmEnvError(
            "The environment has no module vllm.", remedy="Pin a distribution that has one."
        )
    return started
