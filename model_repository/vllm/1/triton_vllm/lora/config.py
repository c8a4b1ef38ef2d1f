"""LoRA adapters of a model: `multi_lora.json` maps the names that clients send to adapters' paths.

Those of LORA_DIRECTORY, which may change while the model serves, are `lora.store`'; a name in the file wins.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_vllm.base.coerce import shown
from triton_vllm.base.errors import ConfigError, InvalidRequestError, UnavailableError
from triton_vllm.base.official import ARGUMENTS_NAME, NO_LORA
from triton_vllm.lora.adapter_files import is_name

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE_NAME = "multi_lora.json"
UNLISTED = (
    f"Triton's OpenAI frontend finds adapters in 1/{ARGUMENTS_NAME} and 1/{FILE_NAME} only; without both, a request "
    "through it that names one may be answered by the base model (docs/official_backend.md)"
)


@dataclass(frozen=True)
class Adapters:
    """The adapters by name; each has a number from 1 on, by which vLLM knows it.

    Attributes:
        enabled: the engine argument enable_lora.
        requests: vLLM's LoRARequests of `multi_lora.json`.
        directory: LORA_DIRECTORY, None where there is none.
        official: whether an error lists all names, as the official backend's does; they may be other tenants'.
        broken: why those of `multi_lora.json` cannot be used that the official backend would find out with their first request.
    """

    enabled: bool = False
    requests: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None
    official: bool = False
    broken: Mapping[str, str] = field(default_factory=dict)

    def request(self, name: str | None) -> Any:
        """Return vLLM's LoRARequest for a name; None for None, and for a name that the directory may have.

        Raises:
            InvalidRequestError: LoRA is off or the name is unknown.
            UnavailableError: the adapter is none.
        """
        if name is None:
            return None
        if not self.enabled:
            raise InvalidRequestError(NO_LORA)
        if name in self.requests:
            return self.requests[name]
        if name in self.broken:
            raise UnavailableError(f"LoRA {name} could not be loaded; the server's log has the reason")
        if self.directory is not None and is_name(name):
            return None
        told = shown(name if name.isprintable() else repr(name)[1:-1])
        others = f", we currently support {[*self.requests, *self.broken]}" if self.official else ""
        raise InvalidRequestError(f"LoRA {told} is not supported{others}")


def read(
    model_dir: Path, version_dir: Path, *, enabled: bool, make: Any, directory: str = "", official: bool = False
) -> Adapters:
    """Read the adapters, the version's own file first as in the official backend.

    Args:
        model_dir: the model's directory; relative paths of adapters start there, or where the server was started.
        version_dir: its version's directory.
        enabled: the engine argument enable_lora.
        make: vLLM's LoRARequest.
        directory: LORA_DIRECTORY, from the model's directory on; with one the file may be missing.
        official: what COMPATIBILITY=official chooses: the server's working directory comes first, errors list all names, and a
            path that is no adapter's is no reason not to load the model.

    Raises:
        ConfigError: the file is missing or malformed, or a directory is not one.
    """
    if not enabled:
        if directory:
            raise ConfigError("config.pbtxt: LORA_DIRECTORY needs the engine argument enable_lora")
        return Adapters()
    root = model_dir / directory if directory else None
    if root is not None and not root.is_dir():
        raise ConfigError(f"config.pbtxt: LORA_DIRECTORY: there is no directory {root}")
    path = next((d / FILE_NAME for d in (version_dir, model_dir) if (d / FILE_NAME).is_file()), None)
    if path is None and root is None:
        raise ConfigError(f"Triton backend cannot find {version_dir / FILE_NAME}.")
    table = _table(path) if path is not None else {}
    starts = (Path.cwd(), model_dir) if official else (model_dir, Path.cwd())
    places, broken = {}, {}
    for name, place in table.items():
        try:
            places[name] = _place(starts, name, place)
        except ConfigError as error:
            if not official:
                raise
            broken[name] = str(error)
    requests = {name: make(name, number, place) for number, (name, place) in enumerate(places.items(), start=1)}
    return Adapters(enabled=True, requests=requests, directory=root, official=official, broken=broken)


def is_listed(version_dir: Path) -> bool:
    """Return whether Triton's OpenAI frontend finds the names of adapters: it leaves one out that it does not find."""
    return all((version_dir / name).is_file() for name in (ARGUMENTS_NAME, FILE_NAME))


def _table(path: Path) -> dict[str, str]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
        raise ConfigError(f'{path} must map names to paths, e.g. {{"sql": "/adapters/sql"}}')
    return table


def _place(starts: tuple[Path, ...], name: str, place: str) -> str:
    given = os.path.expanduser(place)  # noqa: PTH111 - Path.expanduser() raises for a user who has no home
    local = next((start / given for start in starts if (start / given).is_dir()), None)  # an absolute path stays as it is
    if local is not None:
        if not (local / "adapter_config.json").is_file():
            raise ConfigError(f"LoRA adapter '{name}': {local} has no adapter_config.json")
        return str(local)
    if place.startswith(("/", ".", "~")):
        looked = " or ".join(dict.fromkeys(str(start / given) for start in starts))
        raise ConfigError(f"LoRA adapter '{name}': there is no directory {looked}")
    return place  # the name of a repository on a model hub
