"""Keep packed layouts in the cache, and find them again.

An entry is ``KEY.tar.gz``, its parts in ``KEY.parts``, and their sizes and digests in ``KEY.json``.
"""

import json
from pathlib import Path
from typing import Any

from vllm_env.base.cache import Cache, touch
from vllm_env.base.filesystem import put_in_place

from .layout import EnvironmentRecord, Packed


def parts_folder(archive: Path) -> Path:
    """Return the folder of an archive's parts, in the cache or in a model's folder."""
    return archive.with_name(archive.name.removesuffix(".tar.gz") + ".parts")


def file_record(record: EnvironmentRecord) -> dict[str, Any]:
    """Return what is recorded about a packed file: its digest, sizes in bytes, and members."""
    # The code that unpacks the parts reads them by these names.
    return {
        "sha256": record.sha256,
        "size": record.size,
        "members": record.members,
        "unpacked": record.unpacked,
    }


def find_packed(cache: Cache, key: str, files: tuple[str, ...]) -> Packed | None:
    """Return a key's entry if all its files have the recorded size, else None.

    ``files`` are the layout's names: the folder of the parts if it has one, then the archive.
    """
    target = cache.path("archives", f"{key}.tar.gz")
    # The cache finds an entry's files by this name.
    record_file = target.with_name(f"{key}.json")
    if not record_file.is_file():
        return None
    document = json.loads(record_file.read_text())
    # What stays in the document describes the archive.
    parts = document.pop("parts", ())
    sizes = {parts_folder(target) / part["name"]: part["size"] for part in parts}
    sizes[target] = document["size"]
    if not all(file.is_file() and file.stat().st_size == size for file, size in sizes.items()):
        return None
    # Not the archive: repositories have links to it, and Triton extracts it again when its time
    # changes.
    touch(record_file)
    # A record's name is the path in the model's folder.
    records = []
    for part in parts:
        part["name"] = f"{files[0]}/{part['name']}"
        records.append(EnvironmentRecord(**part))
    return Packed(target, (EnvironmentRecord(files[-1], **document), *records), reused=True)


def keep_packed(cache: Cache, file: Path, records: tuple[EnvironmentRecord, ...]) -> Packed:
    """Move a staged archive and its parts into the cache.

    Args:
        cache: the cache.
        file: the archive; its parts are in the folder ``parts_folder(file)``.
        records: those of the archive and of the parts, in this order.
    """
    first, *parts = records
    document = file_record(first)
    if parts:
        document["parts"] = [{"name": Path(part.name).name, **file_record(part)} for part in parts]
    record_file = file.with_name(f"{file.name.removesuffix('.tar.gz')}.json")
    record_file.write_text(json.dumps(document))
    target = cache.path("archives", file.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    if parts:
        put_in_place(parts_folder(file), parts_folder(target))
    file.replace(target)
    # This file goes last: an entry without it counts as incomplete.
    record_file.replace(target.with_name(record_file.name))
    return Packed(target, records)
