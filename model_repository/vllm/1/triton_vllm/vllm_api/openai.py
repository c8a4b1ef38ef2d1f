"""Make vLLM's OpenAI application over a running engine, as ``vllm serve`` does."""

from __future__ import annotations

import importlib
import inspect
import logging
from dataclasses import dataclass
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import InvalidRequestError, UnavailableError, UnsupportedError
from triton_vllm.vllm_api.bodies import body_types
from triton_vllm.vllm_api.fields import dataclass_types, engine_arg_types

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from triton_vllm.base.errors import AdapterError
    from triton_vllm.base.protocols import EngineClient
    from triton_vllm.vllm_api.bodies import BodyType
    from triton_vllm.vllm_api.names import Vllm
    from triton_vllm.vllm_api.parsers import ParserNames

# The newest place comes first. From 0.30 on, `openai.api_server` only warns and imports.
SERVER_PLACES: Mapping[str, tuple[str, ...]] = {
    "build_app": ("vllm.entrypoints.launchers.app", "vllm.entrypoints.openai.api_server"),
    "init_app_state": (
        "vllm.entrypoints.launchers.api_server.app_state",
        "vllm.entrypoints.openai.api_server",
    ),
    "FrontendArgs": (
        "vllm.entrypoints.common.cli_args",
        "vllm.entrypoints.launchers.cli_args",
        "vllm.entrypoints.openai.cli_args",
    ),
    "make_arg_parser": (
        "vllm.entrypoints.common.cli_args",
        "vllm.entrypoints.launchers.cli_args",
        "vllm.entrypoints.openai.cli_args",
    ),
    "validate_parsed_serve_args": (
        "vllm.entrypoints.common.cli_args",
        "vllm.entrypoints.launchers.cli_args",
        "vllm.entrypoints.openai.cli_args",
    ),
    "FlexibleArgumentParser": ("vllm.utils.argparse_utils", "vllm.utils"),
    "InputStreamError": ("vllm.v1.engine.async_llm",),
}
"""Names of vLLM's server, and the modules that may contain them."""


class OpenAiError(Exception):
    """This vLLM has no such server, or refuses its arguments; the text says why."""


@dataclass(frozen=True)
class Application:
    """vLLM's OpenAI application, without an engine.

    Attributes:
        vllm: the loaded vLLM.
        app: the ASGI application.
        args: the arguments of vLLM's server, with the engine's.
        bodies: what the body of each path may have.
    """

    vllm: Vllm
    app: Any
    args: Any
    bodies: Mapping[str, BodyType]

    async def use(self, llm: EngineClient, tasks: Sequence[str]) -> None:
        """Answer with this engine from now on.

        Raises:
            Exception: vLLM's own exception.
        """
        init = _find("init_app_state")
        given = {
            "engine_client": llm,
            "vllm_config": getattr(llm, "vllm_config", None),
            "state": self.app.state,
            "args": self.args,
            "supported_tasks": tuple(tasks),
        }
        await init(**_taken(init, given))

    def add_adapter(self, name: str) -> None:
        """Let requests name an adapter as their model."""
        # Our engine replaces this object with the adapter that it has loaded. So the number and the
        # path mean nothing.
        named = self.vllm.LoRARequest(name, 1, name)
        # Patch names-of-adapters: vLLM's server lists only adapters that it loads itself (since
        # 0.11; entrypoints/openai/models/serving.py). It may go when a name can be added without
        # that.
        self.app.state.openai_serving_models.lora_requests.setdefault(name, named)


def server_arg_types(vllm: Vllm) -> dict[str, Any]:
    """Return the arguments of vLLM's server that the engine does not have, with their types.

    Raises:
        OpenAiError: this vLLM has no such server.
    """
    declared = dataclass_types(_find("FrontendArgs"))
    engine = engine_arg_types(vllm)
    return {name: hint for name, hint in declared.items() if name not in engine}


