"""What a build would cost, as --dry-run says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import triton_folder
from support.small_build import small_lock
from support.small_fixtures import workspace_in
from vllm_env import plan as module
from vllm_env.cli.forecast import forecast
from vllm_env.plan import BuildRequest, make_plan
from vllm_env.prefix.prefix import BUILD_SPACE, EXTRACTED_SPACE, prefix_key

if TYPE_CHECKING:
    from vllm_env.base.workspace import Workspace
    from vllm_env.lock.locked import Lock
    from vllm_env.lock.spec import Spec

_SPEC = """\
[profile.cpu]
vllm = "0.99.0"
python = "3.11"
[profile.cuda]
vllm = "0.99.0"
python = "3.11"
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty cache, no network."""
    return workspace_in(tmp_path / "cache")


@pytest.fixture
def request_(tmp_path: Path) -> BuildRequest:
    """A build of both profiles for a Triton that has a stub; nothing of it is served."""
    (tmp_path / "spec.toml").write_text(_SPEC)
    root = triton_folder.make_root(tmp_path / "triton")
    place = tmp_path / "models"
    return BuildRequest("cpu", spec_file=tmp_path / "spec.toml", triton_root=root, repository=place, smoke=False)


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> Lock:
    """What every spec resolves to."""
    lock = small_lock()

    def resolved(_workspace: Workspace, spec: Spec, *_: object) -> Lock:
        return replace(lock, spec=spec)

    monkeypatch.setattr(module, "make_lock", resolved)
    return lock


@pytest.mark.usefixtures("lock")
def test_a_forecast_is_of_what_is_left_to_do(workspace: Workspace, request_: BuildRequest) -> None:
    """Nothing is fetched for a prefix that the cache has; each part that a build leaves out costs less."""
    plan = make_plan(workspace, request_)
    whole = forecast(workspace, replace(request_, smoke=True), plan.spec, plan)
    assert whole.fetch == plan.lock.download_size
    assert whole.space == {str(workspace.cache.root): BUILD_SPACE["cpu"], "/tmp": EXTRACTED_SPACE["cpu"]}
    unserved = forecast(workspace, request_, plan.spec, plan)
    assert (unserved.seconds or 0) < (whole.seconds or 0)
    assert "/tmp" not in unserved.space
    source = replace(plan, stub=replace(plan.stub, prebuilt=None))
    assert (forecast(workspace, request_, plan.spec, source).seconds or 0) > (unserved.seconds or 0)
    unpacked = forecast(workspace, replace(request_, layout="directory", smoke=True), plan.spec, plan)
    assert unpacked.space[str(request_.repository)] == EXTRACTED_SPACE["cpu"]
    made = workspace.cache.path("prefixes", prefix_key(plan.lock, ()))
    made.mkdir(parents=True)
    (made / ".complete").touch()
    cached = forecast(workspace, request_, plan.spec, plan)
    assert (cached.fetch, cached.space) == (0, {})
    assert 0 < (cached.seconds or 0) < (unserved.seconds or 0)
