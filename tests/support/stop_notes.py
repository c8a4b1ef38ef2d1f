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
from triton_vllm.engine.jobs import Jobs
from triton_vllm.engine.runner import Runner

_out = open(__FILE__, "a", buffering=1)
_texts = {}
_begun = set()
_submit, _use, _begin, _take, _end = Runner.submit, Runner.use, Runner._begin, Runner._take_output, Jobs.end

def note(what, text):
    _out.write(f"{what} {text.split()[0]} {time.monotonic()!r}" + chr(10))

def submit(self, order, delivery):
    _texts[delivery] = order.prompts[0].text
    note("taken", order.prompts[0].text)
    return _submit(self, order, delivery)

def begin(self, job, *work):
    _texts[job.id] = _texts[job.delivery]
    _begin(self, job, *work)

def take(self, job, item):
    if job.id not in _begun:
        _begun.add(job.id)
        note("begun", _texts[job.id])
    _take(self, job, item)

def end(self, job, last):
    note("ended", _texts[job.delivery])
    _end(self, job, last)

def use(self, llm, facts):
    _use(self, llm, facts)
    abort = llm.abort
    async def noted(request_id):
        await abort(request_id)
        note("aborted", _texts[request_id])
    llm.abort = noted

Runner.submit, Runner.use, Runner._begin, Runner._take_output, Jobs.end = submit, use, begin, take, end
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
