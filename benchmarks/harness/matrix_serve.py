"""Run one row of ``gpu_matrix.py``: start the stock server, ask, compare, stop, look around."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from harness import matrix_ask, matrix_media, processes
from harness.matrix_adapter import write_adapter
from harness.matrix_ask import Served, WrongAnswerError
from harness.matrix_rows import COMMON_ARGUMENTS, require_no_multicast
from harness.matrix_shapes import MATRIX_SHAPES
from harness.servers import CPU_VARIABLES, Setting, StartFailedError, free_port, last_reason
from harness.shapes import write_checkpoint
from harness.targets import OpenAITarget, TritonTarget

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from harness.matrix_rows import Row

# The values of ``Row.check`` that are names of tensors.
MEDIA = ("image", "audio")
# A process that the row has started has this variable, also if its parent has died.
MARKER = "VLLM_ENV_MATRIX_ROW"
_STOP_LIMIT_S = 60
_GONE_LIMIT_S = 5
# vLLM's defaults need a compiler on the host; the adapter turns the same off by itself.
WITHOUT_COMPILER = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
CPU_ARGUMENTS = {"dtype": "float32", "enforce_eager": True}
# Two steps of a float32 near -7.6, which is the log probability of each of 2,048 equal tokens.
_ROUNDING = 1e-6


def setting_of(row: Row, options: argparse.Namespace, work: Path) -> Setting:
    """Write the checkpoints of a row below ``work``, and return the setting of its servers."""
    checkpoint = write_checkpoint(MATRIX_SHAPES[row.shape], work / "checkpoint")
    if MATRIX_SHAPES[row.shape].has_weights:
        _write_weights(options.environment, checkpoint)
    arguments = {"model": str(checkpoint), **COMMON_ARGUMENTS, **row.arguments}
    if row.draft:
        draft = write_checkpoint(MATRIX_SHAPES[row.draft], work / "draft")
        arguments["speculative_config"] = {**arguments["speculative_config"], "model": str(draft)}
    variables = row.environment()
    if options.device == "cpu":
        arguments |= CPU_ARGUMENTS
        variables |= CPU_VARIABLES
    setting = Setting.of(options, arguments, work, row.count)
    return replace(setting, variables=variables)


def _write_weights(environment: Path, checkpoint: Path) -> None:
    """Give a checkpoint random weights.

    Raises:
        CalledProcessError: the environment has no such model.
    """
    script = Path(__file__).with_name("matrix_weights.py")
    command = [str(environment / "bin" / "python"), "-B", str(script), str(checkpoint)]
    subprocess.run(command, check=True)


class WarmTriton(TritonTarget):
    """A server of a model that has caches, as ``gen_vllm_env.sh --warm`` leaves them.

    Args:
        setting: as for ``TritonTarget``.
        caches: a folder that a load has filled.
    """

    def __init__(self, setting: Setting, caches: Path) -> None:
        super().__init__(setting)
        self._caches = caches

    def prepare(self) -> Path:
        """See ``TritonTarget``."""
        repository = super().prepare()
        shutil.copytree(self._caches, repository / self.model / "vllm_cache")
        return repository


def _warmed(setting: Setting) -> WarmTriton:
    """Load the model once, which fills its caches; return a server that has them.

    The returned server is not started yet. The first load and this server each have an empty home,
    so that there are no other caches.

    Raises:
        StartFailedError: the model does not load.
    """
    caches = setting.work / "vllm_cache"

    def with_home(name: str, **variables: str) -> Setting:
        """Return the setting with a new home of this name, and these variables in addition."""
        home = setting.work / name
        home.mkdir(exist_ok=True)
        folders = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
        return replace(setting, variables={**setting.variables, **folders, **variables})

    # With this variable the model fills the folder. The builder sets it, too
    # (env/vllm_env/serve/warm.py).
    first = TritonTarget(with_home("home-first", TRITON_VLLM_WARM=str(caches)))
    try:
        first.start()
    finally:
        first.stop()
    # The returned server writes a log of the same name.
    first.log.rename(first.log.with_name("first.log"))
    return WarmTriton(with_home("home"), caches)


def _require_caches(server: TritonTarget) -> None:
    """Check that the load has used the caches.

    Raises:
        WrongAnswerError: it has not.
    """
    if "vLLM's caches, filled on" not in server.log.read_text("utf-8", "replace"):
        raise WrongAnswerError("the log does not say that the caches are used")


def run_row(row: Row, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run a row; return its result, which has ``ok`` and, if that is false, ``message``.

    Args:
        row: the row.
        options: the command line's options.
        work: folder for checkpoints, logs and the model repository.
    """
    work.mkdir(parents=True, exist_ok=True)
    # Everything that this process starts inherits these variables.
    os.environ.update(row.environment() | {MARKER: row.name})
    require_no_multicast(row, os.environ)
    setting = setting_of(row, options, work)
    result: dict[str, Any] = {"ok": False}
    shared_before = _shared()
    server = TritonTarget(setting)
    openai = free_port()
    parameters = {"OPENAI_PORT": str(openai), **row.parameters}
    if row.check == "lora":
        config = MATRIX_SHAPES[row.shape].config
        parameters["LORA_DIRECTORY"] = str(write_adapter(config, work / "adapters"))
    try:
        if row.check == "warm":
            server = _warmed(setting)
        server.parameters = parameters
        result["seconds_to_ready"] = round(server.start(), 1)
        served = Served(server.http, server.grpc, openai, server.model)
        numbers = _check(row, served, server, result)
        _stop(server, shared_before, result)
        if numbers is not None and row.compares and not options.no_compare:
            _compare(row, setting, numbers, result)
    # A failed start is right if the model must be refused. Otherwise vLLM's own server is tried, to
    # see whose fault it is.
    except StartFailedError as error:
        message = last_reason(server.log.read_text("utf-8", "replace")) or str(error)
        result["message"] = message
        result["ok"] = row.check == "refused" and row.says in message
        if row.check != "refused":
            result["own_server"] = _own_server(setting, row, options.device)
    except WrongAnswerError as error:
        result["message"] = str(error)
    except Exception as error:  # noqa: BLE001 - a row must not end the table
        result["message"] = f"{type(error).__name__}: {error}"
    else:
        result["ok"] = row.check != "refused"
        if not result["ok"]:
            result["message"] = "the model loads and answers, and should be refused"
    finally:
        server.stop()
    return result


