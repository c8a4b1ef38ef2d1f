"""Keep the answers of a run in the order of the requests, and write them to a file."""

from __future__ import annotations

import json
import tempfile
from array import array
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from loadtest.errors import ClientError
from loadtest.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.record import Record

SEPARATOR = "\n=========\n\n"
# Bytes of text that need no temporary file.
_IN_MEMORY = 1 << 20


def check_writable(path: Path, flag: str) -> None:
    """Check that ``path`` can be written, and leave it as it is.

    Args:
        path: the file.
        flag: the flag that names it.

    Raises:
        ClientError: the file cannot be written.
    """
    with writing(path, flag):
        existed = path.exists()
        # Mode "a" keeps the results of an earlier run, in case this one fails.
        path.open("a", encoding="utf-8").close()
        if not existed:
            # Otherwise a run that fails would leave an empty file. A link stays.
            path.resolve().unlink()


class TextStore:
    """The texts of the answers, in a temporary file that is deleted with this object.

    Answers come in any order. Only 16 bytes for each stay in memory.

    Args:
        folder: where the temporary file is once it is large. If no file can be created there, or
            for None, it is in the system's folder.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = Path(tempfile.gettempdir())
        if folder is not None and _can_create_files(folder):
            self._folder = folder
        self._file = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed with the store
            max_size=_IN_MEMORY, dir=str(self._folder)
        )
        # By request: where its text starts in the file, and its length. Both are in bytes.
        self._starts = array("q")
        self._lengths = array("q")
        self._end = 0  # of the file

    def add(self, record: Record) -> None:
        """Keep the text of a request that has ended, however it ended: all its completions.

        Raises:
            ClientError: the temporary file cannot be written.
        """
        index = record.request.index
        missing = index + 1 - len(self._starts)
        if missing > 0:
            # The requests up to this one have no text yet.
            self._starts.extend([0] * missing)
            self._lengths.extend([0] * missing)
        # An answer may have half of a surrogate pair, which UTF-8 cannot have.
        text = "\n".join(record.completions).encode("utf-8", errors="replace")
        with writing(self._folder, "--results-file"):
            self._file.write(text)
        self._starts[index] = self._end
        self._lengths[index] = len(text)
        self._end += len(text)

    def texts(self) -> Iterator[str]:
        """Yield the texts in the order of the requests."""
        for start, length in zip(self._starts, self._lengths, strict=True):
            self._file.seek(start)
            yield self._file.read(length).decode("utf-8")

    def write(self, path: Path) -> None:
        """Write each text, followed by the separator, as Triton's sample does.

        Raises:
            ClientError: the file cannot be written.
        """
        # The same bytes on every system: Windows would write "\r\n".
        with (
            writing(path, "--results-file"),
            path.open("w", encoding="utf-8", newline="\n") as file,
        ):
            for text in self.texts():
                file.write(f"{text}\n{SEPARATOR}")

    def close(self) -> None:
        """Delete the temporary file."""
        self._file.close()


class JsonLines:
    """A results file that gets each record as soon as its request has ended, as a line of JSON.

    Args:
        path: the file.
        started: start of the run; the file's times count from it (s of ``time.perf_counter``).

    Raises:
        ClientError: the file cannot be written.
    """

    def __init__(self, path: Path, started: float) -> None:
        self._path = path
        self._started = started
        with writing(path, "--results-file"):
            # With buffering=1, each line is written at once: a run that is killed leaves what it
            # has. A prompt may have half of a surrogate pair, which UTF-8 cannot have. The escape
            # that replaces it is also JSON's.
            self._file: IO[str] = path.open(
                "w", buffering=1, encoding="utf-8", errors="backslashreplace", newline="\n"
            )

    def add(self, record: Record) -> None:
        """Write a record."""
        line = json.dumps(as_json(record, self._started), ensure_ascii=False)
        with writing(self._path, "--results-file"):
            self._file.write(f"{line}\n")

    def close(self) -> None:
        """Close the file."""
        with writing(self._path, "--results-file"):
            self._file.close()


def as_json(record: Record, started: float) -> dict[str, Any]:
    """Return a record as the line of JSON has it; times are in seconds from ``started``."""
    request = record.request
    return {
        "index": request.index,
        "prompt": json.loads(request.prompt) if request.is_chat else request.prompt,
        # Without an outcome, the request was still running when the run ended.
        "outcome": (record.outcome or Outcome.CANCELLED).value,
        "completions": record.completions,
        "finish_reasons": list(record.finish_reasons),
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "due": record.due - started,
        "sent": record.sent - started,
        "times": [time - started for time in record.times],
        "error": record.reason or None,
    }


def _can_create_files(folder: Path) -> bool:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


@contextmanager
def writing(path: Path, flag: str) -> Iterator[None]:
    """Turn an ``OSError`` of the block into a ``ClientError`` that names the file and its flag."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ClientError(
            f"cannot write {path}: {reason}; name another file with {flag}"
        ) from error
