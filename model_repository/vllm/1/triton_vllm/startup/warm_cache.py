"""Use the caches next to the model that ``gen_vllm_env.sh --warm`` filled.

vLLM then does not compile again at each start.

Serving only reads ``vllm_cache/``: vLLM gets a private copy. A model repository may be mounted
read-only, and several servers may serve it at once.

The record cannot promise a cache hit, because vLLM's own keys decide. Those of 0.22.1 contain paths
below HOME and the environment's path. An environment in an archive gets a new path at each start.
The caches of inductor and Triton hit all the same. On a CPU with 0.32 and an archive there were 22
libraries after the start; 16 came with the caches.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_vllm.base import official
from triton_vllm.startup import engine_args
from triton_vllm.startup.home import ROOT_VARIABLE, private_folder
from triton_vllm.startup.manifest import FILE_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from triton_vllm.base.protocols import Log

CACHE_FOLDER = "vllm_cache"
RECORD_NAME = "warm.json"
WARM_VARIABLE = "TRITON_VLLM_WARM"
"""The variable that names the folder which this load must fill; set by ``--warm``."""
# vLLM puts both below its cache root for torch.compile, but not for kernels that it launches itself
# (seen in 0.22.1).
_CACHES_BELOW = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
# The start-up hook sets such a path if the operator has not set one.
_OUR_INDUCTOR = re.compile(r"/vllm_env/inductor/[0-9a-f]{16}$")
_GPUS_FOLDER = Path("/proc/driver/nvidia/gpus")
_CPU_FILE = Path("/proc/cpuinfo")
_REMEDY = "make it again with ./gen_vllm_env.sh --warm"


@dataclass(frozen=True)
class Record:
    """The content of ``warm.json``: what the caches were filled for.

    Attributes:
        environment: digest of the environment's lock, from the manifest. Empty for a model without
            a manifest.
        vllm: vLLM's version.
        devices: names of the GPUs, or of the processor without a GPU.
        engine_args: SHA-256 of the file with the engine arguments.
        root: the folder that was filled. Some of the files contain its path.
        made_at: UTC, ISO 8601.
    """

    environment: str
    vllm: str
    devices: tuple[str, ...]
    engine_args: str
    root: str = ""
    made_at: str = ""


def use(model_dir: Path, environment: MutableMapping[str, str], log: Log) -> None:
    """Set vLLM's cache variables to the model's filled caches, or to the folder to fill.

    Call it before vLLM is imported. Nothing here fails a load: without the caches vLLM compiles
    what it needs, as it does without ``--warm``.

    Args:
        model_dir: the folder with ``config.pbtxt``.
        environment: the process's variables; changed. If the operator has set VLLM_CACHE_ROOT, it
            is kept.
        log: reports which caches are used, or why they are not.
    """
    filled = model_dir / CACHE_FOLDER
    if environment.get(WARM_VARIABLE):
        root = Path(environment[WARM_VARIABLE])
        _write(root, current(model_dir))
        _set_variables(environment, root, replace=True)
        log.info(f"warming: vLLM fills its caches in {root}")
        return
    if not filled.is_dir():
        return
    if environment.get(ROOT_VARIABLE):
        log.info(f"{ROOT_VARIABLE}={environment[ROOT_VARIABLE]} is set, so {filled} is not used")
        return
    try:
        record = read(filled)
        here = current(model_dir)
        reason = misfit(record, here)
        if reason:
            log.warning(f"{filled} is ignored: {reason}; {_REMEDY}")
            return
        root = private_copy(filled, record, environment)
    except (OSError, ValueError, TypeError) as error:
        log.warning(f"{filled} is ignored: {type(error).__name__}: {error}; {_REMEDY}")
        return
    _set_variables(environment, root, replace=False)
    note = ""
    if record.engine_args != here.engine_args:
        note = ", with other engine arguments, so vLLM may compile again"
    log.info(
        f"vLLM's caches, filled on {record.made_at}{note}: a private copy of {filled} in {root}"
    )


def current(model_dir: Path) -> Record:
    """Return the record that caches would get if they were filled now."""
    manifest = {}
    # A model that was made by hand has no manifest.
    with contextlib.suppress(OSError):
        manifest = json.loads((model_dir / FILE_NAME).read_text(encoding="utf-8"))
    digest = hashlib.sha256()
    # The engine arguments are in our file, or in the official backend's of a version.
    official_files = sorted(model_dir.glob(f"*/{official.ARGUMENTS_NAME}"))
    for file in (model_dir / engine_args.FILE_NAME, *official_files):
        if file.is_file():
            digest.update(file.read_bytes())
    return Record(
        environment=str(manifest.get("lock_digest", "")),
        vllm=vllm_version(),
        devices=device_names(),
        engine_args=digest.hexdigest(),
    )


def read(filled: Path) -> Record:
    """Return the record of filled caches.

    Raises:
        OSError: the record is missing or cannot be read.
        ValueError: the record is not JSON.
        TypeError: the record has another format.
    """
    fields = json.loads((filled / RECORD_NAME).read_text(encoding="utf-8"))
    return Record(**{**fields, "devices": tuple(fields.get("devices", ()))})


def misfit(record: Record, here: Record) -> str:
    """Return why filled caches cannot be used here; empty if they fit."""
    # Engine arguments are not compared: vLLM's cache keys contain those that matter.
    for field in ("environment", "vllm", "devices"):
        theirs = getattr(record, field)
        ours = getattr(here, field)
        if theirs != ours:
            return f"it was made with {field} {_shown(theirs)}, and this is {_shown(ours)}"
    return ""


def _shown(value: str | tuple[str, ...]) -> str:
    # 16 digits of a digest tell two environments apart.
    text = value[:16] if isinstance(value, str) else ", ".join(value)
    return text or "unknown"


def vllm_version() -> str:
    """Return the version of the vLLM that an import would load, or an empty string."""
    # The version is read from the file, because importing vLLM takes seconds.
    spec = importlib.util.find_spec("vllm")
    folders = spec and spec.submodule_search_locations
    for folder in folders or ():
        with contextlib.suppress(OSError):
            text = Path(folder, "_version.py").read_text(encoding="utf-8")
            version = re.search(
                r"^(?:__version__ = )?version = ['\"](.+?)['\"]", text, re.MULTILINE
            )
            if version:
                return version[1]
    return ""


def device_names() -> tuple[str, ...]:
    """Return the names of the GPUs, each once, or of the processor."""
    # Files have the names. A call of the driver would initialize it, before vLLM does.
    names: set[str] = set()
    with contextlib.suppress(OSError):
        for file in _GPUS_FOLDER.glob("*/information"):
            text = file.read_text(encoding="utf-8")
            names.update(re.findall(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE))
    if not names:
        with contextlib.suppress(OSError):
            text = _CPU_FILE.read_text(encoding="utf-8")
            names.update(re.findall(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE))
    # Processors other than x86 may have no "model name".
    return tuple(sorted(names)) or (platform.machine(),)


def private_copy(filled: Path, record: Record, environment: Mapping[str, str]) -> Path:
    """Return this user's copy of filled caches; the copy of an earlier start is used again.

    The copy is in the user's cache folder. If that cannot be written, it is below the temporary
    folder. ``gen_vllm_env.sh clean`` deletes it while no server of this user runs.

    Raises:
        OSError: no folder can be written, or the files cannot be read.
    """
    name = hashlib.sha256((filled / RECORD_NAME).read_bytes()).hexdigest()[:16]
    folder_of_copies = _folder_of_copies(environment)
    copy = folder_of_copies / name
    if not copy.is_dir():
        staged = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder_of_copies))
        try:
            shutil.copytree(filled, staged, dirs_exist_ok=True, copy_function=shutil.copy)
            # The original folders may be read-only, and copies have their modes.
            for folder, _, _ in os.walk(staged):
                Path(folder).chmod(0o700)
            relocate(staged, record.root, str(copy))
            # Several models may start at once. The rename fails if another start was first.
            with contextlib.suppress(OSError):
                staged.rename(copy)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    # A build that makes room in this cache first deletes what has been unused for longest.
    os.utime(copy)
    return copy


def relocate(folder: Path, old: str, new: str) -> None:
    """Replace the absolute paths below ``old`` in the copied caches by paths below ``new``.

    Args:
        folder: the copied caches.
        old: the folder that was filled.
        new: the folder in which vLLM will find the copy.
    """
    # 1) vLLM's index of compiled graphs, a Python literal. vLLM 0.22.1 opens the paths in it
    #    without a check (read in compilation/compiler_interface.py). 0.32 joins them with its own
    #    folder.
    for index in folder.rglob("vllm_compile_cache.py"):
        try:
            content = ast.literal_eval(index.read_text(encoding="utf-8"))
        except (ValueError, SyntaxError):
            # vLLM would fail on an index that cannot be read. Without one it compiles.
            index.unlink()
        else:
            index.write_text(repr(_with_new_paths(content, old, new)), encoding="utf-8")
    # 2) The Triton compiler's lists of a kernel's files. With wrong paths it compiles again.
    for group in folder.rglob("__grp__*.json"):
        with contextlib.suppress(ValueError):
            content = json.loads(group.read_text(encoding="utf-8"))
            group.write_text(json.dumps(_with_new_paths(content, old, new)), encoding="utf-8")


def _with_new_paths(value: Any, old: str, new: str) -> Any:
    """Return a value of JSON or Python in which each path below ``old`` is below ``new``.

    ``old`` is empty for caches that do not say where they were filled: then nothing changes.
    """
    if isinstance(value, str):
        is_below = old and (value == old or value.startswith(f"{old}/"))
        return new + value[len(old) :] if is_below else value
    if isinstance(value, dict):
        return {key: _with_new_paths(item, old, new) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_new_paths(item, old, new) for item in value)
    return value


def _set_variables(environment: MutableMapping[str, str], root: Path, *, replace: bool) -> None:
    """Set vLLM's cache root to ``root``, and the variables of other caches to folders in it.

    Without ``replace``, what the operator has set for other caches stays.
    """
    environment[ROOT_VARIABLE] = str(root)
    for name, folder in _CACHES_BELOW.items():
        path = environment.get(name, "")
        is_operators = path and not _OUR_INDUCTOR.search(path)
        if replace or not is_operators:
            environment[name] = str(root / folder)


def _write(root: Path, record: Record) -> None:
    """Write the record of caches that are about to be filled in ``root``."""
    root.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")
    fields = {**asdict(record), "root": str(root), "made_at": now}
    (root / RECORD_NAME).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _folder_of_copies(environment: Mapping[str, str]) -> Path:
    """Return the folder for private copies, which can be written.

    Raises:
        OSError: there is no such folder.
    """
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: this user has no home
        caches = environment.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        place = Path(caches, "vllm_env", "warm")
        place.mkdir(parents=True, exist_ok=True)
        if os.access(place, os.W_OK | os.X_OK):
            return place
    return private_folder()
