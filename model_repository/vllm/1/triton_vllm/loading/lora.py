"""LoRA adapters of a model: `multi_lora.json` maps the names that clients send to adapters' paths."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from triton_vllm.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILE_NAME = "multi_lora.json"


@dataclass(frozen=True)
class Adapters:
    """The adapters by name; each has a number from 1 on, by which vLLM knows it."""

    enabled: bool = False
    requests: Mapping[str, Any] = field(default_factory=dict)

    def request(self, name: str | None) -> Any:
        """Return vLLM's LoRARequest for a name (None for None).

        Raises:
            InvalidRequestError: LoRA is off or the name is unknown; the error does not list the others.
        """
        if name is None:
            return None
        if not self.enabled:
            raise InvalidRequestError("LoRA feature is not enabled.")
        if name not in self.requests:
            raise InvalidRequestError(f"LoRA {name} is not supported")
        return self.requests[name]


def read(model_dir: Path, version_dir: Path, *, enabled: bool, make: Any) -> Adapters:
    """Read the adapters, the version's own file first as in the official backend.

    Args:
        model_dir: the model's directory; relative paths of adapters start there.
        version_dir: its version's directory.
        enabled: the engine argument enable_lora.
        make: vLLM's LoRARequest.

    Raises:
        ConfigError: the file is missing or malformed, or an adapter's directory is not one.
    """
    if not enabled:
        return Adapters()
    path = next((d / FILE_NAME for d in (version_dir, model_dir) if (d / FILE_NAME).is_file()), None)
    if path is None:
        raise ConfigError(f"Triton backend cannot find {model_dir / FILE_NAME}.")
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
        raise ConfigError(f'{path} must map names to paths, e.g. {{"sql": "/adapters/sql"}}')
    places = {name: _place(model_dir, name, place) for name, place in table.items()}
    requests = {name: make(name, number, place) for number, (name, place) in enumerate(places.items(), start=1)}
    return Adapters(enabled=True, requests=requests)


def _place(model_dir: Path, name: str, place: str) -> str:
    local = model_dir / place  # an absolute path stays as it is
    if local.is_dir():
        if not (local / "adapter_config.json").is_file():
            raise ConfigError(f"LoRA adapter '{name}': {local} has no adapter_config.json")
        return str(local)
    if place.startswith(("/", ".")):
        raise ConfigError(f"LoRA adapter '{name}': there is no directory {local}")
    return place  # the name of a repository on a model hub
