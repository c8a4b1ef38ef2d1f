"""Turns a pin into the one requirement that names this very vLLM.

A release is ``distribution==X.Y.Z``. A commit is looked for in the vLLM project's per-commit wheel index and else built
from git. A wheel is taken as it is. A source tree is built into a wheel, because an editable install only points to the
tree and cannot be packed.
"""

from __future__ import annotations

import os
import re
import sys
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from vllm_env.base import cache
from vllm_env.base.errors import CommandError, UsageError, VllmEnvError
from vllm_env.base.process import run
from vllm_env.prefix.relocate import EPOCH

if TYPE_CHECKING:
    from .pip_config import PipConfig
    from .spec import Pin, Spec

_WHEEL_INDEX = "https://wheels.vllm.ai"
_GIT_URL = "https://github.com/vllm-project/vllm.git"
# git refuses a tree of another owner, and in a container the mounted tree is always one
_ANY_OWNER = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}


@dataclass(frozen=True)
class PinnedVllm:
    """The requirement of the pinned vLLM, further options of uv for it, and what is known of where it comes from."""

    requirement: str
    commit: str = ""
    origin: str = ""
    wheel: Path | None = None
    uv_arguments: tuple[str, ...] = ()


def resolve_pin(spec: Spec, root: Path, pip: PipConfig, sources: list[str], *, offline: bool) -> PinnedVllm:
    """Return what to install for a spec's pin; ``sources`` are uv's options for where build requirements come from.

    Raises:
        VllmEnvError: the wheel, tree or commit is not to be had, or not without network.
    """
    pin = spec.pin
    if pin.kind == "release":
        return PinnedVllm(f"{spec.distribution}=={pin.value}", origin="release")
    if pin.kind == "wheel":
        return _from_wheel(pin, root, offline=offline)
    if pin.kind == "source":
        tree = Path(pin.value).resolve()
        commit = _head_of(tree)
        wheel = _build_wheel(tree, spec, root, pip, sources, commit=commit)
        return _of_wheel(wheel, commit=commit, origin=f"source {tree}")
    return _from_commit(spec, root, pip, sources, offline=offline)


def _from_wheel(pin: Pin, root: Path, *, offline: bool) -> PinnedVllm:
    if "://" not in pin.value:
        return _of_wheel(Path(pin.value).resolve(), origin=f"wheel {Path(pin.value).name}")
    name = pin.value.split("#")[0].rsplit("/", 1)[-1]
    target = root / "wheels" / cache.key_of(pin.value) / name
    if not target.is_file():
        if offline:
            raise _not_offline(pin)
        with cache.staging(root) as folder:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, pin.value]
            temporary = {"TMPDIR": str(folder)}  # so that a killed pip leaves nothing elsewhere
            run(command, what=f"download {pin.value}", env=temporary, remedy="Check the URL of the wheel.")
            found = next(folder.glob("*.whl"), None)
            if found is None:
                raise VllmEnvError(f"{pin} is not a wheel.", remedy="Give the URL of a .whl file.")
            target = target.parent / found.name
            target.parent.mkdir(parents=True, exist_ok=True)
            found.replace(target)
    return _of_wheel(target, origin=f"wheel {pin.value}")


def _not_offline(pin: Pin) -> VllmEnvError:
    return VllmEnvError(
        f"--offline: {pin} is not in the cache.",
        cause="It was never fetched on this machine.",
        remedy="Build once with network, or give the wheel's file: --vllm-wheel PATH.",
    )


def _of_wheel(wheel: Path, *, origin: str, commit: str = "") -> PinnedVllm:
    """Check that a file is a whole wheel and name it as a requirement with its digest."""
    try:
        name, _, _, _ = parse_wheel_filename(wheel.name)
        with zipfile.ZipFile(wheel) as archive:
            metadata = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
            declared = HeaderParser().parsestr(archive.read(metadata).decode())["Name"]
            if not any(n == "vllm/__init__.py" for n in archive.namelist()):
                raise UsageError(f"The wheel {wheel} holds no vllm package.", remedy="Give a wheel of vLLM.")
    except (InvalidWheelFilename, zipfile.BadZipFile, StopIteration, OSError) as error:
        raise UsageError(
            f"{wheel} is not a wheel that can be installed: {error or 'it has no metadata'}.",
            remedy="Download it again; its name must be as the wheel format has it (NAME-VERSION-PYTHON-ABI-PLATFORM.whl).",
        ) from error
    del name
    requirement = f"{declared} @ {wheel.as_uri()}#sha256={cache.file_sha256(wheel)}"
    return PinnedVllm(requirement, commit=commit, origin=origin, wheel=wheel)


