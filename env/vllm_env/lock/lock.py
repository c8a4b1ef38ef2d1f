"""The lock: the exact conda packages and wheels, with their SHA-256, that a spec comes to for one Triton release.

A lock file is a requirements file that uv and pip read, with the conda packages and the inputs in comments at its top.
It names no registry: the hashes decide, wherever a file comes from. It lies beside the spec (``vllm_env.cpu.lock``); a
spec changed on the command line has its lock in the cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from vllm_env.base import cache
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.process import run
from vllm_env.interpreter import layer as conda

from .pins import PinnedVllm, resolve_pin
from .spec import DEFAULT_SPEC

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_env.triton.root import ReleaseRules

    from .pip_config import PipConfig
    from .spec import Spec

_HEADER = "# vllm_env lock 1"
_REQUIREMENT = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?\s*(?:==\s*([^\s;\\]+)|@\s*(\S+))", re.MULTILINE)


@dataclass(frozen=True)
class LockOptions:
    """How the lock is to be made: as it is or not at all, anew, without network, from a folder of wheels."""

    locked: bool = False
    upgrade: bool = False
    offline: bool = False
    wheelhouse: Path | None = None


@dataclass(frozen=True)
class Lock:
    """An exact environment: the conda layer, and the wheels as text of a requirements file with hashes."""

    spec: Spec
    vllm: PinnedVllm
    conda: conda.CondaLayer
    requirements: str
    inputs: dict[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of what is locked, in hexadecimal; where the files come from does not count."""
        packages = [dataclasses.asdict(p) for p in self.conda.packages]
        text = json.dumps([packages, _without_folder(self.requirements)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def python(self) -> str:
        """The interpreter's full version, such as ``3.11.7``."""
        return next(p.version for p in self.conda.packages if p.name == "python")

    def versions(self) -> dict[str, str]:
        """Return the version of each locked distribution by its normalised name; a pinned file's is its file name's."""
        found = {}
        for name, version, url in _REQUIREMENT.findall(self.requirements):
            found[str(canonicalize_name(name))] = version or _version_of_file(url)
        return found


def make_lock(
    spec: Spec,
    rules: ReleaseRules,
    root: Path,
    pip: PipConfig,
    options: LockOptions,
    note: Callable[[str], None] = lambda _: None,
) -> Lock:
    """Return the lock of a spec: the one that is there if it fits, else a newly resolved one.

    Raises:
        VllmEnvError: ``--locked`` and there is none that fits, or the requirements have no solution.
    """
    pinned = resolve_pin(spec, root, pip, source_arguments(pip, options), offline=options.offline)
    inputs = _inputs(spec, rules, pinned)
    files = _places(spec, root, inputs)
    drift = ""
    if not options.upgrade:
        for file in files:
            read = _read(file) if file.is_file() else None
            if read and read[0] == inputs:
                lock = Lock(spec, pinned, read[1], _with_pinned_file(read[2], pinned), inputs)
                return _with_reachable_conda(lock, root, options, note)
            drift = drift or (_drift(read[0], inputs, file) if read else "")
    if options.locked:
        raise VllmEnvError(
            f"--locked: the lock {files[0]} does not fit what is asked for.",
            cause=drift or "It does not exist.",
            remedy="Leave --locked away to resolve anew, or --upgrade to write the lock.",
        )
    layer = conda.solve_layer(spec.python, root, offline=options.offline)
    requirements = _resolve(spec, rules, pinned, root, pip, options)
    lock = Lock(spec, pinned, layer, requirements, inputs)
    _write(lock, _place_to_write(spec, files, options))
    return lock


def _inputs(spec: Spec, rules: ReleaseRules, pinned: PinnedVllm) -> dict[str, Any]:
    inputs = spec.inputs()
    inputs["pin"] = _without_folder(pinned.requirement)
    inputs["triton"] = rules.numpy_bound
    return json.loads(json.dumps(inputs))  # type: ignore[no-any-return] # tuples become lists, as when read back


def _without_folder(requirements: str) -> str:
    """A pinned file is known by its name and hash, wherever it lies."""
    return re.sub(r"@ \S*/", "@ ", requirements)


def _with_pinned_file(requirements: str, pinned: PinnedVllm) -> str:
    """Name the pinned file where it lies now: the lock may have been written on another machine."""
    if pinned.wheel is None:
        return requirements
    name, _, place = pinned.requirement.partition(" @ ")
    return re.sub(
        rf"^{re.escape(name)} @ \S+", lambda _: f"{name} @ {place}", requirements, flags=re.MULTILINE | re.IGNORECASE
    )


def _places(spec: Spec, root: Path, inputs: dict[str, Any]) -> list[Path]:
    """Return where the lock of a spec may lie, in the order of looking."""
    cached = root / "locks" / f"{cache.key_of(inputs)}.lock"
    beside = spec.path.with_name(f"{spec.path.stem}.{spec.profile}.lock")
    return [beside, cached] if spec.is_default else [cached]


def _place_to_write(spec: Spec, files: list[Path], options: LockOptions) -> Path:
    """The default spec's lock is part of the checkout: only ``--upgrade`` changes it there."""
    return files[-1] if spec.path == DEFAULT_SPEC and not options.upgrade else files[0]


def _drift(old: dict[str, Any], new: dict[str, Any], file: Path) -> str:
    changed = [f"{k} was {old.get(k)!r} and is {v!r}" for k, v in new.items() if old.get(k) != v]
    return f"{file.name}: {'; '.join(changed) or 'its form is older'}."


def _with_reachable_conda(lock: Lock, root: Path, options: LockOptions, note: Callable[[str], None]) -> Lock:
    """Return the lock with its conda layer, or with this machine's if its own cannot be had here."""
    layer = lock.conda
    if conda.in_wheelhouse(layer, options.wheelhouse):
        return lock
    if layer.channel == conda.LOCAL:
        here = conda.local_layer(lock.spec.python, root)
    else:
        here = layer if conda.is_cached(layer, root) or (not options.offline and conda.remote_answers()) else None
    if here == layer:
        return lock
    if options.locked:
        raise VllmEnvError(
            f"--locked: the lock's Python {lock.python} from {layer.channel} is not to be had on this machine.",
            cause="conda-forge does not answer." if here is None else "This machine's interpreter is another build.",
            remedy="Give access to the channel, or leave --locked away.",
        )
    solved = here or conda.solve_layer(lock.spec.python, root, offline=options.offline)
    changed = dataclasses.replace(lock, conda=solved)
    note(f"the lock's Python is {_python_of(layer)}; this machine has {_python_of(solved)}, which is taken")
    return changed


def _python_of(layer: conda.CondaLayer) -> str:
    package = next(p for p in layer.packages if p.name == "python")
    return f"{package.version} {package.build} from {layer.channel} ({package.sha256[:12]})"


def _resolve(
    spec: Spec, rules: ReleaseRules, pinned: PinnedVllm, root: Path, pip: PipConfig, options: LockOptions
) -> str:
    numpy = [rules.numpy_bound] if rules.numpy_bound else []
    # a marker that is never true drops a requirement; an override of NumPy wins over packages that declare numpy>=2
    overrides = [*spec.overrides, *numpy, *(f'{name}; sys_platform == "never"' for name in spec.drop)]
    with cache.staging(root) as folder:
        (folder / "in.txt").write_text("\n".join([pinned.requirement, *spec.requirements, *numpy]) + "\n")
        (folder / "overrides.txt").write_text("\n".join(overrides) + "\n")
        command = [
            Path(sys.executable).parent / "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate",
            "--generate-hashes", "--no-emit-index-url", "--no-emit-find-links", "--only-binary", ":all:",
            "--python-version", spec.python, "--override", folder / "overrides.txt",
            "--output-file", folder / "out.txt", *source_arguments(pip, options), *pinned.uv_arguments, folder / "in.txt",
        ]  # fmt: skip
        try:
            _run_with_backend(command, spec, options, pip.uv_environment() | {"TMPDIR": str(folder)})
        except CommandError as error:
            raise _explained(error, spec, pip) from error
        return (folder / "out.txt").read_text("utf-8")


def _run_with_backend(command: list[object], spec: Spec, options: LockOptions, env: dict[str, str]) -> None:
    """Resolve from the configured sources, and if they lack the torch build, with the PyTorch project's index."""
    what = "resolve the requirements"
    try:
        run(command, what=what, env=env)
    except CommandError as error:
        if not spec.torch_backend or options.offline or options.wheelhouse or "torch" not in error.tail:
            raise
        with_backend = [*command[:3], "--torch-backend", spec.torch_backend, *command[3:]]
        try:
            run(with_backend, what=what, env=env)
        except CommandError:
            raise error from None  # the first error is about the sources that the person configured


def source_arguments(pip: PipConfig, options: LockOptions) -> list[str]:
    """Return uv's options for where wheels come from: pip's sources, or only the wheelhouse."""
    if options.wheelhouse:
        return ["--offline", "--no-index", "--find-links", str(options.wheelhouse)]
    return [*(["--offline"] if options.offline else []), *pip.uv_arguments()]


def _explained(error: CommandError, spec: Spec, pip: PipConfig) -> VllmEnvError:
    pin = f"{spec.distribution}=={spec.pin.value}"
    if spec.pin.kind == "release" and re.search(
        rf"no version of {re.escape(pin)}|{re.escape(spec.distribution)} was not found", error.tail
    ):
        return VllmEnvError(
            f"--vllm {spec.pin.value}: the package registry has no {pin}.",
            cause=_known_versions(spec.distribution, pip),
            remedy="Pick one of these, or pin another way: --vllm-commit, --vllm-wheel, --vllm-source.",
        )
    python = re.search(r"[Pp]ython>=?[\d.]+[^.]*?cannot be used|does not satisfy Python\S+", error.tail)
    remedy = "Pick another --python." if python else "Change the pin, --with, or the spec's overrides, and try again."
    return CommandError(
        f"The requirements of {spec.pin} for Python {spec.python} have no solution.", tail=error.tail, remedy=remedy
    )


def _known_versions(distribution: str, pip: PipConfig) -> str:
    try:
        answer = run(
            [sys.executable, "-m", "pip", "index", "versions", distribution],
            what="list versions",
            env=pip.uv_environment(),
        )
    except CommandError:
        return f"It has no {distribution} at all, or does not answer."
    found = re.search(r"Available versions: (.*)", answer)
    versions = found.group(1).split(", ")[:12] if found else []
    return f"The newest that it has: {', '.join(versions)}." if versions else ""


def _write(lock: Lock, file: Path) -> None:
    lines = [_HEADER, "# Made by gen_vllm_env.sh; --upgrade resolves anew."]
    lines += [f"# input {key} = {json.dumps(value)}" for key, value in lock.inputs.items()]
    lines += [f"# conda-channel {lock.conda.channel}"]
    lines += [f"# conda {json.dumps(dataclasses.asdict(p))}" for p in lock.conda.packages]
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.new")
    temporary.write_text("\n".join(lines) + "\n\n" + lock.requirements, "utf-8")
    temporary.replace(file)


def _read(file: Path) -> tuple[dict[str, Any], conda.CondaLayer, str] | None:
    """Return inputs, conda layer and requirements of a lock file, or None if it is not one of this form."""
    head, _, requirements = file.read_text("utf-8").partition("\n\n")
    lines = head.splitlines()
    if not lines or lines[0] != _HEADER:
        return None
    try:
        inputs = {m[1]: json.loads(m[2]) for line in lines if (m := re.match(r"# input (\w+) = (.*)", line))}
        packages = [conda.CondaPackage(**json.loads(line[8:])) for line in lines if line.startswith("# conda {")]
        channel = next(line.split()[2] for line in lines if line.startswith("# conda-channel "))
    except (ValueError, TypeError, StopIteration) as error:
        raise VllmEnvError(
            f"The lock {file} is damaged: {error}.", remedy="Restore it from git, or --upgrade."
        ) from error
    return inputs, conda.CondaLayer(channel, tuple(packages)), requirements


def _version_of_file(url: str) -> str:
    name = urllib.parse.unquote(url.rsplit("/", 1)[-1])  # a local version's "+" is quoted in an address
    return name.split("-")[1] if "-" in name else ""
