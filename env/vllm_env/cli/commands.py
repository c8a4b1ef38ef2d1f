"""The subcommands beside the build: ``doctor``, ``verify``, ``inspect``, ``clean``."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_env.base import cache
from vllm_env.base.errors import VllmEnvError
from vllm_env.publish.manifest import read_manifest
from vllm_env.serve.leftovers import find_abandoned, find_private_caches, server_runs
from vllm_env.verify.tree_rules import expected_of_manifest
from vllm_env.verify.verify import check_files, check_stub_release, verify_archive, verify_directory

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from vllm_env.base.console import Console
    from vllm_env.publish.manifest import Manifest


def _options(name: str, description: str, arguments: list[str]) -> argparse.Namespace:
    from vllm_env.build import BuildRequest

    from .main import CommandParser, add_common

    parser = CommandParser(prog=f"gen_vllm_env.sh {name}", allow_abbrev=False, description=description)
    parser.add_argument(
        "--model-repository",
        metavar="DIR",
        type=Path,
        default=BuildRequest().repository,
        help="default: model_repository",
    )
    parser.add_argument("--model", metavar="NAME", default="vllm", help="default: vllm")
    add_common(parser)
    return parser.parse_args(arguments)


def _manifest(options: argparse.Namespace) -> tuple[Path, Manifest]:
    model = options.model_repository / options.model
    manifest = read_manifest(model)
    if manifest is None:
        raise VllmEnvError(f"{model} holds no built environment.", remedy="Build it: ./gen_vllm_env.sh.")
    return model, manifest


def inspect(arguments: list[str], console: Console) -> int:
    """Print the manifest of a built model."""
    options = _options("inspect", "Prints what a built model holds.", arguments)
    _, manifest = _manifest(options)
    if options.json:
        console.result(manifest.to_json().rstrip())
        return 0
    facts = {
        "vLLM": f"{manifest.vllm['version']} {manifest.vllm['commit']}".strip(),
        "from": f"{manifest.vllm['distribution']}, {manifest.vllm['origin']}",
        "Python": manifest.python,
        **manifest.versions,
        "Triton": manifest.triton_release,
        "stub": f"{manifest.stub['origin']}, {manifest.stub['sha256'][:16]}",
        "archive": f"{manifest.archive['name']}, {manifest.archive['size'] / 1e6:.0f} MB, {manifest.archive['sha256'][:16]}",
        "lock": manifest.lock_digest[:16],
        "built": f"{manifest.built_at} by {manifest.built_by}",
    }
    for name, value in facts.items():
        console.result(f"{name:<14} {value}")
    return 0


def verify(arguments: list[str], console: Console) -> int:
    """Check a built model against its manifest and the loader's rules."""
    options = _options("verify", "Checks a built repository as the build does before it publishes.", arguments)
    model, manifest = _manifest(options)
    with console.stage("verify") as stage:
        check_files(model, manifest.archive, manifest.stub)
        check_stub_release(manifest.stub["release"], manifest.triton_release)
        expected = expected_of_manifest(manifest)
        environment, root = model / manifest.archive["name"], cache.cache_root()
        if manifest.layout == "archive":
            unpacked = manifest.archive["unpacked"]
            notes = verify_archive(environment, expected, root, unpacked=unpacked, report=stage.detail)
        else:
            notes = verify_directory(environment, expected, root, report=stage.detail)
        for note in notes:
            console.note(note)
        stage.detail(str(model))
    console.result(json.dumps({"model": str(model), "verified": True}) if options.json else f"{model}: verified")
    return 0


