"""What the unpacker of an environment in parts refuses ends the load."""

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
    (tmp_path / f"{parts.UNPACK_MODULE}.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop(parts.UNPACK_MODULE, None)


def test_what_it_refuses_is_the_reason_of_the_failed_load(unpacker: None, tmp_path: Path) -> None:
    """With its remedy, without a traceback."""
    log = FakeLog()
    with pytest.raises(ConfigError, match="no space; VLLM_ENV_UNPACKED"):
        parts.unpack(tmp_path / "broken", log, Progress(log))