def _from_commit(spec: Spec, root: Path, pip: PipConfig, sources: list[str], *, offline: bool) -> PinnedVllm:
    sha = spec.pin.value
    index = (spec.wheel_index or _WHEEL_INDEX).rstrip("/")
    wheel = _wheel_of_commit(index, spec, root, pip, offline=offline)
    if wheel:
        return _of_wheel(wheel, commit=sha, origin=f"per-commit wheel index {index}")
    tree = root / "sources" / sha
    if not (tree / ".complete").is_file():
        if offline:
            raise _not_offline(spec.pin)
        _clone(spec.git_url or _GIT_URL, sha, tree, root)
    built = _build_wheel(tree, spec, root, pip, sources, commit=sha)
    return _of_wheel(built, commit=sha, origin=f"git {spec.git_url or _GIT_URL} at {sha}")


def _wheel_of_commit(index: str, spec: Spec, root: Path, pip: PipConfig, *, offline: bool) -> Path | None:
    """Fetch the wheel of a commit from the per-commit index, or return None if that has none."""
    sha = spec.pin.value
    folder = root / "wheels" / cache.key_of(index, sha, spec.python, spec.torch_backend)
    known = next(folder.glob("*.whl"), None)
    if known or offline:
        return known
    # the index keeps a folder per variant ("cpu", "cu129") beside the default build
    places = [f"{index}/{sha}/{spec.torch_backend}"] if spec.torch_backend else []
    with cache.staging(root) as staging:
        for place in (*places, f"{index}/{sha}"):
            # pip's own index would answer with the newest release for a commit that has no wheel: leave it out
            command: list[object] = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--isolated",
                "--no-deps",
                "--quiet",
                "--pre",
            ]
            command += ["--dest", staging, "--python-version", spec.python, "--only-binary", ":all:"]
            command += ["--retries", "1", *(["--cert", pip.cert] if pip.cert else []), "--index-url", place, "vllm"]
            try:
                run(command, what=f"find the wheel of commit {sha}", env={"TMPDIR": str(staging)})
            except CommandError:
                continue
            folder.mkdir(parents=True, exist_ok=True)
            found = next(staging.glob("*.whl"))
            return found.replace(folder / found.name)
    return None


def _clone(url: str, sha: str, tree: Path, root: Path) -> None:
    remedy = "Check the SHA and --git-url, and that the machine reaches it."
    with cache.staging(root) as staging:
        work = staging / "vllm"
        run(["git", "init", "--quiet", work], what="make a git repository", remedy="Install git.")
        fetch = ["git", "-C", work, "fetch", "--quiet", "--depth", "1", url, sha]
        run(fetch, what=f"fetch commit {sha} from {url}", env={"GIT_TERMINAL_PROMPT": "0"}, remedy=remedy)
        run(["git", "-C", work, "checkout", "--quiet", "FETCH_HEAD"], what=f"check out {sha}", remedy=remedy)
        (work / ".complete").touch()
        tree.parent.mkdir(parents=True, exist_ok=True)
        cache.remove_tree(tree)
        work.rename(tree)


def _build_wheel(tree: Path, spec: Spec, root: Path, pip: PipConfig, sources: list[str], *, commit: str) -> Path:
    """Build a wheel of a source tree with the requested Python."""
    with cache.staging(root) as staging:
        # the times in the wheel's ZIP: without it each build of the same tree would have a digest of its own
        environment = {"SOURCE_DATE_EPOCH": str(EPOCH), "TMPDIR": str(staging), **_ANY_OWNER, **pip.uv_environment()}
        if commit:  # let vLLM's build take the compiled parts of this very commit instead of compiling them
            environment |= {"VLLM_PRECOMPILED_WHEEL_COMMIT": commit}
        if os.environ.get("VLLM_USE_PRECOMPILED"):
            environment["VLLM_USE_PRECOMPILED"] = "1"
        uv = Path(sys.executable).parent / "uv"
        command = [uv, "build", "--wheel", "--python", spec.python, "--out-dir", staging, *sources, tree]
        run(
            command,
            what=f"build a wheel of {tree}",
            env=environment,
            remedy="An editable install cannot be packed, so the tree must build; VLLM_USE_PRECOMPILED=1 spares the compiler.",
        )
        wheel = next(staging.glob("*.whl"))
        folder = root / "wheels" / cache.file_sha256(wheel)[:32]
        folder.mkdir(parents=True, exist_ok=True)
        return wheel.replace(folder / wheel.name)


def _head_of(tree: Path) -> str:
    """Return the commit that a source tree stands at, or nothing if it is no clean git checkout."""
    if not (tree / ".git").exists():
        return ""
    git = ["git", "-C", tree]
    try:
        # untracked files do not count: an earlier build leaves its build folder there
        state = [*git, "status", "--porcelain", "--untracked-files=no"]
        dirty = run(state, what="read the state of the source tree", env=_ANY_OWNER).strip()
        return "" if dirty else run([*git, "rev-parse", "HEAD"], what="read its commit", env=_ANY_OWNER).strip()
    except CommandError:
        return ""
