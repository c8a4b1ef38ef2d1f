"""Run several AsyncLLMs over one engine, each in its own process.

``vllm serve`` does the same for its API servers.
"""

from __future__ import annotations

import importlib
import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import ConfigError
from triton_vllm.vllm_api.engine import start_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from triton_vllm.base.protocols import EngineClient
    from triton_vllm.vllm_api.names import Vllm

_CLIENT_MODULE = "vllm.v1.engine.core_client"
_READY_TIMEOUT = "VLLM_ENGINE_READY_TIMEOUT_S"
_CLIENT_PARAMETERS = ("client_addresses", "client_count", "client_index")
_COUNT_FIELD = "_api_process_count"
_RANK_FIELD = "_api_process_rank"
# The engine runs already. vLLM would wait for it as long as for one that is still loading.
CONNECT_S = 60
"""How many seconds a front end waits for the engine."""


def lacking(vllm: Vllm) -> str:
    """Return the names that this vLLM lacks for several front ends; empty if it lacks none."""
    try:
        client = importlib.import_module(_CLIENT_MODULE)
    except ImportError:
        return _CLIENT_MODULE
    # A vLLM without this method counts as one whose method takes no arguments.
    make = getattr(vllm.AsyncLLM, "from_vllm_config", lambda: None)
    known = inspect.signature(make).parameters
    missing = [name for name in _CLIENT_PARAMETERS if name not in known]
    launch = getattr(client, "launch_core_engines", None)
    if launch is None or "addresses" not in inspect.signature(launch).parameters:
        missing.append("launch_core_engines(addresses)")
    if not hasattr(client, _READY_TIMEOUT):
        missing.append(_READY_TIMEOUT)
    missing += [
        name for name in (_COUNT_FIELD, _RANK_FIELD) if not hasattr(vllm.AsyncEngineArgs, name)
    ]
    return ", ".join(missing)


def launch(
    vllm: Vllm, values: Mapping[str, Any], others: Sequence[tuple[str, str]]
) -> tuple[EngineClient, str | None]:
    """Start AsyncLLM, and an engine that answers this front end and others.

    The engine ends with this process. Otherwise this is like ``start``.

    Args:
        vllm: the loaded vLLM.
        values: engine arguments.
        others: for each other front end, the address for its requests and the one for its outputs.
            It need not listen there yet.

    Returns:
        The first client, and the address where data-parallel ranks publish their load (None with
        one rank).

    Raises:
        ConfigError: a rank is on another machine, which cannot reach the front ends of this one.
            Or this vLLM starts its engine in another way.
    """
    client = importlib.import_module(_CLIENT_MODULE)
    launch_engines = client.launch_core_engines
    signature = inspect.signature(launch_engines)
    statistics: str | None = None
    called = False

    @contextmanager
    def launch_for_all(*args: Any, **kwargs: Any) -> Iterator[Any]:
        """Do the same as vLLM's function, with the addresses of all front ends."""
        nonlocal statistics, called
        called = True
        # vLLM passes the addresses by position or by name.
        addresses = signature.bind(*args, **kwargs).arguments["addresses"]
        # The front ends listen on Unix sockets, which a rank on another machine cannot reach.
        if not all(address.startswith("ipc://") for address in addresses.inputs):
            raise ConfigError(
                "instance_group: count above 1 needs all ranks of the engine on this machine; "
                "use count: 1"
            )
        addresses.inputs.extend(requests for requests, _ in others)
        addresses.outputs.extend(outputs for _, outputs in others)
        with launch_engines(*args, **kwargs) as launched:
            yield launched
            # vLLM has filled this in by now.
            statistics = addresses.frontend_stats_publish_address

    # Patch addresses-of-front-ends: vLLM's client launches an engine only for itself (since 0.28;
    # v1/engine/core_client.py, MPClient). If it got addresses from outside, it would not supervise
    # the engine. It may go when a client can launch an engine for others, too.
    with _replaced(client, "launch_core_engines", launch_for_all):
        llm = _client(vllm, values, index=0, count=len(others) + 1, addresses=None)
    # The engine would not know the other front ends, and each would wait a minute for it.
    if not called:
        llm.shutdown()
        raise ConfigError(
            "instance_group: count above 1 does not work with this vLLM, which starts its engine "
            "without launch_core_engines; use count: 1"
        )
    return llm, statistics


