"""Take the names of the parsers of chat answers from the engine arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

# The first name is ours. The second one is an option of vLLM's server, and not an argument of its
# engine.
TOOL_ARGUMENTS = ("tool_parser", "tool_call_parser")
"""The names under which the operator may give the parser of tool calls."""


def split(given: Mapping[str, Any], file: str) -> tuple[Mapping[str, Any], str]:
    """Return the engine arguments without the parser of tool calls, and the name of that parser.

    Args:
        given: the engine arguments as the operator wrote them.
        file: the file with the arguments.

    Returns:
        The other arguments, and the name. It is empty if there is no parser.

    Raises:
        ConfigError: the name is not a string, or there are two different names.
    """
    names = {name: given[name] for name in TOOL_ARGUMENTS if given.get(name) not in (None, "")}
    for name, value in names.items():
        if not isinstance(value, str):
            raise ConfigError(f'{file}: {name} must be the name of a parser, such as "hermes"')
    if len(set(names.values())) > 1:
        raise ConfigError(
            f"{file}: {' and '.join(TOOL_ARGUMENTS)} differ, and mean the same: keep one"
        )
    others = {name: value for name, value in given.items() if name not in TOOL_ARGUMENTS}
    return others, next(iter(names.values()), "")


def choose(tool: str, values: Mapping[str, Any], file: str) -> vllm_api.ParserNames:
    """Return the names of the parsers.

    Args:
        tool: the parser of tool calls. May be empty.
        values: the engine arguments. ``reasoning_parser`` is one of them.
        file: the file with the arguments.

    Raises:
        ConfigError: this vLLM does not have such a parser.
    """
    # Before 0.26, vLLM uses its parser of reasoning only to find where a constraint begins. It
    # reads no answers with it.
    if not tool and not vllm_api.has_parsers():
        return vllm_api.ParserNames()
    names = vllm_api.ParserNames(
        tool=tool,
        reasoning=values.get("reasoning_parser") or "",
        plugin=values.get("reasoning_parser_plugin") or "",
    )
    try:
        vllm_api.check_parsers(names)
    except vllm_api.ParserError as error:
        raise ConfigError(f"{file}: {error}") from None
    return names
