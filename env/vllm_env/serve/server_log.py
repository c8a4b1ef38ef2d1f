"""Read a server's log: why it failed, and when it last wrote."""

import contextlib
import re
import time
from pathlib import Path

_TAIL_LINES = 25
# Lines of glog with level E or F, vLLM's ERROR lines, last lines of Python tracebacks, and errors
# of the loader and bash.
_TELLING = re.compile(
    r"^[EF]\d{4} |\bERROR\b|^\w*(Error|Exception|Interrupt)\b|error while loading|^error: "
    r"|cannot open|what\(\): "
)
# Triton's last word on a model that it cannot load. The frames follow in the same message.
_LOAD_FAILED = re.compile(r"failed to load '[^']+' version \d+: (.+)")
# The model's own errors say all that is known. Of others, Triton says "Internal: …" only.
_CONFIG_ERROR = re.compile(r"^(?:\w+: )?ConfigError: ")
# Every machine without a GPU logs these.
_HARMLESS = re.compile(r"CudaDriverHelper has not been initialized|Failed to initialize NVML")


def load_failure(log: Path, *, start: int = 0) -> tuple[str, str]:
    """Return why the model was not loaded, in one line, and the lines of the log that add to it.

    The reason is read from byte ``start`` on. It is "" if Triton has logged none.
    """
    failures = _LOAD_FAILED.findall(read(log, start=start))
    if not failures:
        return "", telling_lines(log)
    # "At:" begins the frames of the Python error.
    reason = _plain(failures[-1].removesuffix('"')).partition(" At: ")[0].strip()
    # An error of the model itself needs no lines.
    models_own = _CONFIG_ERROR.sub("", reason)
    if models_own != reason:
        return models_own, ""
    # The lines that repeat the reason add nothing.
    lines = [line for line in telling_lines(log).splitlines() if reason not in _plain(line)]
    return reason, "\n".join(lines)


def _plain(text: str) -> str:
    """Return a logged text in one line. Triton 24.10 escapes line breaks and quotes in it."""
    return re.sub(r"(?:\\n|\s)+", " ", text).replace('\\"', '"')


def telling_lines(log: Path, *, limit: int = _TAIL_LINES) -> str:
    """Return the last error lines of a server's log, or its last lines if it has no error lines."""
    lines = read(log).splitlines()
    telling = [line for line in lines if _TELLING.search(line) and not _HARMLESS.search(line)]
    return "\n".join((telling or lines)[-limit:])


def read(log: Path, *, start: int = 0) -> str:
    """Return the log's text from byte ``start`` on; an empty string if it cannot be read."""
    with contextlib.suppress(OSError), log.open("rb") as stream:
        stream.seek(start)
        return stream.read().decode("utf-8", errors="replace")
    return ""


def silent_seconds(log: Path) -> float:
    """Return the seconds since the log was last written, or 0 if there is no log."""
    with contextlib.suppress(OSError):
        return time.time() - log.stat().st_mtime
    return 0.0
