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
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base.elf import DynamicSection, read_dynamic_section, walk
from vllm_env.base.errors import VllmEnvError

# The tables say which libraries an environment may expect from the serving machine, and which files
# may lack a library. Each entry was decided on the needs of CPU and CUDA environments of vLLM 0.32
# and 0.33.

# libnsl and libcrypt are not part of the C library: Debian has them in packages of their own, and
# images without them exist.
SYSTEM = {
    **dict.fromkeys(
        ("ld-linux-x86-64.so.2", "libc.so.6", "libm.so.6", "libmvec.so.1", "libdl.so.2",
         "libpthread.so.0", "librt.so.1", "libutil.so.1", "libresolv.so.2", "libanl.so.1"),
        "part of the C library; a process has only one, the machine's",
    ),
    **dict.fromkeys(
        ("libgcc_s.so.1", "libstdc++.so.6"), "tritonserver and the stub need it themselves"
    ),
}  # fmt: skip
"""Libraries that every machine with tritonserver has, with the reason."""

# They must match the driver's version, so a copy in the environment would break on another machine.
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
"""Libraries of the NVIDIA driver, with the reason; only for the profile ``cuda``."""


@dataclass(frozen=True)
class Tolerated:
    """Files that may lack some libraries.

    Attributes:
        file: shell pattern of the files' paths in the environment.
        libraries: shell patterns of the libraries' names.
        reason: why the files do not need them.
    """

    file: str
    libraries: tuple[str, ...]
    reason: str


# Libraries of CUDA, of ROCm and of Intel's toolkit; a machine rarely has all three.
_TOOLKITS = (
    "libcudart.so.*", "libcublas*.so.*", "libcusparse.so.*", "libhip*.so.*", "libroc*.so.*",
    "libsycl.so.*", "libimf.so*", "libintlc.so*", "libirng.so*", "libsvml.so*",
)  # fmt: skip
_RDMA = ("libibverbs.so.*", "librdmacm.so.*", "libmlx5.so.*", "libefa.so.*")
TOLERATED = (
    Tolerated(
        "*/lib-dynload/_crypt.*",
        ("libcrypt.so.*",),
        "the module crypt left Python in 3.13; nothing imports it",
    ),
    Tolerated(
        "*/lib-dynload/nis.*",
        ("libnsl.so.*", "libtirpc.so.*"),
        "nis left Python in 3.13; nothing imports it",
    ),
    Tolerated(
        "*/numba/np/ufunc/*pool.*",
        ("libgomp.so.*", "libtbb.so.*"),
        "omppool and tbbpool are two of three thread pools; numba takes the third, workqueue",
    ),
    # libtorchcodec_heic* also needs libheif, which is opened when a HEIC image is decoded.
    Tolerated(
        "*/torchcodec/libtorchcodec_*",
        ("libav*.so.*", "libsw*.so.*", "libheif.so.*"),
        "one file per FFmpeg release; torchcodec takes the first that loads",
    ),
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
        _TOOLKITS,
        "one file per toolkit and release; bitsandbytes loads the one that fits torch",
    ),
    Tolerated(
        "*/nvidia/*/lib/libcufile_rdma.so*", _RDMA, "opened by libcufile for storage over RDMA"
    ),
)
"""Files that cannot be loaded in a bare container and that are not loaded there."""


def outside(library: str, profile: str) -> bool:
    """Return whether a library comes from the machine or, for ``cuda``, from its driver."""
    return library in SYSTEM or (profile == "cuda" and library in DRIVER)


def tolerated(file: str, library: str, rules: tuple[Tolerated, ...] = TOLERATED) -> bool:
    """Return whether a file of the environment may lack a library."""
    covering = (rule for rule in rules if fnmatch.fnmatchcase(file, rule.file))
    return any(
        fnmatch.fnmatchcase(library, pattern) for rule in covering for pattern in rule.libraries
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
_STUBS = "/stubs/"
# The most libraries that a message names. All of FFmpeg may be missing.
_LISTED = 4


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
    environment: Path, profile: str, rules: tuple[Tolerated, ...] = TOLERATED
) -> NeededLibraries:
    """Return the needs of all ELF files of an unpacked environment.

    Args:
        environment: the folder that contains ``bin`` and ``lib``.
        profile: ``cpu``, or ``cuda``, which gets the driver's libraries from the serving machine.
        rules: the files that may lack libraries.
    """
    # 1) Read all ELF files.
    root = os.path.realpath(environment)
    sections: dict[str, DynamicSection] = {}
    links = []
    for path, is_link in walk(root):
        if is_link:
            links.append(path)
        elif _STUBS not in path and (section := read_dynamic_section(path)) is not None:
            sections[path] = section
    # 2) Collect the names by which ld.so finds them. A link counts if it leads to one of them.
    names = {os.path.basename(path) for path in sections}
    names |= {os.path.basename(link) for link in links if os.path.realpath(link) in sections}
    # 3) Compare.
    missing = []
    for path, section in sections.items():
        file = os.path.relpath(path, root)
        for library in section.needed:
            present = library in names or outside(library, profile)
            if not present and not tolerated(file, library, rules):
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
    libraries = sorted(files)[:_LISTED]
    lines = "; ".join(_line(library, files[library]) for library in libraries)
    more = f" and {len(files) - _LISTED} more" if len(files) > _LISTED else ""
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
