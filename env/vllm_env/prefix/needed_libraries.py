"""Tells for every library that a file of an environment asks for whether the environment has it, or the machine must.

The machine's own folders do not count: what is in them here may be missing where Triton serves.

A library counts as there if any file of the environment, or a link to one, has its name. Run paths are not followed,
because they do not decide it: ld.so takes a library that is loaded already by its name, and wheels rely on that. The
extensions of vLLM name ``libtorch.so`` and no folder, and are imported after torch. Whether the import comes first cannot
be read from a file; ``verify`` imports them. auditwheel renames a library for one wheel alone (torchvision's
``libz.b9a71669.so.1``), so that nobody else finds it by its usual name.
"""

# ruff: noqa: PTH119
# thousands of paths, which os.path joins and splits several times faster than pathlib

import fnmatch
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base.elf import DynamicSection, read_dynamic_section, walk
from vllm_env.base.errors import VllmEnvError

# What an environment may leave to the machine that serves it, and which files may go without a library. Each entry was
# decided on what CPU and CUDA environments of vLLM 0.32 and 0.33 ask for. libnsl and libcrypt are not among the C library's:
# Debian has them in packages of their own, and images without them exist.
SYSTEM = {
    **dict.fromkeys(
        ("ld-linux-x86-64.so.2", "libc.so.6", "libm.so.6", "libmvec.so.1", "libdl.so.2",
         "libpthread.so.0", "librt.so.1", "libutil.so.1", "libresolv.so.2", "libanl.so.1"),
        "part of the C library, of which a process has one: that of the machine",
    ),
    **dict.fromkeys(("libgcc_s.so.1", "libstdc++.so.6"), "tritonserver and the stub need it themselves, so it is where they run"),
}  # fmt: skip
"""Libraries of every machine that runs tritonserver, with the reason."""

DRIVER = {
    "libcuda.so.1": "the driver's; the container runtime mounts it",
    "libcudadebugger.so.1": "the driver's, for debuggers",
    "libnvidia-ml.so.1": "the driver's; the container runtime mounts it",
    "libnvidia-ptxjitcompiler.so.1": "the driver's compiler of PTX",
    "libnvidia-nvvm.so.4": "the driver's compiler of NVVM",
    "libnvcuvid.so.1": "the driver's video decoder",
    "libnvidia-encode.so.1": "the driver's video encoder",
    "libnvidia-opticalflow.so.1": "the driver's, for video",
}
"""Libraries that come with the NVIDIA driver and must be of its version, with the reason; the profile ``cuda`` only."""


@dataclass(frozen=True)
class Tolerated:
    """Files that may go without some libraries: shell patterns of the path in the environment and of the libraries."""

    file: str
    libraries: tuple[str, ...]
    reason: str


_FFMPEG = ("libavcodec.so.*", "libavdevice.so.*", "libavfilter.so.*", "libavformat.so.*", "libavutil.so.*", "libsw*.so.*")
_RDMA = ("libibverbs.so.*", "librdmacm.so.*", "libmlx5.so.*", "libefa.so.*")
TOLERATED = (
    Tolerated("*/lib-dynload/_crypt.*", ("libcrypt.so.*",), "the module crypt left Python in 3.13; nothing imports it"),
    Tolerated("*/lib-dynload/nis.*", ("libnsl.so.*", "libtirpc.so.*"), "nis left Python in 3.13; nothing imports it"),
    Tolerated("*/numba/np/ufunc/omppool.*", ("libgomp.so.*",), "one of three thread pools; numba takes workqueue"),
    Tolerated("*/numba/np/ufunc/tbbpool.*", ("libtbb.so.*",), "one of three thread pools; numba takes workqueue"),
    Tolerated("*/torchcodec/libtorchcodec_*", _FFMPEG, "one file per FFmpeg release; torchcodec takes the first that loads"),
    Tolerated("*/torchcodec/libtorchcodec_heic*", ("libheif.so.*",), "opened when a HEIC image is decoded"),
    Tolerated(
        "*/nvidia/nvshmem/lib/nvshmem_transport_*",
        (*_RDMA, "libfabric.so.*", "libucp.so.*", "libucs.so.*"),
        "a plug-in for one kind of network, opened between hosts that have it",
    ),
    Tolerated(
        "*/nvidia/nvshmem/lib/nvshmem_bootstrap_*",
        ("libmpi.so.*", "liboshmem.so.*", "libpmix.so.*"),
        "a plug-in for one kind of launcher; vLLM starts NVSHMEM through torch",
    ),
    Tolerated(
        "*/bitsandbytes/libbitsandbytes_*",
        (
            "libcudart.so.*",
            "libcublas*.so.*",
            "libcusparse.so.*",
            "libhip*.so.*",
            "libroc*.so.*",
            "libsycl.so.*",
            "libimf.so*",
            "libintlc.so*",
            "libirng.so*",
            "libsvml.so*",
        ),
        "one file per toolkit and release; bitsandbytes takes the one of torch's",
    ),
    Tolerated("*/nvidia/*/lib/libcufile_rdma.so*", _RDMA, "opened by libcufile for storage over RDMA"),
)
"""Files that fail to load in a bare container and are not loaded there; see each reason."""

