"""Tells for every library that a file of an environment asks for whether ld.so will find it where Triton serves.

The order is that of ld.so(8): DT_RPATH of the file and of what loads it, unless the file has a DT_RUNPATH; then DT_RUNPATH.
LD_LIBRARY_PATH does not count, because vLLM's processes do not inherit the stub's (runtime_hook.py), nor do the machine's
own folders: what is in them here may be missing there.

A library that none of this finds may be loaded already, and then ld.so takes it by its DT_SONAME. Wheels rely on that:
the extensions of vLLM name ``libtorch.so`` and no folder, and are imported after torch. Whether the import comes first
cannot be read from a file, so a soname that any file of the environment has counts as found, in a list of its own; the
file, or a link to it, must have that name as well. auditwheel renames a library for one wheel alone and may leave its
soname (torchvision's ``libz.b9a71669.so.1``): nobody else can rely on that one.
"""

# ruff: noqa: PTH118, PTH119, PTH120
# thousands of paths, which os.path joins and splits several times faster than pathlib

import fnmatch
import os
import re
from collections import defaultdict
from collections.abc import Sequence
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

# Where neither Debian's rule for the names of packages nor the library's own name leads to the package.
_CONDA = {"libgomp": "libgomp", "libavcodec": "ffmpeg", "libtbb": "tbb", "libmpi": "openmpi", "libibverbs": "rdma-core"}
_SONAME = re.compile(r"(?P<name>.+?)\.so(?:\.(?P<version>\d+))?")


def outside(library: str, profile: str) -> bool:
    """Tell whether a library is the machine's or, in the profile ``cuda``, the driver's."""
    return library in SYSTEM or (profile == "cuda" and library in DRIVER)


def tolerated(file: str, library: str, rules: tuple[Tolerated, ...] = TOLERATED) -> bool:
    """Tell whether a file of the environment may go without a library."""
    covering = (rule for rule in rules if fnmatch.fnmatchcase(file, rule.file))
    return any(fnmatch.fnmatchcase(library, pattern) for rule in covering for pattern in rule.libraries)


def likely_packages(library: str) -> tuple[str, str]:
    """Return the packages of Debian and of conda-forge that probably have a library.

    Debian names a package of a library after its soname, with a dash after a digit (Debian Policy 8.1): libnuma.so.1
    is in libnuma1, libtbb2.so.1 would be in libtbb2-1.
    """
    match = _SONAME.match(library)
    name, version = (match["name"], match["version"] or "") if match else (library, "")
    dash = "-" if name[-1:].isdigit() and version else ""
    return f"{name}{dash}{version}".lower().replace("_", "-"), _CONDA.get(name, name.lower())


_STUBS = f"{os.sep}stubs{os.sep}"  # for linkers only: the toolkit's stubs/libcuda.so has the driver's soname and no code
_LISTED = 4  # libraries named in a message


@dataclass(frozen=True, order=True)
class Need:
    """A library that a file asks for; ``file`` is relative to the environment."""

    file: str
    library: str


@dataclass(frozen=True)
class NeededLibraries:
    """What the ELF files of an environment ask for.

    Every need is in one of five places: ``by_run_path`` counts those that ld.so finds by itself, ``elsewhere`` has those
    whose library is somewhere in the environment and must be loaded before, ``outside`` names what the machine or the
    driver brings, ``tolerated`` are documented exceptions, ``missing`` is the rest. ``glibc`` is the newest version of a
    symbol of the C library that is asked of the machine, such as ``(2, 34)``; () for none.
    """

    by_run_path: int
    elsewhere: tuple[Need, ...]
    outside: tuple[str, ...]
    tolerated: tuple[Need, ...]
    missing: tuple[Need, ...]
    glibc: tuple[int, ...]

    @property
    def missing_libraries(self) -> tuple[str, ...]:
        """The names of the missing libraries, sorted."""
        return tuple(sorted({need.library for need in self.missing}))