def clean(arguments: list[str], console: Console) -> int:
    """Free what killed builds and dead servers left, and the cache."""
    from .main import CommandParser, add_common

    parser = CommandParser(
        prog="gen_vllm_env.sh clean",
        allow_abbrev=False,
        description="Frees what killed builds and dead servers left behind, and the cache. Running servers keep theirs.",
    )
    parser.add_argument("--dry-run", action="store_true", help="list it only")
    parser.add_argument("--keep-cache", action="store_true", help="leave the cache as it is")
    add_common(parser)
    options = parser.parse_args(arguments)
    root = cache.cache_root()
    with cache.exclusive(root, lambda: console.note("a build is running; waiting for it to end")):
        found: list[tuple[Path, int, Callable[[], object]]] = [
            (entry.path, entry.size, entry.remove) for entry in find_abandoned()
        ]
        found += [(f, cache.tree_size(f), partial(cache.remove_unlocked, f)) for f in cache.abandoned(root)]
        if not options.keep_cache:
            built = [entry for entry in cache.entries(root) if entry.paths[0].parent != root / "warm"]
            found += [(entry.paths[0], entry.size, entry.remove) for entry in built]
            if server_runs():
                console.note("a tritonserver runs: the copies of vLLM's caches that served models made stay")
            else:
                private = find_private_caches({root, cache.default_root()})
                found += [(entry.path, entry.size, entry.remove) for entry in private]
        for path, size, remove in found:
            console.note(f"{size / 1e6:10.1f} MB  {path}")
            if not options.dry_run:
                remove()
    total = sum(size for _, size, _ in found)
    if options.json:
        console.result(
            json.dumps({"removed": not options.dry_run, "paths": [str(p) for p, _, _ in found], "bytes": total})
        )
    else:
        console.result(f"{'would free' if options.dry_run else 'freed'} {total / 1e9:.1f} GB")
    return 0


def doctor(arguments: list[str], console: Console) -> int:
    """Print what this machine and its Triton can do; exit code 1 if something is a problem."""
    from vllm_env.build import default_profile, installed_triton
    from vllm_env.lock.spec import Overrides, load_spec
    from vllm_env.triton.root import open_root

    from .doctor import examine
    from .main import CommandParser, add_common

    parser = CommandParser(prog="gen_vllm_env.sh doctor", description="Says what this machine can do.")
    parser.add_argument("--triton-root", metavar="DIR", type=Path, help="default: as for the build")
    parser.add_argument("--profile", choices=("cuda", "cpu"), help="default: as for the build")
    add_common(parser)
    options = parser.parse_args(arguments)
    path = options.triton_root or installed_triton()
    triton = open_root(path) if path else None
    findings = examine(triton, load_spec(options.profile or default_profile(triton), Overrides()))
    if options.json:
        console.result(json.dumps([dataclasses.asdict(f) for f in findings], indent=2))
    else:
        for finding in findings:
            console.result(f"{finding.state:<8} {finding.name:<14} {finding.what}")
            if finding.remedy:
                console.result(f"{'':<23} {finding.remedy}")
    return 1 if any(f.state == "problem" for f in findings) else 0


def wheelhouse(arguments: list[str], console: Console) -> int:
    """Fill a folder with what a build would download."""
    from vllm_env.wheelhouse import fill_wheelhouse

    from .main import build_parser, request_of

    parser = build_parser()
    parser.prog, parser.epilog = "gen_vllm_env.sh wheelhouse", ""
    parser.description = (
        "Fills DIR with all that a build with the same options downloads, for --offline --wheelhouse DIR."
    )
    parser.add_argument("folder", metavar="DIR", type=Path)
    options = parser.parse_args(arguments)
    lock = fill_wheelhouse(request_of(options), options.folder, console, dry_run=options.dry_run)
    wheels, size = len(lock.versions()), cache.tree_size(options.folder)
    state = f"would get {wheels} wheels" if options.dry_run else f"{size / 1e6:.0f} MB"
    facts = {"wheelhouse": str(options.folder), "fetched": not options.dry_run, "wheels": wheels, "bytes": size}
    console.result(json.dumps(facts) if options.json else f"{options.folder}: {state}")
    return 0


COMMANDS: dict[str, Callable[[list[str], Console], int]] = {
    "doctor": doctor,
    "inspect": inspect,
    "verify": verify,
    "clean": clean,
    "wheelhouse": wheelhouse,
}
