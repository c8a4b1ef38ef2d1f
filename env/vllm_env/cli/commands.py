"""The subcommands other than the build, and the table of all of them."""

import argparse
import contextlib
import dataclasses
import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

from vllm_env.base import report
from vllm_env.base.cache import default_root
from vllm_env.base.command import COMMAND
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import require_writable, tree_size
from vllm_env.base.locks import remove_unlocked
from vllm_env.base.report import Console
from vllm_env.base.workspace import Workspace
from vllm_env.export.export import export as export_models
from vllm_env.lock.spec import Overrides, load_spec
from vllm_env.lock.variants import variant_of
from vllm_env.model.files import check_model
from vllm_env.model.manifest import (
    FOREIGN_REMEDY,
    MANIFEST_NAME,
    Manifest,
    check_files,
    read_manifest,
)
from vllm_env.plan import UNKNOWN, preview
from vllm_env.serve.leftovers import find_abandoned, find_private_caches, find_unpacked, server_runs
from vllm_env.sketch import BuildRequest, choose_profile, installed_triton
from vllm_env.triton.root import open_root
from vllm_env.unpack import unpack as unpack_environment
from vllm_env.verify.verify import opened, verify_tree
from vllm_env.wheelhouse import fill_wheelhouse

from .adopt import adopt
from .audit import audit
from .doctor import examine, foreign_models
from .options import open_workspace, request_of
from .run import client, serve

# A path, its size in bytes, and the function that removes it.
_Removable = tuple[Path, int, "Callable[[], object]"]


def _built_model(options: argparse.Namespace, name: str = "") -> tuple[Path, Manifest]:
    """Return the folder and the manifest of a built model: ``name``, else that of ``--model``.

    Raises:
        VllmEnvError: the model is not built, or its manifest is damaged.
    """
    repository = options.model_repository or BuildRequest.repository
    model = repository / (name or options.model)
    manifest = read_manifest(model)
    if manifest is None:
        cause, remedy = _why_not_built(repository, model)
        raise VllmEnvError(f"{model} holds no built environment.", cause=cause, remedy=remedy)
    return model, manifest


def _why_not_built(repository: Path, model: Path) -> tuple[str, str]:
    """Return the likely cause why a folder is no built model, and the remedy.

    The user may have named the model's folder as the repository, or another model.
    """
    options = shlex.join(["--model-repository", str(repository), "--model", model.name])
    build = f"{COMMAND} {options}"
    if model.is_dir():
        return "The model is not built yet.", f"Build it: {build}."
    if (repository / MANIFEST_NAME).is_file():
        place = repository.absolute()
        named = f"--model-repository {place.parent} --model {place.name}"
        return "--model-repository names a model, not the folder above it.", f"Write {named}."
    names = sorted(file.parent.name for file in repository.glob(f"*/{MANIFEST_NAME}"))
    if names:
        return f"Built models in {repository}: {', '.join(names)}.", "Name one with --model."
    remedy = f"Name another repository with --model-repository, or build this model: {build}."
    return f"{repository} has no built model.", remedy


def inspect(options: argparse.Namespace, console: Console) -> int:
    """Print the manifest of a built model."""
    _, manifest = _built_model(options)
    if options.json:
        console.result(manifest.to_json().rstrip())
        return 0
    vllm = manifest.vllm
    packed, *parts = manifest.environment
    stub = manifest.stub
    shown_stub = f"{stub.origin}, {stub.sha256[:16]}"
    if not stub.is_in_model:
        shown_stub = f"the server's own, Python {stub.python}"
    content = "unpacked"
    # The manifest records no size of an unpacked environment.
    if packed.sha256:
        content = f"{packed.size / 1e6:.0f} MB, {packed.sha256[:16]}"
    facts = {
        "vLLM": f"{vllm.version} {vllm.commit}".strip(),
        "from": f"{vllm.distribution}, {vllm.origin}",
        "platform": manifest.platform,
        "Python": manifest.python,
        **manifest.versions,
        "Triton": manifest.triton_release,
        "stub": shown_stub,
        "archive": f"{packed.name}, {content}",
    }
    if parts:
        facts["parts"] = f"{len(parts)}, {sum(part.size for part in parts) / 1e6:.0f} MB"
    # The size of a volume for it.
    if packed.unpacked:
        facts["unpacked"] = f"{packed.unpacked / 1e9:.1f} GB"
    facts["lock"] = manifest.lock_digest[:16]
    facts["built"] = f"{manifest.built_at} by {manifest.built_by}"
    for name, value in facts.items():
        console.result(f"{name:<14} {value}")
    if manifest.foreign:
        console.note(f"{manifest.foreign} {FOREIGN_REMEDY}")
    return 0


