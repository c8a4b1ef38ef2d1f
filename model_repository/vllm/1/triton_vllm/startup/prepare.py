"""Read the model's files, choose its devices and import vLLM.

The order matters: errors of the files come before the long waits.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base import official
from triton_vllm.base.errors import ConfigError
from triton_vllm.chat import parsers, template
from triton_vllm.lora import config
from triton_vllm.media import audio
from triton_vllm.startup import (
    compilers,
    devices,
    driver,
    engine_args,
    executor,
    guard,
    home,
    inspector,
    interpreter,
    manifest,
    parts,
    run_folder,
    server_release,
    settings,
    toolkit,
    warm_cache,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.protocols import Log
    from triton_vllm.chat.template import ChatTemplate
    from triton_vllm.instances.frontends import Frontends
    from triton_vllm.openai.port import Port
    from triton_vllm.openai.server import Plan
    from triton_vllm.startup.progress import Progress
    from triton_vllm.startup.run_folder import RunFolder
    from triton_vllm.startup.settings import Settings
    from triton_vllm.vllm_api import ParserNames, Vllm

CPU_WORKER = "triton_vllm.vllm_api.cpu_worker.Worker"
"""The class with which vLLM extends its worker on a CPU; see there for the reason."""


@dataclass(frozen=True)
class Prepared:
    """Everything that an engine is started with.

    Attributes:
        settings: the parameters of config.pbtxt.
        vllm: the imported vLLM.
        engine_args: the arguments that this vLLM takes. The choices for this machine are included.
        adapters: where the LoRA adapters are.
        file_name: the file with the engine arguments. Relative to the model's folder.
        parsers: the parsers that read the answers to chats.
        chat_template: the chat template that the operator has chosen.
        server: the server's release. An empty string if it is not known.
        run_folder: where vLLM's sockets are. None if no folder can be made.
        openai: what vLLM's OpenAI server is started with. None if there is none.
    """

    settings: Settings
    vllm: Vllm
    engine_args: Mapping[str, Any]
    adapters: config.Adapters
    file_name: str
    parsers: ParserNames
    chat_template: ChatTemplate
    server: str
    run_folder: RunFolder | None
    openai: Plan | None = None


def prepare(
    args: Mapping[str, str],
    log: Log,
    progress: Progress,
    shared: Frontends | None = None,
) -> Prepared:
    """Return everything that a model's engine is started with.

    Args:
        args: the arguments that Triton passes to ``initialize``.
        log: reports the findings.
        progress: reports the phases.
        shared: this instance's part in an engine that several share. None if it is the only one.

    Raises:
        ConfigError: the model's files are wrong, or its port is taken.
    """
    # 1) Read the model's files. Two of the engine arguments in them are not vLLM's: the chat
    #    template and the parser of tool calls are taken out.
    model_dir = Path(args["model_repository"])
    version_dir = model_dir / args["model_version"]
    chosen = settings.read(json.loads(args["model_config"]))
    server = server_release.find(os.getppid(), os.environ)
    manifest.check(model_dir, server, log)
    file_name = str(engine_args.place(model_dir, version_dir).relative_to(model_dir))
    in_file = engine_args.read(model_dir, version_dir)
    without_template, chat_template = template.split(in_file, model_dir, file_name)
    arguments, tool_parser = parsers.split(without_template, file_name)
    if shared is not None and devices.machines(arguments) > 1:
        raise ConfigError(
            f"instance_group: an engine on several machines (nnodes in {file_name}) has one front "
            "end; use count: 1"
        )
    port = _reserve_port(chosen, shared)
    # 2) Set up this process. vLLM reads variables while it is imported, and its processes inherit
    #    them.
    _choose_devices(args, chosen, arguments, log)
    guard.own()
    guard.follow_parent()
    parts.unpack(model_dir, log, progress)
    _drop_own_variables()
    interpreter.import_nothing_of_the_working_directory()
    interpreter.use_environment_python()
    home.settle(os.environ, log)
    warm_cache.use(model_dir, os.environ, log)
    home.keep_compiled(os.environ)
    driver.check()
    compilers.drop_missing(os.environ, log)
    toolkit.refuse(arguments, os.environ, file_name)
    toolkit.switch_off(os.environ, log)
    run = _make_run_folder(arguments, log)
    # A host that the operator allows could otherwise redirect vLLM to any other host.
    os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    # 3) Import vLLM, which takes 10 s or more on two cores.
    progress.phase("importing vLLM")
    vllm = _import(log)
    # 4) Fit the operator's choices to this vLLM.
    audio.limit(chosen.limits, vllm_api.variables(), os.environ)
    values = _fit_arguments(vllm, arguments, file_name, log)
    names = parsers.choose(tool_parser, values, file_name)
    adapters = config.read(
        model_dir,
        version_dir,
        enabled=bool(values.get("enable_lora", False)),
        log=log,
        directory=chosen.lora_directory,
        official=chosen.dialect.is_official,
    )
    # 5) Choose what the operator has left open. The operator's arguments take precedence.
    defaults = {
        **_choose_compilers(values, log, run),
        **_choose_processes(vllm, values),
        **_choose_statistics(chosen, values, file_name),
    }
    prepared = Prepared(
        settings=chosen,
        vllm=vllm,
        engine_args={**defaults, **values},
        adapters=adapters,
        file_name=file_name,
        parsers=names,
        chat_template=chat_template,
        server=server,
        run_folder=run,
    )
    # 6) Plan vLLM's OpenAI server, if the operator wants it. Otherwise its modules are not loaded.
    if port is None:
        return prepared
    from triton_vllm.openai import start

    plan = start.plan(
        vllm,
        port,
        start.CommonArguments(prepared.engine_args, names, chat_template, file_name),
        name=args["model_name"],
        model_dir=model_dir,
    )
    return replace(prepared, openai=plan)


def _reserve_port(chosen: Settings, shared: Frontends | None) -> Port | None:
    """Take the port of vLLM's OpenAI server; return None if the operator wants no such server.

    Raises:
        ConfigError: the port cannot be taken.
    """
    if not chosen.openai_port:
        return None
    from triton_vllm.openai import start

    if shared is not None:
        # prometheus_client then keeps metrics in files, and vLLM's OpenAI server answers `/metrics`
        # with the sum of all processes that use the folder.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(shared.metrics())
    return start.reserve(
        chosen.openai_host,
        chosen.openai_port,
        without_key=chosen.openai_without_key,
        first=None if shared is None else shared.is_first,
    )


def _choose_devices(
    args: Mapping[str, str], chosen: Settings, arguments: Mapping[str, Any], log: Log
) -> None:
    """Set CUDA_VISIBLE_DEVICES of this process, if Triton or the operator has chosen GPUs.

    Args:
        args: the arguments that Triton passes to ``initialize``.
        chosen: the parameters of config.pbtxt.
        arguments: the engine arguments.
        log: reports the choice.
    """
    kind = args["model_instance_kind"]
    device = int(args["model_instance_device_id"])
    gpus = devices.visible(
        kind=kind,
        device_id=device,
        gpu_ids=chosen.gpu_ids,
        engine_args=arguments,
        environment=os.environ,
    )
    if gpus is not None:
        os.environ[devices.DEVICES_VARIABLE] = gpus
        log.info(official.pinned_line(kind, gpus, f"{args['model_name']}_{device}"))


def _drop_own_variables() -> None:
    """Remove vllm-env's variables, which nothing reads from here on.

    vLLM warns at each start about every variable VLLM_… that it does not know.
    """
    for name in list(os.environ):
        if name.startswith("VLLM_ENV_"):
            del os.environ[name]


def _make_run_folder(arguments: Mapping[str, Any], log: Log) -> RunFolder | None:
    """Make this process's own folder, and let vLLM have its sockets there if it can.

    Without sockets, the folder still has the names of the shared memory. None if it cannot be made.
    """
    temporary = Path(tempfile.gettempdir())
    run_folder.sweep(temporary)
    try:
        made = run_folder.RunFolder(temporary)
    # vLLM itself says what it cannot do without such a folder.
    except OSError as error:
        log.warning(f"vLLM's sockets have no folder of their own: {error}")
        return None
    # This handler runs before the one that ends the process.
    atexit.register(made.remove)
    # vLLM gives the variable to its workers on other machines, which lack the folder.
    on_one_machine = devices.is_on_one_machine(arguments)
    # The sockets of connectors have longer names than the folder has room for.
    has_connector = bool(arguments.get("kv_transfer_config"))
    if made.fits and on_one_machine and not has_connector:
        os.environ.setdefault(run_folder.SOCKETS_VARIABLE, str(made.path))
    return made


def _import(log: Log) -> Vllm:
    with interpreter.importing():
        vllm = vllm_api.load()
    inspector.replace_inspection(log, in_fork=not vllm_api.runs_on_cpu())
    log.info(f"vLLM {vllm.version} from {vllm.path}")
    return vllm


def _fit_arguments(
    vllm: Vllm, arguments: Mapping[str, Any], file_name: str, log: Log
) -> Mapping[str, Any]:
    """Return the operator's engine arguments as this vLLM takes them.

    Raises:
        ConfigError: vLLM does not have such an argument, or cannot use its value here.
    """
    fitted = engine_args.fit(arguments, vllm_api.engine_arg_types(vllm), file_name)
    if fitted.warning:
        log.warning(fitted.warning)
    if fitted.values.get("distributed_executor_backend") == "ray" and not vllm_api.supports_ray():
        raise ConfigError(
            f"{file_name}: distributed_executor_backend: vLLM {vllm.version} does not support ray "
            "on the platform that it runs on here (its CPU build never does); "
            "use mp, or leave it out"
        )
    return fitted.values


def _choose_compilers(
    values: Mapping[str, Any], log: Log, run: RunFolder | None
) -> Mapping[str, Any]:
    """Set the variables that choose compilers; return the engine arguments that go with them."""
    chosen = compilers.choose(values, os.environ, Path(sys.prefix), on_cpu=vllm_api.runs_on_cpu())
    os.environ.update(chosen.variables)
    # The environment's own compiler takes seconds at its first use. It gets them now, in a thread.
    if run is not None and "CC" in chosen.variables:
        compilers.warm_up(chosen.variables["CC"], run.path)
    for note in chosen.notes:
        log.info(note)
    return chosen.arguments


def _choose_processes(vllm: Vllm, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Set the variables for vLLM's processes; return the engine arguments that go with them."""
    # vLLM's executor that runs the worker in EngineCore. None for a GPU; and some versions of vLLM
    # lack it.
    in_engine_core = vllm.UniProcExecutor if vllm_api.runs_on_cpu() else None
    cores = executor.available_cores()
    processes = executor.choose(values, os.environ, cores, in_engine_core)
    os.environ.update(processes.variables)
    for name, value in vllm_api.child_environment().items():
        os.environ.setdefault(name, value)
    vllm_api.limit_threads(vllm, os.environ)
    if in_engine_core is None:
        return {}
    return {**processes.arguments, "worker_extension_cls": CPU_WORKER}


def _choose_statistics(
    chosen: Settings, values: Mapping[str, Any], file_name: str
) -> Mapping[str, Any]:
    """Return the engine argument that turns off vLLM's statistics; empty if something reads them.

    vLLM records them at each step of the model, which takes time.

    Raises:
        ConfigError: the operator wants traces without statistics.
    """
    traces = values.get("otlp_traces_endpoint")
    # Traces are made of statistics: without them, the first traced request ends the engine.
    if traces and values.get("disable_log_stats"):
        raise ConfigError(
            f"{file_name}: otlp_traces_endpoint needs the statistics that disable_log_stats "
            "turns off; leave one of them out"
        )
    # vLLM's OpenAI server publishes them, too.
    if chosen.metrics or traces or chosen.openai_port:
        return {}
    return {"disable_log_stats": True}
