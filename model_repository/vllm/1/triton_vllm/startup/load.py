"""Load a model: prepare it, start the engine, and connect the parts that answer requests."""

from __future__ import annotations

import json
import os
import traceback
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base import processes, triton
from triton_vllm.base.errors import ConfigError
from triton_vllm.base.refusals import Refusals
from triton_vllm.engine.engine import Engine
from triton_vllm.engine.pace import Pace
from triton_vllm.engine.prompts import Prompter
from triton_vllm.instances import frontends
from triton_vllm.instances.machines import Machines
from triton_vllm.instances.source import Sole
from triton_vllm.lora.copies import Copies
from triton_vllm.lora.store import AdapterStore
from triton_vllm.media.clips import check_videos
from triton_vllm.metrics.claim import Claim, instances
from triton_vllm.metrics.mirror import Mirror, Publisher
from triton_vllm.metrics.refused import family
from triton_vllm.reply.deliver import deliver
from triton_vllm.reply.outbox import CORES_TO_SPARE, FEW_CORES, ONE_BY_ONE, Outbox
from triton_vllm.reply.stuck import StuckWatch
from triton_vllm.reply.watch import CancellationWatch, Departure
from triton_vllm.request.contract import require_completed
from triton_vllm.startup import engine_args, interpreter
from triton_vllm.startup.cause import Cause, shared_memory_remedy
from triton_vllm.startup.devices import (
    is_on_one_machine,
    machines,
    master_port,
    parallel_sizes,
    uses_ray,
)
from triton_vllm.startup.endpoint import HttpEndpoint
from triton_vllm.startup.executor import MANY_CORES, advice, available_cores
from triton_vllm.startup.prepare import Prepared, prepare
from triton_vllm.startup.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from triton_vllm.base.protocols import Log, PrometheusFamily
    from triton_vllm.instances.frontends import Frontends

GIVEN_UP = (
    "for 20 s the server has not taken a response, and may never do so (24.10 can deadlock when a "
    "gRPC client is killed): the model takes no more requests and ends; restart tritonserver"
)
# A stopped EngineCore kept 50 requests and all probes waiting for 300 s, the time that vLLM itself
# allows a step.
ENGINE_IDLE_S = 60.0
"""An engine that answers nothing and does nothing for this time hangs, s."""


@dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes:
        prepared: what the engine was started with.
        engine: takes jobs.
        outbox: sends the jobs' outputs.
        watch: looks for cancelled requests.
        send_watch: looks for responses that the server does not take.
        publisher: publishes metrics. None if metrics are off.
        shared: this instance's part in an engine that several share. None if the instance is the
            only one.
        parsers: read the answers to chats. None if the operator has chosen none.
        refusals: counts the errors that clients get.
    """

    prepared: Prepared
    engine: Engine
    outbox: Outbox
    watch: CancellationWatch
    send_watch: StuckWatch
    publisher: Publisher | None
    shared: Frontends | None
    parsers: vllm_api.Parsers | None
    refusals: Refusals

    def close(self) -> None:
        """Let requests in flight finish within a time limit, then end every process and thread."""
        # The engine first: its requests send until they end. The seat last: whoever leaves last
        # removes the folder that the engine uses.
        self.engine.stop(self.prepared.settings.unload_grace_s)
        self.watch.close()
        self.send_watch.close()
        self.outbox.close()
        if self.publisher is not None:
            self.publisher.close()
        if self.shared is not None:
            self.shared.leave()


def load(args: Mapping[str, str], log: Log) -> Model:
    """Load a model, and return it ready to take requests.

    Args:
        args: the arguments that Triton passes to ``initialize``.
        log: reports the phases of the load.

    Raises:
        ConfigError: the model's files are wrong, or vLLM did not start with them.
    """
    require_completed(json.loads(args["model_config"]))
    # Before anything registers an exit handler.
    interpreter.end_at_once()
    shared = frontends.join(args, log)
    try:
        return _load(args, log, shared)
    except Exception as error:
        # The other instances would otherwise wait for this one.
        if shared is not None:
            shared.leave(str(error))
        remedy = shared_memory_remedy(error)
        if remedy is not None:
            raise ConfigError(f"{error}; {remedy}") from error
        raise


def _load(args: Mapping[str, str], log: Log, shared: Frontends | None) -> Model:
    """Load a model after this instance has met the others; see ``load``.

    Args:
        args: the arguments that Triton passes to ``initialize``.
        log: reports the phases of the load.
        shared: this instance's part in an engine that several share. None if it is the only one.
    """
    with Progress(log) as progress:
        prepared = prepare(args, log, progress, shared)
        sharing = 1 if shared is None else shared.count
        has_several_engines = instances(args) != sharing
        if has_several_engines and prepared.settings.limits.operator_requests:
            # A request reaches only one of the engines.
            raise ConfigError(
                "OPERATOR_REQUESTS is for a model with one engine: "
                "have one instance group on one device, or leave it out"
            )
        progress.phase("starting the engine and loading the model")
        engine, outbox = _start_engine(prepared, shared, log)
        parsers = _make_parsers(prepared, engine, outbox)
        departure = _make_departure(engine, prepared, args["model_name"], log)
        watch = CancellationWatch(engine.jobs.ledger.watched, engine.jobs.cancel, log, departure)
        watch.start()
        # The watch calls this in its own thread, and the engine lives in its event loop.
        give_up = partial(engine.jobs.loop.call_soon_threadsafe, engine.give_up, GIVEN_UP)
        server_is_stopped = partial(processes.is_stopped, os.getppid())
        send_watch = StuckWatch(outbox.workers(), give_up, log, server_is_stopped)
        send_watch.start()
        refusals = Refusals()
        publisher = _publish(prepared, shared, args, log, refusals)
    # Once more: the OpenAI port and the metrics are newer than the engine.
    _note_memory(prepared)
    interpreter.tune()
    log.info(f"ready after {progress.seconds():.1f} s, tasks: {', '.join(engine.facts.tasks)}")
    advised = advice(available_cores(), instances(args), on_cpu=vllm_api.runs_on_cpu())
    if advised and "generate" in engine.facts.tasks:
        log.info(advised)
    return Model(
        prepared=prepared,
        engine=engine,
        outbox=outbox,
        watch=watch,
        send_watch=send_watch,
        publisher=publisher,
        shared=shared,
        parsers=parsers,
        refusals=refusals,
    )


def _make_engine(prepared: Prepared, shared: Frontends | None, log: Log) -> Engine:
    """Return the engine, which is not started yet."""
    vllm = prepared.vllm
    values = prepared.engine_args
    settings = prepared.settings
    if shared is not None:
        shared.use(vllm, values, ranks=parallel_sizes(values)["data"])
    # An engine counts as idle if none of its processes works. Processes of other machines cannot be
    # seen from here. And if the operator has set a limit, it is the only one.
    may_judge_idle = not settings.engine_timeout_s and is_on_one_machine(values)
    prompter = Prompter(
        vllm,
        vllm_api.media_loaders(vllm, values),
        partial(check_videos, settings.limits),
        chat_template=prepared.chat_template.text,
        samples_ahead=vllm_api.runs_on_cpu(),
    )
    return Engine(
        vllm,
        shared or Sole(vllm, values, _other_machines(values)),
        prompter,
        _make_adapter_store(prepared, shared, log),
        log=log,
        limits=settings.limits,
        pace=Pace(
            settings.restart,
            silence=settings.engine_timeout_s,
            # 0 turns this limit off.
            idle=ENGINE_IDLE_S if may_judge_idle else 0.0,
        ),
        when_started=partial(_note_memory, prepared),
    )


def _note_memory(prepared: Prepared) -> None:
    """Write down the shared memory. If this process is killed, the next start removes it."""
    if prepared.run_folder is not None:
        prepared.run_folder.note_memory()


def _other_machines(values: Mapping[str, Any]) -> Machines | None:
    """Return what watches the engine's other machines; None if the engine is on one machine."""
    return Machines(master_port(values)) if machines(values) > 1 else None


def _make_outbox(prepared: Prepared, log: Log) -> Outbox:
    """Return the outbox; its sender threads are not started yet."""
    many_cores = available_cores() >= MANY_CORES
    threads = prepared.settings.senders or (2 if many_cores else 1)
    pacing = CORES_TO_SPARE if many_cores else FEW_CORES
    # The official backend sends one output per response.
    if not prepared.settings.dialect.merges_outputs:
        pacing = ONE_BY_ONE
    return Outbox(partial(deliver, log), log, threads, pacing)


