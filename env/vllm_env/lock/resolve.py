"""Resolve a spec to exact wheels with uv, for one platform: Linux on x86-64 with the Triton release's C library."""

import re
import urllib.parse
from pathlib import Path
from typing import Any

from packaging.pylock import Package, PackageArchive, PackageWheel, Pylock, PylockSelectError
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.network import NetworkError
from vllm_env.base.workspace import Workspace
from vllm_env.triton.root import ReleaseRules

from .pins import PinnedVllm
from .pylock import PYTORCH, LockedWheel
from .spec import Spec, read_toml

_OLDEST = 5  # manylinux_2_5 is manylinux1, the oldest platform that wheels name


def resolve(
    workspace: Workspace, spec: Spec, rules: ReleaseRules, pinned: PinnedVllm
) -> tuple[LockedWheel, ...]:
    """Return a spec's wheels for one Triton release.

    Raises:
        VllmEnvError: there is no solution, or no host answered.
    """
    numpy = [rules.numpy_bound] if rules.numpy_bound else []
    # A marker that is never true drops a requirement. NumPy's bound must be an override: some packages declare numpy>=2.
    overrides = [
        *spec.overrides,
        *numpy,
        *(f'{name}; sys_platform == "never"' for name in spec.drop),
    ]
    with workspace.cache.staging() as folder:
        (folder / "in.txt").write_text(
            "\n".join([pinned.requirement, *spec.requirements, *numpy]) + "\n"
        )
        (folder / "overrides.txt").write_text("\n".join(overrides) + "\n")
        answer = folder / "pylock.toml"
        command = [
            "pip", "compile", "--quiet", "--no-config", "--no-header", "--format", "pylock.toml", "--generate-hashes",
            "--only-binary", ":all:", "--python-version", spec.python,
            "--python-platform", f"x86_64-manylinux_2_{rules.glibc}",
            "--override", folder / "overrides.txt", "--output-file", answer, folder / "in.txt",
        ]  # fmt: skip
        try:
            what, env = "resolve the requirements", {"TMPDIR": str(folder)}
            workspace.network.uv(command, what, torch_backend=spec.torch_backend, env=env)
        except NetworkError:
            raise
        except CommandError as error:
            raise _explained(workspace, error, spec) from error
        document = Pylock.from_dict(read_toml(answer))
    environment: Any = {"python_version": spec.python, "python_full_version": f"{spec.python}.0"}
    try:
        chosen = list(
            document.select(environment=environment, tags=_tags(spec.python, rules.glibc))
        )
    except PylockSelectError as error:
        raise VllmEnvError(
            f"{error}.", remedy="Pin another version of that package: --with 'NAME==VERSION'."
        ) from error
    return tuple(_locked(package, file, pinned, spec) for package, file in chosen)


def _tags(python: str, glibc: int) -> list[Tag]:
    """Return the tags of compatible wheels, in pip's order of preference."""
    version = tuple(int(n) for n in python.split("."))
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(glibc, _OLDEST - 1, -1)]
    platforms += [
        "manylinux2014_x86_64",
        "manylinux2010_x86_64",
        "manylinux1_x86_64",
        "linux_x86_64",
    ]
    return [
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, f"cp{version[0]}{version[1]}", platforms),
    ]


def _locked(package: Package, file: object, pinned: PinnedVllm, spec: Spec) -> LockedWheel:
    """Return the one wheel of a package that will be installed."""
    if isinstance(file, PackageArchive):
        return _from_archive(package, file, pinned)
    assert isinstance(file, PackageWheel)  # noqa: S101 - --only-binary leaves nothing else
    version, name = str(package.version), urllib.parse.unquote(file.filename)
    # No public registry has a local version such as 2.13.0+cpu, even if this machine got it from somewhere else.
    index = PYTORCH if spec.torch_backend and "+" in version else ""
    return LockedWheel(
        str(package.name), version, name, file.hashes["sha256"], file.size or _size_of(file), index
    )


def _size_of(wheel: PackageWheel) -> int:
    file = Path(urllib.parse.unquote(urllib.parse.urlsplit(wheel.url or wheel.path or "").path))
    return file.stat().st_size if file.is_file() else 0


def _from_archive(package: Package, archive: PackageArchive, pinned: PinnedVllm) -> LockedWheel:
    """Return a wheel that is named by path or URL: the pinned one, or one from ``--with 'NAME @ URL'``."""
    place = archive.url or Path(archive.path or "").as_uri()
    if pinned.wheel and canonicalize_name(pinned.name) == package.name:
        place = pinned.wheel.as_uri()
    file = urllib.parse.unquote(place.rsplit("/", 1)[-1])
    wheel = pinned.wheel if pinned.wheel and pinned.wheel.name == file else None
    digest = archive.hashes.get("sha256") or (file_sha256(wheel) if wheel else "")
    size = wheel.stat().st_size if wheel else archive.size or 0
    return LockedWheel(
        str(package.name),
        str(package.version or parse_wheel_filename(file)[1]),
        file,
        digest,
        size,
        url=place,
    )


def _explained(workspace: Workspace, error: CommandError, spec: Spec) -> VllmEnvError:
    pin = f"{spec.distribution}=={spec.pin.value}"
    missing = rf"no version of {re.escape(pin)}|{re.escape(spec.distribution)} was not found"
    if spec.pin.kind == "release" and re.search(missing, error.tail):
        return VllmEnvError(
            f"--vllm {spec.pin.value}: the package registry has no {pin}.",
            cause=_known_versions(workspace, spec.distribution),
            remedy="Pick one of these, or pin another way: --vllm-commit, --vllm-wheel, --vllm-source.",
        )
    python = re.search(
        r"[Pp]ython>=?[\d.]+[^.]*?cannot be used|does not satisfy Python\S+", error.tail
    )
    remedy = (
        "Pick another --python."
        if python
        else "Change the pin, --with, or the spec's overrides, and try again."
    )
    what = f"The requirements of {spec.pin} for Python {spec.python} have no solution."
    return CommandError(what, tail=error.tail, remedy=remedy)


def _known_versions(workspace: Workspace, distribution: str) -> str:
    try:
        answer = workspace.network.pip_command(["index", "versions", distribution], "list versions")
    except CommandError:
        return f"It has no {distribution} at all, or does not answer."
    found = re.search(r"Available versions: (.*)", answer)
    versions = found.group(1).split(", ")[:12] if found else []
    return f"The newest that it has: {', '.join(versions)}." if versions else ""
