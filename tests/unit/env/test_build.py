"""The build: its stages in their order, what is reused, and what stands in the repository when one of them fails.

Publishing, the manifest and the cache are real; what takes minutes is stood in for.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field, replace
from functools import partialmethod
from typing import TYPE_CHECKING

import pytest

from support.small_build import small_lock
from support.small_fixtures import workspace_in
from triton_vllm.loading import warm_cache
from vllm_env import build as module
from vllm_env.archive.pack import Archive
from vllm_env.base.cache import Cache, default_root
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.build import BuildResult, build
from vllm_env.plan import BuildRequest, Plan
from vllm_env.prefix.prefix import Prefix
from vllm_env.serve.smoke import SmokeRequest, SmokeResult
from vllm_env.serve.standin import FACTS
from vllm_env.serve.warm import Warmed
from vllm_env.triton.root import TritonRoot, rules_of
from vllm_env.triton.stub import Stub, StubPlan
from vllm_env.triton.stub_source import StubOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vllm_env.base.workspace import Workspace
    from vllm_env.verify.tree_rules import Expected

_SET = {"triton_python_backend_stub", "vllm_env.tar.gz", "vllm_env.cdx.json", "vllm_env.json"}


@dataclass
class Stages:
    """Stands in for the long stages; ``called`` has their names in the order of the calls."""

    folder: Path
    key: str = "k"
    profile: str = "cpu"
    fails: str = ""
    hub: bool = True
    error: BaseException = field(default_factory=lambda: VllmEnvError("It failed."))
    called: list[str] = field(default_factory=list)
    served: list[SmokeRequest] = field(default_factory=list)
    candidates: list[set[str]] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)

    def _call(self, name: str) -> None:
        self.called.append(name)
        if name == self.fails:
            raise self.error

    def make_plan(self, workspace: Workspace, request: BuildRequest) -> Plan:
        """A plan with a stub of the Triton's own."""
        self._call("plan")
        stub = self.folder / "stub"
        stub.write_text("stub")
        lock = small_lock()
        spec = replace(lock.spec, profile=self.profile)
        triton = TritonRoot(self.folder / "triton", "24.10", rules_of("24.10"), {"3.11": stub})
        record = Stub(stub, "3.11", "24.10", hashlib.sha256(b"stub").hexdigest(), 4, "prebuilt")
        planned = StubPlan(triton, "3.11.7", StubOptions(), record)
        return Plan(spec, triton, replace(lock, spec=spec), planned, self.key)

    def make_prefix(self, workspace: Workspace, lock: object, keep: tuple[str, ...], triton: Path) -> Prefix:
        """A prefix with an interpreter."""
        self._call("prefix")
        path = workspace.cache.path("prefixes", "p") / "env"
        (path / "bin").mkdir(parents=True, exist_ok=True)
        (path / "bin" / "python").write_text("python")
        return Prefix(path, "p", small_lock(), (), reused=False)

    def make_stub(self, workspace: Workspace, plan: StubPlan, prefix: Path) -> Stub:
        """The planned one."""
        self._call("stub")
        assert plan.prebuilt
        return plan.prebuilt

    def make_archive(self, workspace: Workspace, prefix: Prefix) -> Archive:
        """A file in the cache, to which published models are links."""
        self._call("archive")
        path = workspace.cache.path("archives", f"{self.key}.tar.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(self.key)
            path.with_name(f"{self.key}.json").write_text("{}")
        digest = hashlib.sha256(self.key.encode()).hexdigest()
        return Archive(path, digest, path.stat().st_size, members=3, unpacked=10)

    def verify_archive(
        self, workspace: Workspace, archive: Path, expected: Expected, triton: TritonRoot, *, unpacked: int
    ) -> tuple[str, ...]:
        """Has a note for the user."""
        self.expected.append(expected)
        self._call("verify")
        return ("a note",)

    def verify_directory(self, workspace: Workspace, environment: Path, expected: Expected) -> tuple[str, ...]:
        """Has none."""
        self.expected.append(expected)
        self._call("verify")
        return ()

    def ensure_standin(self, workspace: Workspace, python: Path) -> Path:
        """A folder."""
        self._call("stand-in")
        (self.folder / "standin").mkdir(exist_ok=True)
        return self.folder / "standin"

    def is_fetchable(self, workspace: Workspace, model: str) -> bool:
        """Whether a model hub answers."""
        return self.hub

    def smoke_run(self, workspace: Workspace, request: SmokeRequest) -> SmokeResult:
        """Look at what is served."""
        self.served.append(request)
        self.candidates.append({path.name for path in request.model_folder.iterdir()})
        self._call("smoke run")
        return SmokeResult(("PASS",), (("Hello", " there"),), 1.0, {"model": str(self.folder / "standin")})

    def warm(self, workspace: Workspace, binary: Path, model: Path, *, log: Path) -> Warmed:
        """Name the caches."""
        self._call("warm")
        assert (model / "vllm_env.json").is_file()
        return Warmed(model / "vllm_cache", 1, 1, 1.0)


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    """Stages that end well."""
    made = Stages(tmp_path)
    for name in ("make_plan", "make_prefix", "make_stub", "make_archive", "verify_archive", "verify_directory"):
        monkeypatch.setattr(module, name, getattr(made, name))
    for name in ("ensure_standin", "is_fetchable", "smoke_run", "warm"):
        monkeypatch.setattr(module, name, getattr(made, name))
    real = module.publish

    def observed(*arguments: object) -> Path:
        made._call("publish")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "publish", observed)
    return made


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty cache, no network."""
    return workspace_in(tmp_path / "cache")


@pytest.fixture
def request_(tmp_path: Path) -> BuildRequest:
    """A build with its smoke run."""
    return BuildRequest(repository=tmp_path / "models")


def _build(workspace: Workspace, request: BuildRequest) -> BuildResult:
    result = build(workspace, request)
    assert isinstance(result, BuildResult)
    return result


def _staged(workspace: Workspace) -> list[Path]:
    return list(workspace.cache.path("build").glob("*"))


def test_stages_run_in_their_order(stages: Stages, workspace: Workspace, request_: BuildRequest) -> None:
    """What is published has been verified and served before, and was warmed afterwards, where it stands."""
    result = _build(workspace, replace(request_, warm=True))
    order = ["plan", "prefix", "stub", "archive", "verify", "stand-in", "smoke run", "publish", "warm"]
    assert stages.called == order
    assert (result.rebuilt, result.model) == (True, request_.model_folder)
    assert result.smoke
    assert result.smoke.answers == (("Hello", " there"),)
    assert result.warmed
    assert result.warmed.folder == request_.model_folder / "vllm_cache"
    assert json.loads((result.model / "vllm_env.json").read_text()) == json.loads(result.manifest.to_json())
    assert {path.name for path in result.model.iterdir()} >= {*_SET, "1", "config.pbtxt"}
    assert _staged(workspace) == []


def test_what_is_served_is_what_will_be_published(stages: Stages, workspace: Workspace, request_: BuildRequest) -> None:
    """Under the model's name, from the cache: the set with the code, while the repository is not yet there."""
    _build(workspace, replace(request_, model="mine"))
    (served,) = stages.served
    assert served.model_folder.name == "mine"
    assert served.model_folder.is_relative_to(workspace.cache.path("build"))
    assert stages.candidates == [{*_SET, "1", "config.pbtxt"}]
    assert served.binary == stages.folder / "triton" / "bin" / "tritonserver"


