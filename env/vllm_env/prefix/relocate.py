"""Takes the build's own folder, times and accidents out of a prefix: it runs anywhere, and equal locks give equal bytes."""

import base64
import csv
import hashlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

from vllm_env.base.filesystem import file_sha256, write_whole
from vllm_env.base.neutral import EPOCH

_ACCIDENTS = ("uv_cache.json", "direct_url.json", "REQUESTED", "INSTALLER")
_LOCAL_FIELDS = ("channel", "indexed_timestamp", "timestamp", "extracted_package_dir", "package_tarball_full_path")
# A shell that starts the interpreter beside the script, wherever the environment lies; to Python it is a string.
_SHEBANG = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")/python" "$0" "$@"
' '''
"""


def make_relocatable(prefix: Path, packages: Path) -> None:
    """Rewrite the scripts' first lines and the RECORD files, and remove what tells when and from where wheels were installed."""
    changed = _rewrite_scripts(prefix)
    for info in sorted(packages.glob("*.dist-info")):
        for name in _ACCIDENTS:
            (info / name).unlink(missing_ok=True)
        if (info / "RECORD").is_file():
            _rewrite_record(info / "RECORD", packages, changed)
    for accident in (prefix / "CACHEDIR.TAG", prefix / "conda-meta" / "history"):
        accident.unlink(missing_ok=True)
    (prefix / "conda-meta" / "history").touch()  # conda-pack and conda know a prefix by it
    for file in (prefix / "conda-meta").glob("*.json"):
        _rewrite_conda_record(file, prefix)


def set_times(prefix: Path) -> None:
    """Give every file and folder of a prefix the same time."""
    for folder, _, files in os.walk(prefix):
        for name in files:
            os.utime(os.path.join(folder, name), (EPOCH, EPOCH), follow_symlinks=False)  # noqa: PTH118 - 60,000 of them
        os.utime(folder, (EPOCH, EPOCH))


def _rewrite_scripts(prefix: Path) -> set[Path]:
    first_line = re.compile(rb"\A#!" + re.escape(str(prefix).encode()) + rb"/bin/python[\d.]*[^\n]*\n")
    trampoline = re.compile(rb"\A#!/bin/sh\n'''exec' '?" + re.escape(str(prefix).encode()) + rb"[^\n]*\n' '''\n")
    changed = set()
    for script in (prefix / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        data = script.read_bytes()
        new = trampoline.sub(_SHEBANG, first_line.sub(_SHEBANG, data))
        if new != data:
            write_whole(script, new)
            changed.add(script)
    return changed


def _rewrite_conda_record(file: Path, prefix: Path) -> None:
    """Take out of conda's record where and when the package was fetched, and what of it was omitted.

    conda-pack takes the files from this record, refuses a prefix that lacks one of them, and wants an address.
    """
    record = json.loads(file.read_text("utf-8"))
    kept = {k: v for k, v in record.items() if k not in _LOCAL_FIELDS} | {"url": record["fn"]}
    kept["link"] = {"source": "", "type": 1}
    kept["files"] = [name for name in record["files"] if os.path.lexists(prefix / name)]
    paths, present = record.get("paths_data", {}), set(kept["files"])
    kept["paths_data"] = paths | {
        "paths": [_as_it_is(p, prefix / p["_path"]) for p in paths.get("paths", []) if p["_path"] in present]
    }
    write_whole(file, json.dumps(kept, indent=1, sort_keys=True))


def _as_it_is(entry: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return conda's entry of a file, with its digest of now if its size is another one (prune.py takes symbols out)."""
    if file.is_symlink() or not file.is_file() or entry.get("size_in_bytes") == file.stat().st_size:
        return entry
    return entry | {"sha256_in_prefix": file_sha256(file), "size_in_bytes": file.stat().st_size}


def _rewrite_record(record: Path, packages: Path, changed: set[Path]) -> None:
    """Sort the rows, omit files that are gone, and digest again those that changed or have another size."""
    rows = []
    for row in csv.reader(io.StringIO(record.read_text("utf-8"))):
        file = Path(os.path.normpath(packages / row[0]))
        if not file.exists() and not row[0].endswith(".pyc"):
            continue
        if file in changed or (row[2:] and row[2].isdecimal() and int(row[2]) != file.stat().st_size):
            data = file.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            row = [row[0], f"sha256={digest}", str(len(data))]  # noqa: PLW2901
        rows.append(row)
    sink = io.StringIO()
    csv.writer(sink, lineterminator="\n").writerows(sorted(rows))
    write_whole(record, sink.getvalue())