def _check(
    row: Row, served: Served, server: TritonTarget, result: dict[str, Any]
) -> list[list[float]] | None:
    """Ask what the row's ``check`` says; return the numbers to compare with the engine's.

    They are a list for each prompt; None if the row has nothing to compare.

    Args:
        row: the row.
        served: where the started model is asked.
        server: its server, whose log is read and whose worker may be killed.
        result: gets the seconds until a model with a killed worker answers again.

    Raises:
        WrongAnswerError: an answer is wrong.
    """
    prompts = matrix_ask.make_prompts(MATRIX_SHAPES[row.shape].vocabulary)
    if row.check == "embedding":
        return matrix_ask.embeddings(served, prompts)
    if row.check == "score":
        return matrix_ask.scores(served, prompts)
    if row.check in MEDIA:
        matrix_media.check_media(served, row.check)
        return matrix_media.media_logprobs(served, row.check)
    matrix_ask.check_texts(served, prompts, distinct=row.distinct)
    if row.check == "lora":
        matrix_ask.check_adapter(served, prompts)
    elif row.check == "choice":
        matrix_ask.check_choice(served, prompts)
    elif row.check == "sleep":
        matrix_ask.check_sleep(served, prompts)
    elif row.check == "warm":
        _require_caches(server)
    numbers = matrix_ask.prompt_logprobs(served, prompts) if row.compares else None
    if row.check == "kill":
        _kill_worker(server)
        result["seconds_to_come_back"] = round(matrix_ask.wait_until_back(served, prompts), 1)
        matrix_ask.check_texts(served, prompts)
    return numbers


def _kill_worker(server: TritonTarget) -> None:
    """Kill one of the server's worker processes, and wait until it has ended.

    Raises:
        WrongAnswerError: there is none.
    """
    for process in processes.session_of(server.running().pid):
        if processes.role_of(process) == "worker":
            process.kill()
            process.wait(_GONE_LIMIT_S)
            return
    raise WrongAnswerError("no worker process is there to kill")


def _stop(server: TritonTarget, shared_before: set[str], result: dict[str, Any]) -> None:
    """Stop the server by SIGTERM, and note its seconds.

    Raises:
        WrongAnswerError: it does not end with status 0, or leaves something behind.
    """
    process = server.running()
    started = time.monotonic()
    process.terminate()
    try:
        status = process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise WrongAnswerError(f"SIGTERM: still running after {_STOP_LIMIT_S} s") from None
    result["seconds_to_stop"] = round(time.monotonic() - started, 1)
    if status:
        raise WrongAnswerError(f"SIGTERM: ends with status {status}")
    # The kernel may need a moment for the memory of a process that has ended.
    limit = time.monotonic() + _GONE_LIMIT_S
    left = leftovers(process.pid, shared_before)
    while left:
        if time.monotonic() > limit:
            raise WrongAnswerError(f"the server has left behind: {', '.join(left)}")
        time.sleep(0.2)
        # What is new since the first look belongs to other servers of this machine.
        left = [name for name in leftovers(process.pid, shared_before) if name in left]


