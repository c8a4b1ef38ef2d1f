"""Build the stub from source: ``python_backend`` at the branch of a Triton release, for the environment's Python."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base import report
from vllm_env.base.cache import key_of, touch
from vllm_env.base.elf import read_dynamic_section
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.filesystem import put_in_place
from vllm_env.base.process import run
from vllm_env.base.workspace import TOOLS, Workspace

from .root import STUB_NAME, TritonRoot

_FORMAT = 1  # raise it when the build changes
DEFAULT_GIT_URL = "https://github.com/triton-inference-server"
_TARGET = "triton-python-backend-stub"
_PACKAGES = "apt-get install g++ git libarchive-dev rapidjson-dev zlib1g-dev libnuma-dev"


@dataclass(frozen=True)
class StubOptions:
    """The sources of the stub and the options of its build.

    Attributes:
        git_url: the organisation with python_backend, backend, common and core.
        boost_url: replaces the address of the Boost archive.
        jobs: number of parallel compilers; 0 takes one per core.
        gpu: whether the stub is for a GPU.
    """

    git_url: str = DEFAULT_GIT_URL
    boost_url: str = ""
    jobs: int = 0
    gpu: bool = False

    @classmethod
    def of(
        cls, git_url: str | None = None, boost_url: str | None = None, jobs: int = 0
    ) -> "StubOptions":
        """Return options with the given mirrors, else with those in TRITON_GIT_URL and TRITON_BOOST_URL."""
        url = git_url or os.environ.get("TRITON_GIT_URL") or DEFAULT_GIT_URL
        return cls(url.rstrip("/"), boost_url or os.environ.get("TRITON_BOOST_URL", ""), jobs)


def source_key(release: str, python: str, options: StubOptions) -> str:
    """Return the content key of a stub that is built from source; ``python`` is the full version."""
    return key_of(_FORMAT, release, python, options.git_url, options.boost_url, options.gpu)


def check_buildable(workspace: Workspace, release: str, python: str, options: StubOptions) -> None:
    """Raise a VllmEnvError early if a stub for a full Python version is not cached and cannot be built here."""
    if _cached(workspace, source_key(release, python, options)).is_file():
        return
    compiler = os.environ.get("CXX") or next(
        (c for c in ("c++", "g++", "clang++") if shutil.which(c)), ""
    )
    for program, what in (("git", "git"), (compiler, "a C++ compiler")):
        if not program or shutil.which(program) is None:
            raise VllmEnvError(
                f"The stub of Triton {release} must be built, and {what} is missing on this machine.",
                remedy=f"Install it ({_PACKAGES}), or pick a --python for which there is a stub.",
            )
    check_branch(workspace, release, options)


def check_branch(workspace: Workspace, release: str, options: StubOptions) -> None:
    """Raise a VllmEnvError if ``python_backend`` has no branch for a release, or the organisation does not answer."""
    repository = f"{options.git_url}/python_backend.git"
    remedy = "Name a mirror with --triton-git-url, or use a --python for which there is a stub (--stub prebuilt)."
    what = f"look for branch r{release} in {repository}"
    workspace.network.require(what)
    try:
        answer = workspace.network.git(
            ["ls-remote", "--heads", "--tags", repository, f"r{release}"], what
        )
    except CommandError as error:
        said = error.tail.strip().splitlines()
        raise CommandError(
            f"The stub of Triton {release} must be built, and {repository} cannot be reached.",
            tail=error.tail,
            cause=said[-1] if said else error.cause,
            remedy=remedy,
        ) from error
    if f"/r{release}" not in answer:
        raise VllmEnvError(
            f"{repository} has no branch r{release}, from which the stub of Triton {release} is built.",
            cause="Branches of python_backend are named after the container's release, rYY.MM.",
            remedy=f"Check that the Triton root is of release {release}. {remedy}",
        )


def _cached(workspace: Workspace, key: str) -> Path:
    return workspace.cache.path("stubs", key, STUB_NAME)


def build_stub(
    workspace: Workspace, triton: TritonRoot, python: str, prefix: Path, options: StubOptions
) -> Path:
    """Return the stub for a prefix's Python (``3.11.7``) from the cache, or clone and build it.

    The log of a build stays in ``logs/`` of the cache, also after a failure.

    Raises:
        VllmEnvError: the build fails; the error names the log.
    """
    key = source_key(triton.release, python, options)
    target = _cached(workspace, key)
    if target.is_file():
        touch(target.parent)
        return target
    log = workspace.cache.path("logs", f"stub-r{triton.release}-python{python}-{key[:8]}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    check_branch(workspace, triton.release, options)
    with workspace.cache.staging() as staging:
        build = _Build(workspace, triton, options, staging, log)
        build.clone()
        built = build.compile(_definitions(build, prefix, python))
        _remove_run_path(built)
        done = staging / "done"
        done.mkdir()
        shutil.copyfile(built, done / STUB_NAME)
        (done / STUB_NAME).chmod(0o755)
        put_in_place(done, target.parent)
    return target


@dataclass(frozen=True)
class _Build:
    """A running build: ``source`` and ``build`` are in ``staging``; the output of programs goes to ``log``."""

    workspace: Workspace
    triton: TritonRoot
    options: StubOptions
    staging: Path
    log: Path

    def clone(self) -> None:
        release, source = self.triton.release, self.staging / "source"
        url = f"{self.options.git_url}/python_backend.git"
        report.step(f"clone python_backend r{release}")
        self.workspace.network.git(
            ["clone", "--quiet", "--depth", "1", "--branch", f"r{release}", url, source],
            f"clone python_backend at r{release}",
            on_line=self._record,
            remedy="Check the network, or name a mirror with --triton-git-url.",
        )
        lists = source / "CMakeLists.txt"
        if self.options.boost_url and lists.is_file():
            lists.write_text(
                with_boost_url(lists.read_text("utf-8"), self.options.boost_url), "utf-8"
            )

    def compile(self, definitions: list[str]) -> Path:
        cmake, build, jobs = (
            TOOLS / "cmake",
            self.staging / "build",
            self.options.jobs or os.cpu_count() or 1,
        )
        self._step("configure", [cmake, "-S", self.staging / "source", "-B", build, *definitions])
        self._step("compile", [cmake, "--build", build, "--target", _TARGET, "--parallel", jobs])
        built = next(build.rglob(STUB_NAME), None)
        if built is None:
            cause = f"The whole log is in {self.log}."
            raise VllmEnvError(
                f"The target {_TARGET} left no {STUB_NAME}.",
                cause=cause,
                remedy="Use --stub prebuilt.",
            )
        return built

    def _step(self, name: str, command: list[object]) -> None:
        """Run CMake through the network's gate, because it fetches sources when it configures and when it builds."""
        report.step(name)
        what, env = (
            f"{name} the stub of Triton {self.triton.release}",
            _build_environment(self.options),
        )
        try:
            self.workspace.network.program(command, what, env=env, on_line=self._record)
        except CommandError as error:
            cause = f"The whole log is in {self.log}."
            raise CommandError(
                error.what, tail=error.tail, cause=cause, remedy=_remedy(error.tail)
            ) from error

    def _record(self, line: str) -> None:
        with self.log.open("a", encoding="utf-8") as sink:
            sink.write(f"{line}\n")
        if re.match(r"\[\d+/\d+\]", line):
            report.step(line)