def connect(
    vllm: Vllm,
    values: Mapping[str, Any],
    addresses: Mapping[str, str | None],
    index: int,
    count: int,
) -> EngineClient:
    """Start AsyncLLM as a front end over an engine that another process has launched.

    Args:
        vllm: the loaded vLLM.
        values: engine arguments. The same as the engine's.
        addresses: ``input_address`` and ``output_address`` as ``launch`` got them, and
            ``stats_update_address`` as it returned it.
        index: from 1 on. The front end that launched the engine is 0.
        count: how many front ends there are.

    Raises:
        TimeoutError: the engine does not answer.
    """
    client = importlib.import_module(_CLIENT_MODULE)
    known = {name: address for name, address in addresses.items() if address is not None}
    # Patch patience-of-front-ends: vLLM has one time limit for engines that load and for those that
    # run (since 0.14; v1/engine/core_client.py reads the variable when it is imported). It may go
    # when `from_vllm_config` takes the limit.
    with _replaced(client, _READY_TIMEOUT, CONNECT_S):
        return _client(vllm, values, index=index, count=count, addresses=known)


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Give a name of a module another value while the block runs."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def note_statistics(llm: Any, note: Callable[[int, float], None]) -> None:
    """Call ``note`` whenever this front end has recorded the engine's figures.

    Call this function before the first output is taken.

    Args:
        llm: the front end.
        note: takes the rank, and the time when the engine made the figures (``time.monotonic``, s).
    """
    manager = getattr(llm, "logger_manager", None)
    if manager is None:  # statistics are off
        return
    engine = llm.engine_core
    receive = engine.get_output_async
    record = manager.record
    # Patch age-of-figures: vLLM gives each step's figures to one front end, and records them
    # without their time (since 0.28; v1/engine/async_llm.py, output_handler). The time of arrival
    # would mislead: a busy front end may receive an older step's figures after another one has
    # received the newest. It may go when a logger of vLLM gets the time.
    made_at = 0.0

    async def received() -> Any:
        nonlocal made_at
        outputs = await receive()
        made_at = outputs.timestamp
        return outputs

    def noted(scheduler_stats: Any = None, *args: Any, **kwargs: Any) -> None:
        record(scheduler_stats, *args, **kwargs)
        if scheduler_stats is not None:
            note(kwargs.get("engine_idx", 0), made_at)

    engine.get_output_async = received
    manager.record = noted


def _client(
    vllm: Vllm, values: Mapping[str, Any], *, index: int, count: int, addresses: Any
) -> EngineClient:
    """Start AsyncLLM as one of several front ends.

    Args:
        vllm: the loaded vLLM.
        values: engine arguments.
        index: which of the front ends this is, from 0.
        count: how many front ends there are.
        addresses: the running engine's addresses. If None, vLLM launches an engine.
    """

    def make(args: Any) -> Any:
        """Make AsyncLLM from vLLM's ``AsyncEngineArgs``."""
        # Patch count-of-front-ends: with these private fields set, vLLM turns off its cache of
        # pictures (since 0.28; multimodal/cache/factories.py), as `vllm serve` does. Only one front
        # end and the engine could agree on its contents. It may go when `client_count` does that.
        setattr(args, _COUNT_FIELD, count)
        setattr(args, _RANK_FIELD, index)
        return vllm.AsyncLLM.from_vllm_config(
            args.create_engine_config(vllm.UsageContext.API_SERVER),
            usage_context=vllm.UsageContext.API_SERVER,
            enable_log_requests=getattr(args, "enable_log_requests", False),
            disable_log_stats=args.disable_log_stats,
            client_addresses=addresses,
            client_count=count,
            client_index=index,
        )

    return start_with(vllm, values, make)
