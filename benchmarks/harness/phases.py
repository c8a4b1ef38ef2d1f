"""Find where the time of a start goes, from the timestamps in the server's own log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

# Lines of Triton's log (glog) and of vLLM's, each with its date, time and text.
_TRITON = re.compile(r"^[IWE](\d\d)(\d\d) (\d\d:\d\d:\d\d\.\d{6}) \d+ \S+\] (.*)")
_VLLM = re.compile(r"(?:INFO|WARNING|ERROR) (\d\d)-(\d\d) (\d\d:\d\d:\d\d) (.*)")

# Each phase with the pattern of the line at its end. A phase lasts from the end of the previous
# phase that the log shows.
_ENDS = (
    ("server", r'"Using Python execution env '),
    ("extraction, auto-complete stub", r'"TRITONBACKEND_ModelInstanceInitialize: '),
    ("instance stub", r"importing vLLM"),
    ("import of vLLM", r"\] vLLM \S+ from "),
    ("EngineCore spawn and import", r"Initializing a V1 LLM engine"),
    ("engine set-up", r"Starting to load model"),
    ("weights", r"Model loading took|Loading weights took"),
    ("compile, KV cache, warm-up", r"init engine .*took|ready after"),
    ("rest of the load", r'"successfully loaded '),
    ("front ends", r'"Started HTTPService at '),
)


@dataclass(frozen=True)
class Phase:
    """A phase of a start, in seconds."""

    name: str
    seconds: float


def parse(log: str, launch: datetime) -> list[Phase]:
    """Return the phases of a start in their order, without those that the log does not show.

    Args:
        log: the text of the server's log.
        launch: when the server was started, in local time as in the log.
    """
    # Lines without a timestamp, such as tables and tracebacks, end no phase.
    timestamps = [_timestamp(line, launch.year) for line in log.splitlines()]
    lines = [found for found in timestamps if found]
    phases = []
    # When the previous phase ended.
    last = launch
    for name, end in _ENDS:
        for number, (when, text) in enumerate(lines):
            if re.search(end, text):
                # vLLM's times are whole seconds. So its line may have an earlier time than the line
                # of Triton in front of it.
                ended = max(last, when)
                phases.append(Phase(name, (ended - last).total_seconds()))
                last = ended
                # Only later lines can end the next phase.
                del lines[: number + 1]
                break
    return phases


def _timestamp(line: str, year: int) -> tuple[datetime, str] | None:
    """Return the time and the text of a line of the log; None if it has no time."""
    found = _TRITON.match(line) or _VLLM.search(line)
    if not found:
        return None
    month, day, clock, text = found.groups()
    # Neither log has the year, nor a time zone.
    return datetime.fromisoformat(f"{year}-{month}-{day} {clock}"), text
