"""What the tests of the model ask, in few words: tensors in, answers by request and completion out."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from support.triton_client import stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.triton_client import Response
    from vllm_env.serve.server import TritonServer

# prompts that the stand-in was not taught: it goes on until its limit
STRANGE = ("Once upon a time", "The animal of AI is my", "Paris is the most", "dangerous rivers of")


@dataclass(frozen=True)
class Answer:
    """All responses to one request, in the order of arrival, the empty final one left out."""

    responses: tuple[Response, ...]

    @property
    def error(self) -> str:
        """The error's text, or nothing; that nothing came at all is one, too."""
        if not self.responses:
            return "there was no response"
        return "".join(response.error for response in self.responses)

    def texts(self) -> list[str]:
        """Return the text of each completion, joined over the responses."""
        pieces = self.values("text_output")
        return [b"".join(column).decode() for column in zip(*pieces, strict=True)]

    @property
    def text(self) -> str:
        """The one completion's text."""
        (text,) = self.texts()
        return text

    def values(self, name: str) -> list[list[Any]]:
        """Return an output tensor of each response, as lists."""
        return [response.tensors[name].tolist() for response in self.responses]

    def token_ids(self) -> list[int]:
        """Return the token ids of all responses."""
        return [token for part in self.values("token_ids") for token in part]


def prompt(text: str | None, parameters: Any = None, **tensors: Any) -> dict[str, Any]:
    """Return a request's tensors; parameters become JSON, those given as a string stay as they are."""
    made = dict(tensors) if text is None else {"text_input": text, **tensors}
    if parameters is not None:
        made["sampling_parameters"] = parameters if isinstance(parameters, str) else json.dumps(parameters)
    return made


def ask_all(server: TritonServer, requests: Sequence[dict[str, Any]], **options: Any) -> list[Answer]:
    """Send requests at once on one stream; return the answers in the order of the requests.

    tritonclient does not say whose an error is: those that have no response get one each.
    """
    parts = [r for r in stream(server.grpc_url, requests, **options) if r.tensors or r.error]
    errors = iter([r for r in parts if r.error])
    owned = [tuple(r for r in parts if r.tensors and r.request_id == str(number)) for number in range(len(requests))]
    return [Answer(own or tuple(itertools.islice(errors, 1))) for own in owned]


def ask(server: TritonServer, text: str | None, parameters: Any = None, *, options: Any = None, **tensors: Any) -> Answer:
    """Send one request; return its answer, errors included.

    Args:
        server: the server.
        text: ``text_input``, or None for a request without it.
        parameters: ``sampling_parameters``.
        options: keyword arguments of ``triton_client.stream``.
        tensors: further inputs.
    """
    found = stream(server.grpc_url, [prompt(text, parameters, **tensors)], **(options or {}))
    return Answer(tuple(r for r in found if r.tensors or r.error))
