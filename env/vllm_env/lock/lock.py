"""Find or make the lock of a spec: its exact conda packages and wheels, with SHA-256.

A lock is for one Triton release. It is next to the spec (``pylock.vllm_env-cpu.toml``). If the
command line changes the spec, the lock is in the cache. ``--save`` writes it next to a new spec.
"""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vllm_env.base import report
from vllm_env.base.cache import key_of
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.machine import AMD64, Platform
from vllm_env.base.sources import masked
from vllm_env.base.workspace import Workspace
from vllm_env.interpreter.layer import choose_layer
from vllm_env.triton.root import ReleaseRules

from .pins import NotKnownError, PinnedVllm, resolve_pin
from .pylock import Inputs, Lock, LockedWheel, LockFile, read_pylock, write_pylock
from .resolve import resolve
from .spec import DEFAULT_SPEC, Spec, check_save, save_spec


@dataclass(frozen=True)
class LockOptions:
    """How to make the lock.

    Attributes:
        locked: use the existing lock or fail (``--locked``).
        upgrade: resolve again even if a lock fits.
        save: file for the spec; its lock is written next to it.
    """

    locked: bool = False
    upgrade: bool = False
    save: Path | None = None


def make_lock(workspace: Workspace, spec: Spec, rules: ReleaseRules, options: LockOptions) -> Lock:
    """Return the existing lock of a spec if it fits, else make a new one and write it.

    A dry run does not write it.

    Raises:
        VllmEnvError: no lock fits, and ``--locked`` forbids a new one.
        NotKnownError: a dry run cannot know the lock.
    """
    # 1) Find a lock that fits.
    if options.save:
        # Refused before a pinned vLLM is fetched or built, which may take minutes.
        check_save(spec, options.save)
    pinned = resolve_pin(workspace, spec)
    inputs = inputs_of(spec, pinned)
    # Searched in this order: the lock that --save has written, so that the same command finds it
    # again; the one next to the spec; the cache.
    files = [workspace.cache.path("locks", key_of(inputs.document()), "pylock.toml")]
    if spec.is_default:
        files.insert(0, lock_beside(spec.path, spec.profile, spec.target))
    if options.save:
        files.insert(0, lock_beside(options.save, spec.profile, spec.target))
    fitting, drift = _find_fitting([] if options.upgrade else files, inputs, rules)

    # 2) Take it, or resolve the spec.
    if fitting:
        layer = choose_layer(workspace, spec.python, fitting.layer, target=spec.target)
        if options.locked and layer.packages and layer != fitting.layer:
            # Each machine makes its local channel from its own interpreter, so no lock can name it.
            report.note(
                f"the lock does not pin the interpreter of this machine: Python {layer} is used"
            )
        wheels = _with_files(fitting.wheels, spec, pinned)
    elif options.locked:
        raise _not_locked(spec, options, files[0], drift)
    else:
        # Offline, uv can resolve only what its cache has. A dry run reports that it cannot know
        # the lock and does not fail like a build.
        if workspace.dry_run and workspace.network.offline and not workspace.network.wheelhouse:
            raise NotKnownError(
                f"{spec.pin} is not locked yet.",
                cause="With --offline only uv's cache may have the wheels.",
            )
        layer = choose_layer(workspace, spec.python, upgrade=options.upgrade, target=spec.target)
        wheels = resolve(workspace, spec, rules, pinned)
    lock = Lock(spec, pinned, layer, wheels, inputs)

    # 3) Write it.
    if workspace.dry_run:
        return lock
    if not fitting:
        # The default spec's lock is part of the checkout: only --upgrade changes it there. The lock
        # of --save is written by _save() below.
        in_cache = options.save or (spec.path == DEFAULT_SPEC and not options.upgrade)
        # The last of the files is the one in the cache.
        write_pylock(lock, files[-1 if in_cache else 0])
    _save(lock, options.save)
    return lock


def _not_locked(spec: Spec, options: LockOptions, file: Path, drift: str) -> VllmEnvError:
    """Return the error for ``--locked`` without a lock that fits.

    Args:
        spec: the spec.
        options: the options of the command line.
        file: where the lock was looked for first.
        drift: how an existing lock differs from the spec; "" if there is none.
    """
    if spec.is_default or options.save:
        return VllmEnvError(
            f"--locked: the lock {file} does not fit this spec.",
            cause=drift or "It does not exist.",
            remedy="Omit --locked to resolve again, or use --upgrade to write the lock.",
        )
    # The file is in the cache. The user does not know it, and a dry run has a cache of its own.
    return VllmEnvError(
        f"--locked: there is no lock of {spec.path} with the options given here.",
        cause=drift or "The lock next to a spec is for the spec as it is.",
        remedy="Use --save FILE in place of --locked: it writes a spec with these options, and its "
        "lock. From then on: --spec FILE --locked.",
    )


