"""Find where the time of a start goes, from the timestamps in the server's own log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

# Lines of Triton's log (glog) and of vLLM's, each with its date, time and text.
_TRITON = re.compile(r"^[IWE](\d\d)(\d\d) (\d\d:\d\d:\d\d\.\d{6}) \d+ \S+\] (.*)")
_VLLM = re.compile(r"(?:INFO|WARNING|ERROR) (\d\d)-(\d\d) (\d\d:\d\d:\d\d) (.*)")

# (phase, pattern at its end). A phase lasts from the end of the previous phase that the log shows.
_ENDS = (
    ("server", r'"Using Python execution env '),
    ("extraction, auto-complete stub", r'"TRITONBACKEND_ModelInstanceInitialize: '),
    ("instance stub", r"importing vLLM"),
    ("import of vLLM", r"\] vLLM \S+ from |\[[^]]*\] vLLM \S+ from "),
    ("EngineCore spawn and import", r"Initializing a V1 LLM engine"),
    ("engine set-up", r"Starting to load model"),
    ("weights", r"Model loading took|Loading weights took"),
    ("compile, KV cache, warm-up", r"init engine .*took|ready after"),
    ("rest of the load", r'"successfully loaded '),
    ("front ends", r'"Started HTTPService at '),
)


@dataclass(frozen=True)
class Phase:
    """A phase of a start, in seconds; vLLM's lines have whole seconds only."""

    name: str
    seconds: float


def parse(log: str, launched: datetime) -> list[Phase]:
    """Return the phases of a start in their order, without those that the log does not show.

    Args:
        log: the text of the server's log.
        launched: when the server's process was started, in this machine's local time like the log's timestamps.
    """
    lines = [
        found for line in log.splitlines() if (found := _timestamp(line, launched)) is not None
    ]
    phases = []
    at, last = 0, launched
    for name, end in _ENDS:
        pattern = re.compile(end)
        match = next((i for i in range(at, len(lines)) if pattern.search(lines[i][1])), None)
        if match is None:
            continue
        when = max(
            last, lines[match][0]
        )  # vLLM's whole seconds may be earlier than the microseconds of the previous line
        phases.append(Phase(name, (when - last).total_seconds()))
        at, last = match + 1, when
    return phases


def _timestamp(line: str, launched: datetime) -> tuple[datetime, str] | None:
    if found := _TRITON.match(line):
        month, day, clock, text = found.groups()
        form = "%Y %m %d %H:%M:%S.%f"
    elif found := _VLLM.search(line):
        month, day, clock, text = found.groups()
        form = "%Y %m %d %H:%M:%S"
    else:
        return None
    return datetime.strptime(f"{launched.year} {month} {day} {clock}", form), text  # noqa: DTZ007 - the log has no zone