def _start_engine(prepared: Prepared, shared: Frontends | None, log: Log) -> tuple[Engine, Outbox]:
    """Start the engine and the outbox; return both.

    Raises:
        ConfigError: vLLM did not start. The text has the cause; the log has the traceback.
    """
    values = prepared.engine_args
    engine = _make_engine(prepared, shared, log)
    outbox = _make_outbox(prepared, log)
    outbox.start()
    # Ray passes variables on to other machines. The file that `Cause` names in a variable does not
    # exist there, and vLLM would not start.
    with Cause(None if uses_ray(values) else prepared.vllm.logging_config, os.environ) as cause:
        try:
            engine.start()
        except ConfigError:
            # The instances that share an engine raise it. vLLM does not.
            outbox.close()
            raise
        # vLLM may raise anything, and each is a reason why the load failed.
        except Exception as error:  # noqa: BLE001
            outbox.close()
            unfetched = engine_args.unfetched(values, error, prepared.file_name)
            # vLLM's traceback through three libraries would add nothing to this line.
            if unfetched:
                raise ConfigError(unfetched) from None
            # Triton's log has no method `exception`.
            log.error(_frames(error))  # noqa: TRY400
            raise ConfigError(
                engine_args.failure(values, error, prepared.file_name, cause.find())
            ) from None
    return engine, outbox


def _frames(error: Exception) -> str:
    """Return a traceback without its last lines: they are the reason, which Triton logs itself."""
    whole = traceback.TracebackException.from_exception(error)
    reason = "".join(whole.format_exception_only())
    return "".join(whole.format()).removesuffix(reason)


def _make_adapter_store(
    prepared: Prepared, shared: Frontends | None, log: Log
) -> AdapterStore | None:
    """Return the store of LoRA adapters; None if the engine arguments do not enable them."""
    if not prepared.adapters.enabled:
        return None
    copies = Copies(shared.adapters() if shared is not None else None)
    return AdapterStore(prepared.adapters, copies, prepared.vllm.LoRARequest, log)


def _make_parsers(prepared: Prepared, engine: Engine, outbox: Outbox) -> vllm_api.Parsers | None:
    """Return the parsers of chat answers; None if none is chosen, or the model does not generate.

    Raises:
        ConfigError: a parser does not fit the model. Engine and outbox have then been ended.
    """
    if not prepared.parsers or "generate" not in engine.facts.tasks:
        return None
    try:
        return engine.parsers(prepared.parsers)
    except vllm_api.ParserError as error:
        # Parsers are made from the started engine, which must now end.
        engine.stop(0.0)
        outbox.close()
        raise ConfigError(f"{prepared.file_name}: {error}") from None


def _make_departure(engine: Engine, prepared: Prepared, name: str, log: Log) -> Departure:
    """Return the check whether the server stops; it then lets the requests in flight finish."""
    grace = prepared.settings.unload_grace_s

    def leave() -> None:
        """Let the requests in flight finish within the grace period, then end the engine."""
        count = len(engine.jobs.ledger.jobs())
        log.info(f"the server ends: {count} requests in flight have {grace:.0f} s to finish")
        engine.leave(grace)

    endpoint = HttpEndpoint(os.getppid())

    def is_ending() -> bool:
        # The core says so only after the HTTP endpoint has stopped, which may take 30 s.
        return triton.is_ending(name) or endpoint.is_closing()

    return Departure(is_ending, leave, prepare=endpoint.find)


def _publish(
    prepared: Prepared,
    shared: Frontends | None,
    args: Mapping[str, str],
    log: Log,
    refusals: Refusals,
) -> Publisher | None:
    """Begin to publish metrics on Triton's metrics endpoint; return None if they are off."""
    if not prepared.settings.metrics or prepared.engine_args.get("disable_log_stats", False):
        return None
    labels = {"model": args["model_name"], "version": args["model_version"]}
    claim = Claim(args, os.getppid(), log)
    # Without a served_model_name, vLLM's label `model_name` would be the path of the weights.
    is_named = prepared.engine_args.get("served_model_name")
    mirror = Mirror(
        triton.TritonMetrics(),
        labels,
        dialect=prepared.settings.dialect,
        others=claim.shared,
        model_name="" if is_named else args["model_name"],
    )

    def families() -> Iterable[PrometheusFamily]:
        """Return what this instance publishes now: vLLM's metrics and the refused requests."""
        current = vllm_api.prometheus_families()
        # Several instances have gauges of the same engine. Those with the newest figures count.
        found = current if shared is None else shared.latest(current)
        return [*found, family(refusals.counts())]

    return Publisher(mirror, families, log.warning, claim)
