"""Which model the finder of the parts takes them from."""

from __future__ import annotations

import importlib.util
import io
import sys
from typing import TYPE_CHECKING

import pytest

from vllm_env import inside

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@pytest.fixture
def finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The finder as the small archive has it, with a list of modules next to it."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    file = tmp_path / "_vllm_env_parts.py"
    file.write_bytes((inside.FOLDER / "parts_finder.py").read_bytes())
    (tmp_path / "_vllm_env_parts.json").write_text('{"modules": []}')
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("command", "model"),
    [(b"stub\0/models/vllm/1/model.py\0more\0", "/models/vllm"), (b"python\0/a/b/c\0", "/a"), (b"stub\0", "")],
)
def test_the_model_is_that_of_the_first_argument(
    command: bytes, model: str, finder: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub is started with MODEL/VERSION/model.py; a program without arguments has no model."""
    monkeypatch.setattr(finder, "open", lambda *_: io.BytesIO(command), raising=False)
    assert finder._own_model() == model
