"""Refuse a port that Triton itself is about to take, before the model loads.

Triton opens its ports when all models are loaded. A model that has one of them makes Triton end
then, with a message that does not name the model's parameter.
"""

from __future__ import annotations

import os
from pathlib import Path

from triton_vllm.base.errors import ConfigError

DEFAULTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
"""Triton's endpoints and the ports that they have unless an option of Triton says otherwise."""


def refuse_tritons(port: int, arguments: list[str]) -> None:
    """Return if Triton does not use the port.

    Args:
        port: OPENAI_PORT.
        arguments: the command line of Triton, or of another program that runs the model.

    Raises:
        ConfigError: Triton uses it.
    """
    for name, number in _ports(arguments).items():
        if number == port:
            raise ConfigError(
                f"config.pbtxt: OPENAI_PORT: {port} is the port of Triton's {name} endpoint; "
                f"choose another one, such as 9000, or start Triton with another --{name}-port"
            )


def parents_arguments() -> list[str]:
    """Return the command line of the process that started this one. Empty if it is not readable."""
    try:
        text = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return os.fsdecode(text).split("\0")


def _ports(arguments: list[str]) -> dict[str, int]:
    """Return the ports of the endpoints that Triton opens, by the endpoints' names."""
    # Any argument, because a loader may have started Triton.
    is_triton = any(Path(argument).name == "tritonserver" for argument in arguments)
    ports = dict(DEFAULTS)
    # Another program's options may mean something else.
    for name in DEFAULTS if is_triton else ():
        given = _value(arguments, f"--{name}-port")
        if given is not None and given.isdecimal():
            ports[name] = int(given)
        if (_value(arguments, f"--allow-{name}") or "").lower() in ("false", "0"):
            del ports[name]
    return ports


def _value(arguments: list[str], option: str) -> str | None:
    """Return the value of ``--option=VALUE`` or ``--option VALUE``; the last one counts."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == option:
            found = following
        elif argument.startswith(f"{option}="):
            found = argument.partition("=")[2]
    return found
