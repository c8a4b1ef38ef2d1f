"""Find or make the lock of a spec: its exact conda packages and wheels, with SHA-256, for one Triton release.

The lock lies next to the spec (``pylock.vllm_env-cpu.toml``). If the command line changes the spec, the lock is in the
cache, and next to the spec that ``--save`` writes.
"""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vllm_env.base import report
from vllm_env.base.cache import key_of
from vllm_env.base.errors import VllmEnvError
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
    if options.save:
        check_save(spec, options.save)
    pinned = resolve_pin(workspace, spec)
    inputs = inputs_of(spec, pinned)
    saved = [lock_beside(options.save, spec.profile)] if options.save else []
    # Searched in this order: the lock next to --save's file, the one next to the default spec, the cache.
    files = [*saved, *_places(workspace, spec, inputs)]
    fitting, drift = (None, "") if options.upgrade else _find(files, inputs, rules)
    if fitting:
        layer = choose_layer(workspace, spec.python, fitting.layer)
        if options.locked and layer != fitting.layer:
            report.note(
                f"the lock does not pin the interpreter of this machine: Python {layer} is taken"
            )
        lock = Lock(spec, pinned, layer, _with_files(fitting.wheels, spec, pinned), inputs)
    elif options.locked:
        raise VllmEnvError(
            f"--locked: the lock {files[0]} does not fit what is asked for.",
            cause=drift or "It does not exist.",
            remedy="Omit --locked to resolve again, or use --upgrade to write the lock.",
        )
    else:
        if workspace.dry_run and workspace.network.offline and not workspace.network.wheelhouse:
            raise NotKnownError(
                f"{spec.pin} is not locked yet.",
                cause="With --offline only uv's cache may have the wheels.",
            )
        layer = choose_layer(workspace, spec.python, upgrade=options.upgrade)
        lock = Lock(spec, pinned, layer, resolve(workspace, spec, rules, pinned), inputs)
    if workspace.dry_run:
        return lock
    if not fitting:
        # The default spec's lock is part of the checkout: only --upgrade changes it there.
        write_pylock(
            lock,
            files[-1] if saved or (spec.path == DEFAULT_SPEC and not options.upgrade) else files[0],
        )
    _keep(lock, options.save)
    return lock


def _keep(lock: Lock, save: Path | None) -> None:
    """Write the spec and its lock for ``--save``; without it, report that a changed spec's lock is only in the cache."""
    spec = lock.spec
    if save:
        save_spec(spec, save)
        write_pylock(lock, lock_beside(save, spec.profile))
        report.note(f"saved the spec {save} and its lock {lock_beside(save, spec.profile)}")
    elif not spec.is_default:
        report.note(
            f"the lock of {spec.pin} is in the cache only; --save FILE keeps it, with its spec"
        )


def lock_beside(spec: Path, profile: str) -> Path:
    """Return the path of the lock for one profile of a spec."""
    stem = f"{spec.stem}-{profile}".replace(".", "-")
    return spec.with_name(f"pylock.{stem}.toml")


def inputs_of(spec: Spec, pinned: PinnedVllm) -> Inputs:
    """Return the values that a spec's lock depends on. A pinned file counts by name and hash, not by its folder."""
    names = {field.name for field in dataclasses.fields(Inputs)} - {"pin"}
    pin = re.sub(r"@ \S*/", "@ ", pinned.requirement)
    return Inputs(pin=pin, **{name: getattr(spec, name) for name in names})


def _places(workspace: Workspace, spec: Spec, inputs: Inputs) -> list[Path]:
    """Return the places of a spec's lock, in the order in which they are searched."""
    cached = workspace.cache.path("locks", key_of(dataclasses.asdict(inputs)), "pylock.toml")
    return [lock_beside(spec.path, spec.profile), cached] if spec.is_default else [cached]


def _find(files: list[Path], inputs: Inputs, rules: ReleaseRules) -> tuple[LockFile | None, str]:
    """Return the first lock that fits; or None, and how the first one found differs."""
    drift = ""
    for file in (f for f in files if f.is_file()):
        found = read_pylock(file)
        differs = found.inputs.drift(inputs) or _breaks(found, rules)
        if not differs:
            return found, ""
        drift = drift or f"{file.name}: {differs}"
    return None, drift


def _breaks(found: LockFile, rules: ReleaseRules) -> str:
    """Return how a lock breaks the rules of a Triton release, or "". A lock for an older release often fits a newer one."""
    version = next((wheel.version for wheel in found.wheels if wheel.name == "numpy"), "")
    if (
        not version
        or not rules.numpy_bound
        or Requirement(rules.numpy_bound).specifier.contains(version)
    ):
        return ""
    return f"numpy is {version}, and Triton since {rules.since} needs {rules.numpy_bound}"


def _with_files(
    wheels: tuple[LockedWheel, ...], spec: Spec, pinned: PinnedVllm
) -> tuple[LockedWheel, ...]:
    """Set the places of the files that no index has: a lock names them without their folders or hosts."""
    urls: dict[str, str | None] = {
        canonicalize_name(r.name): r.url for r in map(Requirement, spec.requirements)
    }
    if pinned.wheel:
        urls[canonicalize_name(pinned.name)] = pinned.wheel.as_uri()
    return tuple(
        dataclasses.replace(wheel, url=urls.get(wheel.name) or wheel.url) for wheel in wheels
    )
