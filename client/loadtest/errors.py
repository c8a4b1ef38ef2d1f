"""The errors of a run. Each message names the input, the reason and the remedy."""

from __future__ import annotations


class ClientError(Exception):
    """The server, the model or the results file does not allow the run. The exit status is 1."""


class ServerGoneError(ClientError):
    """The server has not come back. What happened until then is reported."""


class NoSuchModelError(ClientError):
    """The server is ready, and does not list the model: to wait for it does not help."""


class InputError(ClientError):
    """The contents of an input file are wrong, or what a flag needs is missing.

    The exit status is 2, as for a wrong flag.
    """
