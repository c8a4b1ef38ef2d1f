"""Which interpreter of this machine can be packed; a script that prints facts stands for one. See also `test_interpreter.py`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from vllm_env.base.errors import VllmEnvError
from vllm_env.interpreter.find import find_interpreter

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("library", "is_taken"), [("libpython3.99.so.1.0", True), ("libpython3.99.a", False)])
def test_only_an_interpreter_with_a_shared_libpython_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str, is_taken: bool
) -> None:
    """Triton's stub loads libpython; an interpreter that was built without --enable-shared has only an archive of it."""
    program = tmp_path / "python3.99"
    facts: dict[str, object] = {"version": "3.99.2", "prefix": str(tmp_path), "executable": str(program)}
    facts |= {"implementation": "cpython", "stdlib": str(tmp_path), "library": library}
    facts |= {"folders": [str(tmp_path)], "multiarch": ""}
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(facts)}\nEND\n")
    program.chmod(0o755)
    (tmp_path / library).touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if is_taken:
        assert find_interpreter("3.99").library == tmp_path / library
    else:
        with pytest.raises(VllmEnvError, match=r"no Python 3\.99 to pack") as caught:
            find_interpreter("3.99")
        assert f"{program} (has no shared libpython" in caught.value.cause
