"""Build the stub from source: ``python_backend`` at a Triton release, for one Python.

The build takes 2 minutes on 2 cores. It fetches Triton's repositories, and through them pybind11,
dlpack, googletest and Boost.
"""

import os
import re
import shlex
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

# Raise it when the build changes.
_FORMAT = 1
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
        """Return options with these mirrors, else those in TRITON_GIT_URL and TRITON_BOOST_URL."""
        git_url = git_url or os.environ.get("TRITON_GIT_URL") or DEFAULT_GIT_URL
        boost_url = boost_url or os.environ.get("TRITON_BOOST_URL", "")
        return cls(git_url.rstrip("/"), boost_url, jobs)


def source_key(release: str, python: str, options: StubOptions) -> str:
    """Return the content key of a stub that is built from source.

    Args:
        release: the Triton release, such as ``24.10``.
        python: the full Python version, such as ``3.11.7``.
        options: the sources; the number of jobs does not count.
    """
    return key_of(_FORMAT, release, python, options.git_url, options.boost_url, options.gpu)


def check_buildable(workspace: Workspace, release: str, python: str, options: StubOptions) -> None:
    """Raise a VllmEnvError if a stub is not cached and cannot be built here.

    Args:
        workspace: the cache and the network.
        release: the Triton release, such as ``24.10``.
        python: the full Python version, such as ``3.11.7``.
        options: the sources.
    """
    if _cached(workspace, source_key(release, python, options)).is_file():
        return
    # CMake takes CXX and no other compiler if it is set.
    compiler = os.environ.get("CXX")
    compilers = [compiler] if compiler else ["c++", "g++", "clang++"]
    for what, programs in {"git": ["git"], "a C++ compiler": compilers}.items():
        if not any(map(shutil.which, programs)):
            raise VllmEnvError(
                f"The stub of Triton {release} must be built, and {what} is missing here.",
                remedy=f"Install it ({_PACKAGES}), or pick a --python for which there is a stub.",
            )
    check_branch(workspace, release, options)


def check_branch(workspace: Workspace, release: str, options: StubOptions) -> None:
    """Raise a VllmEnvError if ``python_backend`` cannot be reached or has no such release."""
    repository = f"{options.git_url}/python_backend.git"
    branch = f"r{release}"
    remedy = (
        "Name a mirror with --triton-git-url, or use a --python for which there is a stub "
        "(--stub prebuilt)."
    )
    what = f"look for branch {branch} in {repository}"
    # Outside the try: the error of --offline already has its own remedy.
    workspace.network.require(what)
    try:
        # A mirror may have the release as a tag.
        command = ["ls-remote", "--heads", "--tags", repository, branch]
        answer = workspace.network.git(command, what)
    except CommandError as error:
        lines = error.tail.strip().splitlines()
        raise CommandError(
            f"The stub of Triton {release} must be built, and {repository} cannot be reached.",
            tail=error.tail,
            # git prints its reason last.
            cause=lines[-1] if lines else error.cause,
            remedy=remedy,
        ) from error
    if f"/{branch}" not in answer:
        raise VllmEnvError(
            f"{repository} has no branch {branch}, from which Triton {release}'s stub is built.",
            cause="Branches of python_backend are named after the container's release, rYY.MM.",
            remedy=f"Check that the Triton root is of release {release}. {remedy}",
        )


def _cached(workspace: Workspace, key: str) -> Path:
    """Return the path of a stub in the cache, which need not exist."""
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
    # The log has only the last build.
    log.unlink(missing_ok=True)
    check_branch(workspace, triton.release, options)
    with workspace.cache.staging() as staging:
        build = _Build(workspace, triton, options, staging, log)
        build.clone()
        program = build.compile(_definitions(build, prefix, python))
        _remove_run_path(program)
        # Only the program goes into the cache; the rest of the build is removed with ``staging``.
        entry = staging / "done"
        entry.mkdir()
        stub = entry / STUB_NAME
        shutil.copyfile(program, stub)
        stub.chmod(0o755)
        put_in_place(entry, target.parent)
    return target


