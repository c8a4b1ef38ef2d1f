"""Options and fixtures of all tests; the end-to-end ones share one build and one server."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from support import models, repositories, slow_run, starts
from support.leftovers import leftovers, wait_for_none
from support.light_fixtures import light_long_arguments, light_parts, light_server, light_serving  # noqa: F401 - fixtures
from support.memory_folder import memory_folder
from support.once import RUN, once, run_folder
from support.reference import ONE_THREAD
from support.serving import EXPLICIT, Parts, Serve, serve
from support.settings import with_metrics, with_openai
from support.sightings import Sightings
from support.small_fixtures import bare_prefix, channel, small_cache, small_spec, small_tree, small_wheel  # noqa: F401 - fixtures
from support.thin_builds import finished_place, thin_channel, thin_lab, thin_wheels  # noqa: F401 - fixtures

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from support.first_start import FirstStart
    from vllm_env.serve.server import TritonServer

# a property that takes long is not wrong: the machine may be busy
settings.register_profile("however slow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("however slow")
PACKAGES_BESIDE = ("triton", "vllm", "torch", "transformers")


_SOURCES = pytest.StashKey[slow_run.Sources]()
_IN_MEMORY = pytest.StashKey[contextlib.ExitStack]()


@pytest.hookimpl(tryfirst=True)  # before pytest makes its folder for temporary ones
def pytest_configure(config: pytest.Config) -> None:
    """Let programs be interrupted: a shell starts a background command, such as this run, with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not _is_worker(config):
        _choose_temporary_folder(config)
        os.environ[RUN] = tempfile.mkdtemp(prefix="vllm_env_test_")
        config.stash[_SOURCES] = slow_run.read_sources(Path(os.environ.get("VLLM_ENV_TEST_CHECKOUT", repositories.CHECKOUT)))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the gigabytes that the run's workers shared, and what tests wrote to memory."""
    if not _is_worker(config):
        shutil.rmtree(os.environ.pop(RUN), ignore_errors=True)
        if _IN_MEMORY in config.stash:
            config.stash[_IN_MEMORY].close()


