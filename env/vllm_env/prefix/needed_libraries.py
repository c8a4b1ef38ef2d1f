"""Find the libraries that an environment needs and that neither it nor the serving machine has.

This machine's folders do not count: their libraries may be missing on the machine where Triton
serves.

A library counts as present if any file of the environment, or a link to one, has its name. Run
paths are not followed, because they do not decide it. If a library is already loaded, ld.so finds
it by its name, and wheels rely on that. For example, vLLM's extensions name ``libtorch.so`` without
a folder and are imported after torch. A file does not say whether the import comes first;
``verify`` therefore imports the extensions.

auditwheel renames a library for one wheel (torchvision's ``libz.b9a71669.so.1``), so no other wheel
finds it by its usual name.
"""

# ruff: noqa: PTH119
# os.path joins and splits thousands of paths several times faster than pathlib.

import fnmatch
import os
import platform
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base.elf import DynamicSection, read_dynamic_section, walk
from vllm_env.base.errors import VllmEnvError

# The tables say which libraries an environment may expect from the serving machine, and which files
# may lack a library. Each entry was decided on the needs of CPU and CUDA environments of vLLM 0.32
# and 0.33.

_LOADER = "ld-linux-aarch64.so.1" if platform.machine() == "aarch64" else "ld-linux-x86-64.so.2"
SYSTEM_LIBRARIES = {
    # The C library. A process has only one, the machine's. libnsl and libcrypt are not part of it:
    # Debian has them in packages of their own, and images without them exist.
    _LOADER, "libc.so.6", "libm.so.6", "libmvec.so.1", "libdl.so.2",
    "libpthread.so.0", "librt.so.1", "libutil.so.1", "libresolv.so.2", "libanl.so.1",
    # tritonserver and the stub need these two themselves.
    "libgcc_s.so.1", "libstdc++.so.6",
}  # fmt: skip
"""Libraries that every machine with tritonserver has."""

DRIVER_LIBRARIES = {
    # Mounted by the container runtime. All of these must match the driver's version.
    "libcuda.so.1", "libnvidia-ml.so.1",
    # For debuggers.
    "libcudadebugger.so.1",
    # The compilers of PTX and NVVM.
    "libnvidia-ptxjitcompiler.so.1", "libnvidia-nvvm.so.4",
    # Video: decoder, encoder and optical flow.
    "libnvcuvid.so.1", "libnvidia-encode.so.1", "libnvidia-opticalflow.so.1",
}  # fmt: skip
"""Libraries of the NVIDIA driver; only for the profile ``cuda``."""

_RDMA = ("libibverbs.so.*", "librdmacm.so.*", "libmlx5.so.*", "libefa.so.*")
TOLERATED_LIBRARIES: dict[str, tuple[str, ...]] = {
    # These two modules left Python in 3.13, and nothing imports them.
    "*/lib-dynload/_crypt.*": ("libcrypt.so.*",),
    "*/lib-dynload/nis.*": ("libnsl.so.*", "libtirpc.so.*"),
    # Two of three thread pools; numba takes the third, workqueue.
    "*/numba/np/ufunc/omppool.*": ("libgomp.so.*",),
    "*/numba/np/ufunc/tbbpool.*": ("libtbb.so.*",),
    # One file per FFmpeg release; torchcodec takes the first that loads.
    "*/torchcodec/libtorchcodec_*": (
        "libavcodec.so.*", "libavdevice.so.*", "libavfilter.so.*", "libavformat.so.*",
        "libavutil.so.*", "libsw*.so.*",
    ),
    # Opened when a HEIC image is decoded.
    "*/torchcodec/libtorchcodec_heic*": ("libheif.so.*",),
    # A plug-in for one kind of network, opened between hosts that have it.
    "*/nvidia/nvshmem/lib/nvshmem_transport_*": (
        *_RDMA, "libfabric.so.*", "libucp.so.*", "libucs.so.*",
    ),
    # A plug-in for one kind of launcher; vLLM starts NVSHMEM through torch.
    "*/nvidia/nvshmem/lib/nvshmem_bootstrap_*": (
        "libmpi.so.*", "liboshmem.so.*", "libpmix.so.*",
    ),
    # One file per toolkit and release; bitsandbytes loads the one of torch's toolkit.
    "*/bitsandbytes/libbitsandbytes_*": (
        "libcudart.so.*", "libcublas*.so.*", "libcusparse.so.*",
        "libhip*.so.*", "libroc*.so.*",
        "libsycl.so.*", "libimf.so*", "libintlc.so*", "libirng.so*", "libsvml.so*",
    ),
    # Opened by libcufile for storage over RDMA.
    "*/nvidia/*/lib/libcufile_rdma.so*": _RDMA,
}  # fmt: skip
"""Files that are never loaded in a bare container, and the libraries that they may lack.

Both are shell patterns: of a file's path in the environment, and of a library's name.
"""


