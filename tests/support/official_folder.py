"""A model folder of the official backend, as people have it, and what tests of ``adopt`` ask of folders."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = '# mine\nbackend: "vllm"\ninstance_group [{ count: 1 kind: KIND_MODEL }]\n'
ARGUMENTS = {"model": "weights", "enable_lora": True}


def make_official(model: Path) -> Path:
    """Make such a folder, with weights and adapters of its own, and links."""
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(CONFIG)
    (model / "config.pbtxt").chmod(0o640)
    (model / "1" / "model.json").write_text(json.dumps(ARGUMENTS))
    (model / "1" / "model.json").chmod(0o600)
    (model / "1" / "multi_lora.json").write_text('{"sql": "adapters/sql", "hub": "org/name"}')
    for folder in ("weights", "adapters/sql"):
        (model / folder).mkdir(parents=True)
        (model / folder / "data.bin").write_bytes(b"1")
    (model / "notes").symlink_to("chat.jinja")
    (model / "chat.jinja").write_text("{{ messages }}")
    (model / "linked").symlink_to("weights")
    return model


def manifest(source: Path) -> str:
    """A manifest that says where the model is from."""
    record = {"name": "n", "sha256": "", "size": 0}
    vllm = {"version": "1", "commit": "", "distribution": "vllm", "origin": "o"}
    texts = {"layout": "archive", **dict.fromkeys(("key", "python", "triton_release", "lock_digest", "built_at"), "x")}
    stub = {**record, "python": "3.11", "release": "24.10", "origin": "o"}
    parts = {"vllm": vllm, "versions": {}, "archive": record, "stub": stub, "spec": {}, "left_out": []}
    return json.dumps({**texts, **parts, "format": 1, "adopted_from": str(source)})


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """The folder and all in it: kind, content, mode, owner, time of change, and how many names a file has."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        content: object = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        links = status.st_nlink if path.is_file() else 0
        mode = stat.S_IMODE(status.st_mode)
        found[str(path.relative_to(folder))] = (content, mode, status.st_uid, status.st_mtime_ns, links)
    return found


def names(folder: Path) -> set[str]:
    """Its files and links, from it on."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}
