"""Take the names of the parsers of chat answers from the engine arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

TOOL = ("tool_parser", "tool_call_parser")
"""Our name, and the name of the option of vLLM's server; neither is an argument of its engine."""


def split(given: Mapping[str, Any], file: str) -> tuple[Mapping[str, Any], str]:
    """Return the engine arguments without the parser of tool calls, and that parser's name (may be empty).

    Raises:
        ConfigError: the name is not a string, or there are two different names.
    """
    found = {name: given[name] for name in TOOL if given.get(name) not in (None, "")}
    for name, value in found.items():
        if not isinstance(value, str):
            raise ConfigError(f'{file}: {name} must be the name of a parser, such as "hermes"')
    if len(set(found.values())) > 1:
        raise ConfigError(f"{file}: {TOOL[0]} and {TOOL[1]} differ, and mean the same: keep one")
    return {name: value for name, value in given.items() if name not in TOOL}, next(
        iter(found.values()), ""
    )


def choose(tool: str, values: Mapping[str, Any], file: str) -> vllm_api.ParserNames:
    """Return the names of the parsers.

    They are empty if this vLLM uses its parser of reasoning only to find where a constraint begins
    (before 0.26).

    Args:
        tool: the parser of tool calls.
        values: the engine arguments. ``reasoning_parser`` is one of them.
        file: the file with the arguments.

    Raises:
        ConfigError: this vLLM does not have such a parser.
    """
    if not tool and not vllm_api.has_parsers():
        return vllm_api.ParserNames()
    names = vllm_api.ParserNames(
        tool, values.get("reasoning_parser") or "", values.get("reasoning_parser_plugin") or ""
    )
    try:
        vllm_api.check_parsers(names)
    except vllm_api.ParserError as error:
        raise ConfigError(f"{file}: {error}") from None
    return names