def find_needed_libraries(environment: Path, profile: str, rules: tuple[Tolerated, ...] = TOLERATED) -> NeededLibraries:
    """Look at every ELF file of an unpacked environment; the profile ``cuda`` leaves the driver's libraries to the machine."""
    tree = _Tree(environment)
    tree.pass_run_paths_on()
    elsewhere, outer, excused, missing, found = [], set(), [], [], 0
    for path, section in tree.sections.items():
        file = os.path.relpath(path, tree.root)
        for library in section.needed:
            need = Need(file, library)
            if tree.found[path].get(library):
                found += 1
            elif outside(library, profile):
                outer.add(library)
            elif library in tree.sonames:
                elsewhere.append(need)
            elif tolerated(file, library, rules):
                excused.append(need)
            else:
                missing.append(need)
    return NeededLibraries(
        by_run_path=found,
        elsewhere=tuple(sorted(elsewhere)),
        outside=tuple(sorted(outer)),
        tolerated=tuple(sorted(excused)),
        missing=tuple(sorted(missing)),
        glibc=max((section.glibc for section in tree.sections.values()), default=()),
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
    debian, conda = zip(*(likely_packages(library) for library in first), strict=True)
    raise VllmEnvError(
        f"The environment lacks shared libraries: {'; '.join(_line(name, files[name]) for name in first)}{more}.",
        cause="They are in no folder that ld.so will look into and in no package, and a bare container does not have them.",
        remedy=f"Install them on this machine, from which they are then packed (probably: apt-get install {' '.join(debian)}; "
        f"on conda-forge: {', '.join(dict.fromkeys(conda))}), or leave out what needs them.",
    )


def _line(library: str, files: list[str]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{library}, which {files[0]}{more} needs"


class _Tree:
    """The ELF files of an environment by their real paths, and where ld.so finds what they ask for."""

    def __init__(self, environment: Path) -> None:
        self.root = os.path.realpath(environment)
        self.sections: dict[str, DynamicSection] = {}
        self.found: dict[str, dict[str, str]] = defaultdict(dict)
        links = []
        for path, is_link in walk(self.root):
            if is_link:
                links.append(path)
            elif _STUBS not in path and (section := read_dynamic_section(path)) is not None:
                self.sections[path] = section
        self._origins = {path: [os.path.dirname(path)] for path in self.sections}
        for link in links:
            real = os.path.realpath(link)
            if real in self._origins:  # $ORIGIN is the folder of the name that a file is opened by
                self._origins[real].append(os.path.dirname(link))
        self._inherited: dict[str, tuple[str, ...]] = dict.fromkeys(self.sections, ())
        self._files: dict[str, str] = {}
        self.sonames = {
            self.sections[real].soname
            for name in (*self.sections, *links)
            if (real := os.path.realpath(name)) in self.sections and self.sections[real].soname == os.path.basename(name)
        }

    def pass_run_paths_on(self) -> None:
        """Find each file's libraries, and again those of a library that inherits folders from what loads it."""
        waiting = list(self.sections)
        while waiting:
            path = waiting.pop()
            section = self.sections[path]
            handed_on = tuple(dict.fromkeys((*self._own_rpath(path), *self._inherited[path])))
            folders = self._search_path(path)
            for library in section.needed:
                if library not in self.found[path] and (file := self._look_up(library, folders)):
                    self.found[path][library] = file
                file = self.found[path].get(library, "")
                if file and not set(handed_on) <= set(self._inherited[file]):
                    self._inherited[file] = tuple(dict.fromkeys((*self._inherited[file], *handed_on)))
                    waiting.append(file)

    def _search_path(self, path: str) -> tuple[str, ...]:
        section = self.sections[path]
        first = () if section.runpath else (*self._own_rpath(path), *self._inherited[path])
        return (*first, *self._expanded(path, section.runpath))

    def _own_rpath(self, path: str) -> tuple[str, ...]:
        """Return the folders of DT_RPATH, which counts for nothing in a file that has a DT_RUNPATH as well."""
        section = self.sections[path]
        return () if section.runpath else self._expanded(path, section.rpath)

    def _expanded(self, path: str, entries: Sequence[str]) -> tuple[str, ...]:
        return tuple(
            entry.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for origin in self._origins[path] for entry in entries
        )

    def _look_up(self, library: str, folders: Sequence[str]) -> str:
        """Return the real path of a library in the first folder that has it, or an empty string.

        ld.so takes a name with a slash for a path, and passes over a file that is not of this machine's kind.
        """
        for folder in ("",) if "/" in library else folders:
            candidate = os.path.join(folder, library)
            if candidate not in self._files:
                self._files[candidate] = os.path.realpath(candidate) if os.path.lexists(candidate) else ""
            if self._files[candidate] in self.sections:
                return self._files[candidate]
        return ""
