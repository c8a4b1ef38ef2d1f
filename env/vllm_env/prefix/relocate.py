"""Make a prefix run in any folder: without activation (runtime_hook.py), and without the build's folder and times.

Accidental traces of one build are removed, too, so that equal locks give equal bytes.
"""

import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import conda_pack

from vllm_env import inside
from vllm_env.base.filesystem import file_sha256, write_whole
from vllm_env.base.machine import EPOCH

COMPILER = "vllm-env-cc"
"""The environment's own C compiler. The model sets CC to it if the container has none (triton_vllm's compilers.py)."""
# Triton (the GPU kernel compiler) compiles a C launcher for each kernel. Symbols of an old glibc (2.28) run anywhere.
_COMPILER = """\
#!/bin/sh
prefix=$(dirname -- "$(dirname -- "$(realpath -- "$0")")")
: "${{ZIG_GLOBAL_CACHE_DIR:=${{XDG_CACHE_HOME:-${{TMPDIR:-/tmp}}}}/vllm_env_cc-$(id -u)}}"
export ZIG_GLOBAL_CACHE_DIR
exec "$prefix/{packages}/ziglang/zig" cc -target x86_64-linux-gnu.2.28 "$@"
"""
_SCRIPTS = Path(conda_pack.__file__).with_name("scripts") / "posix"
_HOOK = inside.FOLDER / "runtime_hook.py"
_MODULE = "_vllm_env_runtime"
# This name sorts before the .pth files of packages, so that they already run with UTF-8.
_PTH = "00_vllm_env.pth"


def site_packages(prefix: Path) -> Path:
    """Return the folder ``lib/pythonX.Y/site-packages`` of a prefix."""
    return next(p for p in sorted(prefix.glob("lib/python3.*/site-packages")) if p.is_dir())


def install_runtime(prefix: Path, identity: str) -> None:
    """Install the start-up hook and the variable that it sets. No package of the conda layer has ``activate.d`` scripts.

    ``identity`` distinguishes environments, such as a lock's digest. It is part of the path of compiled kernels, because they
    include headers of this environment. By default, torch would share them with every other environment in
    ``/tmp/torchinductor_USER``.
    """
    packages = site_packages(prefix)
    if (packages / "ziglang" / "zig").is_file():
        (prefix / "bin" / COMPILER).write_text(
            _COMPILER.format(packages=packages.relative_to(prefix))
        )
        (prefix / "bin" / COMPILER).chmod(0o755)
    # Triton looks for bin/activate in an unpacked environment, too; conda-pack adds it only to an archive.
    for name in ("activate", "deactivate"):
        shutil.copyfile(_SCRIPTS / name, prefix / "bin" / name)
    shutil.copyfile(_HOOK, packages / f"{_MODULE}.py")
    (packages / _PTH).write_text(f"import {_MODULE}\n")
    kernels = f"{{cache}}/vllm_env/inductor/{identity[:16]}"
    (packages / "_vllm_env_variables.txt").write_text(
        f"TORCHINDUCTOR_CACHE_DIR={kernels}\n", "utf-8"
    )


# uv and pip write these; they say how, when and from where a wheel was installed.
_ACCIDENTS = ("uv_cache.json", "direct_url.json", "REQUESTED", "INSTALLER")
_LOCAL_FIELDS = (
    "channel",
    "indexed_timestamp",
    "timestamp",
    "extracted_package_dir",
    "package_tarball_full_path",
)
# A shell starts the interpreter next to the script, wherever the environment is. Python reads the second line as a string.
_SHEBANG = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")/python" "$0" "$@"
' '''
"""


def make_relocatable(prefix: Path, packages: Path) -> None:
    """Rewrite the scripts' first lines and the RECORD files, and remove the traces of when and from where wheels came."""
    changed = _rewrite_scripts(prefix)
    for info in sorted(packages.glob("*.dist-info")):
        for name in _ACCIDENTS:
            (info / name).unlink(missing_ok=True)
        if (info / "RECORD").is_file():
            _rewrite_record(info / "RECORD", packages, changed)
    for accident in (prefix / "CACHEDIR.TAG", prefix / "conda-meta" / "history"):
        accident.unlink(missing_ok=True)
    (
        prefix / "conda-meta" / "history"
    ).touch()  # conda-pack and conda recognise a prefix by this file
    for file in (prefix / "conda-meta").glob("*.json"):
        _rewrite_conda_record(file, prefix)


def set_times(prefix: Path) -> None:
    """Set the same time for every file and folder of a prefix."""
    for folder, _, files in os.walk(prefix):
        for name in files:
            os.utime(os.path.join(folder, name), (EPOCH, EPOCH), follow_symlinks=False)  # noqa: PTH118 - faster, for 60,000 files
        os.utime(folder, (EPOCH, EPOCH))


def _rewrite_scripts(prefix: Path) -> set[Path]:
    first_line = re.compile(
        rb"\A#!" + re.escape(str(prefix).encode()) + rb"/bin/python[\d.]*[^\n]*\n"
    )
    trampoline = re.compile(
        rb"\A#!/bin/sh\n'''exec' '?" + re.escape(str(prefix).encode()) + rb"[^\n]*\n' '''\n"
    )
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
    """Remove from a conda record where and when the package was fetched, and the files that were omitted.

    conda-pack takes the list of files from this record. It refuses a prefix without one of them, and it requires a URL.
    """
    record = json.loads(file.read_text("utf-8"))
    kept = {k: v for k, v in record.items() if k not in _LOCAL_FIELDS} | {"url": record["fn"]}
    kept["link"] = {"source": "", "type": 1}
    kept["files"] = [name for name in record["files"] if os.path.lexists(prefix / name)]
    paths, present = record.get("paths_data", {}), set(kept["files"])
    kept["paths_data"] = paths | {
        "paths": [
            _as_it_is(p, prefix / p["_path"])
            for p in paths.get("paths", [])
            if p["_path"] in present
        ]
    }
    write_whole(file, json.dumps(kept, indent=1, sort_keys=True))


def _as_it_is(entry: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return conda's entry of a file, with a new digest if the size has changed (prune.py removes symbols)."""
    if file.is_symlink() or not file.is_file() or entry.get("size_in_bytes") == file.stat().st_size:
        return entry
    return entry | {"sha256_in_prefix": file_sha256(file), "size_in_bytes": file.stat().st_size}


def _rewrite_record(record: Path, packages: Path, changed: set[Path]) -> None:
    """Sort the rows, omit removed files, and update the digests of files that changed or have another size."""
    rows = []
    for row in csv.reader(io.StringIO(record.read_text("utf-8"))):
        file = Path(os.path.normpath(packages / row[0]))
        if not file.exists() and not row[0].endswith(".pyc"):
            continue
        if file in changed or (
            row[2:] and row[2].isdecimal() and int(row[2]) != file.stat().st_size
        ):
            data = file.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            row = [row[0], f"sha256={digest}", str(len(data))]  # noqa: PLW2901
        rows.append(row)
    sink = io.StringIO()
    csv.writer(sink, lineterminator="\n").writerows(sorted(rows))
    write_whole(record, sink.getvalue())
