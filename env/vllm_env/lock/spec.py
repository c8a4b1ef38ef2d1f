"""The spec: what to pin and pack, read from a TOML file and the command line."""

import dataclasses
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from vllm_env.base.errors import UsageError, meant
from vllm_env.base.filesystem import require_writable, write_whole
from vllm_env.base.machine import AMD64, PLATFORMS, Platform, this_platform
from vllm_env.base.sources import has_password, masked
from vllm_env.base.workspace import CHECKOUT

from .variants import cuda_of, dropped_for, overrides_for

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PinKind = Literal["release", "commit", "wheel", "source"]
DEFAULT_SPEC = CHECKOUT / "env" / "vllm_env.toml"
# Kind of pin by its key in the spec file.
_PIN_KEYS: dict[str, PinKind] = {
    "vllm": "release",
    "commit": "commit",
    "wheel": "wheel",
    "source": "source",
}
_LIST_KEYS = ("requirements", "drop", "overrides")
_STRING_KEYS = (
    "distribution",
    "python",
    "torch_backend",
    "wheel_index",
    "git_url",
    "triton_release",
)
PIN_OPTIONS: dict[PinKind, str] = {
    "release": "--vllm",
    "commit": "--vllm-commit",
    "wheel": "--vllm-wheel",
    "source": "--vllm-source",
}
"""The command-line option for each kind of pin."""
_EXAMPLE = "See env/vllm_env.toml for an example."


@dataclass(frozen=True)
class Pin:
    """Which vLLM to install.

    ``value`` is a release number, a commit's full SHA, a wheel's path or URL, or a source folder.
    """

    kind: PinKind
    value: str

    def __str__(self) -> str:
        return f"{PIN_OPTIONS[self.kind]} {masked(self.value)}"


@dataclass(frozen=True)
class Spec:
    """Everything that determines the environment before it is resolved.

    Attributes:
        profile: ``cpu`` or ``cuda``.
        pin: which vLLM.
        distribution: vLLM's name in the registry.
        python: a version such as ``3.11``.
        torch_backend: uv's name of a torch build ("cpu"), or a CUDA variant ("cu129"); "" takes
            the registry's build.
        requirements: further requirements.
        drop: distributions that are never installed.
        overrides: requirements that replace those of packages.
        wheel_index: the index of commits and CUDA variants; "" takes vLLM's.
        git_url: vLLM's repository; "" takes vLLM's own.
        triton_release: the release that will serve, if it is not here, such as ``26.07``.
        platform: the machines that it is for. No spec file has it: one spec serves all of them.
        path: the file that the spec was read from; it does not count in comparisons.
        is_default: whether the command line changed nothing; it does not count either.
    """

    profile: str
    pin: Pin
    distribution: str
    python: str
    torch_backend: str = ""
    requirements: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    wheel_index: str = ""
    git_url: str = ""
    triton_release: str = ""
    platform: str = AMD64.name
    path: Path = dataclasses.field(default=DEFAULT_SPEC, compare=False)
    is_default: bool = dataclasses.field(default=True, compare=False)

    @property
    def target(self) -> Platform:
        """Return the machines that it is for."""
        return PLATFORMS[self.platform]


@dataclass(frozen=True)
class Overrides:
    """The command line's changes to a profile; ``None`` and ``()`` change nothing."""

    pin: Pin | None = None
    python: str | None = None
    distribution: str | None = None
    packages: tuple[str, ...] = ()
    wheel_index: str | None = None
    git_url: str | None = None
    triton_release: str | None = None
    torch_backend: str | None = None


def load_spec(
    profile: str, overrides: Overrides, path: Path | None = None, platform: str = ""
) -> Spec:
    """Read a profile's table and apply the command line's changes.

    Args:
        profile: the profile's name.
        overrides: the command line's changes.
        path: the spec file, if it is not the default one.
        platform: the machines that the environment is for; "" for those like this one.

    Raises:
        UsageError: a value is missing or not valid.
    """
    file = path or DEFAULT_SPEC
    table = _profile_table(file, profile)
    spec = _from_table(table, profile, file)
    spec = dataclasses.replace(spec, platform=platform or this_platform().name)
    changes: dict[str, Any] = {name: value for name, value in vars(overrides).items() if value}
    # --with adds packages to the profile's. Every other option replaces the profile's value.
    packages = changes.pop("packages", ())
    new_packages = tuple(package for package in packages if package not in spec.requirements)
    changes["requirements"] = spec.requirements + new_packages
    new_spec = dataclasses.replace(spec, **changes)
    _validate(new_spec)
    _refuse_unused(overrides, new_spec)
    spec = _completed(spec)
    new_spec = _completed(new_spec)
    # Compared with the spec without these changes, by value: an option that repeats the profile's
    # own value changes nothing, so the committed lock still fits.
    return dataclasses.replace(new_spec, is_default=new_spec == spec)


