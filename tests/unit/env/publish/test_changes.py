"""What somebody changes in a model's folder while the one that will replace it is made is not lost."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from vllm_env.base.errors import VllmEnvError
from vllm_env.publish.changes import refuse_changes, state_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder."""
    folder = tmp_path / "vllm"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("one")
    return folder


def edit_in_place(model: Path) -> None:
    """Write as many bytes as before, a nanosecond later."""
    file = model / "1" / "model.py"
    status = file.stat()
    file.write_text("two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


CHANGES: dict[str, Callable[[Path], object]] = {
    "the same size": edit_in_place,
    "a new file": lambda model: (model / "1" / "extra.py").write_text(""),
    "a new folder": lambda model: (model / "2").mkdir(),
    "a file less": lambda model: (model / "1" / "model.py").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused(model: Path, tmp_path: Path, change: str) -> None:
    """Also one that leaves the size as it was."""
    before = state_of(model)
    refuse_changes(model, tmp_path / "new", before)
    CHANGES[change](model)
    with pytest.raises(VllmEnvError, match="was changed while"):
        refuse_changes(model, tmp_path / "new", before)


def test_what_is_left_out_may_change(model: Path, tmp_path: Path) -> None:
    """The built files are replaced anyway; below the model's folder a file of such a name is the user's."""
    before = state_of(model)
    (model / "vllm_env.tar.gz").write_text("")
    refuse_changes(model, tmp_path / "new", before)
    (model / "1" / "vllm_env.tar.gz").write_text("")
    with pytest.raises(VllmEnvError, match="was changed while"):
        refuse_changes(model, tmp_path / "new", before)