def verify(options: argparse.Namespace, console: Console) -> int:
    """Check a built model against its manifest and the loader's rules."""
    model, manifest = _built_model(options)
    # The checks start the environment's programs, which must run on this machine.
    manifest.require_platform()
    workspace = open_workspace(options)
    with console.stage("verify"):
        # First what takes seconds. The checks of an environment take minutes.
        check_files(model, manifest)
        check_model(model, manifest)
        # Without a Triton root, this machine's libarchive unpacks the archive.
        triton = open_root(root) if (root := installed_triton()) else None
        # The interpreter of an unpacked environment is started in another folder.
        layout, packed = manifest.packed(model.absolute())
        expected = manifest.expected()
        with opened(workspace, layout, packed, expected, triton) as tree:
            notes = verify_tree(workspace, tree, expected)
        for note in notes:
            console.note(note)
        console.step(str(model))
    facts = {"model": str(model), "verified": True}
    console.result(json.dumps(facts) if options.json else f"{model}: verified")
    return 0


def unpack(options: argparse.Namespace, console: Console) -> int:
    """Make the whole environment of a built model in a folder."""
    model, manifest = _built_model(options)
    folder = unpack_environment(model, manifest, options.folder)
    size = tree_size(folder)
    facts = {"environment": str(folder), "bytes": size}
    line = f"{folder}: vLLM {manifest.vllm.version}, {size / 1e9:.1f} GB"
    console.result(json.dumps(facts) if options.json else line)
    return 0


def export(options: argparse.Namespace, console: Console) -> int:
    """Write built models as an OCI image."""
    # Any --model replaces the default.
    names = options.models or ["vllm"]
    models = [_built_model(options, name) for name in names]
    exported = export_models(
        models, options.oci, compression=options.compression, tag=options.tag or ""
    )
    tagged = f"{exported.folder}:{exported.tag}"
    target = f"$REGISTRY/{names[0]}:{exported.tag}"
    # The commands that push it, for the user to paste. In double quotes, the shell replaces
    # $REGISTRY.
    push = [
        f'skopeo copy --preserve-digests {shlex.quote(f"oci:{tagged}")} "docker://{target}"',
        f'oras cp --from-oci-layout {shlex.quote(tagged)} "{target}"',
    ]
    if exported.left_out:
        size = sum(tree_size(path) for path in exported.left_out)
        first = exported.left_out[0]
        more = f" and {len(exported.left_out) - 1} more" if len(exported.left_out) > 1 else ""
        console.note(f"not in the image: {first}{more}, {size / 1e6:.0f} MB of weights and caches")
        console.note("give weights to the server by a volume, and name it in vllm_engine_args.json")
    if options.json:
        facts = {
            "oci": str(exported.folder),
            "digest": exported.digest,
            "tag": exported.tag,
            "layers": [dataclasses.asdict(layer) for layer in exported.layers],
            "left_out": [str(path) for path in exported.left_out],
            "push": push,
        }
        console.result(json.dumps(facts, indent=2))
        return 0
    for layer in exported.layers:
        console.result(f"{layer.size / 1e6:10.1f} MB  {layer.name}")
    console.result(f"{exported.folder}: {exported.digest}")
    for line in ("Push it, by either:", *push):
        console.result(line)
    return 0


