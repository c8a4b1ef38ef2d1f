"""What the load and the service need of this package; they import it if OPENAI_PORT is set."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.errors import ConfigError
from triton_vllm.openai import arguments
from triton_vllm.openai.checked_engine import Rules
from triton_vllm.openai.port import Port, claim, is_loopback
from triton_vllm.openai.server import Plan, Server
from triton_vllm.openai.tritons_ports import parents_arguments, refuse_tritons

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.refusals import Refusals
    from triton_vllm.chat.template import ChatTemplate
    from triton_vllm.engine.engine import Engine
    from triton_vllm.engine.fit import Fit
    from triton_vllm.lora.config import Adapters
    from triton_vllm.vllm_api import ParserNames, Vllm

KEY = "VLLM_API_KEY"
STORE = "VLLM_ENABLE_RESPONSES_API_STORE"


@dataclass(frozen=True)
class CommonArguments:
    """The arguments that count for both APIs.

    Attributes:
        engine: the engine's arguments.
        parsers: the parsers of chat answers.
        chat_template: the chat template.
        file: the file in which the operator wrote them.
    """

    engine: Mapping[str, Any]
    parsers: ParserNames
    chat_template: ChatTemplate
    file: str

    def values(self) -> dict[str, Any]:
        """Return them as the operator wrote them, under the names that vLLM's server has."""
        return {
            **self.engine,
            "chat_template": self.chat_template.value,
            "tool_call_parser": self.parsers.tool or None,
            "reasoning_parser": self.parsers.reasoning or None,
        }


def reserve(host: str, port: int, *, without_key: bool, first: bool | None) -> Port:
    """Take the port before the engine starts.

    Args:
        host: OPENAI_HOST.
        port: OPENAI_PORT.
        without_key: OPENAI_WITHOUT_KEY.
        first: whether this is the first of several instances. None if it is the only one.

    Raises:
        ConfigError: the port is taken, is one of Triton's, or is open to other machines without a
            key.
    """
    refuse_tritons(port, parents_arguments())
    if not (os.environ.get(KEY) or without_key or is_loopback(host)):
        raise ConfigError(
            f"config.pbtxt: OPENAI_HOST: with {host}, other machines reach the model without a "
            f"key: set {KEY} in the server's environment, or the parameter OPENAI_WITHOUT_KEY"
        )
    has_others = first is not None
    # Instances after the first take the port later: when the engine runs, the first one listens.
    if first is False:
        return Port(port, partial(claim, host, port, shared=has_others, first=False))
    taken = claim(host, port, shared=has_others)
    return Port(port, lambda: taken)


def plan(
    vllm: Vllm,
    port: Port,
    common: CommonArguments,
    *,
    name: str,
    model_dir: Path,
) -> Plan:
    """Return what the port is served with, after all that can be checked without the engine.

    Args:
        vllm: the loaded vLLM.
        port: where it will listen.
        common: the arguments that count for both APIs.
        name: the model's name in Triton.
        model_dir: the folder with ``config.pbtxt``.

    Raises:
        ConfigError: an argument is wrong, or this vLLM has no such server.
    """
    # The store would keep the responses of all clients, for ever and for everybody.
    if os.environ.get(STORE, "0").lower() not in ("", "0", "false"):
        raise ConfigError(f"OPENAI_PORT: responses are not kept; unset {STORE}")
    try:
        own = arguments.read(model_dir, vllm, common.values(), common.file)
        args = vllm_api.server_args(
            vllm,
            common.engine,
            own,
            parsers=common.parsers,
            chat_template=common.chat_template.text,
        )
    except vllm_api.OpenAiError as error:
        raise ConfigError(f"{arguments.FILE_NAME}: {error}") from None
    args.served_model_name = [name]
    # vLLM's list of models has this, and clients need not learn where the model is.
    if Path(args.model).is_absolute():
        args.model = name
    made = Plan(args, os.environ.get(KEY, ""), port)
    # The check of the TLS files: this reads the certificates.
    made.config(None)
    return made


def make_server(
    plan: Plan, engine: Engine, fit: Fit, *, vllm: Vllm, adapters: Adapters, refusals: Refusals
) -> Server:
    """Return the server of a running engine; ``Engine.attach`` starts it."""
    rules = Rules(
        vllm=vllm,
        fit=fit,
        jobs=engine.jobs,
        operator=engine.runner.operator,
        store=engine.runner.store,
        prompter=engine.prompter,
        adapters=adapters,
        refusals=refusals,
    )
    return Server(plan, rules, engine.log_error)
