"""Check the rules for an unpacked environment, whatever its layout.

They are the loader's own rules, and mistakes that would cause errors at the first request.
"""
# The loader's rules for archives are checked when one is unpacked (layout/archive.py). conda-pack
# refuses editable packages when it chooses the files of an archive (layout/tar.py).

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import Specifier
from packaging.utils import canonicalize_name
from packaging.version import Version

from vllm_env.base.errors import REBUILD_REMEDY, VllmEnvError
from vllm_env.triton.root import rules_of

# An interpreter's conda package may contain them, so they need not be in the lock.
_OF_PYTHON = ("pip", "setuptools", "wheel")


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

    @property
    def activates(self) -> bool:
        """Return whether the release's launcher sources ``bin/activate``."""
        return rules_of(self.release).activates


def check_tree(environment: Path, expected: Expected) -> None:
    """Check that Triton would accept an unpacked environment and answer its first request.

    Raises:
        VllmEnvError: names the rule and the remedy.
    """
    if not (environment / "bin" / "activate").is_file():
        raise VllmEnvError(
            f"{environment} has no bin/activate.",
            cause=(
                "Triton refuses an environment without it (stub_launcher.cc). "
                "Releases since 25.08 do so, too, although they do not run it."
            ),
            remedy=REBUILD_REMEDY,
        )
    packages = _check_python(environment, expected.python)
    _check_distributions(_installed(packages), expected)


def _check_python(environment: Path, python: str) -> Path:
    """Return the ``site-packages`` of the stub's Python, if the environment has that Python."""
    packages = environment / "lib" / f"python{python}" / "site-packages"
    libraries = sorted(path.name for path in environment.glob("lib/libpython3.*.so.*"))
    embedded = [name for name in libraries if name.startswith(f"libpython{python}.so")]
    if not embedded or not packages.is_dir():
        has = ", ".join(libraries) or "none"
        raise VllmEnvError(
            f"{environment} has no Python {python}, which the stub embeds.",
            cause=f"The stub loads libpython{python} from lib/, and there is: {has}.",
            remedy=(
                f"Build it with --python {python}, or with a stub of its own Python: --stub source."
            ),
        )
    return packages


def _installed(packages: Path) -> dict[str, str]:
    """Return the versions of the distributions in ``site-packages``, by normalised name."""
    # The folders are named NAME-VERSION.dist-info. importlib.metadata would read a file of each.
    parts = [path.stem.rpartition("-") for path in packages.glob("*.dist-info")]
    return {str(canonicalize_name(name)): version for name, _, version in parts if name}


def _check_distributions(installed: dict[str, str], expected: Expected) -> None:
    """Refuse distributions that do not work with the stub, or are not those of the lock."""
    check_versions(installed, expected.release)
    wrong = differing(installed, expected.versions)
    if expected.complete:
        extra = installed.keys() - expected.versions.keys() - {*_OF_PYTHON}
        wrong += [f"{name} {installed[name]} is not in it" for name in sorted(extra)]
    if wrong:
        more = " …" if len(wrong) > 5 else ""
        raise VllmEnvError(
            f"The environment is not what its lock says: {'; '.join(wrong[:5])}{more}.",
            cause="It was changed after it was built, or this is the lock of another environment.",
            remedy=REBUILD_REMEDY,
        )


def differing(installed: Mapping[str, str], locked: Mapping[str, str]) -> list[str]:
    """Return a line for each distribution that is missing or has another version than locked.

    Args:
        installed: the installed versions.
        locked: the expected versions; an empty string accepts any version.
    """
    return [
        f"{name} is {installed.get(name, 'missing')} and not {version}"
        for name, version in locked.items()
        if version and not is_same_version(installed.get(name, ""), version)
    ]


def is_same_version(one: str, other: str) -> bool:
    """Return whether version ``one`` matches ``other`` by PEP 440.

    If ``other`` has no local part, any local part matches.
    """
    # PyTorch's wheels on the registry are 2.13.0 in their metadata and 2.13.0+cu130 in
    # torch.__version__.
    try:
        return Specifier(f"=={other}").contains(one, prereleases=True)
    # One of them does not follow PEP 440.
    except ValueError:
        return one == other


def check_versions(versions: Mapping[str, str], release: str) -> None:
    """Check the distributions that every first request needs.

    Raises:
        VllmEnvError: setuptools is missing, or a stub of this release cannot read the arrays of
            this NumPy.
    """
    if "setuptools" not in versions:
        raise VllmEnvError(
            "The environment has no setuptools.",
            cause="vLLM imports torch.utils.cpp_extension, which imports setuptools.",
            remedy="Add it: --with setuptools.",
        )
    numpy = versions.get("numpy")
    if numpy and rules_of(release).numpy_bound and Version(numpy).major >= 2:
        raise VllmEnvError(
            f"NumPy {numpy} does not work with a stub of Triton {release}.",
            cause=(
                "Stubs before 24.11 have pybind11 2.10, which cannot read arrays of NumPy 2: "
                "the first request aborts them."
            ),
            remedy="Do not pin NumPy (the build asks for numpy<2), or use Triton 24.11 or newer.",
        )
