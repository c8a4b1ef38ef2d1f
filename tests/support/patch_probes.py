"""What the pinned vLLM does without each patch of ours, and with it: ``python patch_probes.py REQUEST.json ANSWER.json``.

The environment's interpreter runs it (`tests/e2e/test_patches.py`). The request has a model, and folders: `code` has the
package triton_vllm, `cache` is for caches. The answer has what is wrong without each patch and with it; "" is nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tracemalloc
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
LOG_PROBABILITIES = "vllm.v1.engine.logprobs"
WAITS_S = 2  # for an engine, as vLLM's variable says
PROBES: dict[str, Callable[..., Any]] = {}


def probe(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a probe by its patch's name. It gets the request, and whether the patch is there; it returns what is wrong."""
    PROBES[function.__name__.replace("_", "-")] = function
    return function


def main(request_file: str, answer_file: str) -> None:
    """Try each patch."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    sys.path.insert(0, request["code"])
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(WAITS_S),
        "VLLM_CACHE_ROOT": request["cache"],
    }
    # With the patch first: without the last one, the engine ends.
    answer = {name: {"with": tried(function, request, True)} for name, function in PROBES.items()}
    for name, function in PROBES.items():
        answer[name]["without"] = tried(function, request, False)
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


def tried(function: Callable[..., Any], request: Any, patched: bool) -> str:
    """Return what is wrong."""
    try:
        # What stays when an engine has been started.
        texts = unchanged(LOG_PROBABILITIES, "convert_ids_list_to_tokens", "create_sample_logprobs")
        with texts, unchanged("vllm.envs", "__getattr__"):
            found = function(request, patched)
            return asyncio.run(found) if asyncio.iscoroutine(found) else found
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def unchanged(name: str, *attributes: str) -> Iterator[Any]:
    """Yield a module, and put its attributes back after the block."""
    module = importlib.import_module(name)
    before = {attribute: getattr(module, attribute) for attribute in attributes}
    try:
        yield module
    finally:
        vars(module).update(before)


def config(request: Any) -> tuple[Any, dict[str, Any]]:
    """Return the loaded vLLM and engine arguments."""
    from triton_vllm import vllm_api

    return vllm_api.load(), {**ENGINE, "model": request["model"]}


# A front end without an engine: vLLM's own output handler and processor take what a test puts into the engine's queue.


def core_request(name: str, external: str = "", **parameters: Any) -> Any:
    """Return a request as vLLM's front end has it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest

    params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA, max_tokens=1000, **parameters)
    return EngineCoreRequest(name, [1], None, params, None, 0.0, None, None, None, external_req_id=external or name)


