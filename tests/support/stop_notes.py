"""Notes of when a served model takes each request and has ended it.

`Notes.prepare` puts a few lines into the copied model, which write to a file beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from support.settings import with_line

if TYPE_CHECKING:
    from pathlib import Path

_CODE = """
from triton_vllm.engine.runner import Runner

_out = open(__FILE__, "a", buffering=1)
_submit, _finish = Runner.submit, Runner._finish

def note(what, text):
    _out.write(f"{what} {text.split()[0]}" + chr(10))

def submit(self, job):
    note("taken", job.request.text)
    _submit(self, job)

def finish(self, job, last):
    note("ended", job.request.text)
    _finish(self, job, last)

Runner.submit, Runner._finish = submit, finish
"""


@dataclass(frozen=True)
class Notes:
    """What the served model has written to ``file``; a request's name is the first word of its prompt."""

    file: Path

    def prepare(self, model: Path) -> None:
        """Change a copied model before it is served."""
        (model / "1" / "stop_notes.py").write_text(_CODE.replace("__FILE__", repr(str(self.file))), encoding="utf-8")
        with_line(model, "import stop_notes", after="from triton_vllm.request import contract")

    def running(self) -> set[str]:
        """Return the names of requests that the model has taken and that have not ended."""
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        found: dict[str, set[str]] = {"taken": set(), "ended": set()}
        for what, name in (line.split() for line in lines):
            found[what].add(name)
        return found["taken"] - found["ended"]
