"""Send what this package logs by Python's ``logging`` to the server's log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton_vllm.base.protocols import Log

_NAME = __name__.partition(".")[0]


class _Handler(logging.Handler):
    """Sends records to the server's log.

    Args:
        log: the server's log.
    """

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        send = self._log.error if record.levelno >= logging.ERROR else self._log.warning
        try:
            send(self.format(record))
        except Exception:  # noqa: BLE001 - a failure to log must not fail a request
            self.handleError(record)


def send_to(log: Log) -> None:
    """Send warnings and errors of this package's own loggers to ``log``.

    With vLLM 0.28 and 0.30, Python's default handler does not write them there (seen on
    30 November 2026).
    """
    logger = logging.getLogger(_NAME)
    logger.handlers = [_Handler(log)]
    logger.setLevel(logging.WARNING)
