"""Remember the answers of a smoke run for as long as nothing has changed that they depend on.

Only the stand-in's answers are remembered: which files another model is made of is not known. The
cache has one entry for each model's folder: the result of the folder's last smoke run, and the
state of all files and devices that it used.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_env.base.cache import Cache, key_of, touch
from vllm_env.base.filesystem import file_sha256, write_whole
from vllm_env.base.machine import gpus
from vllm_env.base.workspace import CHECKOUT
from vllm_env.model.files import CONFIG_NAME, ENGINE_ARGS_NAME, VERSION_FOLDER
from vllm_env.model.manifest import MANIFEST_NAME, Manifest
from vllm_env.publish.model_folder import code_files
from vllm_env.publish.official_model import LORA_NAME
from vllm_env.triton.root import STUB_LIBRARIES

from .smoke import SmokeResult

CLIENT = CHECKOUT / "client" / "client.py"
PROMPTS = CHECKOUT / "prompts.txt"
# Triton starts the server and loads its Python backend from these folders of its root.
_TRITON_FOLDERS = ("bin", "lib", "backends/python")

_State = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A published model, and with what a smoke run serves it.

    Attributes:
        model: the published folder.
        manifest: its manifest.
        triton: the Triton root.
    """

    model: Path
    manifest: Manifest
    triton: Path


def recall(cache: Cache, subject: Subject) -> SmokeResult | None:
    """Return the result of the last smoke run; None if there was none, or something has changed."""
    file = _file(cache, subject)
    try:
        entry = json.loads(file.read_text("utf-8"))
        if entry["state"] != _state_of(subject):
            return None
        touch(file)
        document = entry["result"]
        # JSON has no tuples. The other fields are in the document as SmokeResult has them.
        answers = tuple((prompt, answer) for prompt, answer in document.pop("answers"))
        last = document.pop("last_line")
        return SmokeResult((last,), answers, engine_args={}, recalled=True, **document)
    # There is no entry, or it was written by another version.
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(cache: Cache, subject: Subject, result: SmokeResult) -> None:
    """Keep the result of a smoke run of the published model."""
    document = {
        "last_line": result.client_lines[-1],
        "answers": result.answers,
        "ready_seconds": result.ready_seconds,
        "served_at": result.served_at,
    }
    entry = {"state": _state_of(subject), "result": document}
    write_whole(_file(cache, subject), json.dumps(entry))


def state_before_run(model: Path, triton: Path) -> _State:
    """Return what a smoke run is about to use; if it differs afterwards, the run proves nothing.

    The run serves a copy of the model, and the user may edit files meanwhile. So the model's
    configuration and code are compared by their digests, by their path in its folder.

    Args:
        model: the model's folder, as it is served.
        triton: the Triton root.
    """
    files = [model / CONFIG_NAME, *code_files(model / VERSION_FOLDER)]
    digests = {str(file.relative_to(model)): file_sha256(file) for file in files}
    others = {str(file): _stat(file) for file in _around(triton)}
    return {**digests, **others, "gpus": gpus()}


def _file(cache: Cache, subject: Subject) -> Path:
    return cache.path("proofs", key_of(str(subject.model.resolve())))


def _state_of(subject: Subject) -> _State:
    """Return the state of what a smoke run of a published model uses, as JSON gives it back."""
    is_for_gpu = subject.manifest.spec.get("profile") == "cuda"
    return {
        # Size and mtime, because an environment has several GB.
        "files": {str(file): _stat(file) for file in _files(subject)},
        "gpus": gpus() if is_for_gpu else "",
    }


def _files(subject: Subject) -> Iterator[Path]:
    """Yield the files that a smoke run of a published model uses; some may not exist."""
    # With a link, the same files would have two names.
    model = subject.model.resolve()
    for name in (MANIFEST_NAME, CONFIG_NAME, ENGINE_ARGS_NAME, LORA_NAME):
        yield model / name
    for record in subject.manifest.environment:
        yield model / record.name
    yield model / subject.manifest.stub.name
    yield from (model / STUB_LIBRARIES).iterdir()
    yield from code_files(model / VERSION_FOLDER)
    yield from _around(subject.triton)


def _around(triton: Path) -> Iterator[Path]:
    """Yield the files of Triton and of the client that a smoke run uses."""
    for name in _TRITON_FOLDERS:
        yield from _files_in(triton / name)
    yield PROMPTS
    yield from CLIENT.parent.rglob("*.py")


def _files_in(folder: Path) -> Iterator[Path]:
    # Without folders: Python writes a __pycache__ next to Triton's own modules.
    return (path for path in folder.glob("*") if path.is_file())


def _stat(path: Path) -> list[int] | None:
    """Return a file's size (bytes) and mtime (ns); None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]
