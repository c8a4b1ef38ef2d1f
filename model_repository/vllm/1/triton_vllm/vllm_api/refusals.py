"""Distinguish vLLM's refusals of a request from its faults, by its exceptions and outputs."""

from __future__ import annotations

import opcode
import re
from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import InternalError, UnavailableError

if TYPE_CHECKING:
    from triton_vllm.base.errors import AdapterError
    from triton_vllm.base.protocols import Output
    from triton_vllm.vllm_api.names import Vllm

_ADVICE = re.compile(r"\.?\s*Set VLLM_\w+ to\s+increase this\s+limit\.?\s*$")
REQUEST_FAILED = "the engine could not finish this request; the server's log has the details"
REQUEST_MAY_SUCCEED = (
    "the engine could not finish this request; the same request may succeed if it is sent again"
)
_RAISE = opcode.opmap["RAISE_VARARGS"]


def is_refusal(vllm: Vllm, error: Exception) -> bool:
    """Return whether vLLM says by this exception that the request is wrong."""
    # vLLM has classes for that. In most places it uses them.
    if isinstance(error, vllm.refusals):
        return True
    # Patch plain-refusals: in some places, and everywhere before 0.20, vLLM raises a plain
    # ValueError or TypeError (such as 0.32 in tokenizers/deepseek_v32_encoding.py). Wrong calls and
    # faults of vLLM raise the same two. So a plain one is a refusal only if a `raise` in vLLM's
    # code made it. It may go when all refusals of vLLM have its own classes.
    last = error.__traceback__
    if last is None or not isinstance(error, vllm.client_errors):
        return False
    while last.tb_next is not None:
        last = last.tb_next
    module = str(last.tb_frame.f_globals.get("__name__", ""))
    # The last frame is the one that raised. Its last instruction shows whether that was a `raise`
    # or a call that failed.
    instruction = last.tb_frame.f_code.co_code[last.tb_lasti]
    return module.partition(".")[0] == "vllm" and instruction == _RAISE


def too_large(error: Exception) -> str | None:
    """Return vLLM's message about a file that decodes to too much; None for any other error."""
    text = str(error)
    if text.startswith("Maximum file size exceeded"):
        return text
    # The error is a plain ValueError. Its advice to set an environment variable identifies it. The
    # client cannot follow that advice, so we omit it.
    message = _ADVICE.sub("", text)
    return message if message != text else None


def failure(item: Output) -> AdapterError | None:
    """Return the error that an output of a failed request means; None if it has not failed."""
    # vLLM ends a request that failed in EngineCore with an ordinary output. Its own server raises
    # an error then.
    outputs: Any = item.outputs
    if isinstance(outputs, list):
        failed = any(completion.finish_reason == "error" for completion in outputs)
        return InternalError(REQUEST_FAILED) if failed else None
    # A pooled output that failed has an `error` (since 0.32) or no numbers.
    error = getattr(item, "error", None)
    if getattr(error, "retryable", False):
        return UnavailableError(REQUEST_MAY_SUCCEED)
    failed = error is not None or not outputs.data.numel()
    return InternalError(REQUEST_FAILED) if failed else None
