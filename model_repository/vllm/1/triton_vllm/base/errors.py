"""The errors of requests, and the Triton status code of each.

AdapterError
├── InvalidRequestError   INVALID_ARG    the request itself is wrong
├── UnsupportedError      UNSUPPORTED    right, but not for this model
├── UnavailableError      UNAVAILABLE    the engine is dead or full, or time is up
│   └── StoppedError      UNAVAILABLE    the model was unloaded before the request had finished
├── CancelledError        CANCELLED      the client asked for it, or went away
└── InternalError         INTERNAL       a fault of vLLM or of this adapter
"""

from __future__ import annotations

import re
from typing import ClassVar

# vLLM's errors repeat their input, however long it is.
LONGEST_TEXT = 500
"""The most characters of an error's text."""
# Clients must not learn where the server's files and objects are.
_PLACE = re.compile(r"(?<![\w:/.])/(?:[\w.+~-]+/)+[\w.+~-]*|\b0x[0-9a-fA-F]{6,}")
"""Matches a path of this machine, or an address in its memory."""
# The official backend uses the same text.
DEAD = "Model is unavailable due to unhealthy vLLM engine"
"""The answer to every request while the engine is dead."""
UNLOADING = "the model is being unloaded"
"""The answer to every request once an unload has begun."""

# Kubernetes' probe for readiness takes an answer with "healthy" for one without an engine
# (deploy/kubernetes/probes/ready.sh).
NOT_TAKEN = (
    "the server is not healthy: it has stopped taking this model's responses, and must be restarted"
)
"""The answer to every request once a response could not be sent for long."""


def cut(text: str) -> str:
    """Return an error's text, shortened to ``LONGEST_TEXT`` characters."""
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."


class AdapterError(Exception):
    """An error with a text for the client and the name of a ``TritonError`` code.

    The text is cut to 500 characters, and the server's paths and addresses are removed.
    """

    code: ClassVar[str] = "INTERNAL"

    def __init__(self, text: str = "") -> None:
        super().__init__(_PLACE.sub("…", cut(text)))


class InvalidRequestError(AdapterError):
    """The request is malformed; the text names the input, the reason and a correct value."""

    code = "INVALID_ARG"


class UnsupportedError(AdapterError):
    """The request is well formed, but this model or this vLLM cannot do it."""

    code = "UNSUPPORTED"


class UnavailableError(AdapterError):
    """The engine cannot take or finish the request now; the same request may succeed later."""

    code = "UNAVAILABLE"


class StoppedError(UnavailableError):
    """The model was unloaded before the request had finished."""


class CancelledError(AdapterError):
    """The request was cancelled."""

    code = "CANCELLED"


class InternalError(AdapterError):
    """Something unexpected failed; the details are in the server's log only."""


class ConfigError(Exception):
    """The model's configuration is wrong; Triton reports this text when the load fails."""
