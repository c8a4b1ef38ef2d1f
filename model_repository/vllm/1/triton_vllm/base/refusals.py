"""Count the errors that clients get; both APIs count here.

Triton 24.10 counts an error of a streaming model as a success.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from triton_vllm.base.errors import (
    CancelledError,
    InternalError,
    InvalidRequestError,
    UnavailableError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.errors import AdapterError

_KINDS = (InvalidRequestError, UnsupportedError, UnavailableError, InternalError)


class Refusals:
    """The number of requests that got an error, by its code. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {kind.code: 0 for kind in _KINDS}

    def note(self, error: AdapterError) -> None:
        """Count an error, unless the client itself has cancelled the request."""
        if not isinstance(error, CancelledError):
            with self._lock:
                self._counts[error.code] += 1

    def counts(self) -> Mapping[str, int]:
        """Return the numbers by code."""
        with self._lock:
            return dict(self._counts)
