"""The rules for an unpacked environment: the loader's own, and mistakes that would cause errors at the first request.

The loader's rules for archives are checked when one is unpacked (layout/archive.py). The rules here read the unpacked tree,
so they apply to every layout. conda-pack refuses editable packages when it plans an archive (layout/tar.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vllm_env.base.errors import REBUILD, VllmEnvError
from vllm_env.triton.root import rules_of

_OF_PYTHON = ("pip", "setuptools", "wheel")  # an interpreter's conda package may contain them


@dataclass(frozen=True)
class Expected:
    """The expected properties of an environment, from its lock or its manifest.

    Attributes:
        python: the stub's Python (``3.11``).
        release: the stub's Triton release (``24.10``).
        versions: versions of distributions by normalised name.
        complete: whether ``versions`` lists all installed distributions.
        profile: ``cpu`` or ``cuda``.
    """

    python: str
    release: str
    versions: dict[str, str]
    complete: bool = False
    profile: str = "cpu"


def check_tree(environment: Path, expected: Expected) -> None:
    """Raise a VllmEnvError if Triton would refuse an unpacked environment, or its first request would fail."""
    if not (environment / "bin" / "activate").is_file():
        raise VllmEnvError(
            f"{environment} has no bin/activate.",
            cause="Triton refuses an environment without it (stub_launcher.cc), even where it does not run it.",
            remedy=REBUILD,
        )
    packages = _check_python(environment, expected.python)
    _check_distributions(installed(packages), expected)


def _check_python(environment: Path, python: str) -> Path:
    """Return the ``site-packages`` of the stub's Python; raise a VllmEnvError if the environment lacks that Python."""
    packages = environment / "lib" / f"python{python}" / "site-packages"
    libraries = {p.name for p in environment.glob("lib/libpython3.*.so.*")}
    if (
        not any(name.startswith(f"libpython{python}.so") for name in libraries)
        or not packages.is_dir()
    ):
        has = ", ".join(sorted(libraries)) or "none"
        raise VllmEnvError(
            f"{environment} has no Python {python}, which the stub embeds.",
            cause=f"The stub loads libpython{python} from lib/, and there is: {has}.",
            remedy=f"Build it with --python {python}, or with a stub of its own Python: --stub source.",
        )
    return packages


def installed(packages: Path) -> dict[str, str]:
    """Return the versions of the distributions in a ``site-packages`` folder, by normalised name."""
    stems = (
        p.name.removesuffix(".dist-info").rpartition("-") for p in packages.glob("*.dist-info")
    )
    return {str(canonicalize_name(name)): version for name, _, version in stems if name}


def _check_distributions(found: dict[str, str], expected: Expected) -> None:
    check_versions(found, expected.release)
    wrong = differing(found, expected.versions)
    if expected.complete:
        wrong += [
            f"{name} {found[name]} is not in it"
            for name in found
            if name not in {*expected.versions, *_OF_PYTHON}
        ]
    if wrong:
        raise VllmEnvError(
            f"The environment is not what its lock says: {'; '.join(wrong[:5])}{' …' if len(wrong) > 5 else ''}.",
            cause="It was changed after it was built, or the lock is another one's.",
            remedy=REBUILD,
        )


def differing(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return a line for each distribution that is missing or has another version than wanted; "" accepts any version."""
    return [
        f"{name} is {found.get(name, 'missing')} and not {version}"
        for name, version in wanted.items()
        if version and not is_same_version(found.get(name, ""), version)
    ]


def is_same_version(one: str, other: str) -> bool:
    """Return whether version ``one`` matches ``other`` by PEP 440: if ``other`` has no local part, any local part matches.

    PyTorch's wheels on the registry are 2.13.0 in their metadata and 2.13.0+cu130 in ``torch.__version__``.
    """
    try:
        found, wanted = Version(one), Version(other)
    except InvalidVersion:
        return one == other
    return found == wanted or (wanted.local is None and Version(found.public) == wanted)


def check_versions(versions: Mapping[str, str], release: str) -> None:
    """Raise a VllmEnvError if setuptools is missing, or a stub of this release cannot read the arrays of this NumPy."""
    if "setuptools" not in versions:
        raise VllmEnvError(
            "The environment has no setuptools.",
            cause="torch.utils.cpp_extension imports it, and vLLM that.",
            remedy="Add it: --with setuptools.",
        )
    numpy = versions.get("numpy", "")
    if rules_of(release).numpy_bound and int(numpy.partition(".")[0] or 0) >= 2:
        raise VllmEnvError(
            f"NumPy {numpy} does not go with a stub of Triton {release}.",
            cause="Stubs before 24.11 have pybind11 2.10, which cannot read arrays of NumPy 2: the first request aborts them.",
            remedy="Leave NumPy to the tool (it asks for numpy<2), or use Triton 24.11 or newer.",
        )