@dataclass(frozen=True)
class _Build:
    """A running build in the folder ``staging``; the output of programs goes to ``log``."""

    workspace: Workspace
    triton: TritonRoot
    options: StubOptions
    staging: Path
    log: Path

    def clone(self) -> None:
        """Fetch ``python_backend`` at Triton's release into ``source`` of the staging folder.

        Raises:
            CommandError: git fails.
        """
        branch = f"r{self.triton.release}"
        source = self.staging / "source"
        url = f"{self.options.git_url}/python_backend.git"
        report.step(f"clone python_backend {branch}")
        self.workspace.network.git(
            ["clone", "--quiet", "--depth", "1", "--branch", branch, url, source],
            f"clone python_backend at {branch}",
            on_line=self._record,
            remedy="Check the network, or name a mirror with --triton-git-url.",
        )
        lists = source / "CMakeLists.txt"
        if self.options.boost_url and lists.is_file():
            text = with_boost_url(lists.read_text("utf-8"), self.options.boost_url)
            lists.write_text(text, "utf-8")

    def compile(self, definitions: list[str]) -> Path:
        """Compile the stub with these options of CMake; return the program.

        Raises:
            VllmEnvError: the build fails, or leaves no stub.
        """
        cmake = TOOLS / "cmake"
        build = self.staging / "build"
        jobs = self.options.jobs or os.cpu_count() or 1
        source = self.staging / "source"
        self._run_cmake("configure", [cmake, "-S", source, "-B", build, *definitions])
        # Only the stub: the backend's own library belongs to the Triton root.
        command = [cmake, "--build", build, "--target", _TARGET, "--parallel", jobs]
        self._run_cmake("compile", command)
        stub = next(build.rglob(STUB_NAME), None)
        if stub is None:
            raise VllmEnvError(
                f"The target {_TARGET} left no {STUB_NAME}.",
                cause=f"The whole log is in {self.log}.",
                remedy="Use --stub prebuilt.",
            )
        return stub

    def _run_cmake(self, name: str, command: list[object]) -> None:
        """Run a step of the build, with its output in the log; ``name`` is a verb for messages.

        Raises:
            CommandError: it fails; the remedy is by its output.
        """
        report.step(name)
        try:
            # Through the network's gate, which knows --offline: CMake fetches sources both when it
            # configures and when it builds.
            self.workspace.network.program(
                command,
                f"{name} the stub of Triton {self.triton.release}",
                env=_build_environment(self.options),
                on_line=self._record,
            )
        except CommandError as error:
            raise CommandError(
                error.what,
                tail=error.tail,
                cause=f"The whole log is in {self.log}.",
                remedy=_remedy(error.tail),
            ) from error

    def _record(self, line: str) -> None:
        """Append a line of output to the log, and show it if it is progress."""
        with self.log.open("a", encoding="utf-8") as sink:
            sink.write(f"{line}\n")
        # Ninja's progress.
        if re.match(r"\[\d+/\d+\]", line):
            report.step(line)


def with_boost_url(text: str, url: str) -> str:
    """Return a CMakeLists.txt that fetches Boost from ``url``."""
    # Up to 25.07 the address is hard-coded in the file. Since then this variable has it.
    if "TRITON_BOOST_URL" in text:
        return text
    return re.sub(r"(\bURL\s+)\S+/boost_\S+", rf"\g<1>{url}", text)


def _definitions(build: _Build, prefix: Path, python: str) -> list[str]:
    """Return CMake's options.

    Args:
        build: the build.
        prefix: the environment's prefix, whose Python the stub embeds.
        python: its full version, such as ``3.11.7``.
    """
    minor = ".".join(python.split(".")[:2])
    tag = f"r{build.triton.release}"
    options = build.options
    definitions = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": TOOLS / "ninja",
        # Without it, CMake 4 refuses the projects of older releases.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        # Gives equal bytes for every build folder.
        "CMAKE_CXX_FLAGS": shlex.quote(f"-ffile-prefix-map={build.staging}/="),
        "TRITON_BACKEND_REPO_TAG": tag,
        "TRITON_COMMON_REPO_TAG": tag,
        "TRITON_CORE_REPO_TAG": tag,
        "TRITON_REPO_ORGANIZATION": options.git_url,
        "TRITON_ENABLE_GPU": "ON" if options.gpu else "OFF",
        "PYBIND11_PYTHON_VERSION": minor,
    }
    # The paths are given because the interpreter's own LIBDIR is a placeholder for the folder into
    # which it will be unpacked. Nothing exists there. pybind11 2.6 to 2.13 and CMake's modules read
    # them under one of these names.
    for name in ("PYTHON", "Python", "Python3"):
        definitions[f"{name}_EXECUTABLE"] = prefix / "bin" / "python"
        definitions[f"{name}_LIBRARY"] = prefix / "lib" / f"libpython{minor}.so"
        definitions[f"{name}_INCLUDE_DIR"] = prefix / "include" / f"python{minor}"
    if options.boost_url:
        definitions["TRITON_BOOST_URL"] = options.boost_url
    return ["-G", "Ninja", *(f"-D{name}={value}" for name, value in definitions.items())]


def _build_environment(options: StubOptions) -> dict[str, str]:
    """Return the variables of a build."""
    # An empty value removes a variable. Without these three, CMake cannot find another Python.
    variables = dict.fromkeys(("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH"), "")
    # Here, too, because CMake also configures the projects that it fetches.
    variables["CMAKE_POLICY_VERSION_MINIMUM"] = "3.5"
    if options.git_url != DEFAULT_GIT_URL:
        # Older releases hard-code the organisation for the other repositories. git replaces it.
        variables |= {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.{options.git_url}/.insteadOf",
            "GIT_CONFIG_VALUE_0": f"{DEFAULT_GIT_URL}/",
        }
    return variables


def _remedy(tail: str) -> str:
    """Return the next step for a failed build, by the last lines of its output."""
    if re.search(r"archive\.h|rapidjson|RapidJSON|zlib\.h|ZLIB|numa\.h", tail):
        return f"Install what it needs: {_PACKAGES}."
    if re.search(r"CUDAToolkit|nvcc|cuda", tail, re.IGNORECASE):
        return (
            "Build it where the CUDA toolkit is, or for a Python for which the container has a "
            "stub: --stub prebuilt."
        )
    if re.search(r"Could not resolve host|Failed to clone|download|Connection", tail):
        return "Check the network, or name mirrors with --triton-git-url and --triton-boost-url."
    return "Use a --python for which there is a stub (--stub prebuilt), or report the log."


def _remove_run_path(stub: Path) -> None:
    """Remove the path that libpython had at link time."""
    # pybind11 takes it from the interpreter, and no other machine has it. Under Triton,
    # LD_LIBRARY_PATH begins with the environment's lib.
    section = read_dynamic_section(stub)
    if section and (section.rpath or section.runpath):
        run([TOOLS / "patchelf", "--remove-rpath", stub], what="remove the stub's library path")
