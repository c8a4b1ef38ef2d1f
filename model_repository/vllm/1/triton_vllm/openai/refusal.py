"""Refusals that only HTTP knows, and the body of every refusal."""

from __future__ import annotations

import json
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

from triton_vllm import vllm_api
from triton_vllm.base.coerce import shown
from triton_vllm.base.errors import AdapterError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator


class HttpRefusalError(AdapterError):
    """A request is refused with a status that Triton does not have.

    Args:
        status: the status of the answer.
        text: the fault, and the remedy.
    """

    code = InvalidRequestError.code

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class FieldError(InvalidRequestError):
    """A field of the body is refused.

    Args:
        name: the field.
        text: the whole message.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        # A client could send a name of megabytes.
        self.name = shown(name)


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Give the field's name to refusals in the block."""
    try:
        yield
    except InvalidRequestError as error:
        raise FieldError(field, str(error)) from None


# vLLM's names of these kinds of errors.
_KINDS = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
}


def status_of(error: AdapterError) -> HTTPStatus:
    """Return the HTTP status of an error."""
    if isinstance(error, HttpRefusalError):
        return error.status
    return vllm_api.status_of(error)


def event_of(error: AdapterError, path: str) -> bytes:
    """Return the event that ends a stream which cannot go on."""
    return b"event: error\ndata: " + body_of(error, path) + b"\n\n"


def body_of(error: AdapterError, path: str) -> bytes:
    """Return the JSON of a refusal, as vLLM's server has it for this path."""
    status = status_of(error)
    kind = _KINDS.get(status, status.phrase)
    # Anthropic's protocol has another form.
    if path.startswith("/v1/messages"):
        return json.dumps(
            {"type": "error", "error": {"type": kind, "message": str(error)}}
        ).encode()
    fields = {
        "message": str(error),
        "type": kind,
        "param": error.name if isinstance(error, FieldError) else None,
        "code": int(status),
    }
    return json.dumps({"error": fields}).encode()
