"""The machines that environments are built on."""

from __future__ import annotations

import pytest

from vllm_env.base.errors import VllmEnvError
from vllm_env.base.machine import require_x86_64

_OTHERS = [("Linux", "aarch64", "aarch64"), ("Darwin", "arm64", "Darwin arm64"), ("Darwin", "x86_64", "Darwin x86_64")]


@pytest.mark.parametrize(("system", "machine", "named"), _OTHERS)
def test_another_machine_is_named(system: str, machine: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is fetched for it."""
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(VllmEnvError, match=f"This machine is {named}") as caught:
        require_x86_64()
    assert caught.value.remedy


def test_x86_64_linux_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said."""
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    require_x86_64()
