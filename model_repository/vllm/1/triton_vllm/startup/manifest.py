"""Check at load that the environment and the stub next to config.pbtxt were built together."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME = "vllm_env.json"
REMEDY = "build it again with ./gen_vllm_env.sh, or copy the model's directory again as a whole"


def check(model_dir: Path) -> str:
    """Compare the manifest with the files, and return a line for the log.

    Raises:
        ConfigError: the manifest cannot be read, or a file's size differs from the manifest.
    """
    path = model_dir / FILE_NAME
    # A model that was made by hand has no manifest.
    if not path.is_file():
        return f"no {FILE_NAME}, so nothing to check the environment against"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}; {REMEDY}") from None
    if not isinstance(manifest, dict):
        raise ConfigError(f"{path} holds no JSON object; {REMEDY}")
    for part in ("archive", "stub"):
        _compare(model_dir, manifest.get(part) or {})
    vllm = manifest.get("vllm") or {}
    commit = f" (commit {vllm['commit']})" if vllm.get("commit") else ""
    return (
        f"built for vLLM {vllm.get('version', '?')}{commit}, Python {manifest.get('python', '?')}, "
        f"Triton {manifest.get('triton_release', '?')} on {manifest.get('built_at', '?')}"
    )


def _compare(model_dir: Path, entry: dict[str, Any]) -> None:
    file = model_dir / str(entry.get("name"))
    # An unpacked environment has no archive.
    if not file.is_file():
        return
    # Only sizes are compared. Hashing gigabytes would delay every start; `verify` does that.
    expected = entry.get("size")
    size = file.stat().st_size
    if isinstance(expected, int) and size != expected:
        raise ConfigError(
            f"{file} has {size} bytes, but {FILE_NAME} says {expected}: "
            f"it belongs to another build; {REMEDY}"
        )
