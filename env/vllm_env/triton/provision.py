"""Make a CPU Triton from the wheel ``nvidia-pytriton``, for machines without a Triton.

The wheel contains a genuine tritonserver, its libraries and stubs for several Pythons. They are
laid out like ``/opt/tritonserver``. A launcher replaces the program; it sets the library folder and
the backend folder.
"""

import shutil
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path

from vllm_env.base.filesystem import (
    give_tree,
    make_readable,
    owner_of,
    put_in_place,
)
from vllm_env.base.locks import locked_folder, remove_unlocked
from vllm_env.base.machine import Platform, require_glibc, this_platform
from vllm_env.base.workspace import Workspace

from .root import STUB_NAME, TritonRoot, rules_of

TRITON_WHEEL = "nvidia-pytriton==0.7.0"
_WHEEL_PATTERN = "nvidia_pytriton-0.7.0-*{machine}.whl"
_RELEASE = "24.10"
# The wheel's stub for 3.13 needs a libpython under a name that only the wheel has.
_STUB_PYTHONS = ("3.8", "3.9", "3.10", "3.11", "3.12")
_DOWNLOAD = f"download {TRITON_WHEEL}, which carries the CPU Triton"
# Folders of the wheel and their places in the root. The rest is PyTriton's Python code.
_PLACES = {
    "pytriton/tritonserver/bin/": "libexec/",
    "pytriton/tritonserver/backends/": "backends/",
    "pytriton/tritonserver/caches/": "caches/",
    "pytriton/tritonserver/python_backend_stubs/": "python_backend_stubs/",
    "nvidia_pytriton.libs/": "lib/",
}
_LAUNCHER = """\
#!/bin/sh
# Starts the tritonserver of the wheel nvidia-pytriton, which expects to be in /opt/tritonserver.
root=$(CDPATH= cd -- "$(dirname -- "$(readlink -f -- "$0")")/.." && pwd)
server=$root/libexec/tritonserver
# The Python backend starts a stub by a line of bash that has these paths without quotes. Its stub
# decodes them as ASCII. The server and its stubs inherit the open folder, which has a plain path.
case $root in
  *[!A-Za-z0-9_@%+=,./-]*)
    exec 9<"$root"
    root=/proc/self/fd/9
    ;;
esac
LD_LIBRARY_PATH=$root/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
exec "$server" \\
  --backend-directory="$root/backends" --cache-directory="$root/caches" "$@"
"""


def to_be_provisioned(workspace: Workspace, target: Path) -> TritonRoot:
    """Return the root that ``provision`` will make in ``target``, without making it.

    Raises:
        VllmEnvError: this machine cannot run it, or ``--offline`` forbids to fetch its wheel.
    """
    _check_machine()
    if not _wheel_in(workspace.network.wheelhouse, this_platform()):
        workspace.network.require(_DOWNLOAD)
    # The pinned wheel always has the same content, so a dry run need not fetch 100 MB.
    stubs = {python: target / _stub_in_root(python) for python in _STUB_PYTHONS}
    return TritonRoot(target, _RELEASE, rules_of(_RELEASE), stubs)


def _stub_in_root(python: str) -> Path:
    return Path("python_backend_stubs", python, STUB_NAME)


def _check_machine() -> None:
    """Raise a VllmEnvError if the C library of this machine is too old for the CPU Triton."""
    # A Triton of 24.10 is built for Ubuntu 22.04, which has glibc 2.35.
    require_glibc(
        minor=35,
        what=f"The CPU Triton of {TRITON_WHEEL}",
        remedy="Build in a Triton container, or name a Triton with --triton-root.",
    )


def provision(workspace: Workspace, target: Path) -> None:
    """Lay out the wheel's Triton in ``target`` unless it is already there.

    Raises:
        CommandError: the wheel cannot be fetched.
    """
    if (target / "RELEASE").is_file():
        return
    _check_machine()
    place = target.parent
    place.mkdir(parents=True, exist_ok=True)
    prefix = f"{target.name}.staging-"
    # Builds with different caches may share a checkout. The second one waits and then finds the
    # first one's Triton.
    with workspace.locked(place, f"another build provisions {target}; waiting for it to end"):
        if (target / "RELEASE").is_file():
            return
        # Left by builds that were killed.
        for abandoned in place.glob(f"{prefix}*"):
            remove_unlocked(abandoned)
        with locked_folder(place, prefix) as folder:
            fetch(workspace, folder, this_platform())
            root = folder / "root"
            _lay_out(next(folder.glob("*.whl")), root)
            # The server may run as another user.
            make_readable(root)
            # In a container the builder is root, and the checkout is a user's.
            give_tree(root, owner_of(target))
            put_in_place(root, target)


def fetch(
    workspace: Workspace, folder: Path, target: Platform, options: Sequence[str] = ()
) -> None:
    """Put the CPU Triton's wheel into a folder, from the wheelhouse if that has it.

    Args:
        workspace: the wheelhouse and the network.
        folder: gets the wheel.
        target: the machines that it is for.
        options: pip's options for wheels of another kind of machine.

    Raises:
        CommandError: the wheel cannot be fetched.
    """
    if _wheel_in(folder, target):
        return
    wheel = _wheel_in(workspace.network.wheelhouse, target)
    if wheel:
        shutil.copy(wheel, folder)
        return
    workspace.network.pip_command(
        [
            "download", "--no-deps", "--only-binary", ":all:", "--quiet", *options,
            "--dest", folder, TRITON_WHEEL,
        ],
        _DOWNLOAD,
        env={"TMPDIR": str(folder)},
        remedy="Check that the package registry answers (pip config list), "
        "or give a Triton with --triton-root.",
    )  # fmt: skip


def _wheel_in(folder: Path | None, target: Platform) -> Path | None:
    """Return the CPU Triton's wheel for a kind of machine in a folder, or None."""
    pattern = _WHEEL_PATTERN.format(machine=target.machine)
    return next(folder.glob(pattern), None) if folder else None


def _lay_out(wheel: Path, root: Path) -> None:
    """Unpack the wheel's Triton into a new folder, in the form of ``/opt/tritonserver``."""
    # 1) Unpack the files that belong to Triton.
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            folder = next((f for f in _PLACES if member.filename.startswith(f)), None)
            if folder is None or member.is_dir():
                continue
            target = root / (_PLACES[folder] + member.filename.removeprefix(folder))
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            # zipfile does not restore modes. A ZIP has them in the upper half of this field.
            is_program = member.external_attr >> 16 & stat.S_IXUSR
            target.chmod(0o755 if is_program else 0o644)
    # These are started, whatever mode the wheel has for them.
    for program in [root / "libexec/tritonserver", *root.glob("python_backend_stubs/*/*stub")]:
        program.chmod(0o755)
    # 2) Add what a container has. Without a stub in its backend folder, the server loads no Python
    # model at all. The container of this release has the stub for 3.10 there.
    shutil.copy(root / _stub_in_root("3.10"), root / "backends/python")
    launcher = root / "bin" / "tritonserver"
    launcher.parent.mkdir()
    launcher.write_text(_LAUNCHER)
    launcher.chmod(0o755)
    # The version that its tritonserver reports.
    (root / "TRITON_VERSION").write_text("2.51.0\n")
    # Last, because this file marks a complete root.
    (root / "RELEASE").write_text(f"{_RELEASE}\n")
