"""The smoke run: stock tritonserver serves the built model, and the client sends it prompts.

The server gets a temporary copy of the model's folder. Its engine arguments name a small model and suit this machine. The
copy names the environment by its path and does not copy or link it. The published folder does not change.
"""

import json
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.process import run
from vllm_env.base.workspace import Workspace
from vllm_env.model.files import CODE, ENGINE_ARGS_NAME, MODEL_DIRECTORY, OFFICIAL_ARGS
from vllm_env.publish.model_folder import copy_code

from .server import Launch, TritonServer
from .server_log import telling_lines

_GAP = r"(?:\s|,|;|#[^\n]*\n)*"  # protobuf's text format allows these between fields, comments too
_GPU_IDS = re.compile(
    r"""(\bkey : (["'])GPU_DEVICE_IDS\2 value :? [{<] string_value : (["'])[^"',]*),[^"']*(?=\3)""".replace(
        " ", _GAP
    )
)
_COPIED = ("config.pbtxt", "triton_python_backend_stub", "vllm_env.json")
Documents = Mapping[str, Mapping[str, Any]]
_RESULTS = "results.txt"
_SEPARATOR = "\n=========\n\n"  # between the answers in the client's results file
_ANSWER_SECONDS = 120
_STALL_SECONDS = (
    150.0  # extraction and vLLM's import are silent for 25 s each, longer on a busy machine
)


@dataclass(frozen=True)
class SmokeRequest:
    """The model to serve and the client that asks.

    Attributes:
        binary: the tritonserver program of the Triton root.
        model_folder: the built model; the folder's name is the model's name.
        engine_model: a folder in Hugging Face format, such as the stand-in's, or a name on the hub.
        client: the client's script.
        prompts: a file with one prompt per line.
        log: receives the output of the server.
        gpu: whether the environment is for a GPU.
        expected: how the answers to some prompts must begin, by prompt.
        ready_timeout: the model must be ready within this time (s).
        own: the model's own JSON files, by their path in its folder, the engine arguments first. If given, the model is
            served with them and not with ``engine_model``.
    """

    binary: Path
    model_folder: Path
    engine_model: str
    client: Path
    prompts: Path
    log: Path
    gpu: bool = False
    expected: Mapping[str, str] = field(default_factory=dict)
    ready_timeout: float = 600.0
    own: Documents = field(default_factory=dict)


@dataclass(frozen=True)
class SmokeResult:
    """The result of the smoke run.

    Attributes:
        client_lines: the client's output; the last line is ``PASS: vLLM example``.
        answers: pairs of prompt and answer, in the order of the prompts.
        ready_seconds: time from the server's launch until it was ready.
        engine_args: the arguments that the engine was started with.
    """

    client_lines: tuple[str, ...]
    answers: tuple[tuple[str, str], ...]
    ready_seconds: float
    engine_args: Mapping[str, Any]


def smoke_run(workspace: Workspace, request: SmokeRequest) -> SmokeResult:
    """Serve a copy of the model, ask every prompt, check the answers, and remove the copy.

    Raises:
        CommandError: the server did not become ready, or a request failed; ``tail`` says why.
        VllmEnvError: an answer is missing, empty or not the expected one.
    """
    # A download is silent for a long time, loading a local model is not.
    stall_timeout = _STALL_SECONDS if Path(request.engine_model).is_dir() else None
    launch = Launch(server_environment(request), (), request.ready_timeout, stall_timeout)
    with workspace.cache.staging() as staged:
        repository = staged / "models"
        arguments = dict(next(iter(request.own.values()), {})) or engine_args(request)
        copy_model(
            request.model_folder, repository / request.model_folder.name, arguments, request.own
        )
        started = time.monotonic()
        with TritonServer(request.binary, repository, log=request.log, launch=launch) as server:
            ready = time.monotonic()
            output = _ask(request, server, staged)
        lines = (
            (staged / _RESULTS).read_text(encoding="utf-8").split(f"\n{_SEPARATOR}")[:-1]
        )  # it ends with a separator
    prompts = _read_prompts(request.prompts)
    if len(lines) != len(prompts):
        raise VllmEnvError(
            f"The client stored {len(lines)} answers to {len(prompts)} prompts of {request.prompts}."
        )
    answers = tuple(zip(prompts, lines, strict=True))
    _check(request, answers)
    return SmokeResult(tuple(output.splitlines()), answers, ready - started, arguments)


