"""Check at load that the environment, the stub and the server belong together."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from triton_vllm.base.protocols import Log

FILE_NAME = "vllm_env.json"
REMEDY = "build it again with ./gen_vllm_env.sh, or copy the model's directory again as a whole"
FITTING: dict[tuple[str, str], str] = {}
"""Pairs of a stub's release and another release of the server, and the test that has served both.

There is none yet. A stub of 24.10 on 26.07 ends the server at the first request (signal 11): the
layout of their shared memory changes between releases.
"""
_PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
OWN_STUB_SINCE = "24.11"
"""The first release whose own stub is for Python 3.12, so that ``--triton-release`` can build."""


def check(model_dir: Path, server: str, log: Log) -> None:
    """Compare the manifest with the model's files and with the server.

    Args:
        model_dir: the model's folder.
        server: the server's release. An empty string if it is not known.
        log: reports what the model was built for, and what cannot be compared.

    Raises:
        ConfigError: the manifest cannot be read, a file's size differs from the manifest, an
            unpacked environment has no program, or the model was built for another release of
            Triton or another kind of machine.
    """
    path = model_dir / FILE_NAME
    # A model that was made by hand has no manifest.
    if not path.is_file():
        log.info(f"no {FILE_NAME}, so nothing to check the environment against")
        return
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}; {REMEDY}") from None
    if not isinstance(manifest, dict):
        raise ConfigError(f"{path} holds no JSON object; {REMEDY}")
    _compare_platforms(manifest)
    for part in ("archive", "stub"):
        _compare_sizes(model_dir, manifest.get(part) or {})
    _require_program(model_dir, manifest.get("archive") or {})
    _compare_releases(manifest, server, log)
    vllm = manifest.get("vllm") or {}
    commit = f" (commit {vllm['commit']})" if vllm.get("commit") else ""
    log.info(
        f"built for vLLM {vllm.get('version', '?')}{commit}, Python {manifest.get('python', '?')}, "
        f"Triton {manifest.get('triton_release', '?')} on {manifest.get('built_at', '?')}"
    )


def _compare_platforms(manifest: dict[str, Any]) -> None:
    """Raise a ConfigError if the model was built for another kind of processor.

    A stub for another one does not start, so this code does not run. But the model may use the
    server's own stub, or its stub was replaced.
    """
    machine = os.uname().machine
    here = _PLATFORMS.get(machine, machine)
    # Builds of earlier versions were for x86-64 only.
    built_for = (manifest.get("spec") or {}).get("platform") or _PLATFORMS["x86_64"]
    if here != built_for:
        raise ConfigError(
            f"this model was built for {built_for}, and this machine is {here}: "
            f"build it again with ./gen_vllm_env.sh on this machine, or serve it on {built_for}"
        )


def _compare_sizes(model_dir: Path, entry: dict[str, Any]) -> None:
    """Raise a ConfigError if a file has another size than the manifest's ``entry`` of it says."""
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


def _require_program(model_dir: Path, entry: dict[str, Any]) -> None:
    """Raise a ConfigError if an unpacked environment has lost its modes or links.

    ``entry`` is the manifest's entry ``archive``: it names the environment's folder or file.
    """
    folder = model_dir / str(entry.get("name"))
    python = folder / "bin" / "python"
    # vLLM's processes are started with this Python. If it cannot be used and PATH has another one,
    # the stub has ended before this line: see docs/troubleshooting.md.
    if folder.is_dir() and not os.access(python, os.X_OK):
        raise ConfigError(
            f"{python} is no program: an object store keeps neither modes nor links, so the layout "
            "`directory` cannot come from one; build the model with --layout parts"
        )


def _compare_releases(manifest: dict[str, Any], server: str, log: Log) -> None:
    """Raise a ConfigError if the model was built for a release of Triton that does not fit.

    Args:
        manifest: the model's manifest.
        server: the server's release. An empty string if it is not known.
        log: warns if releases cannot be compared.
    """
    built_for = str(manifest.get("triton_release") or "")
    if not built_for:
        log.warning(
            f"{FILE_NAME} names no release of Triton, so it is not compared with the server's; "
            "if the first request ends the server, build the model again"
        )
        return
    if not server:
        log.warning(
            f"the release of this server is not known; the model was built for Triton {built_for}, "
            "and with another release the first request may end the server"
        )
        return
    servers = manifest.get("servers")
    # 1) A model with a stub of its own, which is for one release
    if not servers:
        if server != built_for and (built_for, server) not in FITTING:
            raise ConfigError(_refusal(manifest, server, "its stub cannot talk to"))
        return
    # 2) A model that uses the server's own stub: it fits releases from `since` until `before`, of
    #    those that were known when it was built. All are written YY.MM, so they compare as strings.
    if server > servers["known"]:
        log.warning(
            f"Triton {server} is newer than {servers['known']}, the newest release that was known "
            f"when this model was built for {built_for}"
        )
    elif server < servers["since"] or (servers["before"] and server >= servers["before"]):
        raise ConfigError(_refusal(manifest, server, "other rules hold for"))


def _refusal(manifest: dict[str, Any], server: str, reason: str) -> str:
    """Return the message for a server that does not fit, with the commands that help.

    Args:
        manifest: the model's manifest.
        server: the server's release.
        reason: stands before "this server" in the message.
    """
    built_for = manifest["triton_release"]
    profile = (manifest.get("spec") or {}).get("profile") or "cuda"
    how = "./gen_vllm_env.sh in its container, or with --triton-root DIR"
    # For these releases, a model can be built without the server.
    if server >= OWN_STUB_SINCE:
        is_own_python = str(manifest.get("python")).startswith("3.12.")
        python = "" if is_own_python else " --python 3.12"
        option = f"--profile {profile} --triton-release {server}{python}"
        how = f"./gen_vllm_env.sh {option}, or ./gen_vllm_env.sh in its container"
    return (
        f"this model was built for Triton {built_for}, and {reason} this server, which is "
        f"Triton {server}: build it again for {server} ({how}), or serve it with Triton "
        f"{built_for} (nvcr.io/nvidia/tritonserver:{built_for}-py3)"
    )
