"""Make a prefix run in any folder, without activation and without the build's folder and times.

Accidental traces of one build are removed, too, so that equal locks give equal bytes.
"""

import base64
import csv
import hashlib
import io
import json
import os
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import conda_pack

from vllm_env import inside
from vllm_env.base.filesystem import file_sha256, write_whole
from vllm_env.base.machine import AMD64, ARM64, EPOCH

# Triton, the GPU kernel compiler, compiles a C launcher for each kernel, and a container may lack a
# C compiler. The model then sets CC to this one (triton_vllm's compilers.py).
COMPILER = "vllm-env-cc"
"""The environment's own C compiler."""
# Symbols of an old glibc (2.28) run anywhere.
_COMPILER = """\
#!/bin/sh
prefix=$(dirname -- "$(dirname -- "$(realpath -- "$0")")")
: "${{ZIG_GLOBAL_CACHE_DIR:=${{XDG_CACHE_HOME:-${{TMPDIR:-/tmp}}}}/vllm_env_cc-$(id -u)}}"
export ZIG_GLOBAL_CACHE_DIR
exec "$prefix/{packages}/ziglang/zig" cc -target {machine}-linux-gnu.2.28 "$@"
"""
_SCRIPTS = Path(conda_pack.__file__).with_name("scripts") / "posix"
_MODULE = "_vllm_env_runtime"
# This name sorts before the .pth files of packages, so that they already run with UTF-8.
_PTH = "00_vllm_env.pth"
_GUARD = "00_vllm_env_machine.pth"
_WRONG_MACHINE = (
    f"This model was built for {ARM64.name}, and this machine is another one. Build it again on "
    f"this machine, or serve it on {ARM64.name}."
)


def site_packages(prefix: Path) -> Path:
    """Return the folder ``lib/pythonX.Y/site-packages`` of a prefix."""
    # conda-forge's Python has a link lib/python3.1 to that folder.
    folders = sorted(prefix.glob("lib/python3.*/site-packages"))
    return next(p for p in folders if p.is_dir() and not p.parent.is_symlink())


def install_runtime(prefix: Path, identity: str) -> None:
    """Install the start-up hook, the variable that it sets, ``activate`` and the C compiler.

    Args:
        prefix: the environment.
        identity: a text that distinguishes environments, such as a lock's digest.
    """
    packages = site_packages(prefix)
    programs = prefix / "bin"
    # The wheel ziglang has the compiler. Not every lock has that wheel.
    if (packages / "ziglang" / "zig").is_file():
        compiler = programs / COMPILER
        script = _COMPILER.format(packages=packages.relative_to(prefix), machine=platform.machine())
        compiler.write_text(script)
        compiler.chmod(0o755)
    # Triton looks for bin/activate in an unpacked environment, too; conda-pack adds it only to an
    # archive. No package of the conda layer has activate.d scripts.
    for name in ("activate", "deactivate"):
        shutil.copyfile(_SCRIPTS / name, programs / name)
    _install_guard(packages)
    shutil.copyfile(inside.FOLDER / "runtime_hook.py", packages / f"{_MODULE}.py")
    (packages / _PTH).write_text(f"import {_MODULE}\n")
    # Compiled kernels include headers of this environment. By default, torch would share them with
    # every other environment in /tmp/torchinductor_USER. The hook replaces {cache}.
    kernels = f"{{cache}}/vllm_env/inductor/{identity[:16]}"
    variables = packages / "_vllm_env_variables.txt"
    variables.write_text(f"TORCHINDUCTOR_CACHE_DIR={kernels}\n", "utf-8")


def _install_guard(packages: Path, machine: str = platform.machine()) -> None:
    """Make an environment for Arm end a process on another kind of machine, with a message.

    Environments for x86-64 do not do so: their archives stay equal to those of older builds.
    """
    if machine == AMD64.machine:
        return
    # A server's own stub starts on the other machine, and imports NumPy before model.py. Without
    # this, it would fail with NumPy's words. A stub in the model's folder does not start at all.
    refusal = f'(os.write(2, b"{_WRONG_MACHINE}\\n"), os._exit(1))'
    check = f'import os; os.uname().machine == "{machine}" or {refusal}\n'
    (packages / _GUARD).write_text(check)


