"""Wires requests, engine and responses together; `model.py` is its only user."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_vllm import compat, transport
from triton_vllm.admission import pooling, sampling
from triton_vllm.admission.parse import parse
from triton_vllm.delivery.outbox import Outbox
from triton_vllm.delivery.reply import Reply
from triton_vllm.delivery.response import Assembler, PoolingAssembler
from triton_vllm.delivery.watch import CancellationWatch
from triton_vllm.errors import DEAD, AdapterError, ConfigError, InternalError, UnavailableError, UnsupportedError
from triton_vllm.inference.engine import Engine
from triton_vllm.inference.prompt import Prompter
from triton_vllm.job import Job
from triton_vllm.loading import devices, engine_args, executor, guard, inspector, lora, manifest, settings, warm_cache
from triton_vllm.metrics import Mirror, Publisher
from triton_vllm.request import EmbedRequest, GenerateRequest, Request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.compat import Vllm
    from triton_vllm.loading.engine_args import EngineArgs

PROGRESS_S = 15.0


class Service:
    """A loaded model.

    Args:
        args: what Triton hands to `initialize`.

    Raises:
        ConfigError: the model's files are wrong.
    """

    def __init__(self, args: Mapping[str, str]) -> None:
        self._name = args["model_name"]
        self._log = transport.Log(self._name)
        self._settings = settings.read(json.loads(args["model_config"]))
        self._labels = {"model": self._name, "version": args["model_version"]}
        began = time.monotonic()
        progress = _Progress(self._log)
        self._ahead: inspector.Inspector | None = None
        try:
            vllm, fitted, adapters = self._prepare(args, progress)
            self._start(vllm, fitted, adapters, progress)
        finally:
            progress.close()
            if self._ahead is not None:
                self._ahead.close()
        _tune_interpreter()
        self._log.info(f"ready after {time.monotonic() - began:.1f} s, tasks: {', '.join(self._engine.tasks)}")

    def accept(self, request: Any) -> None:
        """Take one Triton request; it is answered later, or at once if it is wrong."""
        reply = Reply(transport.Channel(request))
        try:
            job = self._job(request, reply)
        except AdapterError as error:
            reply.fail(error)
        except Exception as error:  # noqa: BLE001 - a request must never take the model down
            self._log.error(f"request refused: {type(error).__name__}: {error}")
            reply.fail(InternalError("the request could not be read; the server's log has the details"))
        else:
            self._engine.submit(job)
            self._watch.wake()

    def is_ready(self) -> bool:
        """Whether requests can be served now."""
        return self._engine.is_healthy()

    def close(self) -> None:
        """Finish what is in flight within a bound, cancel the rest and end every process and thread."""
        self._log.info(f"unloading, {len(self._engine.jobs())} requests in flight")
        self._engine.stop(self._settings.unload_grace_s)
        self._watch.close()
        self._outbox.close()
        if self._publisher is not None:
            self._publisher.close()
        gc.unfreeze()
        gc.collect()
        self._log.info("unloaded")

    def _prepare(self, args: Mapping[str, str], progress: _Progress) -> tuple[Vllm, EngineArgs, lora.Adapters]:
        """Read the model's files, choose its devices and import vLLM, in this order: errors come before long waits."""
        model_dir = Path(args["model_repository"])
        version_dir = model_dir / args["model_version"]
        self._log.info(manifest.check(model_dir))
        given = engine_args.read(model_dir, version_dir)
        kind, device = args["model_instance_kind"], int(args["model_instance_device_id"])
        gpus = devices.visible(kind, device, self._settings.gpu_ids, given, os.environ)
        if gpus is not None:
            os.environ[devices.VARIABLE] = gpus
            self._log.info(f"{devices.VARIABLE}={gpus}")
        guard.own()
        guard.follow_parent()
        _use_environment_python()
        warm_cache.use(model_dir, os.environ, self._log)
        progress.phase("importing vLLM")
        self._ahead = inspector.start(os.environ)
        vllm = compat.load()
        if self._ahead is not None:
            self._ahead.lend()
        self._log.info(f"vLLM {vllm.version} from {vllm.path}")
        fitted = engine_args.fit(given, compat.engine_arg_types(vllm))
        if fitted.warning:
            self._log.warning(fitted.warning)
        if fitted.values.get("distributed_executor_backend") == "ray" and not compat.supports_ray():
            raise ConfigError(
                f"{engine_args.FILE_NAME}: distributed_executor_backend: vLLM {vllm.version} does not support ray on the "
                "platform that it runs on here (its CPU build never does); use mp, or leave it out"
            )
        in_engine_core = vllm.UniProcExecutor if compat.runs_on_cpu() else None
        cores = executor.available_cores()
        self._processes = executor.choose(fitted.values, os.environ, cores, in_engine_core)
        os.environ.update(self._processes.variables)
        for name, value in compat.child_environment().items():
            os.environ.setdefault(name, value)
        enabled = bool(fitted.values.get("enable_lora", False))
        return vllm, fitted, lora.read(model_dir, version_dir, enabled=enabled, make=vllm.LoRARequest)

    def _start(self, vllm: Vllm, fitted: EngineArgs, adapters: lora.Adapters, progress: _Progress) -> None:
        self._vllm = vllm
        self._adapters = adapters
        self._schema = compat.sampling_schema(vllm)
        self._pooling_types = compat.pooling_types(vllm)
        self._outbox = Outbox(self._deliver, self._settings.senders or (2 if (os.cpu_count() or 1) >= 8 else 1))
        self._engine = Engine(
            vllm,
            {**self._processes.arguments, **fitted.values},
            Prompter(vllm, compat.media_loaders(vllm, fitted.values)),
            put=self._outbox.put,
            log=self._log,
            restart=self._settings.restart,
        )
        progress.phase("starting the engine and loading the model")
        try:
            self._engine.start(tuple(adapters.requests.values()))
        except Exception as error:  # noqa: BLE001 - vLLM raises what it likes; all of it is the load's reason
            self._outbox.close()
            self._log.error("".join(traceback.format_exception(error)))
            raise ConfigError(engine_args.failure(fitted.values, error)) from None
        self._watch = CancellationWatch(self._engine.jobs, self._engine.cancel)
        self._watch.start()
        wanted = self._settings.metrics and not fitted.values.get("disable_log_stats", False)
        self._publisher = self._publish() if wanted else None

    def _publish(self) -> Publisher | None:
        mirror = Mirror(transport.TritonMetrics(), self._labels)
        return Publisher(mirror, compat.prometheus_families, self._log.warning)

    def _job(self, request: Any, reply: Reply) -> Job:
        if not self._engine.is_healthy():
            if self._settings.health_check and not self._settings.restart:
                transport.unload(self._name)
            raise UnavailableError(DEAD)
        parsed = parse(transport.inputs(request), request.parameters(), transport.timeout_us(request))
        job = self._generate(parsed, reply) if isinstance(parsed, GenerateRequest) else self._embed(parsed, reply)
        job.lora = self._adapters.request(parsed.lora_name)
        self._outbox.assign(job)
        return job

    def _generate(self, parsed: GenerateRequest, reply: Reply) -> Job:
        self._require("generate", parsed)
        params = sampling.build(self._schema, parsed.parameters, stream=parsed.stream)
        prefix = (parsed.text or "") if parsed.echo else ""
        return Job(parsed, params, reply, Assembler(parsed.wants, params.n, prefix))

    def _embed(self, parsed: EmbedRequest, reply: Reply) -> Job:
        self._require(parsed.task, parsed)
        params = pooling.build(self._vllm.PoolingParams, self._pooling_types, self._vllm.client_errors, parsed)
        return Job(parsed, params, reply, PoolingAssembler(parsed.wants))

    def _require(self, task: str, _: Request) -> None:
        if task not in self._engine.tasks:
            raise UnsupportedError(f"Model {self._name} does not support '{task}' request")

    def _deliver(self, job: Job, items: list[Any]) -> None:
        """Send one response for all items; called by the job's sender thread."""
        last = items[-1]
        try:
            if isinstance(last, AdapterError):
                job.reply.fail(last)
            else:
                job.reply.send(job.assembler.build(items), final=last.finished)
        except Exception as error:  # noqa: BLE001 - the next job must be served
            self._give_up(job, error)

    def _give_up(self, job: Job, error: Exception) -> None:
        """End a job whose response could not be built or sent."""
        self._log.error(f"response not sent: {type(error).__name__}: {error}")
        self._engine.drop(job)
        job.reply.give_up()


class _Progress:
    """Tells the log what a load is at, every quarter of a minute."""

    def __init__(self, log: transport.Log) -> None:
        self._log = log
        self._phase = "starting"
        self._began = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="triton-progress", daemon=True)
        self._thread.start()

    def phase(self, text: str) -> None:
        """Name what is done next."""
        self._phase = text
        self._log.info(text)

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(PROGRESS_S):
            self._log.info(f"still {self._phase} ({time.monotonic() - self._began:.0f} s since the load began)")


def _tune_interpreter() -> None:
    # What exists now lives as long as the model; the collector need not walk it again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)
    # A sender that comes back from its handshake waits that long for the event loop to let it go on (default 5 ms).
    sys.setswitchinterval(0.001)


def _use_environment_python() -> None:
    """Point spawned children at the environment's interpreter: embedded, Python may guess its own path wrongly."""
    python = Path(sys.prefix) / "bin" / "python"
    if python.exists() and Path(sys.executable or "/").parent != python.parent:
        sys.executable = str(python)
    multiprocessing.set_executable(sys.executable)