def _choose_temporary_folder(config: pytest.Config) -> None:
    """Keep what tests write in memory, unless somebody has named a folder, perhaps to look at it."""
    if config.option.basetemp:
        return
    stack = contextlib.ExitStack()
    folder = stack.enter_context(memory_folder())
    if folder:
        config.stash[_IN_MEMORY] = stack
        config.option.basetemp = folder / "tests"


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")  # of xdist


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests that take minutes")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole groups of tests."""
    from support.groups import GroupScheduling  # needs xdist

    return GroupScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine or this run is not for, each with its reason."""
    items.sort(key=lambda item: item.get_closest_marker("ends_server") is not None)
    if _is_worker(config):
        from support.groups import sort_and_note  # needs xdist

        sort_and_note(items)
    if not {"VLLM_ENV_TEST_CHECKOUT", "VLLM_ENV_TEST_ENVIRONMENT"} & os.environ.keys() and any(map(_builds, items)):
        pytest.exit("tests that build or serve are started by tests/run.sh, which gives them a home and caches of their own", 4)
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with --slow"))
        if item.get_closest_marker("gpu") and not Path("/proc/driver/nvidia/version").exists():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU in this machine"))


def _builds(item: pytest.Item) -> bool:
    return item.nodeid.startswith(("tests/chaos", "tests/clients", "tests/e2e", "tests/integration"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop shared servers behind the last test that uses them."""
    if _is_worker(item.config):
        from support.groups import end_servers  # needs xdist

        end_servers(item, nextitem)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the log of a program that failed: its reason stands there, and the file goes with the test."""
    report = yield
    tail = getattr(call.excinfo.value, "tail", "") if call.excinfo else ""
    if tail:
        report.sections.append(("end of the log", tail[-8000:]))
    return report


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Say how many servers the run has started, which take most of its time, and note the result of a slow run.

    xdist's workers have no terminal, so only the process that hands out tests does this.
    """
    line = starts.summary(run_folder())
    if line:
        terminalreporter.write_line(line)
    if exitstatus and _IN_MEMORY in config.stash:
        terminalreporter.write_line("The files of failed tests are gone. To keep them, give --basetemp=FOLDER.")
    if config.getoption("--slow"):
        arguments = config.invocation_params.args
        slow_run.note(repositories.CHECKOUT, config.stash[_SOURCES], arguments, terminalreporter.stats, int(exitstatus))


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of this repository."""
    return repositories.CHECKOUT


@pytest.fixture(scope="session")
def session_folder() -> Iterator[Path]:
    """A folder for gigabytes, gone at the end; a worker's own."""
    folder = Path(tempfile.mkdtemp(prefix="worker_", dir=run_folder()))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def disk_folder(session_folder: Path) -> Iterator[Path]:
    """A test's own folder for gigabytes, with links to what was built: ``tmp_path`` is in memory."""
    folder = Path(tempfile.mkdtemp(dir=session_folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def built_repository() -> Path:
    """A model repository that the real gen_vllm_env.sh built, once for all tests; read it, do not change it."""
    return once("model_repository", repositories.build)


@pytest.fixture(scope="session")
def triton_root(built_repository: Path) -> Path:
    """The Triton root that the build used."""
    return repositories.triton_root()


@pytest.fixture(scope="session")
def unpacked_environment(built_repository: Path) -> Path:
    """The built environment as a folder, with ``bin/python``."""
    return once("environment", lambda _: repositories.unpacked_environment(built_repository / "vllm"))


@pytest.fixture(scope="session")
def standin_model(unpacked_environment: Path) -> Path:
    """A tiny model that knows the answers to prompts.txt."""
    return once("standin", lambda _: models.small_standin(unpacked_environment))


@pytest.fixture(scope="session")
def parts(built_repository: Path, triton_root: Path, unpacked_environment: Path, standin_model: Path) -> Parts:
    """What servers are made of."""
    binary = triton_root / "bin" / "tritonserver"
    return Parts(binary, built_repository / "vllm", unpacked_environment, standin_model)


@pytest.fixture(scope="session")
def serving(parts: Parts) -> Serve:
    """Starts a server of a test's own: ``with serving({"max_model_len": 128}) as server:``."""
    return functools.partial(serve, parts)


@pytest.fixture(scope="session")
def first_start(serving: Serve, session_folder: Path) -> Iterator[FirstStart]:
    """A server with the stand-in on both APIs, which starts with an empty vLLM cache and has been asked its first requests.

    It publishes metrics, and loads and unloads its model when told. Where it is started are folders with the names of packages,
    as where somebody works on these; none may be imported. CXX names a compiler that is not there.
    """
    from support.first_start import FirstStart, ask_first  # imports gRPC, which unit tests do without

    cache = {"VLLM_CACHE_ROOT": str(session_folder / "first_start")}
    beside = session_folder / "beside"
    for name in PACKAGES_BESIDE:
        (beside / name).mkdir(parents=True, exist_ok=True)
        if name != "triton":
            (beside / name / "__init__.py").write_text("raise RuntimeError('imported from the working directory')\n")

    def prepare(model: Path) -> None:
        with_metrics(model)
        with_openai(model)

    variables = {**ONE_THREAD, **cache, "CXX": "/nowhere/g++"}
    start = serving(environment=variables, prepare=prepare, arguments=(EXPLICIT, "--load-model=vllm"))
    sightings = Sightings(cache)
    with contextlib.ExitStack() as stack:
        with sightings.watching(), pytest.MonkeyPatch.context() as patch:
            patch.chdir(beside)
            running = stack.enter_context(start)
        yield FirstStart(running, cache, sightings, ask_first(running))


@pytest.fixture(scope="session")
def server(first_start: FirstStart) -> TritonServer:
    """The same server, shared by all tests that leave it as they found it."""
    return first_start.server


@pytest.fixture(scope="session")
def vision_server(serving: Serve, parts: Parts) -> Iterator[TritonServer]:
    """A server with a small BLIP-2, shared by all tests that leave it as they found it."""
    model = models.vision(parts.environment, parts.standin)
    with serving({"model": str(model), "limit_mm_per_prompt": {"image": 1}}, environment=ONE_THREAD) as running:
        yield running


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    """Fails the test if it leaves a process of a server, an extracted environment or shared memory behind."""
    before = leftovers(os.getpid())
    yield
    wait_for_none(before)