def outside(library: str, profile: str) -> bool:
    """Return whether a library comes from the machine or, for ``cuda``, from its driver."""
    return library in SYSTEM_LIBRARIES or (profile == "cuda" and library in DRIVER_LIBRARIES)


def tolerated(
    file: str, library: str, rules: Mapping[str, tuple[str, ...]] = TOLERATED_LIBRARIES
) -> bool:
    """Return whether a file of the environment may lack a library by the ``rules``.

    These are patterns of files, each with patterns of the libraries that such a file may lack.
    """
    return any(
        fnmatch.fnmatchcase(file, files) and fnmatch.fnmatchcase(library, pattern)
        for files, libraries in rules.items()
        for pattern in libraries
    )


def likely_package(library: str) -> str:
    """Return the Debian package that probably contains a library (``libnuma1``)."""
    name, _, version = library.partition(".so")
    major = version.lstrip(".").partition(".")[0]
    # Debian Policy 8.1 makes the package's name from the soname, with a dash after a digit:
    # libtbb2.so.1 would be in libtbb2-1.
    dash = "-" if name[-1:].isdigit() and major else ""
    return f"{name}{dash}{major}".lower().replace("_", "-")


# For linkers only: the toolkit's stubs/libcuda.so has the soname of the driver's library, but no
# code.
_STUBS_FOLDER = "/stubs/"
# The most libraries that a message names. All of FFmpeg may be missing.
_LISTED_FILES = 4


@dataclass(frozen=True, order=True)
class Need:
    """A library that a file needs; ``file`` is relative to the environment."""

    file: str
    library: str


@dataclass(frozen=True)
class NeededLibraries:
    """The needs of an environment's ELF files on the serving machine.

    Attributes:
        missing: libraries of neither the environment, nor every machine, nor the driver.
        glibc: the newest version of glibc's symbols that is needed, such as ``(2, 34)``, or ``()``.
    """

    missing: tuple[Need, ...]
    glibc: tuple[int, ...]

    @property
    def missing_libraries(self) -> tuple[str, ...]:
        """Return the names of the missing libraries, sorted."""
        return tuple(sorted({need.library for need in self.missing}))


def find_needed_libraries(
    environment: Path, profile: str, rules: Mapping[str, tuple[str, ...]] = TOLERATED_LIBRARIES
) -> NeededLibraries:
    """Return the needs of all ELF files of an unpacked environment.

    Args:
        environment: the folder that contains ``bin`` and ``lib``.
        profile: ``cpu``, or ``cuda``, which gets the driver's libraries from the serving machine.
        rules: the files that may lack libraries, as :data:`TOLERATED_LIBRARIES`.
    """
    # 1) Read all ELF files.
    root = os.path.realpath(environment)
    sections: dict[str, DynamicSection] = {}
    links = []
    for path, is_link in walk(root):
        if is_link:
            links.append(path)
        elif _STUBS_FOLDER not in path and (section := read_dynamic_section(path)) is not None:
            sections[path] = section
    # 2) Collect the names by which ld.so finds them. A link counts if it leads to one of them.
    names = {os.path.basename(path) for path in sections}
    names |= {os.path.basename(link) for link in links if os.path.realpath(link) in sections}
    # 3) Compare.
    missing = []
    for path, section in sections.items():
        file = os.path.relpath(path, root)
        for library in section.needed:
            is_present = library in names or outside(library, profile)
            if not is_present and not tolerated(file, library, rules):
                missing.append(Need(file, library))
    glibc = max((section.glibc for section in sections.values()), default=())
    return NeededLibraries(tuple(sorted(missing)), glibc)


def check_missing_libraries(needs: NeededLibraries) -> None:
    """Raise an error if files need libraries that a bare container does not have.

    Raises:
        VllmEnvError: names the libraries, the files that need them and the packages.
    """
    if not needs.missing:
        return
    files: dict[str, list[str]] = defaultdict(list)
    for need in needs.missing:
        files[need.library].append(need.file)
    libraries = sorted(files)[:_LISTED_FILES]
    lines = "; ".join(_line(library, files[library]) for library in libraries)
    more = f" and {len(files) - _LISTED_FILES} more" if len(files) > _LISTED_FILES else ""
    packages = " ".join(likely_package(library) for library in libraries)
    raise VllmEnvError(
        f"The environment lacks shared libraries: {lines}{more}.",
        cause="They are in no package, and a bare container does not have them.",
        remedy="Install them on this machine, from which they are then packed (probably: "
        f"apt-get install {packages}), or leave out the packages that need them.",
    )


def _line(library: str, files: list[str]) -> str:
    others = len(files) - 1
    return f"{library}, needed by {files[0]}" + (f" and {others} more" if others else "")