def _completed(spec: Spec) -> Spec:
    """Return a spec with its pin as locks spell it, and with what its CUDA variant needs."""
    return dataclasses.replace(
        spec,
        pin=_normalised(spec.pin),
        drop=dropped_for(spec.torch_backend, spec.drop),
        overrides=overrides_for(spec.torch_backend, spec.overrides),
    )


def read_toml(file: Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        ValueError: the file is not valid TOML.
    """
    return tomllib.loads(file.read_text("utf-8"))


def only_profile(path: Path) -> str | None:
    """Return the profile of a spec that has only one, as ``--save`` writes them; else None."""
    try:
        profiles = read_toml(path)["profile"]
        return str(next(iter(profiles))) if len(profiles) == 1 else None
    except (OSError, ValueError, KeyError, TypeError):
        # load_spec() reads the file afterwards and reports the error.
        return None


def check_save(spec: Spec, file: Path) -> None:
    """Raise a UsageError if ``--save`` would replace a file that the user still needs."""
    if file.suffix != ".toml":
        raise UsageError(
            f"--save {file}: a spec is a .toml file.", remedy=f"Write {file.name}.toml."
        )
    values = [spec.pin.value, spec.wheel_index, spec.git_url, *spec.requirements, *spec.overrides]
    for value in filter(has_password, values):
        raise UsageError(
            f"--save {file}: {masked(value)} has a password, which every reader would see.",
            remedy="Put the password into ~/.netrc, and leave it out of the URL.",
        )
    require_writable(file.parent, f"The folder of --save {file}")
    # Only a spec of this profile alone may be replaced, and not the one that is read: it would lose
    # its other profiles, its comments, or the values that the command line has changed.
    is_source = file.resolve() == spec.path.resolve()
    if file.exists() and (is_source or only_profile(file) != spec.profile):
        raise UsageError(
            f"--save {file}: the file exists and will not be replaced.",
            cause=f"It is the spec in use, or not a spec of the profile {spec.profile} alone.",
            remedy="Name another file.",
        )


def save_spec(spec: Spec, file: Path) -> None:
    """Write a spec as the table of one profile."""
    value = spec.pin.value
    if _is_path(spec.pin):
        folder = file.parent.absolute()
        place = Path(value).absolute()
        # Relative below the spec's folder, so that both can be moved to another machine together.
        value = str(place.relative_to(folder) if place.is_relative_to(folder) else place)
    key = next(key for key, kind in _PIN_KEYS.items() if kind == spec.pin.kind)
    table = {key: value} | {name: getattr(spec, name) for name in (*_STRING_KEYS, *_LIST_KEYS)}
    # resolve(): if the file is a link, the link stays and its target is written.
    write_whole(file.resolve(), tomli_w.dumps({"profile": {spec.profile: table}}))


def _profile_table(file: Path, profile: str) -> dict[str, Any]:
    """Return a profile's table in a spec file, whose values are not checked yet.

    Raises:
        UsageError: the file cannot be read, or does not have this table.
    """
    try:
        document = read_toml(file)
    except OSError as error:
        raise UsageError(
            f"The spec {file} cannot be read: {error.strerror}.", remedy="Check the path in --spec."
        ) from error
    except ValueError as error:
        raise UsageError(f"The spec {file} is not TOML: {error}.", remedy=_EXAMPLE) from error
    _refuse_unknown(document, {"profile"}, f"the spec {file}")
    profiles = document.get("profile", {})
    if profile not in profiles:
        raise UsageError(
            f"The spec {file} has no profile {profile!r}.",
            remedy=f"It has: {', '.join(profiles) or 'none'}.",
        )
    table = profiles[profile]
    if not isinstance(table, dict):
        raise UsageError(f"profile.{profile} in {file} is not a table.", remedy=_EXAMPLE)
    return table


def _from_table(table: dict[str, Any], profile: str, file: Path) -> Spec:
    """Return the spec of a profile's table.

    Raises:
        UsageError: a key is not known, a value has another type, or there is not exactly one pin.
    """
    where = f"[profile.{profile}] of {file}"
    _refuse_unknown(table, {*_PIN_KEYS, *_LIST_KEYS, *_STRING_KEYS}, where)
    # dataclasses do not check types, and a wrong one would fail later, far from the spec file.
    for key, value in table.items():
        if key in _LIST_KEYS:
            is_valid = isinstance(value, list) and all(isinstance(item, str) for item in value)
            form = 'a list of strings, such as ["…"]'
        else:
            is_valid = isinstance(value, str)
            form = 'a string, such as "…"'
        if not is_valid:
            raise UsageError(
                f"{key} in {where} must be {form}, not {value!r}.", remedy="Fix the value."
            )
    pins = [Pin(kind, table[key]) for key, kind in _PIN_KEYS.items() if table.get(key)]
    if len(pins) != 1:
        raise UsageError(
            f"{where} must pin exactly one vLLM, not {len(pins)}.",
            remedy=f"Keep one of {', '.join(_PIN_KEYS)}.",
        )
    pin = pins[0]
    if _is_path(pin):
        # Relative to the spec's folder: the spec then means the same in every working folder.
        pin = Pin(pin.kind, str(file.parent.absolute() / pin.value))
    strings = {key: table[key] for key in _STRING_KEYS if key in table}
    lists = {key: tuple(table.get(key, ())) for key in _LIST_KEYS}
    fields: dict[str, Any] = {"distribution": "vllm", "python": "3.12", **strings, **lists}
    return Spec(profile=profile, pin=pin, path=file, **fields)


def _is_path(pin: Pin) -> bool:
    """Return whether a pin names a file or folder of this machine."""
    return pin.kind == "source" or (pin.kind == "wheel" and "://" not in pin.value)


def _refuse_unknown(table: dict[str, Any], known: set[str], where: str) -> None:
    """Raise a UsageError for a key that is not known; ``where`` names the table."""
    for key in table:
        if key not in known:
            raise UsageError(f"Unknown key {key!r} in {where}.", remedy=meant(key, sorted(known)))


def _validate(spec: Spec) -> None:
    """Check the values that go into commands of uv and pip, whose messages name no option of ours.

    Raises:
        UsageError: one of them is not valid.
    """
    if not re.fullmatch(r"3\.\d{1,2}", spec.python):
        raise UsageError(
            f"--python {spec.python} is not a Python version.", remedy="Write it like 3.11 or 3.12."
        )
    for requirement in (*spec.requirements, *spec.overrides):
        try:
            Requirement(requirement)
        except InvalidRequirement as error:
            raise UsageError(
                f"{requirement!r} is not a requirement: {error}.",
                remedy="Write it like ray or 'ray>=2.40'.",
            ) from error
    for name in (spec.distribution, *spec.drop):
        if not re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", name):
            raise UsageError(
                f"{name!r} is not a distribution's name.",
                remedy="Write it like vllm or torchvision.",
            )
    _validate_pin(spec.pin)


def _refuse_unused(overrides: Overrides, spec: Spec) -> None:
    """Raise a UsageError for an option that this kind of pin or profile does not use."""
    pin = spec.pin
    cuda = cuda_of(spec.torch_backend)
    if overrides.torch_backend and spec.profile == "cpu":
        raise UsageError(
            f"--cuda {cuda} has no effect with --profile cpu.", remedy="Omit one of them."
        )
    # The kind of pin that uses an option.
    used_by: dict[str, PinKind] = {
        "distribution": "release", "wheel_index": "commit", "git_url": "commit"
    }  # fmt: skip
    for name, kind in used_by.items():
        # A release for another CUDA version is on the index of commits, too.
        is_variant = name == "wheel_index" and pin.kind == "release" and cuda
        if getattr(overrides, name) and pin.kind != kind and not is_variant:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} has no effect with {pin}.",
                remedy=f"It is for {PIN_OPTIONS[kind]}: give that, or omit {option}.",
            )


def _normalised(pin: Pin) -> Pin:
    """Return a pin whose release is spelled as the locks spell it: ``0.32.0`` for ``v0.32``."""
    if pin.kind != "release":
        return pin
    try:
        version = Version(pin.value)
    # The profile's own pin counts only if no option replaces it, and _validate() then reports it.
    except InvalidVersion:
        return pin
    # PEP 440: zeros at the end make no difference. vLLM's versions have three numbers.
    numbers = list(version.release)
    while len(numbers) > 3 and not numbers[-1]:
        numbers.pop()
    numbers += [0] * (3 - len(numbers))
    # What follows the numbers stays, such as rc1.
    old = ".".join(map(str, version.release))
    new = ".".join(map(str, numbers))
    return Pin(pin.kind, str(version).replace(old, new, 1))


def _validate_pin(pin: Pin) -> None:
    """Raise a UsageError if the pin's value has the wrong form, or names no file or source tree."""
    if pin.kind == "release":
        try:
            Version(pin.value)
        except InvalidVersion as error:
            raise UsageError(f"{pin} is not a version.", remedy="Write it like 0.32.0.") from error
    # The per-commit index and a fetch from git know full SHAs only.
    elif pin.kind == "commit" and not re.fullmatch(r"[0-9a-f]{40}", pin.value):
        raise UsageError(
            f"{pin} is not a full commit SHA.",
            remedy="Give all 40 hexadecimal digits (git rev-parse COMMIT).",
        )
    elif pin.kind == "wheel" and _is_path(pin) and not Path(pin.value).is_file():
        raise UsageError(
            f"{pin}: the file does not exist.", remedy="Give the path or the URL of a .whl file."
        )
    elif pin.kind == "source" and not any(
        Path(pin.value, name).is_file() for name in ("pyproject.toml", "setup.py")
    ):
        raise UsageError(
            f"{pin} is not a Python source tree.",
            remedy="Give the folder that holds vLLM's pyproject.toml.",
        )
