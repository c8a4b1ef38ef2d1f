"""A place for caches where `~/.cache` cannot be written, as with a user whom the container does not know: the home is `/`.

The environment's start-up hook, vLLM, torch, Triton's compiler and FlashInfer take folders below the home for granted; torch
makes one when vLLM is imported, and the load would end there with `Permission denied: '/.cache'`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from triton_vllm.base.protocols import Log

CACHE = "XDG_CACHE_HOME"
_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"  # set by the hook before anything else runs, below a cache folder that it does not try


def settle(environment: MutableMapping[str, str], log: Log) -> None:
    """Name a folder of this user's own for all caches if the home cannot hold them; call it before vLLM is imported.

    What is set already stays, and so does a hub's cache that the home has, which may be mounted read-only.

    Args:
        environment: the process's variables; changed.
        log: told which folder was chosen, or why none could be.
    """
    usual = Path(os.path.expanduser("~"), ".cache")  # noqa: PTH111 - Path.home() raises for a user who has none
    if environment.get(CACHE) or _is_writable(usual):
        return
    try:
        place = str(private_folder())
    except OSError as error:
        log.warning(f"neither {usual} nor a folder in its place can be written: {error}; name one with {CACHE}")
        return
    if (usual / "huggingface").is_dir():
        environment.setdefault("HF_HOME", str(usual / "huggingface"))
    if environment.get(_INDUCTOR, "").startswith(f"{usual}/"):
        environment[_INDUCTOR] = place + environment[_INDUCTOR].removeprefix(str(usual))
    environment[CACHE] = place
    for name in ("TRITON_HOME", "FLASHINFER_WORKSPACE_BASE"):
        environment.setdefault(name, place)
    log.info(f"{usual} cannot be written, so caches are in {place}; {CACHE} names another folder")


def private_folder() -> Path:
    """Return a folder below that for temporary files which belongs to this user alone, for vLLM unpickles what lies there.

    Raises:
        OSError: it cannot be made, or is another user's; `gen_vllm_env.sh clean` frees one's own.
    """
    place = Path(tempfile.gettempdir(), f"vllm_env_warm_{os.getuid()}")
    place.mkdir(mode=0o700, exist_ok=True)
    status = place.lstat()
    if place.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{place} is not this user's alone")
    return place


def _is_writable(folder: Path) -> bool:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    return os.access(existing, os.W_OK | os.X_OK)
