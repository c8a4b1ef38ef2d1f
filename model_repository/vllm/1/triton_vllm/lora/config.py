"""Read which LoRA adapters a model has.

``multi_lora.json`` maps names to places. LORA_DIRECTORY has a folder for each name. A name in the
file takes precedence.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from triton_vllm.base.coerce import shown
from triton_vllm.base.errors import ConfigError, InvalidRequestError
from triton_vllm.base.official import ARGUMENTS_NAME, NO_LORA
from triton_vllm.lora.copies import CONFIG_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.protocols import Log

FILE_NAME = "multi_lora.json"
UNLISTED = (
    f"Triton's OpenAI frontend finds adapters in 1/{ARGUMENTS_NAME} and 1/{FILE_NAME} only; "
    "without both, a request through it that names one may be answered by the base model "
    "(docs/official_backend.md)"
)
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""The name of a folder directly below LORA_DIRECTORY: one path component, and not hidden."""


@dataclass(frozen=True)
class Adapters:
    """The places of the adapters, by name.

    Attributes:
        enabled: the engine argument enable_lora.
        listed: the entries of ``multi_lora.json``. Each is the adapter's folder, or its name on a
            model hub (a string).
        directory: LORA_DIRECTORY. None if it is not set.
        official: whether an error lists all names, as the official backend's does.
    """

    enabled: bool = False
    listed: Mapping[str, Path | str] = field(default_factory=dict)
    directory: Path | None = None
    official: bool = False

    def find(self, name: str) -> Path | str:
        """Return the folder that should contain an adapter, or its name on a model hub.

        Raises:
            InvalidRequestError: LoRA is off, or no adapter can have this name.
        """
        if not self.enabled:
            raise InvalidRequestError(NO_LORA)
        if name in self.listed:
            return self.listed[name]
        if self.directory is not None and _FOLDER_NAME.fullmatch(name):
            return self.directory / name
        # A NUL would end the server's message, and a line break would begin a new line of its log.
        printable = shown(name if name.isprintable() else repr(name)[1:-1])
        # The other names may be other tenants'.
        others = f", we currently support {[*self.listed]}" if self.official else ""
        raise InvalidRequestError(f"LoRA {printable} is not supported{others}")


def read(
    model_dir: Path,
    version_dir: Path,
    *,
    enabled: bool,
    log: Log,
    directory: str = "",
    official: bool = False,
) -> Adapters:
    """Read which adapters the model has.

    Args:
        model_dir: the model's directory. Relative paths of adapters start there, or in the server's
            working directory.
        version_dir: the version's directory.
        enabled: the engine argument enable_lora.
        log: reports problems that do not prevent loading the model.
        directory: LORA_DIRECTORY, relative to the model's directory. If it is set, the file may be
            missing.
        official: whether COMPATIBILITY is ``official``. Then the server's working directory comes
            first and errors list all names. A path without an adapter does not prevent loading the
            model.

    Raises:
        ConfigError: the file is missing or malformed, or a directory does not exist.
    """
    if not enabled:
        if directory:
            raise ConfigError("config.pbtxt: LORA_DIRECTORY needs the engine argument enable_lora")
        return Adapters()
    root = model_dir / directory if directory else None
    if root is not None and not root.is_dir():
        raise ConfigError(f"config.pbtxt: LORA_DIRECTORY: there is no directory {root}")
    # The file in the version's directory comes first, as in the official backend.
    paths = (version_dir / FILE_NAME, model_dir / FILE_NAME)
    path = next(filter(Path.is_file, paths), None)
    if path is None and root is None:
        # the official backend's message
        raise ConfigError(f"Triton backend cannot find {paths[0]}.")
    table = _read_table(path) if path is not None else {}
    starts = (Path.cwd(), model_dir) if official else (model_dir, Path.cwd())
    listed = {}
    for name, place in table.items():
        listed[name], problem = _locate(starts, place)
        if problem and not official:
            raise ConfigError(f"LoRA adapter '{name}': {problem}")
        if problem:
            log.warning(f"LoRA adapter '{name}': {problem}; its requests are refused")
    # The frontend finds the adapters only if both files are there.
    has_both = all((version_dir / name).is_file() for name in (ARGUMENTS_NAME, FILE_NAME))
    if not has_both:
        log.info(UNLISTED)
    return Adapters(enabled=True, listed=listed, directory=root, official=official)


def _read_table(path: Path) -> dict[str, str]:
    """Return the names and places in a file ``multi_lora.json``.

    Raises:
        ConfigError: the file cannot be read, or has something else.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
        raise ConfigError(f'{path} must map names to paths, e.g. {{"sql": "/adapters/sql"}}')
    return table


def _locate(starts: tuple[Path, ...], place: str) -> tuple[Path | str, str]:
    """Return an adapter's place, and the problem with it; "" if there is none.

    Args:
        starts: the two folders where a relative path may start, the first one preferred.
        place: the adapter's entry in ``multi_lora.json``: a path, or a name on a model hub.
    """
    # Path.expanduser() raises for a user whom the container does not know.
    path = os.path.expanduser(place)  # noqa: PTH111
    # An absolute path stays as it is, so both folders are the same then.
    folders = list(dict.fromkeys(start / path for start in starts))
    for folder in folders:
        if folder.is_dir():
            has_config = (folder / CONFIG_NAME).is_file()
            return folder, "" if has_config else f"{folder} has no {CONFIG_NAME}"
    if place.startswith(("/", ".", "~")):
        return folders[0], f"there is no directory {' or '.join(map(str, folders))}"
    # Any other name may be one on a model hub, which only vLLM can check.
    return place, ""