@pytest.mark.parametrize("stage", ["prefix", "stub", "archive", "verify", "stand-in", "smoke run", "publish"])
@pytest.mark.parametrize("error", [CommandError("No."), KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")], ids=repr)
def test_a_stage_that_fails_changes_nothing(
    stages: Stages, workspace: Workspace, request_: BuildRequest, stage: str, error: BaseException
) -> None:
    """The old set stands as it was, nothing is staged any more, and the next build ends well."""
    model = _build(workspace, request_).model
    before = {path: path.stat().st_mtime_ns for path in model.rglob("*")}
    stages.key, stages.fails, stages.error = "another", stage, error
    with pytest.raises(type(error)):
        build(workspace, request_)
    assert stages.called[-1] == stage
    assert {path: path.stat().st_mtime_ns for path in model.rglob("*")} == before
    assert _staged(workspace) == []
    stages.fails = ""
    assert _build(workspace, request_).manifest.key == "another"


def test_what_stands_there_already_is_not_built_again(
    stages: Stages, workspace: Workspace, request_: BuildRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is served all the same, where it stands, and warmed if that is asked for."""
    first = _build(workspace, request_)
    stages.called.clear()
    second = _build(workspace, replace(request_, warm=True))
    assert stages.called == ["plan", "prefix", "stand-in", "smoke run", "warm"]
    assert stages.served[-1].model_folder == request_.model_folder
    assert (second.rebuilt, second.manifest.to_json()) == (False, first.manifest.to_json())
    assert "is up to date; nothing to build" in capsys.readouterr().err
    stages.called.clear()
    third = _build(workspace, replace(request_, smoke=False))
    assert stages.called == ["plan"]
    assert (third.smoke, third.warmed) == (None, None)


def _cut_off(model: Path) -> None:
    (model / "vllm_env.tar.gz").unlink()  # it is a link to the cache's
    (model / "vllm_env.tar.gz").touch()


def _without_execution(model: Path) -> None:
    (model / "triton_python_backend_stub").chmod(0o644)


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda model: (model / "vllm_env.tar.gz").unlink(), id="the archive is gone"),
        pytest.param(_cut_off, id="the archive is cut off"),
        pytest.param(lambda model: (model / "triton_python_backend_stub").unlink(), id="the stub is gone"),
        pytest.param(lambda model: (model / "triton_python_backend_stub").write_text("stab"), id="another stub"),
        pytest.param(_without_execution, id="a stub that may not be run"),
        pytest.param(lambda model: (model / "vllm_env.json").unlink(), id="the manifest is gone"),
        pytest.param(lambda model: (model / "vllm_env.json").write_text("{"), id="the manifest is damaged"),
        pytest.param(lambda model: (model / "vllm_env.json").write_text('{"format": 99}'), id="of another version"),
    ],
)
def test_what_is_not_whole_is_built_again(
    stages: Stages, workspace: Workspace, request_: BuildRequest, harm: Callable[[Path], object]
) -> None:
    """A damaged manifest says "Build it again", and a build must be able to."""
    model = _build(workspace, request_).model
    harm(model)
    again = _build(workspace, request_)
    assert again.rebuilt
    assert (model / "vllm_env.tar.gz").read_text() == "k"
    assert os.access(model / "triton_python_backend_stub", os.X_OK)
    assert not _build(workspace, request_).rebuilt


def test_another_set_is_built_again(stages: Stages, workspace: Workspace, request_: BuildRequest) -> None:
    """The key tells it."""
    _build(workspace, request_)
    stages.key = "another"
    assert _build(workspace, request_).rebuilt
    assert (request_.model_folder / "vllm_env.tar.gz").read_text() == "another"


def test_what_passed_before_is_not_verified_again(
    stages: Stages, workspace: Workspace, request_: BuildRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On this machine, for another repository; its notes were said the first time."""
    _build(workspace, request_)
    assert "a note" in capsys.readouterr().err
    _build(workspace, replace(request_, repository=tmp_path / "other"))
    assert stages.called.count("verify") == 1
    assert "passed before" in capsys.readouterr().err


def test_what_did_not_pass_is_verified_again(stages: Stages, workspace: Workspace, request_: BuildRequest) -> None:
    """A failure is not remembered as a success, though the archive is in the cache."""
    stages.fails = "verify"
    for _ in range(2):
        with pytest.raises(VllmEnvError, match=r"It failed\."):
            build(workspace, request_)
    assert stages.called.count("verify") == 2


@pytest.mark.parametrize(("layout", "members"), [("archive", 3), ("directory", 0)])
def test_it_is_verified_against_the_lock(
    stages: Stages, workspace: Workspace, request_: BuildRequest, layout: str, members: int
) -> None:
    """All that is installed, the stub's Python and release, and the archive's members."""
    _build(workspace, replace(request_, layout=layout))  # type: ignore[arg-type]
    (expected,) = stages.expected
    assert (expected.python, expected.release, expected.members) == ("3.11", "24.10", members)
    assert expected.versions == small_lock().versions()
    assert expected.complete


def test_an_unpacked_environment_is_not_packed(stages: Stages, workspace: Workspace, request_: BuildRequest) -> None:
    """--layout directory: the prefix itself is verified, served and published."""
    result = _build(workspace, replace(request_, layout="directory"))
    assert "archive" not in stages.called
    assert (result.manifest.layout, result.manifest.archive.key) == ("directory", "p")
    assert (result.model / "vllm_env" / "bin" / "python").read_text() == "python"
    assert not (result.model / "vllm_env.tar.gz").exists()
    assert not _build(workspace, replace(request_, layout="directory")).rebuilt


def test_a_dry_run_makes_nothing(stages: Stages, workspace: Workspace, request_: BuildRequest) -> None:
    """The plan is returned, and nothing after it is begun."""
    plan = build(workspace, request_, dry_run=True)
    assert isinstance(plan, Plan)
    assert stages.called == ["plan"]
    assert not request_.repository.exists()


def test_the_standins_answers_are_known_and_a_named_models_are_not(
    stages: Stages, workspace: Workspace, request_: BuildRequest
) -> None:
    """--smoke-model: nobody knows what it says, and no stand-in is made."""
    _build(workspace, request_)
    assert stages.served[-1].engine_model == str(stages.folder / "standin")
    assert stages.served[-1].expected == dict(FACTS)
    stages.called.clear()
    _build(workspace, replace(request_, smoke_model="facebook/opt-125m"))
    assert stages.served[-1].engine_model == "facebook/opt-125m"
    assert stages.served[-1].expected == {}
    assert "stand-in" not in stages.called


@pytest.mark.parametrize(("hub", "smoke_model", "names"), [(False, "", "standin"), (False, "/mine", ""), (True, "", "")])
def test_where_no_hub_answers_the_standin_is_served_next(
    stages: Stages, workspace: Workspace, request_: BuildRequest, hub: bool, smoke_model: str, names: str
) -> None:
    """After the first build and after one that had nothing to do; a model of the user's is not replaced."""
    stages.hub = hub
    for _ in range(2):
        model = _build(workspace, replace(request_, smoke_model=smoke_model)).model
        arguments = model / "vllm_engine_args.json"
        assert json.loads(arguments.read_text())["model"] == (names or "facebook/opt-125m")
        shutil.copyfile(arguments.with_suffix(".example.json"), arguments)


@pytest.mark.parametrize(("profile", "here", "used"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)])
def test_a_gpu_serves_what_is_built_for_one(
    stages: Stages,
    workspace: Workspace,
    request_: BuildRequest,
    monkeypatch: pytest.MonkeyPatch,
    profile: str,
    here: bool,
    used: bool,
) -> None:
    """Where there is one."""
    monkeypatch.setattr(module, "has_gpu", lambda: here)
    stages.profile = profile
    _build(workspace, request_)
    assert stages.served[-1].gpu is used


def test_the_log_of_an_earlier_smoke_run_is_gone(stages: Stages, workspace: Workspace, request_: BuildRequest) -> None:
    """A message that names it must not lead to another server's lines."""
    log = workspace.cache.path("smoke-server.log")
    log.parent.mkdir()
    log.write_text("of an earlier run")
    _build(workspace, request_)
    assert stages.served[-1].log == log
    assert not log.exists()


def test_one_build_at_a_time_holds_the_cache(
    stages: Stages, workspace: Workspace, request_: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the plan to the last stage; afterwards it is free."""
    held: list[bool] = []

    def look(*arguments: object) -> None:
        with workspace.cache.path("build.lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(True)
            else:
                held.append(False)

    real = stages._call
    monkeypatch.setattr(stages, "_call", lambda name: (look(), real(name)))
    _build(workspace, replace(request_, warm=True))
    assert held == [True] * 9
    look()
    assert held[-1] is False


def test_what_a_killed_build_staged_is_removed_first(stages: Stages, workspace: Workspace, request_: BuildRequest) -> None:
    """Also by a dry run, which may be all that is ever run again."""
    left = workspace.cache.path("build", "vllm_env-abcd_123")
    (left / "env").mkdir(parents=True)
    build(workspace, request_, dry_run=True)
    assert not left.exists()


def test_an_interrupted_build_looks_once_more(
    workspace: Workspace, request_: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt may hit the very code that removes a staging folder."""
    left = workspace.cache.path("build", "vllm_env-abcd_123")

    def interrupted(*_: object) -> None:
        left.mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "make_plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(workspace, request_)
    assert not left.exists()


def test_a_build_keeps_its_own_entries(
    stages: Stages, workspace: Workspace, request_: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However full the cache is; others go."""
    other = workspace.cache.path("prefixes", "other")
    other.mkdir(parents=True)
    (other / "file").write_text("x")
    monkeypatch.setattr("vllm_env.serve.leftovers._servers", list)
    monkeypatch.setattr(Cache, "evict", partialmethod(Cache.evict, limit=0))
    _build(workspace, request_)
    assert not other.exists()
    assert workspace.cache.path("prefixes", "p", "env", "bin", "python").is_file()
    assert workspace.cache.path("archives", "k.tar.gz").is_file()


@pytest.mark.usefixtures("stages")
@pytest.mark.parametrize("serves", [True, False])
def test_eviction_leaves_a_running_servers_caches(
    tmp_path: Path, request_: BuildRequest, monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    """A start marks its copy as used, and weeks later vLLM still reads a file there whenever it meets a new shape."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("vllm_env.serve.leftovers._servers", lambda: [(os.getuid(), 0.0)] if serves else [])
    monkeypatch.setattr(Cache, "evict", partialmethod(Cache.evict, limit=1500))
    (tmp_path / "vllm_cache").mkdir()
    (tmp_path / "vllm_cache" / warm_cache.RECORD).write_bytes(b"x" * 1000)
    copy = warm_cache.private_copy(tmp_path / "vllm_cache", warm_cache.Record("", "", (), ""), os.environ)
    workspace = workspace_in(default_root())
    prefix = workspace.cache.path("prefixes", "newer")
    prefix.mkdir(parents=True)
    (prefix / "file").write_bytes(b"x" * 1000)
    os.utime(copy, (1, 1))
    os.utime(prefix, (2, 2))
    _build(workspace, request_)
    assert (copy.exists(), prefix.exists()) == (serves, not serves)