# uv and pip write these; they say how, when and from where a wheel was installed.
_ACCIDENTS = ("uv_cache.json", "direct_url.json", "REQUESTED", "INSTALLER")
# Where and when py-rattler fetched a package.
_LOCAL_FIELDS = (
    "channel", "indexed_timestamp", "timestamp",
    "extracted_package_dir", "package_tarball_full_path",
)  # fmt: skip
# A shell starts the interpreter next to the script, wherever the environment is. Python reads the
# second line as a string.
_SHEBANG = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")/python" "$0" "$@"
' '''
"""


def make_relocatable(prefix: Path, packages: Path) -> None:
    """Rewrite the scripts and records that name the build's folder, and remove its other traces.

    Args:
        prefix: the environment.
        packages: its ``site-packages``.
    """
    scripts = _rewrite_scripts(prefix)
    for info in sorted(packages.glob("*.dist-info")):
        for name in _ACCIDENTS:
            (info / name).unlink(missing_ok=True)
        if (info / "RECORD").is_file():
            _rewrite_record(info / "RECORD", packages, scripts)
    (prefix / "CACHEDIR.TAG").unlink(missing_ok=True)
    records = prefix / "conda-meta"
    # conda-pack and conda recognise a prefix by this file. Its content is the time of each step.
    write_whole(records / "history", "")
    for file in records.glob("*.json"):
        _rewrite_conda_record(file, prefix)


def set_times(prefix: Path) -> None:
    """Set the same time for every file and folder of a prefix."""
    for folder, _, files in os.walk(prefix):
        for name in files:
            # A string, not a Path, which is slower for 60,000 files.
            os.utime(f"{folder}/{name}", (EPOCH, EPOCH), follow_symlinks=False)
        os.utime(folder, (EPOCH, EPOCH))


def _rewrite_scripts(prefix: Path) -> set[str]:
    """Make the scripts start the interpreter next to them; return the paths of the changed ones."""
    folder = re.escape(str(prefix))
    direct = rf"#!{folder}/bin/python[\d.]*[^\n]*\n"
    # uv writes this form if the line would be longer than 127 bytes, the limit of the kernel.
    by_shell = rf"#!/bin/sh\n'''exec' '?{folder}[^\n]*\n' '''\n"
    first_lines = re.compile(rf"\A(?:{direct}|{by_shell})".encode())
    scripts = set()
    for script in (prefix / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        data = script.read_bytes()
        new = first_lines.sub(_SHEBANG, data)
        if new != data:
            write_whole(script, new)
            scripts.add(str(script))
    return scripts


def _rewrite_conda_record(file: Path, prefix: Path) -> None:
    """Remove from a conda record the place and time of the fetching, and the omitted files."""
    record = json.loads(file.read_text("utf-8"))
    for field in _LOCAL_FIELDS:
        record.pop(field, None)
    # conda-pack requires a URL. The file's name is the same on every machine.
    record["url"] = record["fn"]
    record["link"] = {"source": "", "type": 1}
    # conda-pack takes the list of files from this record, and refuses a prefix that lacks one.
    record["files"] = [name for name in record["files"] if os.path.lexists(prefix / name)]
    present = set(record["files"])
    # conda's own list of the files, with their digests.
    paths = record.setdefault("paths_data", {})
    paths["paths"] = [
        _updated(entry, prefix / entry["_path"])
        for entry in paths.get("paths", [])
        if entry["_path"] in present
    ]
    write_whole(file, json.dumps(record, indent=1, sort_keys=True))


def _updated(entry: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return conda's entry of a file, with a new digest if the size has changed."""
    # prune.py removes symbols from programs and libraries, which makes them smaller.
    if file.is_symlink() or not file.is_file() or entry.get("size_in_bytes") == file.stat().st_size:
        return entry
    return entry | {"sha256_in_prefix": file_sha256(file), "size_in_bytes": file.stat().st_size}


def _rewrite_record(record: Path, packages: Path, scripts: set[str]) -> None:
    """Sort the rows of a wheel's RECORD, omit removed files, and update those of changed files.

    Args:
        record: the RECORD.
        packages: ``site-packages``, which contains the paths.
        scripts: the changed scripts.
    """
    rows = []
    for row in csv.reader(io.StringIO(record.read_text("utf-8"))):
        # A row has the path, the digest and the size. Some wheels have rows of two columns, or
        # empty lines. pip takes them, and so they stay.
        path, _, size = (*row, "", "", "")[:3]
        # Strings, not Paths, which are slower for 60,000 rows.
        file = os.path.normpath(f"{packages}/{path}")
        try:
            length = os.stat(file).st_size  # noqa: PTH116
        except FileNotFoundError:
            # A row of bytecode stays: it is compiled later.
            if path.endswith(".pyc"):
                rows.append(row)
            continue
        # prune.py changes the size of a file. A script may have its old size by chance.
        has_other_size = size.isdecimal() and int(size) != length
        if has_other_size or file in scripts:
            data = Path(file).read_bytes()
            sha256 = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append([path, f"sha256={sha256}", str(len(data))])
        else:
            rows.append(row)
    sink = io.StringIO()
    csv.writer(sink, lineterminator="\n").writerows(sorted(rows))
    write_whole(record, sink.getvalue())