def _shared() -> set[str]:
    """Return the names in /dev/shm, without those of this project's tests, which may run now."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if not name.startswith("pytest_")}


def leftovers(leader: int, shared_before: set[str]) -> list[str]:
    """Return the processes of the row, and new shared memory that no process uses, as texts.

    Args:
        leader: process id of the server, which led its session.
        shared_before: the files of /dev/shm before the start.
    """
    found = [f"{process.name()} ({process.pid})" for process in processes.session_of(leader)]
    # The files are listed before their users. So a file that another row makes now does not count.
    new = _shared() - shared_before
    # The maps and the open files of all processes, in one text.
    used = ""
    for process in psutil.process_iter():
        # A process may end, or be another user's.
        with contextlib.suppress(psutil.Error, OSError):
            is_of_row = process.environ().get(MARKER) == os.environ[MARKER]
            # It has lost its parent, and may have left the server's session.
            if is_of_row and process.ppid() == 1:
                found.append(f"{process.name()} ({process.pid})")
            used += Path(f"/proc/{process.pid}/maps").read_text("utf-8", "replace")
            used += " ".join(file.path for file in process.open_files())
    return [*found, *(f"/dev/shm/{name}" for name in sorted(new) if name not in used)]


def _compare(row: Row, setting: Setting, ours: list[list[float]], result: dict[str, Any]) -> None:
    """Compare with the engine in process, which ``matrix_engine.py`` runs; note the differences.

    Args:
        row: the row.
        setting: of the row's servers. The engine gets the same arguments.
        ours: the server's numbers, a list for each prompt.
        result: gets what ``judge`` returns.

    Raises:
        WrongAnswerError: the engine does not run, or ours is further away than twice the engine's
            difference from itself.
    """
    kind = row.check if row.check in {"embedding", "score"} else "text"
    prompts: Sequence[Any] = matrix_ask.make_prompts(MATRIX_SHAPES[row.shape].vocabulary)
    if row.check in MEDIA:
        prompts = matrix_media.questions(row.check)
    # With room for each prompt four times in one batch, which is the largest that the engine gets.
    arguments = {**setting.arguments, "max_num_seqs": 16}
    question = json.dumps({"arguments": arguments, "prompts": prompts, "kind": kind})
    python = setting.environment / "bin" / "python"
    worker = Path(__file__).with_name("matrix_engine.py")
    log = setting.work / "engine.log"
    with log.open("wb") as errors:
        done = subprocess.run(
            [str(python), "-B", str(worker)],
            input=question.encode(),
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **own_variables(setting, row)},
            check=False,
        )
    if done.returncode:
        reason = last_reason(log.read_text("utf-8", "replace"))
        raise WrongAnswerError(f"the engine in process ends: {reason}")
    # Something may have written other lines before.
    runs = json.loads(done.stdout.splitlines()[-1])
    result |= judge(ours, runs)
    if not result["within"]:
        raise WrongAnswerError(
            f"differs from the engine in process by {result['difference']:.2g}, and the engine "
            f"from itself by {result['from_itself']:.2g}"
        )


def judge(ours: Sequence[Sequence[float]], runs: Sequence[Any]) -> dict[str, Any]:
    """Return the differences, and whether ours is within twice the engine's difference from itself.

    Args:
        ours: the numbers of the server, a list for each prompt.
        runs: those of the engine, for each of its runs.
    """
    first, *others = runs
    from_itself = max((matrix_ask.difference(first, other) for other in others), default=0.0)
    # To the nearest run, because all runs of the engine are right.
    difference = min(matrix_ask.difference(ours, one) for one in runs)
    # Dummy weights are so small, those of the norms too, that even another prompt's numbers differ
    # little: by 2e-5 (Llama, CPU).
    other_prompt = matrix_ask.difference(first[:1], first[1:2])
    limit = 2 * max(from_itself, _ROUNDING)
    return {
        "difference": difference,
        "from_itself": from_itself,
        "of_other_prompt": other_prompt,
        "within": difference <= limit,
        # If even another prompt's numbers were within the limit, the comparison says nothing.
        "tells": limit < other_prompt,
    }


def own_variables(setting: Setting, row: Row) -> dict[str, str]:
    """Return the variables for vLLM without the adapter, which would set them itself."""
    variables = {**WITHOUT_COMPILER, **setting.variables, **row.environment()}
    variables |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    compiler = setting.environment / "bin" / "vllm-env-cc"
    if compiler.exists():
        variables["CC"] = str(compiler)
    return variables


def _own_server(setting: Setting, row: Row, device: str) -> str:
    """Return ``ready``, or why vLLM's own server does not start with the same arguments."""
    variables = setting.variables if device == "cpu" else own_variables(setting, row)
    server = OpenAITarget(replace(setting, variables=variables, instances=1))
    try:
        server.start()
    except StartFailedError as error:
        return last_reason(server.log.read_text("utf-8", "replace")) or str(error)
    finally:
        server.stop()
    return "ready"
