"""The subcommands other than the build: ``adopt``, ``doctor``, ``verify``, ``inspect``, ``wheelhouse``, ``clean``."""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from vllm_env.base import report
from vllm_env.base.cache import default_root
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import tree_size
from vllm_env.base.locks import remove_unlocked
from vllm_env.base.report import Console
from vllm_env.base.workspace import Workspace
from vllm_env.lock.spec import Overrides, load_spec
from vllm_env.model.files import check_model
from vllm_env.model.manifest import Manifest, check_files, read_manifest
from vllm_env.plan import UNKNOWN, BuildRequest, default_profile, installed_triton, make_dry_plan
from vllm_env.serve.leftovers import find_abandoned, find_private_caches, find_unpacked, server_runs
from vllm_env.triton.root import open_root
from vllm_env.verify.verify import verify_packed
from vllm_env.wheelhouse import fill_wheelhouse

from .adopt import adopt
from .doctor import examine
from .options import open_workspace, request_of

_Removable = tuple[Path, int, "Callable[[], object]"]


def _manifest(options: argparse.Namespace) -> tuple[Path, Manifest]:
    model = (options.model_repository or BuildRequest.repository) / options.model
    manifest = read_manifest(model)
    if manifest is None:
        raise VllmEnvError(
            f"{model} holds no built environment.", remedy="Build it: ./gen_vllm_env.sh."
        )
    return model, manifest


def inspect(options: argparse.Namespace, console: Console) -> int:
    """Print the manifest of a built model."""
    _, manifest = _manifest(options)
    if options.json:
        console.result(manifest.to_json().rstrip())
        return 0
    vllm, packed, stub = manifest.vllm, manifest.archive, manifest.stub
    facts = {
        "vLLM": f"{vllm.version} {vllm.commit}".strip(),
        "from": f"{vllm.distribution}, {vllm.origin}",
        "Python": manifest.python,
        **manifest.versions,
        "Triton": manifest.triton_release,
        "stub": f"{stub.origin}, {stub.sha256[:16]}",
        "archive": f"{packed.name}, "
        + (f"{packed.size / 1e6:.0f} MB, {packed.sha256[:16]}" if packed.sha256 else "unpacked"),
        **(
            {"parts": f"{len(parts)}, {sum(p.size for p in parts) / 1e6:.0f} MB"}
            if (parts := manifest.parts)
            else {}
        ),
        "lock": manifest.lock_digest[:16],
        "built": f"{manifest.built_at} by {manifest.built_by}",
    }
    for name, value in facts.items():
        console.result(f"{name:<14} {value}")
    return 0


def verify(options: argparse.Namespace, console: Console) -> int:
    """Check a built model against its manifest and the loader's rules."""
    model, manifest = _manifest(options)
    workspace = open_workspace(options)
    with console.stage("verify"):
        check_files(model, manifest)
        check_model(model, manifest)
        # Without a Triton root, this machine's libarchive unpacks the archive.
        triton = open_root(root) if (root := installed_triton()) else None
        layout, packed = manifest.packed(model)
        for note in verify_packed(workspace, layout, packed, manifest.expected(), triton):
            console.note(note)
        console.step(str(model))
    console.result(
        json.dumps({"model": str(model), "verified": True})
        if options.json
        else f"{model}: verified"
    )
    return 0


def clean(options: argparse.Namespace, console: Console) -> int:
    """Remove the leftovers of killed builds and dead servers, and the cache."""
    workspace = open_workspace(options)
    # No build may run while its entries are removed.
    with contextlib.nullcontext() if options.dry_run else workspace.exclusive():
        found = _abandoned(workspace) + ([] if options.keep_cache else _cached(workspace))
        for path, size, remove in found:
            console.note(f"{size / 1e6:10.1f} MB  {path}")
            if not options.dry_run:
                remove()
    total = sum(size for _, size, _ in found)
    facts = {
        "removed": not options.dry_run,
        "paths": [str(path) for path, _, _ in found],
        "bytes": total,
    }
    console.result(
        json.dumps(facts)
        if options.json
        else f"{'would free' if options.dry_run else 'freed'} {total / 1e9:.1f} GB"
    )
    return 0


def _abandoned(workspace: Workspace) -> list[_Removable]:
    staged = [
        (folder, tree_size(folder), partial(remove_unlocked, folder))
        for folder in workspace.cache.abandoned()
    ]
    return [*((entry.path, entry.size, entry.remove) for entry in find_abandoned()), *staged]


def _cached(workspace: Workspace) -> list[_Removable]:
    """Return the cache's entries, and the private copies of vLLM's caches unless a server may read them."""
    cache = workspace.cache
    entries = [entry for entry in cache.entries() if entry.paths[0].parent != cache.path("warm")]
    found: list[_Removable] = [
        *((entry.paths[0], entry.size, entry.remove) for entry in entries),
        *find_unpacked(),
    ]
    if server_runs():
        report.note("a tritonserver runs: the copies of vLLM's caches that served models made stay")
        return found
    private = find_private_caches({cache.root, default_root()})
    return [*found, *((entry.path, entry.size, entry.remove) for entry in private)]


def doctor(options: argparse.Namespace, console: Console) -> int:
    """Print what this machine and its Triton can do; return 1 if there is a problem."""
    path = options.triton_root or installed_triton()
    triton = open_root(path) if path else None
    spec = load_spec(options.profile or default_profile(triton), Overrides())
    findings = examine(open_workspace(options), triton, spec)
    if options.json:
        console.result(json.dumps([dataclasses.asdict(f) for f in findings], indent=2))
    else:
        for finding in findings:
            console.result(f"{finding.state:<8} {finding.name:<14} {finding.what}")
            if finding.remedy:
                console.result(f"{'':<23} {finding.remedy}")
    return 1 if any(f.state == "problem" for f in findings) else 0


def wheelhouse(options: argparse.Namespace, console: Console) -> int:
    """Fill a folder with everything that a build would download."""
    workspace = open_workspace(options)
    # Serve nothing here: the machine that fills a wheelhouse is seldom the one that serves.
    request = dataclasses.replace(request_of(options), smoke=False, warm=False)
    folder = options.folder
    lock = (
        make_dry_plan(workspace, request).lock
        if options.dry_run
        else fill_wheelhouse(workspace, request, folder)
    )
    wheels = len(lock.wheels) if lock else UNKNOWN
    size = tree_size(folder)
    state = f"would get {wheels} wheels" if options.dry_run else f"{size / 1e6:.0f} MB"
    facts = {
        "wheelhouse": str(folder),
        "fetched": not options.dry_run,
        "wheels": wheels,
        "bytes": size,
    }
    facts["lock_digest"] = lock.digest if lock else UNKNOWN
    console.result(json.dumps(facts) if options.json else f"{folder}: {state}")
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace, Console], int]] = {
    command.__name__: command for command in (adopt, doctor, inspect, verify, clean, wheelhouse)
}
