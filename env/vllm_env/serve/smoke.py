"""The smoke run: stock tritonserver serves the built model, and the client sends it prompts.

The server gets a staged model or a copy of the published one. Its engine arguments name a small
model and suit this machine. The published folder does not change.
"""

import contextlib
import datetime
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.process import run
from vllm_env.base.workspace import Workspace
from vllm_env.model.files import (
    CONFIG_NAME,
    MODEL_DIRECTORY,
    VERSION_FOLDER,
    arguments_file,
    encode_config,
    read_config_text,
)
from vllm_env.model.manifest import MANIFEST_NAME
from vllm_env.publish.model_folder import copy_code
from vllm_env.triton.root import STUB_LIBRARIES, STUB_NAME

from .plain_paths import PlainPath, plain_links
from .server import Launch, TritonServer
from .server_log import telling_lines

# protobuf's text format allows these between two fields.
_GAP = r"(?:\s|,|;|#[^\n]*\n)*"
# The parameter GPU_DEVICE_IDS with several GPUs. Group 1 ends after the first GPU.
_GPU_IDS = re.compile(
    (
        r"""(\bkey : (["'])GPU_DEVICE_IDS\2 value :? """
        r"""[{<] string_value : (["'])[^"',]*),[^"']*(?=\3)"""
    ).replace(" ", _GAP)
)
_COPIED = (CONFIG_NAME, STUB_NAME, MANIFEST_NAME)
Documents = Mapping[str, Mapping[str, Any]]
_RESULTS = "results.txt"
# Ends each answer in the client's results file.
_SEPARATOR = "\n\n=========\n\n"
_ANSWER_SECONDS = 120
# Extraction and vLLM's import are silent for 25 s each, longer on a busy machine.
_STALL_SECONDS = 150.0
_READY_SECONDS = 600.0


@dataclass(frozen=True)
class SmokeRequest:
    """The model to serve and the client that asks.

    Attributes:
        binary: the tritonserver program of the Triton root.
        model_folder: a model that may be changed, alone in its repository. The folder's name is the
            model's name.
        engine_model: a folder in Hugging Face format, such as the stand-in's, or a name on the hub.
        client: the client's script.
        prompts: a file with one prompt per line.
        log: receives the output of the server.
        gpu: whether the environment is for a GPU.
        expected: how the answers to some prompts must begin, by prompt.
        own: the model's own JSON files, by their path in its folder, the engine arguments first.
            If there are any, the model is served with them and not with ``engine_model``.
    """

    binary: Path
    model_folder: Path
    engine_model: str
    client: Path
    prompts: Path
    log: Path
    gpu: bool = False
    expected: Mapping[str, str] = field(default_factory=dict)
    own: Documents = field(default_factory=dict)


@dataclass(frozen=True)
class SmokeResult:
    """The result of the smoke run.

    Attributes:
        client_lines: the client's output; the last line is ``PASS: vLLM example``.
        answers: pairs of prompt and answer, in the order of the prompts.
        ready_seconds: time from the server's launch until it was ready.
        engine_args: the arguments that the engine was started with.
        served_at: time of the run (ISO 8601, UTC).
        recalled: whether an earlier build served the model, and nothing has changed since.
    """

    client_lines: tuple[str, ...]
    answers: tuple[tuple[str, str], ...]
    ready_seconds: float
    engine_args: Mapping[str, Any]
    served_at: str = ""
    recalled: bool = False