def server_args(
    vllm: Vllm,
    engine_args: Mapping[str, Any],
    own: Mapping[str, Any],
    *,
    parsers: ParserNames,
    chat_template: str | None,
) -> Any:
    """Return the arguments of vLLM's server.

    Args:
        vllm: the loaded vLLM.
        engine_args: the engine's arguments. They replace those of the same name.
        own: the server's own arguments, which the engine does not have.
        parsers: the parsers of both APIs.
        chat_template: the chat template of both APIs. None means the model's own.

    Raises:
        OpenAiError: vLLM refuses the arguments.
    """
    parser = _find("make_arg_parser")(_find("FlexibleArgumentParser")())
    args = parser.parse_args([])
    for name, value in vars(vllm.AsyncEngineArgs(**engine_args)).items():
        setattr(args, name, value)
    for name, value in own.items():
        setattr(args, name, value)
    args.chat_template = chat_template
    args.tool_call_parser = parsers.tool or None
    args.enable_auto_tool_choice = bool(parsers.tool)
    # vLLM validates all arguments of a command line, and its exceptions are of any kind.
    try:
        _find("validate_parsed_serve_args")(args)
    except Exception as error:
        raise OpenAiError(str(error).strip()) from error
    return args


def build_application(
    vllm: Vllm, llm: EngineClient, args: Any, tasks: Sequence[str]
) -> Application:
    """Return vLLM's application; ``Application.use`` gives it the engine.

    Raises:
        Exception: vLLM's own exception.
    """
    # vLLM's application reads the name of the reasoning parser here only. The operator may have
    # written it elsewhere; the engine's configuration has it in any case.
    args.structured_outputs_config = llm.vllm_config.structured_outputs_config  # type: ignore[attr-defined]
    build = _find("build_app")
    given = {
        "args": args,
        "supported_tasks": tuple(tasks),
        "model_config": llm.model_config,
    }
    # Patch level-of-the-log: a package for SageMaker that vLLM imports here sets this level to
    # ERROR (0.32; entrypoints/serve/sagemaker/api_router.py). The warnings of the model's own code
    # would no longer reach the server's log. It may go when the level stays.
    level = logging.root.level
    try:
        app = build(**_taken(build, given))
    finally:
        logging.root.setLevel(level)
    # Patch server-of-application: vLLM's handlers end the server of a dead engine (since 0.11;
    # terminate_if_errored). Ours waits for the next engine. It may go when they work without a
    # server.
    app.state.server = SimpleNamespace(should_exit=False)
    return Application(vllm, app, args, body_types(app))


def as_vllms(vllm: Vllm, error: AdapterError) -> Exception:
    """Return an exception of vLLM for which its server answers with the status of ``error``."""
    if isinstance(error, InvalidRequestError | UnsupportedError):
        # vLLM has had a class for that since 0.14.
        kind = next(iter(vllm.refusals), ValueError)
        return kind(str(error))
    status = status_of(error)
    # vLLM's exception of a full queue takes any status.
    if vllm.busy_errors:
        return vllm.busy_errors[0](str(error), status)
    http_exception = importlib.import_module("fastapi").HTTPException
    made: Exception = http_exception(status_code=int(status), detail=str(error))
    return made


def ends_generate(vllm: Vllm, error: AdapterError) -> Exception:
    """Return what makes ``generate`` raise ``as_vllms(error)`` if it is put into the collector."""
    raised = as_vllms(vllm, error)
    if isinstance(raised, (*vllm.busy_errors, *vllm.refusals)):
        return raised
    # Before 0.30, `generate` turns all other exceptions into a fault of the engine. Where vLLM has
    # this class, `generate` raises what is in it.
    try:
        wrapped: Exception = _find("InputStreamError")(raised)
    except OpenAiError:
        return raised
    return wrapped


def status_of(error: AdapterError) -> HTTPStatus:
    """Return the HTTP status of an error."""
    if isinstance(error, InvalidRequestError | UnsupportedError):
        return HTTPStatus.BAD_REQUEST
    if isinstance(error, UnavailableError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.INTERNAL_SERVER_ERROR


def _taken(call: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function of this vLLM takes."""
    known = inspect.signature(call).parameters
    return {name: value for name, value in given.items() if name in known}


def _find(name: str) -> Any:
    """Return what a name of ``SERVER_PLACES`` stands for in this vLLM.

    Raises:
        OpenAiError: none of its modules has it.
    """
    for place in SERVER_PLACES[name]:
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError):
            continue
    raise OpenAiError(f"this vLLM has no {name} in {' or '.join(SERVER_PLACES[name])}")
