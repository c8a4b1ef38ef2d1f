"""An environment in parts is unpacked by what it brings for that; any other environment is left alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from support.fake_log import FakeLog
from triton_vllm.base.errors import ConfigError
from triton_vllm.startup import parts
from triton_vllm.startup.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MODULE = """
class UnpackError(ImportError):
    pass

def use(model, tell):
    tell(f"unpacking for {model}")
    if model.endswith("broken"):
        raise UnpackError("no space; VLLM_ENV_UNPACKED names another folder")
"""


@pytest.fixture
def unpacker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What an environment in parts has on sys.path."""
    (tmp_path / f"{parts.MODULE}.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop(parts.MODULE, None)


def test_another_environment_is_left_alone(tmp_path: Path) -> None:
    """Nothing is said nor done where there is no unpacker."""
    log = FakeLog()
    parts.unpack(tmp_path, log, Progress(log))
    assert log.lines == []


def test_the_environments_own_unpacker_is_told_the_model(unpacker: None, tmp_path: Path) -> None:
    """Its progress is in the model's log."""
    log = FakeLog()
    parts.unpack(tmp_path, log, Progress(log))
    assert log.lines == ["looking for the unpacked environment", f"unpacking for {tmp_path}"]


def test_what_it_refuses_is_the_reason_of_the_failed_load(unpacker: None, tmp_path: Path) -> None:
    """With its remedy, without a traceback."""
    log = FakeLog()
    with pytest.raises(ConfigError, match="no space; VLLM_ENV_UNPACKED"):
        parts.unpack(tmp_path / "broken", log, Progress(log))
