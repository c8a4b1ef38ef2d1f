"""The errors of a run. Each message names the input, the reason and the remedy."""

from __future__ import annotations


class ClientError(Exception):
    """The server, the model or the results file does not allow the run. The exit status is 1."""


class InputError(ClientError):
    """The contents of an input file are wrong. The exit status is 2, as for a wrong flag."""