def smoke_run(workspace: Workspace, request: SmokeRequest) -> SmokeResult:
    """Give the model its engine arguments, serve it, ask every prompt and check the answers.

    Raises:
        CommandError: the server did not become ready, or a request failed; ``cause`` or ``tail``
            says why.
        VllmEnvError: an answer is missing, empty or not the expected one.
    """
    launch = Launch(
        environment=server_environment(request),
        ready_timeout=_READY_SECONDS,
        # A download is silent for a long time, loading a local model is not.
        stall_timeout=_STALL_SECONDS if _is_local(request) else None,
    )
    with workspace.cache.staging() as staged, plain_links() as plain:
        # 1) The engine arguments: the first of the model's own files has them.
        arguments = next(iter(request.own.values()), None) or engine_args(request)
        # The server may get a link to the engine's model. The result names the folder itself, since
        # the link is gone by then.
        served = arguments
        if _is_local(request) and not request.own:
            served = {**arguments, "model": str(plain(Path(request.engine_model).absolute()))}
        set_arguments(request.model_folder, served, request.own)
        # 2) Serve the model and ask.
        repository = request.model_folder.parent
        started = time.monotonic()
        with TritonServer(request.binary, repository, log=request.log, launch=launch) as server:
            ready = time.monotonic()
            output = _ask(request, server, staged)
            server.kill()
        # 3) Check the answers. Nothing follows the last separator.
        *texts, _ = (staged / _RESULTS).read_text("utf-8").split(_SEPARATOR)
    prompts = _read_prompts(request.prompts)
    if len(texts) != len(prompts):
        raise VllmEnvError(
            f"The client stored {len(texts)} answers to {len(prompts)} prompts "
            f"of {request.prompts}."
        )
    answers = tuple(zip(prompts, texts, strict=True))
    _check(request, answers)
    return SmokeResult(
        client_lines=tuple(output.splitlines()),
        answers=answers,
        ready_seconds=ready - started,
        engine_args=arguments,
        served_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def _is_local(request: SmokeRequest) -> bool:
    return Path(request.engine_model).is_dir()


def engine_args(request: SmokeRequest) -> dict[str, Any]:
    """Return engine arguments for a short run: no compilation, short sequences, little memory."""
    arguments: dict[str, Any] = {
        "model": request.engine_model,
        "enforce_eager": True,
        "max_model_len": 256,
    }
    if _is_local(request):
        # The stand-in has a few MB. The GPU or the memory may be shared, so it must not take most
        # of it, as vLLM does by default.
        arguments["gpu_memory_utilization"] = 0.2
        # A larger cache took 10 s of each start. On a CPU vLLM fills it with zeros. On a GPU it had
        # nine million blocks, each a Python object.
        arguments["kv_cache_memory_bytes"] = 2**30
    # On a GPU, a model from the hub has its own type.
    if _is_local(request) or not request.gpu:
        arguments["dtype"] = "float16" if request.gpu else "float32"
    return arguments


def server_environment(request: SmokeRequest) -> dict[str, str]:
    """Return the variables to add to the server's environment."""
    # The environment that it uses may be checked at the same time, and must not change.
    variables = {"VLLM_NO_USAGE_STATS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # GiB. By default vLLM takes a share of the RAM.
    if not request.gpu:
        variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
        # On a CPU, vLLM compiles one function even with `enforce_eager`, again for each size of the
        # vocabulary. That took 4 s of a smoke run. A model's own arguments may ask to compile.
        if not request.own:
            variables["TORCHDYNAMO_DISABLE"] = "1"
    if _is_local(request):
        variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return variables


@contextlib.contextmanager
def copied(workspace: Workspace, folder: Path) -> Iterator[Path]:
    """Yield a copy of a published model for a smoke run; it is removed when the block ends."""
    with workspace.cache.staging() as staged, plain_links() as plain:
        copy = staged / folder.name
        copy_model(folder, copy, plain)
        yield copy


def copy_model(folder: Path, copy: Path, plain: PlainPath = Path) -> None:
    """Copy a built model's folder without its environment and engine arguments.

    Only the code of the version folder is copied. The copy's ``config.pbtxt`` names the
    environment by its absolute path, in the folder that ``plain`` returns.
    """
    copy.mkdir(parents=True)
    for name in _COPIED:
        if (folder / name).is_file():
            shutil.copy2(folder / name, copy / name)
    if (folder / STUB_LIBRARIES).is_dir():
        shutil.copytree(folder / STUB_LIBRARIES, copy / STUB_LIBRARIES)
    copy_code(folder / VERSION_FOLDER, copy / VERSION_FOLDER)

    # The environment is not linked. Newer releases of Triton follow no symbolic link out of the
    # model's folder. A hard link changes the archive's ctime, and a server of the original would
    # load it again at its next `load` or poll (seen with 24.10).
    def absolute(match: re.Match[str]) -> str:
        environment = (folder / match[1]).resolve()
        path = str(plain(environment.parent) / environment.name)
        # Quotes and backslashes are escaped in protobuf's text format.
        return re.sub(r"""([\\"'])""", r"\\\1", path)

    config = copy / CONFIG_NAME
    text = read_config_text(config)
    text = re.sub(re.escape(MODEL_DIRECTORY) + r'/([^"/]+)', absolute, text)
    config.write_bytes(encode_config(text))


def set_arguments(model: Path, arguments: Mapping[str, Any], own: Documents | None = None) -> None:
    """Write engine arguments into a staged model; if ``own`` has files, write these instead."""
    # Without ``own``, write only one of the two files with arguments: the model refuses two that
    # differ.
    for name, document in (own or {arguments_file(model): arguments}).items():
        (model / name).write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    # The user's parallel sizes are among the replaced arguments, and the model refuses several
    # GPUs for an engine that takes one.
    if not own:
        config = model / CONFIG_NAME
        config.write_bytes(encode_config(_GPU_IDS.sub(r"\1", read_config_text(config))))


def _ask(request: SmokeRequest, server: TritonServer, folder: Path) -> str:
    """Run the client in a folder, where it writes the answers; return what it prints.

    Raises:
        CommandError: the client failed; ``tail`` also has the server's error lines.
    """
    argv = [
        sys.executable,
        request.client,
        "--verbose",
        "--exclude-inputs-in-outputs",
        f"--url={server.grpc_url}",
        f"--model={request.model_folder.name}",
        f"--input-prompts={request.prompts.resolve()}",
        f"--results-file={_RESULTS}",
        f"--stream-timeout={_ANSWER_SECONDS}",
    ]
    try:
        return run(argv, what="query the server with the client", cwd=folder)
    except CommandError as error:
        # The reason is often in the server's log, and the client only knows that it failed.
        tail = f"{telling_lines(request.log)}\n{error.tail}".strip()
        raise CommandError(
            error.what, tail=tail, remedy=f"The server's whole log is {request.log}."
        ) from error


def _read_prompts(path: Path) -> list[str]:
    # The client reads the file in the same way.
    lines = path.read_text("utf-8-sig").split("\n")
    return [line for line in lines if line.strip()]


def _check(request: SmokeRequest, answers: tuple[tuple[str, str], ...]) -> None:
    """Check the answers, which are pairs of prompt and answer.

    Raises:
        VllmEnvError: an answer is empty, or does not begin as expected.
    """
    for prompt, answer in answers:
        # Every answer begins with "".
        beginning = request.expected.get(prompt, "")
        if not answer.strip():
            raise VllmEnvError(
                f"The served model answered nothing to {prompt!r}.",
                cause="An empty answer does not show that the weights are right.",
                remedy=(
                    "Name another --smoke-model, or use --no-smoke-run. "
                    f"The server's log is {request.log}."
                ),
            )
        if not answer.startswith(beginning):
            raise VllmEnvError(
                f"The served model completed {prompt!r} with {answer!r}, not with {beginning!r}.",
                cause=(
                    "This environment computes other results "
                    "than the one that trained the stand-in model."
                ),
                remedy=(
                    f"Read the server's log, {request.log}. "
                    "If the environment is as you want it, use --no-smoke-run."
                ),
            )
