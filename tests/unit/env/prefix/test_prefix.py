"""The prefix's key, and what a cached prefix tells; making one is tested with the real tools in tests/integration."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from support.small_build import small_lock
from support.small_fixtures import workspace_in
from vllm_env.base.errors import VllmEnvError
from vllm_env.prefix.prefix import make_prefix, prefix_key

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("profile", "size", "needed"),
    [("cpu", 0, r"6\.0 GB"), ("cuda", 0, r"12\.0 GB"), ("cpu", 6 * 10**8, r"6\.0 GB"), ("cpu", 10**7, r"1\.[1-9] GB")],
)
def test_a_prefix_without_its_mark_is_not_whole(
    profile: str, size: int, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made again, and the space for it is asked for first: the profile's, or less for a few small wheels."""
    lock = small_lock()
    wheels = tuple(dataclasses.replace(wheel, size=size) for wheel in lock.wheels)
    lock = dataclasses.replace(lock, spec=dataclasses.replace(lock.spec, profile=profile), wheels=wheels)
    (tmp_path / "prefixes" / prefix_key(lock, ()) / "env").mkdir(parents=True)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10**9}))
    with pytest.raises(VllmEnvError, match=f"the environment needs {needed}"):
        make_prefix(workspace_in(tmp_path), lock)