def clean(options: argparse.Namespace, console: Console) -> int:
    """Remove the leftovers of killed builds and dead servers, and the cache."""
    workspace = open_workspace(options)
    # No build may run while its entries are removed. A dry run must not wait for one.
    with contextlib.nullcontext() if options.dry_run else workspace.exclusive():
        leftovers = _abandoned(workspace)
        if not options.keep_cache:
            leftovers += _cached(workspace)
        for path, size, remove in leftovers:
            console.note(f"{size / 1e6:10.1f} MB  {path}")
            if not options.dry_run:
                remove()
    total = sum(size for _, size, _ in leftovers)
    facts = {
        "removed": not options.dry_run,
        "paths": [str(path) for path, _, _ in leftovers],
        "bytes": total,
    }
    freed = "would free" if options.dry_run else "freed"
    console.result(json.dumps(facts) if options.json else f"{freed} {total / 1e9:.1f} GB")
    return 0


def _abandoned(workspace: Workspace) -> list[_Removable]:
    """Return what killed builds and dead servers left behind."""
    leftovers: list[_Removable] = [(e.path, e.size, e.remove) for e in find_abandoned()]
    folders = workspace.cache.abandoned()
    # Another process may have locked a folder meanwhile. It is then not removed.
    leftovers += [(f, tree_size(f), partial(remove_unlocked, f)) for f in folders]
    return leftovers


def _cached(workspace: Workspace) -> list[_Removable]:
    """Return the cache's entries and the environments and caches that served models made."""
    cache = workspace.cache
    # The copies of vLLM's caches follow below: only they may be in use.
    entries = [e for e in cache.entries() if e.paths[0].parent != cache.path("warm")]
    removables: list[_Removable] = [(e.paths[0], e.size, e.remove) for e in entries]
    removables += find_unpacked()
    # Weeks after its start, vLLM still reads a file there when it meets a new shape.
    if server_runs():
        report.note("a tritonserver runs: the copies of vLLM's caches that served models made stay")
        return removables
    # Served models do not know VLLM_ENV_CACHE, so they have copies in the default cache, too.
    copies = find_private_caches({cache.root, default_root()})
    return removables + [(e.path, e.size, e.remove) for e in copies]


def doctor(options: argparse.Namespace, console: Console) -> int:
    """Print what this machine and its Triton can do; return 1 if there is a problem."""
    path = options.triton_root or installed_triton()
    triton = open_root(path) if path else None
    overrides = Overrides(torch_backend=variant_of(options.cuda) if options.cuda else None)
    spec = load_spec(choose_profile(options.profile, path, overrides), overrides)
    workspace = open_workspace(options)
    findings = examine(workspace, triton, spec) + foreign_models(BuildRequest.repository)
    if options.audit:
        findings += audit(workspace, spec)
    if options.json:
        console.result(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            console.result(f"{finding.state:<8} {finding.name:<14} {finding.what}")
            if finding.remedy:
                console.result(f"{'':<23} {finding.remedy}")
    return int(any(finding.state == "problem" for finding in findings))


def wheelhouse(options: argparse.Namespace, console: Console) -> int:
    """Fill a folder with everything that a build would download."""
    workspace = open_workspace(options)
    # Serve nothing here: the machine that fills a wheelhouse is seldom the one that serves.
    request = dataclasses.replace(
        request_of(options), smoke=False, smoke_again=False, smoke_model="", warm=False, count=0
    )
    folder = options.folder
    require_writable(folder, str(folder))
    # A dry run knows the lock only if it need not build or fetch the pinned vLLM.
    if options.dry_run:
        lock = preview(workspace, request).lock
    else:
        lock = fill_wheelhouse(workspace, request, folder)
    wheels = len(lock.wheels) if lock else UNKNOWN
    # A dry run may find the folder filled by an earlier run, or missing.
    size = tree_size(folder)
    state = f"would get {wheels} wheels" if options.dry_run else f"{size / 1e6:.0f} MB"
    facts = {
        "wheelhouse": str(folder),
        "fetched": not options.dry_run,
        "wheels": wheels,
        "bytes": size,
        "lock_digest": lock.digest if lock else UNKNOWN,
    }
    console.result(json.dumps(facts) if options.json else f"{folder}: {state}")
    return 0


# Each function has the name of its subcommand.
COMMANDS: dict[str, Callable[[argparse.Namespace, Console], int]] = {
    command.__name__: command
    for command in (
        adopt,
        doctor,
        inspect,
        verify,
        unpack,
        export,
        clean,
        wheelhouse,
        serve,
        client,
    )
}