_SONAME = re.compile(r"(?P<name>.+?)\.so(?:\.(?P<version>\d+))?")


def outside(library: str, profile: str) -> bool:
    """Tell whether a library is the machine's or, in the profile ``cuda``, the driver's."""
    return library in SYSTEM or (profile == "cuda" and library in DRIVER)


def tolerated(file: str, library: str, rules: tuple[Tolerated, ...] = TOLERATED) -> bool:
    """Tell whether a file of the environment may go without a library."""
    covering = (rule for rule in rules if fnmatch.fnmatchcase(file, rule.file))
    return any(fnmatch.fnmatchcase(library, pattern) for rule in covering for pattern in rule.libraries)


def likely_package(library: str) -> str:
    """Return the package of Debian that probably has a library.

    It is named after the soname, with a dash after a digit (Debian Policy 8.1): libnuma.so.1 is in libnuma1, libtbb2.so.1
    would be in libtbb2-1.
    """
    match = _SONAME.match(library)
    name, version = (match["name"], match["version"] or "") if match else (library, "")
    dash = "-" if name[-1:].isdigit() and version else ""
    return f"{name}{dash}{version}".lower().replace("_", "-")


_STUBS = f"{os.sep}stubs{os.sep}"  # for linkers only: the toolkit's stubs/libcuda.so has the driver's soname and no code
_LISTED = 4  # libraries named in a message


@dataclass(frozen=True, order=True)
class Need:
    """A library that a file asks for; ``file`` is relative to the environment."""

    file: str
    library: str


@dataclass(frozen=True)
class NeededLibraries:
    """What the ELF files of an environment ask of the machine that serves it.

    ``missing`` is what nobody brings: neither the environment nor every machine nor the driver. ``glibc`` is the newest
    version of a symbol of the C library that is asked of the machine, such as ``(2, 34)``; () for none.
    """

    missing: tuple[Need, ...]
    glibc: tuple[int, ...]

    @property
    def missing_libraries(self) -> tuple[str, ...]:
        """The names of the missing libraries, sorted."""
        return tuple(sorted({need.library for need in self.missing}))


def find_needed_libraries(environment: Path, profile: str, rules: tuple[Tolerated, ...] = TOLERATED) -> NeededLibraries:
    """Look at every ELF file of an unpacked environment; the profile ``cuda`` leaves the driver's libraries to the machine."""
    root = os.path.realpath(environment)
    sections: dict[str, DynamicSection] = {}
    links = []
    for path, is_link in walk(root):
        if is_link:
            links.append(path)
        elif _STUBS not in path and (section := read_dynamic_section(path)) is not None:
            sections[path] = section
    brought = {os.path.basename(path) for path in (*sections, *links) if os.path.realpath(path) in sections}
    needs = [Need(os.path.relpath(path, root), library) for path, section in sections.items() for library in section.needed]
    asked = [need for need in needs if need.library not in brought and not outside(need.library, profile)]
    return NeededLibraries(
        missing=tuple(sorted(need for need in asked if not tolerated(need.file, need.library, rules))),
        glibc=max((section.glibc for section in sections.values()), default=()),
    )


def check_missing_libraries(found: NeededLibraries) -> None:
    """Refuse an environment whose files ask for libraries that a bare container does not have.

    Raises:
        VllmEnvError: naming the libraries, the files that need them and the packages that have them.
    """
    if not found.missing:
        return
    files: dict[str, list[str]] = defaultdict(list)
    for need in found.missing:
        files[need.library].append(need.file)
    first = sorted(files)[:_LISTED]
    more = f" and {len(files) - _LISTED} more" if len(files) > _LISTED else ""
    raise VllmEnvError(
        f"The environment lacks shared libraries: {'; '.join(_line(name, files[name]) for name in first)}{more}.",
        cause="They are in no package, and a bare container does not have them.",
        remedy="Install them on this machine, from which they are then packed (probably: apt-get install "
        f"{' '.join(likely_package(library) for library in first)}), or leave out what needs them.",
    )


def _line(library: str, files: list[str]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{library}, which {files[0]}{more} needs"