def with_boost_url(text: str, url: str) -> str:
    """Return a CMakeLists.txt that fetches Boost from ``url``. Up to 25.07, the address is hard-coded in the file."""
    return (
        text
        if "TRITON_BOOST_URL" in text
        else re.sub(r"(\bURL\s+)\S+/boost_\S+", rf"\g<1>{url}", text)
    )


def _definitions(build: _Build, prefix: Path, python: str) -> list[str]:
    """Return CMake's options. They name the Python in each way that pybind11 2.6 to 2.13 and CMake's modules read."""
    minor = ".".join(python.split(".")[:2])
    interpreter, library = prefix / "bin" / "python", prefix / "lib" / f"libpython{minor}.so"
    headers, tag = prefix / "include" / f"python{minor}", f"r{build.triton.release}"
    options = build.options
    definitions = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": TOOLS / "ninja",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # without it, CMake 4 refuses the projects of older releases
        "CMAKE_CXX_FLAGS": f"-ffile-prefix-map={build.staging}/=",  # gives equal bytes for every build folder
        "TRITON_BACKEND_REPO_TAG": tag,
        "TRITON_COMMON_REPO_TAG": tag,
        "TRITON_CORE_REPO_TAG": tag,
        "TRITON_REPO_ORGANIZATION": options.git_url,
        "TRITON_ENABLE_GPU": "ON" if options.gpu else "OFF",
        "PYBIND11_PYTHON_VERSION": minor,
    }
    # The paths are given because the interpreter's own LIBDIR is the neutral prefix, where nothing exists.
    for name in ("PYTHON", "Python", "Python3"):
        places = {"EXECUTABLE": interpreter, "LIBRARY": library, "INCLUDE_DIR": headers}
        definitions |= {f"{name}_{what}": place for what, place in places.items()}
    if options.boost_url:
        definitions["TRITON_BOOST_URL"] = options.boost_url
    return ["-G", "Ninja", *(f"-D{name}={value}" for name, value in definitions.items())]


def _build_environment(options: StubOptions) -> dict[str, str]:
    """Return the variables of a build. git itself replaces the organisation that older releases hard-code."""
    variables = {
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "VIRTUAL_ENV": "",
        "CONDA_PREFIX": "",
        "PYTHONPATH": "",
    }
    if options.git_url != DEFAULT_GIT_URL:
        variables |= {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.{options.git_url}/.insteadOf",
            "GIT_CONFIG_VALUE_0": f"{DEFAULT_GIT_URL}/",
        }
    return variables


def _remedy(tail: str) -> str:
    if re.search(r"archive\.h|rapidjson|RapidJSON|zlib\.h|ZLIB|numa\.h", tail):
        return f"Install what it needs: {_PACKAGES}."
    if re.search(r"CUDAToolkit|nvcc|cuda", tail, re.IGNORECASE):
        return "Build it where the CUDA toolkit is, or for a Python for which the container has a stub: --stub prebuilt."
    if re.search(r"Could not resolve host|Failed to clone|download|Connection", tail):
        return "Check the network, or name mirrors with --triton-git-url and --triton-boost-url."
    return "Use a --python for which there is a stub (--stub prebuilt), or report the log."


def _remove_run_path(stub: Path) -> None:
    """Remove the path of libpython at link time: under Triton, LD_LIBRARY_PATH begins with the environment's lib."""
    needs = read_dynamic_section(stub)
    if needs and (needs.rpath or needs.runpath):
        run([TOOLS / "patchelf", "--remove-rpath", stub], what="remove the stub's library path")