def _save(lock: Lock, save: Path | None) -> None:
    """Write the spec and its lock for ``--save``, or report that only the cache has the lock."""
    spec = lock.spec
    if save:
        save_spec(spec, save)
        file = lock_beside(save, spec.profile, spec.target)
        write_pylock(lock, file)
        report.note(f"saved the spec {save} and its lock {file}")
    elif not spec.is_default:
        report.note(
            f"the lock of {spec.pin} is in the cache only; --save FILE keeps it, with its spec"
        )


def lock_beside(spec: Path, profile: str, platform: Platform = AMD64) -> Path:
    """Return the path of the lock for one profile of a spec on one platform."""
    # Locks for x86-64 are older than the other platforms, and have no platform in their names.
    suffix = "" if platform == AMD64 else f"-{platform.short}"
    # PEP 751 allows only ``pylock.NAME.toml``, with a NAME that has no dots.
    stem = f"{spec.stem}-{profile}{suffix}".replace(".", "-")
    return spec.with_name(f"pylock.{stem}.toml")


def inputs_of(spec: Spec, pinned: PinnedVllm) -> Inputs:
    """Return the values that a spec's lock depends on."""
    names = {field.name for field in dataclasses.fields(Inputs)} - {"pin"}
    # A pinned file counts by name and hash. On another machine it may be in another folder.
    pin = re.sub(r"@ \S*/", "@ ", pinned.requirement)
    # They go into the lock and the model's manifest, which others read.
    return Inputs(pin=masked(pin), **{name: _masked(getattr(spec, name)) for name in names})


def _masked(value: Any) -> Any:
    """Return a string, or a tuple of strings, without the passwords of URLs."""
    return masked(value) if isinstance(value, str) else tuple(map(masked, value))


def _find_fitting(
    files: list[Path], inputs: Inputs, rules: ReleaseRules
) -> tuple[LockFile | None, str]:
    """Return the first lock that fits; or None, and how the first existing lock differs."""
    first_drift = ""
    for file in filter(Path.is_file, files):
        lock = read_pylock(file)
        drift = lock.inputs.drift(inputs) or _violation(lock, rules)
        if not drift:
            return lock, ""
        # The first file is the one next to the spec, which the user knows.
        first_drift = first_drift or f"{file.name}: {drift}"
    return None, first_drift


def _violation(lock: LockFile, rules: ReleaseRules) -> str:
    """Return how a lock violates the rules of a Triton release, or ""."""
    # A lock does not record its Triton release, so its wheels are compared with the rules: a lock
    # for an older release often fits a newer one.
    numpy = next((wheel.version for wheel in lock.wheels if wheel.name == "numpy"), "")
    bound = rules.numpy_bound
    if numpy and bound and not Requirement(bound).specifier.contains(numpy):
        return f"numpy is {numpy}, and Triton since {rules.since} needs {bound}"
    for wheel in lock.wheels:
        needed = _needed_glibc(wheel.file)
        # A wheel that no index has (``url``) may be built on this machine. Its name then says
        # nothing about glibc.
        if not wheel.url and needed > rules.glibc:
            has = f"Triton since {rules.since} has 2.{rules.glibc}"
            return f"{wheel.file} needs glibc 2.{needed}, and {has}"
    return ""


def _needed_glibc(file: str) -> int:
    """Return the minor version of the oldest glibc for which a wheel was made; 0 for any."""
    return min(map(int, re.findall(r"manylinux_2_(\d+)_", file)), default=0)


def _with_files(
    wheels: tuple[LockedWheel, ...], spec: Spec, pinned: PinnedVllm
) -> tuple[LockedWheel, ...]:
    """Return the wheels with the places of those files that no index has."""
    # A lock names these files without their folders and hosts, so that it fits other machines.
    urls: dict[str, str | None] = {
        canonicalize_name(requirement.name): requirement.url
        for requirement in map(Requirement, spec.requirements)
    }
    if pinned.wheel:
        urls[canonicalize_name(pinned.name)] = pinned.wheel.as_uri()
    return tuple(
        dataclasses.replace(wheel, url=urls.get(wheel.name) or wheel.url) for wheel in wheels
    )
