"""What a build would cost, as --dry-run says it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from vllm_env.cli.forecast import forecast
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.plan import preview
from vllm_env.prefix.prefix import EXTRACTED_SPACE, build_space, prefix_key

if TYPE_CHECKING:
    from vllm_env.base.workspace import Workspace
    from vllm_env.sketch import BuildRequest


@pytest.mark.usefixtures("lock")
def test_a_forecast_is_of_what_is_left_to_do(workspace: Workspace, planned: BuildRequest) -> None:
    """Nothing is fetched for a prefix that the cache has; each part that a build leaves out costs less."""
    known = preview(workspace, planned)
    assert known.lock
    assert "/tmp" not in forecast(workspace, known).space
    whole = forecast(workspace, preview(workspace, replace(planned, layout=LAYOUTS["archive"], smoke=True)))
    assert whole.fetch == known.lock.download_size
    assert whole.space == {str(workspace.cache.root): build_space(known.lock), "/tmp": EXTRACTED_SPACE["cpu"]}
    assert "/tmp" not in forecast(workspace, preview(workspace, replace(planned, smoke=True))).space
    unpacked = forecast(workspace, preview(workspace, replace(planned, layout=LAYOUTS["directory"], smoke=True)))
    assert unpacked.space[str(planned.repository)] == EXTRACTED_SPACE["cpu"]
    made = workspace.cache.path("prefixes", prefix_key(known.lock, ()))
    made.mkdir(parents=True)
    (made / ".complete").touch()
    cached = forecast(workspace, known)
    assert (cached.fetch, cached.space) == (0, {})
