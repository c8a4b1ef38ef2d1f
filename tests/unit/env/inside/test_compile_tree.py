"""Bytecode: the same from any folder, and none for what does not compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from vllm_env.inside import compile_tree

if TYPE_CHECKING:
    from pathlib import Path

_SOURCES = {
    "lib/a.py": "X = {'b', 'a', 'c'}\n\n\ndef f(x):\n    return x in {'one', 'two', 'three'}\n",
    "lib/pkg/__init__.py": "from . import b\n",
    "lib/pkg/b.py": "NAME = __file__\n",
    "lib/pkg/broken.py": "print 'Python 2'\n",
    "lib/pkg/nul.py": "x = 1\0\n",
    "bin/not_in_lib.py": "x = 1\n",
}


def _compile(folder: Path, workers: int) -> tuple[dict[str, bytes], str]:
    for name, text in _SOURCES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        os.utime(folder / name, (1_577_836_800, 1_577_836_800))
    # a source each
    chunks = folder.with_name(f"{folder.name}.json")
    chunks.write_text(json.dumps([[name] for name in _SOURCES if name.startswith("lib/")]))
    output = subprocess.check_output(
        [sys.executable, "-I", "-S", compile_tree.__file__, folder, "/opt/neutral", chunks, str(workers)],
        text=True,
        env={"PYTHONHASHSEED": "0"},
    )
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.pyc")}, output


def test_equal_sources_give_equal_bytecode_in_any_folder(tmp_path: Path) -> None:
    """Neither the place nor the number of workers is in it, and it names the neutral place."""
    one, _ = _compile(tmp_path / "one", 1)
    two, _ = _compile(tmp_path / "a" / "longer" / "place", 3)
    assert one == two
    assert {name.split("/")[-1].split(".")[0] for name in one} == {"a", "__init__", "b"}
    assert all(b"/opt/neutral/lib/" in data and str(tmp_path).encode() not in data for data in one.values())


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    """A line DONE TOTAL after each chunk; sources that do not compile count as done."""
    _, output = _compile(tmp_path / "prefix", 2)
    assert output.splitlines() == [f"{done} 5" for done in range(1, 6)]