def front_end(*requests: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """Return an AsyncLLM with requests in flight, and the list to which their outputs go."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    queue: asyncio.Queue[Any] = asyncio.Queue()
    llm: Any = object.__new__(AsyncLLM)
    llm.engine_core = SimpleNamespace(get_output_async=queue.get, outputs_queue=queue, shutdown=lambda *_, **__: None)
    llm.output_processor = OutputProcessor(None, log_stats=False)
    llm.log_stats = False
    llm.logger_manager = None
    llm.output_handler = None
    llm.renderer = SimpleNamespace(mm_processor_cache=None, stat_mm_cache=lambda: None, shutdown=lambda: None)
    taken: list[tuple[str, Any]] = []
    for request in requests:
        collector: Any = RequestOutputCollector(request.sampling_params.output_kind, request.request_id)
        collector.put = lambda item, name=request.request_id: taken.append((name, item))
        llm.output_processor.add_request(request, None, None, 0, collector)
    return llm, taken


def log_probabilities(count: int) -> Any:
    """Return those of one token."""
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    return LogprobsLists(np.arange(count)[None], np.full((1, count), -0.5, np.float32), np.zeros(1, int))


async def handled(llm: Any) -> None:
    """Let vLLM's handler take everything that is in the queue."""
    llm._run_output_handler()
    for _ in range(3000):
        await asyncio.sleep(0)
    llm.output_handler.cancel()
    llm.output_handler = None


@probe
async def collector_put(request: Any, patched: bool) -> str:
    """Each output wakes a task."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from triton_vllm.vllm_api import attach

    llm, _ = front_end()
    one = core_request("one")
    collector: Any = RequestOutputCollector(RequestOutputKind.DELTA, "one")
    llm.output_processor.add_request(one, None, None, 0, collector)
    woken: list[int] = []
    taken: list[Any] = []
    collector.ready = SimpleNamespace(set=lambda: woken.append(1), clear=lambda: None)
    if patched:
        attach(collector, taken.append)
    for _ in range(10):
        llm.engine_core.outputs_queue.put_nowait(EngineCoreOutputs(outputs=[EngineCoreOutput("one", [7])]))
        await handled(llm)
        taken += filter(None, [collector.get_nowait()])
    if len(taken) != 10:
        return f"{len(taken)} of 10 outputs came"
    return f"10 outputs: a task is woken {len(woken)} times" if woken else ""


@probe
async def fair_outputs(request: Any, patched: bool) -> str:
    """A new request waits for all outputs with log probabilities that have piled up for others."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    from triton_vllm.vllm_api.outputs import deliver_fairly

    llm, taken = front_end(core_request("old", logprobs=5), core_request("new"))
    if patched:
        deliver_fairly(llm)
    for _ in range(300):
        llm.engine_core.outputs_queue.put_nowait(EngineCoreOutputs(outputs=[EngineCoreOutput("old", [7], log_probabilities(6))]))
    llm.engine_core.outputs_queue.put_nowait(EngineCoreOutputs(outputs=[EngineCoreOutput("new", [7])]))
    await handled(llm)
    names = [name for name, _ in taken]
    if names.count("old") != 300 or "new" not in names:
        return f"outputs are lost: {len(names)} of 301 came"
    before = names.index("new")
    return f"the new request's output came after {before} others" if before > 100 else ""


@probe
async def age_of_figures(request: Any, patched: bool) -> str:
    """Nothing tells when the engine made the figures that a front end records."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

    from triton_vllm.vllm_api import note_statistics

    recorded: list[Any] = []
    llm, _ = front_end()
    llm.logger_manager = SimpleNamespace(record=lambda *values, **given: recorded.append((values, given)))
    ages: list[float] = []
    if patched:
        note_statistics(llm, lambda _, made: ages.append(made))
    llm.engine_core.outputs_queue.put_nowait(EngineCoreOutputs(scheduler_stats=SchedulerStats(), timestamp=4321.0))
    await handled(llm)
    if not recorded:
        return "nothing was recorded"
    said = ages == [4321.0] or "4321.0" in repr(recorded)
    return "" if said else f"recorded without a time: {recorded[0]}"


@probe
def parent_of_aborted(request: Any, patched: bool) -> str:
    """What collects the completions of an aborted request stays."""
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest

    from triton_vllm.vllm_api import forget_parent

    processor = OutputProcessor(None, log_stats=False)
    parent = ParentRequest(core_request("own", "given", n=2))
    for index in range(2):
        name, params = parent.get_child_info(index)
        child = core_request(name, "given")
        child.sampling_params = params
        processor.add_request(child, None, parent, index, None)
    processor.abort_requests(["given"], internal=False)
    if patched:
        forget_parent(SimpleNamespace(output_processor=processor), "given")
    return f"{len(processor.parent_requests)} parent stays" if processor.parent_requests else ""


@probe
def texts_of_tokens(request: Any, patched: bool) -> str:
    """Each token of each output is decoded again."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    from triton_vllm.vllm_api.log_probabilities import keep_small

    decoded = 0

    def decode(_tokenizer: Any, ids: list[int]) -> list[str]:
        nonlocal decoded
        decoded += len(ids)
        return ["x"] * len(ids)

    module: Any = importlib.import_module(LOG_PROBABILITIES)
    module.convert_ids_list_to_tokens = decode
    if patched:
        keep_small()
    tokenizer: Any = type("Tokenizer", (), {})()
    processor = LogprobsProcessor.from_new_request(tokenizer, core_request("one", logprobs=20, flat_logprobs=True))
    for _ in range(100):
        processor._update_sample_logprobs(log_probabilities(21))
    return f"100 outputs of the same 21 tokens: {decoded} decoded" if decoded > 21 else ""


@probe
def log_probabilities_in_arrays(request: Any, patched: bool) -> str:
    """Each number of an answer's log probabilities is an object."""
    import numpy as np
    from vllm.v1.engine.logprobs import LogprobsProcessor

    from triton_vllm.vllm_api.log_probabilities import keep_small

    count = 500 * 21
    generator = np.random.default_rng(1)
    if patched:
        keep_small()
    processor = LogprobsProcessor.from_new_request(None, core_request("one", logprobs=20, flat_logprobs=True))
    tracemalloc.start()
    for _ in range(500):
        ids = generator.integers(1000, 50_000, (1, 21))
        processor._update_sample_logprobs((ids, generator.random((1, 21)), np.zeros(1, int), None))
    taken = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    # With pointers to shared objects for the rank and the text, and with what lists reserve.
    return f"{taken:.0f} bytes for each" if taken > 45 else ""


@probe
def cached_variables(request: Any, patched: bool) -> str:
    """Each output looks an environment variable up."""
    from vllm import envs
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, RequestStateStats

    from triton_vllm.vllm_api.engine import start_with

    looked_up: list[str] = []
    real = envs.environment_variables.copy()

    def noting(name: str) -> Any:
        return lambda: (looked_up.append(name), real[name]())[1]

    envs.environment_variables.update({name: noting(name) for name in real})
    try:
        if patched:
            vllm, values = config(request)
            start_with(vllm, values, lambda _: SimpleNamespace())
        looked_up.clear()
        stats, lora = IterationStats(), LoRARequestStates(log_stats=False)
        state = RequestStateStats(arrival_time=0.0)
        for _ in range(10):
            stats.update_from_output(EngineCoreOutput("one", [7]), 1.0, False, state, lora, None)
    finally:
        envs.environment_variables.update(real)
    return f"10 outputs: {len(looked_up)} look-ups of {set(looked_up)}" if looked_up else ""


@probe
def inspection(request: Any, patched: bool) -> str:
    """To inspect a model's class for the first time, vLLM starts an interpreter that imports vLLM."""
    from triton_vllm.startup.inspector import replace_inspection

    started: list[Any] = []

    def run(command: Any, **_: Any) -> Any:
        started.append(command)
        raise OSError("no process")

    log: Any = SimpleNamespace(warning=print)
    with unchanged("vllm.model_executor.models.registry", "subprocess") as registry:
        if patched:
            replace_inspection(log, in_fork=False)
        real = subprocess.run
        subprocess.run = run  # type: ignore[assignment]
        try:
            names = registry.ModelRegistry.models
            cache = Path(request["cache"], "modelinfos")
            for file in cache.glob("*"):
                file.unlink()
            with contextlib.suppress(OSError):
                names["OPTForCausalLM"].inspect_model_cls()
        finally:
            subprocess.run = real
    return f"started {' '.join(started[0][1:])}" if started else ""


@probe
def plain_refusals(request: Any, patched: bool) -> str:
    """A wrong role in a conversation is refused with Python's own exception."""
    from vllm.tokenizers.deepseek_v32_encoding import encode_messages

    from triton_vllm import vllm_api

    vllm = vllm_api.load()
    try:
        encode_messages([{"role": "nobody", "content": "Hello"}], thinking_mode="chat")
    except ValueError as error:
        known = vllm_api.is_refusal(vllm, error) if patched else isinstance(error, vllm.refusals)
        return "" if known else f"{type(error).__name__}: {error}"
    return "vLLM takes the role"


@probe
def addresses_of_front_ends(request: Any, patched: bool) -> str:
    """The engine would know only the front end that launches it."""
    from triton_vllm.vllm_api import instances

    vllm, values = config(request)
    told: list[Any] = []

    @contextmanager
    def launch(vllm_config: Any, executor_class: Any, log_stats: Any, addresses: Any) -> Iterator[Any]:
        told.append(list(addresses.inputs))
        raise InterruptedError
        yield

    with unchanged("vllm.v1.engine.core_client", "launch_core_engines") as client:
        client.launch_core_engines = launch
        with contextlib.suppress(InterruptedError):
            if patched:
                instances.launch(vllm, values, [("ipc:///tmp/in", "ipc:///tmp/out")])
            else:
                instances._client(vllm, values, index=0, count=2, addresses=None)
    return "" if [len(inputs) for inputs in told] == [2] else f"of 2 front ends the engine is told {told}"


@probe
def count_of_front_ends(request: Any, patched: bool) -> str:
    """Several front ends and the engine would each have a part of a cache of pictures."""
    from vllm.multimodal.cache.factories import _get_cache_type

    from triton_vllm.vllm_api import instances

    vllm, values = config(request)
    made: list[Any] = []
    vllm = dataclasses.replace(vllm, AsyncLLM=SimpleNamespace(from_vllm_config=lambda found, **_: made.append(found)))
    if patched:
        with contextlib.suppress(AttributeError):  # nothing was started
            instances._client(vllm, values, index=0, count=2, addresses=None)
    else:
        made.append(vllm.AsyncEngineArgs(**values).create_engine_config(vllm.UsageContext.API_SERVER))
    pictures = SimpleNamespace(mm_processor_cache_gb=4, mm_processor_cache_type="lru")
    model: Any = SimpleNamespace(supports_multimodal_inputs=True, get_multimodal_config=lambda: pictures)
    kind = _get_cache_type(SimpleNamespace(model_config=model, parallel_config=made[0].parallel_config))
    return "" if kind == "processor_only" else f"the cache is {kind}"


@probe
def patience_of_front_ends(request: Any, patched: bool) -> str:
    """A front end would wait for an engine that is gone as long as for one that loads."""
    from triton_vllm.vllm_api import instances

    vllm, values = config(request)
    place = {"input_address": f"ipc://{request['cache']}/in", "output_address": f"ipc://{request['cache']}/out"}
    instances.CONNECT_S = 1
    if not patched:
        instances._replaced = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
    try:
        instances.connect(vllm, values, place, 1, 2)
    except TimeoutError as error:
        return "" if "Waited 1s" in str(error) else str(error).partition(". To")[0]
    return "it did not wait"


class Anything(SimpleNamespace):
    """Has all attributes."""

    def __getattr__(self, name: str) -> None:
        return None


def application(request: Any) -> tuple[Any, Any]:
    """Return vLLM's application over an engine that is dead, and that engine."""
    from triton_vllm import vllm_api

    vllm, values = config(request)
    found = vllm.AsyncEngineArgs(**values).create_engine_config(vllm.UsageContext.API_SERVER)
    llm: Any = Anything(vllm_config=found, model_config=found.model_config, errored=True, is_running=False)
    args = vllm_api.server_args(vllm, values, {}, parsers=vllm_api.ParserNames(), chat_template=None)
    return vllm_api.build_application(vllm, llm, args, ["generate"]), llm


@probe
async def server_of_application(request: Any, patched: bool) -> str:
    """vLLM's handler of a dead engine ends its server, which the application does not have here."""
    from vllm.v1.engine.exceptions import EngineDeadError

    made, llm = application(request)
    app = made.app
    app.state.args = Namespace(log_error_stack=False)
    app.state.engine_client = llm
    if not patched:
        del app.state.server
    kinds = [kind for kind in EngineDeadError.__mro__ if kind in app.exception_handlers]
    answer = await app.exception_handlers[kinds[0]](SimpleNamespace(app=app, state=SimpleNamespace()), EngineDeadError())
    return "" if answer.status_code == 500 else f"status {answer.status_code}"


@probe
def level_of_the_log(request: Any, patched: bool) -> str:
    """A package that vLLM imports turns off all warnings of the process."""
    import logging

    level = logging.root.level
    # Its import is what sets the level.
    for name in [name for name in sys.modules if name.startswith("model_hosting_container_standards")]:
        del sys.modules[name]
    try:
        logging.root.setLevel(logging.WARNING)
        if patched:
            application(request)
        else:
            with unchanged("triton_vllm.vllm_api.openai", "logging") as ours:
                ours.logging = SimpleNamespace(root=SimpleNamespace(level=0, setLevel=lambda _: None))
                application(request)
        return "" if logging.root.level == logging.WARNING else f"the level is {logging.root.level}"
    finally:
        logging.root.setLevel(level)


@probe
async def names_of_adapters(request: Any, patched: bool) -> str:
    """vLLM's server knows only adapters that it has loaded itself."""
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    from triton_vllm import vllm_api

    made, llm = application(request)
    models = OpenAIServingModels(llm, [BaseModelPath(name="base", model_path="base")])
    app = SimpleNamespace(state=SimpleNamespace(openai_serving_models=models))
    if patched:
        vllm_api.Application(made.vllm, app, made.args, {}).add_adapter("mine")
    listed = [card.id for card in (await models.show_available_models()).data]
    return "" if "mine" in listed else f"listed are {listed}"


@probe
def generators_on_a_cpu(request: Any, patched: bool) -> str:
    """A request with a seed ends the engine if its prompt does not fit into one step."""
    from vllm import LLM, SamplingParams

    from triton_vllm.startup.prepare import CPU_WORKER

    options = {"worker_extension_cls": CPU_WORKER} if patched else {}
    with unchanged("torch", "Generator"):
        engine = LLM(**ENGINE, model=request["model"], max_num_batched_tokens=32, max_num_seqs=2, **options)
        params = SamplingParams(seed=7, max_tokens=20, temperature=1.0, ignore_eos=True)
        # The short one samples in the steps that read the long one.
        prompts: Any = [{"prompt_token_ids": [5]}, {"prompt_token_ids": [5] * 100}]
        engine.generate(prompts, params, use_tqdm=False)
    return ""


class Late:
    """Writes a file when Python takes it apart."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __del__(self, _open: Callable[..., Any] = open) -> None:
        _open(self.file, "w").close()


def leave_behind(file: Path) -> None:
    """Run in a child: keep an object until the end."""
    globals()["late"] = Late(file)


@probe
def exit_of_children(request: Any, patched: bool) -> str:
    """Python takes all objects of a spawned process apart before the process ends."""
    import multiprocessing

    variable = "TRITON_VLLM_OWNER_PID"
    # The environment's start-up hook is in every interpreter. It does this only in processes of a stub.
    os.environ.pop(variable, None)
    if patched:
        os.environ[variable] = str(os.getpid())
    file = Path(request["cache"], f"late-{patched}")
    child = multiprocessing.get_context("spawn").Process(target=leave_behind, args=(file,))
    child.start()
    child.join()
    os.environ.pop(variable, None)
    if child.exitcode != 0:
        return f"the child ended with {child.exitcode}"
    return "it took an object apart" if file.exists() else ""


if __name__ == "__main__":
    main(*sys.argv[1:])
