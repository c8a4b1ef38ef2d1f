"""Notes of when a served model takes each request, has its first output and tells vLLM to stop it.

`Notes.prepare` puts a few lines into the copied model, which write to a file beside it: the clock of both processes is
the machine's monotonic one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from support.settings import with_line

if TYPE_CHECKING:
    from pathlib import Path

_CODE = """
import time
from triton_vllm.engine.runner import Runner

_out = open(__FILE__, "a", buffering=1)
_texts = {}
_begun = set()
_submit, _use, _take, _finish = Runner.submit, Runner.use, Runner._take, Runner._finish

def note(what, text):
    _out.write(f"{what} {text.split()[0]} {time.monotonic()!r}" + chr(10))

def submit(self, job):
    _texts[job.id] = job.request.text
    note("taken", job.request.text)
    _submit(self, job)

def take(self, job, item):
    if job.id in _texts and job.id not in _begun:
        _begun.add(job.id)
        note("begun", job.request.text)
    _take(self, job, item)

def finish(self, job, last):
    note("ended", job.request.text)
    _finish(self, job, last)

def use(self, llm, facts):
    _use(self, llm, facts)
    abort = llm.abort
    async def noted(request_id):
        await abort(request_id)
        note("aborted", _texts[request_id])
    llm.abort = noted

Runner.submit, Runner.use, Runner._take, Runner._finish = submit, use, take, finish
"""


@dataclass(frozen=True)
class Notes:
    """What the served model has written to ``file``; a request's name is the first word of its prompt."""

    file: Path

    def prepare(self, model: Path) -> None:
        """Change a copied model before it is served."""
        (model / "1" / "stop_notes.py").write_text(_CODE.replace("__FILE__", repr(str(self.file))), encoding="utf-8")
        with_line(model, "import stop_notes", after="from triton_vllm.request import contract")

    def read(self) -> dict[str, dict[str, float]]:
        """Return for "taken", "begun", "ended" and "aborted" the seconds by the requests' names."""
        found: dict[str, dict[str, float]] = {"taken": {}, "begun": {}, "ended": {}, "aborted": {}}
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        for what, name, at in (line.split() for line in lines):
            found[what][name] = float(at)
        return found
