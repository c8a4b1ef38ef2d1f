"""Wheels in the cache, one for each key of what it was fetched or built from."""

from pathlib import Path

from vllm_env.base.cache import key_of, touch
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.sources import masked
from vllm_env.base.workspace import Workspace


def cached_wheel(folder: Path) -> Path | None:
    """Return the wheel of a cache entry, or None."""
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        return None
    touch(folder)
    # A dry run has a cache of links. Resolved, the path is the one that a build would use.
    return wheel.resolve()


def keep_wheel(staging: Path, folder: Path) -> Path | None:
    """Move the fetched or built wheel into the cache and return it; None if there is no wheel."""
    wheel = next(staging.glob("*.whl"), None)
    if wheel is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return wheel.replace(folder / wheel.name)


def folder_of_url(workspace: Workspace, url: str) -> Path:
    """Return the cache entry of the wheel of a URL."""
    return workspace.cache.path("wheels", key_of(url))


def fetch_wheel(workspace: Workspace, url: str, what: str) -> Path:
    """Return the wheel of a URL from the cache, or fetch it; ``what`` names it in messages.

    Raises:
        VllmEnvError: it cannot be fetched, or it is no wheel.
    """
    folder = folder_of_url(workspace, url)
    wheel = cached_wheel(folder)
    if wheel:
        return wheel
    with workspace.cache.staging() as staging:
        workspace.network.pip_command(
            ["download", "--no-deps", "--quiet", "--dest", staging, url],
            f"download {masked(url)}",
            # TMPDIR: a killed pip then leaves nothing in other folders.
            env={"TMPDIR": str(staging)},
            remedy="Check the URL of the wheel.",
        )
        wheel = keep_wheel(staging, folder)
    if wheel is None:
        # pip download accepts a source archive, too.
        raise VllmEnvError(f"{what} is not a wheel.", remedy="Give the URL of a .whl file.")
    return wheel
