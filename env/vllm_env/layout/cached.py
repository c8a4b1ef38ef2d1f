"""The packed layouts in the cache: ``KEY.tar.gz``, its parts in ``KEY.parts``, and their sizes and digests in ``KEY.json``."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from vllm_env.base.cache import Cache, touch
from vllm_env.base.filesystem import put_in_place

from .layout import EnvironmentRecord, Packed


def parts_folder(archive: Path) -> Path:
    """Return the folder of an archive's parts. It has the archive's name, in the cache and in a model's folder."""
    return archive.with_name(archive.name.removesuffix(".tar.gz") + ".parts")


def facts_of(record: EnvironmentRecord) -> dict[str, Any]:
    """Return the facts to record about a packed file, under the names that the environment's own code reads."""
    return {
        field: value
        for field, value in dataclasses.asdict(record).items()
        if field not in ("name", "key")
    }


def find_packed(cache: Cache, key: str, files: tuple[str, ...]) -> Packed | None:
    """Return a key's entry if all its files have the recorded size; ``files`` are the layout's names, the archive last."""
    target = cache.path("archives", f"{key}.tar.gz")
    facts = target.with_name(f"{key}.json")  # the cache finds an entry's files by this name
    if not facts.is_file():
        return None
    document = json.loads(facts.read_text())
    parts = document.pop("parts", ())
    sizes = {
        target: document["size"],
        **{parts_folder(target) / part["name"]: part["size"] for part in parts},
    }
    if not all(file.is_file() and file.stat().st_size == size for file, size in sizes.items()):
        return None
    # Do not touch the archive: repositories have links to it, and Triton extracts it again when its time changes.
    touch(facts)
    records = [
        EnvironmentRecord(**{**part, "name": f"{files[0]}/{part['name']}"}) for part in parts
    ]
    return Packed(target, (EnvironmentRecord(files[-1], **document), *records), reused=True)


def keep_packed(cache: Cache, file: Path, records: tuple[EnvironmentRecord, ...]) -> Packed:
    """Move a staged archive and its parts into the cache. The facts go last: an entry without them counts as incomplete."""
    first, *parts = records
    document = facts_of(first)
    if parts:
        document["parts"] = [{"name": Path(part.name).name, **facts_of(part)} for part in parts]
    facts = file.with_name(f"{file.name.removesuffix('.tar.gz')}.json")
    facts.write_text(json.dumps(document))
    target = cache.path("archives", file.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    if parts:
        put_in_place(parts_folder(file), parts_folder(target))
    file.replace(target)
    facts.replace(target.with_name(facts.name))
    return Packed(target, records)
