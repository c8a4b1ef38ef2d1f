"""Items of a response's input that vLLM takes."""

from __future__ import annotations

from typing import Any

_TEXTS = [{"type": "input_text", "text": "a"}]
_SAID = {"type": "output_text", "text": "a", "annotations": []}
_ANSWER = {"type": "message", "role": "assistant", "id": "m", "status": "completed"}
_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
_RESULT = {"type": "function_call_output", "call_id": "c", "output": "a"}
_THOUGHT = {"type": "reasoning_text", "text": "a"}
TAKEN: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "a"},
    {"type": "message", "role": "developer", "content": "a"},
    {"role": "system", "content": _TEXTS, "type": "message"},
    {"role": "assistant", "content": "a", "phase": None},
    {**_ANSWER, "content": [_SAID, {"type": "refusal", "refusal": "a"}]},
    {**_ANSWER, "content": [{**_SAID, "logprobs": None}], "phase": None},
    {**_ANSWER, "content": [{**_SAID, "logprobs": []}]},
    _CALL,
    {**_CALL, "id": None, "status": None, "namespace": None, "caller": None},
    {**_CALL, "id": "f", "status": "completed"},
    _RESULT,
    {**_RESULT, "output": _TEXTS},
    {**_RESULT, "id": None, "status": None},
    {"type": "reasoning", "id": "r", "summary": []},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "a"}], "content": [_THOUGHT]},
    {"type": "reasoning", "id": "r", "summary": [], "content": None, "encrypted_content": None, "status": None},
)
"""By every version."""
INCOMPLETE: tuple[dict[str, Any], ...] = (
    {"type": "reasoning", "summary": []},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
)
"""By versions that add what is missing."""
