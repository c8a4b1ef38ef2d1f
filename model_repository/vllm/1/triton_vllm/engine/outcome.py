"""Turn vLLM's exceptions and error outputs into errors for clients."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from triton_vllm import vllm_api
from triton_vllm.base.errors import (
    DEAD,
    AdapterError,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from triton_vllm.vllm_api.refusals import REQUEST_FAILED, REQUEST_MAY_SUCCEED

if TYPE_CHECKING:
    from triton_vllm.base.protocols import Log


class Translator:
    """Turns vLLM's exceptions into errors for clients; logs those that are not a client's fault.

    Args:
        vllm: the loaded vLLM. It says which exceptions are refusals.
        log: gets the traceback of each kind of failure once. After that it gets one line each time.
    """

    def __init__(self, vllm: vllm_api.Vllm, log: Log) -> None:
        self._vllm = vllm
        self._log = log
        # Kinds of failures whose traceback is in the log.
        self._known: set[tuple[str, type[Exception], str]] = set()
        self._last: Exception | None = None

    def refusal(self, error: Exception) -> AdapterError:
        """Return the error for a request that could not be added to the engine."""
        if isinstance(error, AdapterError):
            return error
        if isinstance(error, self._vllm.EngineDeadError):
            return UnavailableError(DEAD)
        if isinstance(error, self._vllm.busy_errors):
            return UnavailableError(f"the engine cannot take the request now: {error}")
        if vllm_api.is_refusal(self._vllm, error):
            return InvalidRequestError(str(error).strip())
        self.log_error("request failed", error)
        return InternalError("the engine failed on this request; the server's log has the details")

    def own(self, error: Exception) -> AdapterError | None:
        """Return the error for a request if vLLM gave this exception to that request alone.

        Return None if vLLM gave it to all requests in flight; ``loss`` then returns their error.
        """
        # Since 0.33, vLLM puts such an exception into the collector if EngineCore has not taken a
        # request: its grammar does not compile, or the engine sleeps.
        if isinstance(error, self._vllm.passing_failures):
            return UnavailableError(REQUEST_MAY_SUCCEED)
        if isinstance(error, self._vllm.failures):
            return InternalError(REQUEST_FAILED)
        if isinstance(error, (*self._vllm.refusals, *self._vllm.busy_errors)):
            return self.refusal(error)
        return None

    def loss(self, error: Exception) -> AdapterError:
        """Return the error for a request that was in flight when vLLM's output handler failed."""
        # The handler gives the same exception to all requests in flight, so it is logged once. Then
        # the handler ends, and vLLM is dead. That is no request's fault.
        if not isinstance(error, self._vllm.EngineDeadError) and error is not self._last:
            self._last = error
            self.log_error("vLLM's output handler failed", error)
        return UnavailableError(DEAD)

    def log_error(self, what: str, error: Exception) -> None:
        """Log an exception; the first one from a place in the code is logged with its traceback."""
        places = traceback.extract_tb(error.__traceback__)
        # Kinds are told apart without the text, which may contain a request's own values and then
        # differs each time.
        kind = (what, type(error), str(places[-1:]))
        line = f"{what}: {type(error).__name__}: {error}"
        if kind not in self._known:
            self._known.add(kind)
            line = f"{what}:\n{''.join(traceback.format_exception(error))}"
        self._log.error(line)