def engine_args(request: SmokeRequest) -> dict[str, Any]:
    """Return engine arguments for a short run: no compilation, short sequences, a small share of the memory."""
    arguments: dict[str, Any] = {
        "model": request.engine_model,
        "enforce_eager": True,
        "max_model_len": 256,
    }
    if Path(request.engine_model).is_dir():
        # The stand-in has a few MB. The GPU or the memory may be shared, so it must not take most of it, as vLLM does by default.
        arguments["gpu_memory_utilization"] = 0.2
    elif request.gpu:
        return arguments
    return {**arguments, "dtype": "float16" if request.gpu else "float32"}


def server_environment(request: SmokeRequest) -> dict[str, str]:
    """Return variables for the server: no usage statistics, no hub for a local model, 1 GiB of KV cache on CPU."""
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if not request.gpu:
        variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if Path(request.engine_model).is_dir():
        variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return variables


def copy_model(
    folder: Path, copy: Path, arguments: Mapping[str, Any], own: Documents | None = None
) -> None:
    """Copy a built model's folder with other engine arguments, or with its ``own`` files.

    Only the code of the version folder is copied. The copy's ``config.pbtxt`` names the environment by its absolute path, for
    two reasons. Newer releases of Triton follow no symbolic link out of the model's folder. A hard link changes the archive's
    ctime. A server that serves the original would then load it again at its next `load` or poll (seen with 24.10).

    Without ``own``, GPU_DEVICE_IDS in the copy keeps only its first GPU. The user's parallel sizes are among the replaced
    arguments, and the model refuses several GPUs for an engine that takes one.
    """
    copy.mkdir(parents=True)
    for name in _COPIED:
        if (folder / name).is_file():
            shutil.copy2(folder / name, copy / name)
    copy_code(folder / CODE, copy / CODE)
    # Write only one of the two files: the model refuses two that differ.
    name = OFFICIAL_ARGS if (copy / OFFICIAL_ARGS).is_file() else ENGINE_ARGS_NAME
    for file, document in (own or {name: arguments}).items():
        (copy / file).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    config = copy / "config.pbtxt"
    text = config.read_text("utf-8") if own else _GPU_IDS.sub(r"\1", config.read_text("utf-8"))
    text = re.sub(
        re.escape(MODEL_DIRECTORY) + r'/([^"/]+)',
        lambda named: str((folder / named[1]).resolve()),
        text,
    )
    config.write_text(text, encoding="utf-8")


def _ask(request: SmokeRequest, server: TritonServer, folder: Path) -> str:
    argv: list[str | Path] = [
        sys.executable,
        request.client,
        "--verbose",
        f"--url={server.grpc_url}",
    ]
    argv += [f"--model={request.model_folder.name}", f"--input-prompts={request.prompts.resolve()}"]
    argv += [f"--results-file={_RESULTS}", f"--stream-timeout={_ANSWER_SECONDS}"]
    try:
        return run(argv, what="query the server with the client", cwd=folder)
    except CommandError as error:
        tail = "\n".join(part for part in (telling_lines(request.log), error.tail) if part)
        raise CommandError(
            error.what, tail=tail, remedy=f"The server's whole log is {request.log}."
        ) from error


def _read_prompts(path: Path) -> list[str]:
    return [
        line.rstrip("\r")
        for line in path.read_text(encoding="utf-8-sig").split("\n")
        if line.strip()
    ]


def _check(request: SmokeRequest, answers: tuple[tuple[str, str], ...]) -> None:
    for prompt, answer in answers:
        wanted = request.expected.get(prompt, "")
        if not answer.strip():
            raise VllmEnvError(
                f"The served model answered nothing to {prompt!r}.",
                cause="A model that ends at once shows neither that its weights are right nor that its answers arrive.",
                remedy=f"Name another --smoke-model, or use --no-smoke-run. The server's log is {request.log}.",
            )
        if not answer.startswith(wanted):
            raise VllmEnvError(
                f"The served model completed {prompt!r} with {answer!r}, not with {wanted!r}.",
                cause="The environment computes something else than the one that trained the stand-in model.",
                remedy=f"The server's log is {request.log}; if the environment is as you want it, use --no-smoke-run.",
            )
