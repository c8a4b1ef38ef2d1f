"""Choose places for caches, also if ``~/.cache`` cannot be written.

That happens when the container does not know the user: the home is then ``/``. The environment's
start-up hook, vLLM, torch, Triton's compiler and FlashInfer all write to folders below the home.
torch makes one when vLLM is imported. The load would fail there with ``Permission denied:
'/.cache'``.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from triton_vllm.base.protocols import Log

CACHE_VARIABLE = "XDG_CACHE_HOME"
ROOT_VARIABLE = "VLLM_CACHE_ROOT"
"""vLLM's variable for the folder of its caches."""
_COMPILED_FOLDERS = {
    # vLLM sets it in a start that compiles, but not in one that loads a compiled model. So Triton
    # compiled its kernels again in the second start, to another folder: 50.7 s for 28.6 s on an
    # H200 (vLLM 0.33.0).
    "TRITON_CACHE_DIR": "triton",
    # The environment's own C compiler compiles its libraries first, in 6 s, to 49 MB. Its usual
    # place is below /tmp, which ends with the container.
    "ZIG_GLOBAL_CACHE_DIR": "zig",
}
# The start-up hook sets it first, below a folder that may not be writable.
_INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def settle(environment: MutableMapping[str, str], log: Log) -> None:
    """If the home cannot hold caches, set the variables for all caches to a private folder.

    Call it before vLLM is imported. Variables that are already set stay.

    Args:
        environment: the process's variables; changed.
        log: reports which folder was chosen, or why none could be.
    """
    # Path.home() raises for a user whom the container does not know
    usual = Path(os.path.expanduser("~"), ".cache")  # noqa: PTH111
    if environment.get(CACHE_VARIABLE) or _is_writable(usual):
        return
    try:
        instead = str(private_folder())
    except OSError as error:
        log.warning(
            f"neither {usual} nor a folder in its place can be written: {error}; "
            f"name one with {CACHE_VARIABLE}"
        )
        return
    # A model hub's cache in the home is still used: it may be mounted read-only.
    hub = usual / "huggingface"
    if hub.is_dir():
        environment.setdefault("HF_HOME", str(hub))
    # The start-up hook has named a folder below the usual one. Only that part of its path is
    # replaced: `warm_cache` recognizes the hook's folder by the rest.
    inductor = environment.get(_INDUCTOR_VARIABLE, "")
    if inductor.startswith(f"{usual}/"):
        environment[_INDUCTOR_VARIABLE] = inductor.replace(str(usual), instead, 1)
    environment[CACHE_VARIABLE] = instead
    # Triton's compiler and FlashInfer do not read XDG_CACHE_HOME.
    for name in ("TRITON_HOME", "FLASHINFER_WORKSPACE_BASE"):
        environment.setdefault(name, instead)
    log.info(
        f"{usual} cannot be written, so caches are in {instead}; "
        f"{CACHE_VARIABLE} names another folder"
    )


def keep_compiled(environment: MutableMapping[str, str]) -> None:
    """Put what compilers leave into vLLM's cache root; variables that are already set stay.

    Call it when that root is settled, and before vLLM is imported.
    """
    caches = environment.get(CACHE_VARIABLE) or "~/.cache"
    root = Path(os.path.expanduser(environment.get(ROOT_VARIABLE) or f"{caches}/vllm"))  # noqa: PTH111
    # Without this folder, the compilers use their own places.
    if not _is_writable(root):
        return
    home = environment.get("TRITON_HOME")
    # `settle` sets it to the same folder as CACHE_VARIABLE.
    is_operators = bool(home) and home != environment.get(CACHE_VARIABLE)
    for name, folder in _COMPILED_FOLDERS.items():
        # This variable would take Triton's kernels out of the operator's TRITON_HOME.
        if name == "TRITON_CACHE_DIR" and is_operators:
            continue
        environment.setdefault(name, str(root / folder))


def private_folder() -> Path:
    """Return a folder below the temporary folder that only this user can write.

    Raises:
        OSError: the folder cannot be made, or belongs to another user. ``gen_vllm_env.sh clean``
            deletes the user's own.
    """
    place = Path(tempfile.gettempdir(), f"vllm_env_warm_{os.getuid()}")
    place.mkdir(mode=0o700, exist_ok=True)
    status = place.lstat()
    # vLLM unpickles the files in it, so another user who could write there could run code here.
    if place.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{place} is not this user's alone")
    return place


def _is_writable(folder: Path) -> bool:
    """Return whether this user can write into a folder, or make it if it is missing."""
    # It can be made if its nearest existing parent can be written.
    absolute = folder.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if os.path.lexists(path))
    return os.access(existing, os.W_OK | os.X_OK)
