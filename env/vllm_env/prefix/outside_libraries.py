"""What an environment may leave to the machine that serves it, and which files may go without a library.

Each entry was decided on what CPU and CUDA environments of vLLM 0.32 and 0.33 really ask for. libnsl and libcrypt are
not among the C library's: Debian has them in packages of their own, and images without them exist.
"""

import fnmatch
import re
from dataclasses import dataclass

SYSTEM = {
    **dict.fromkeys(
        ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libc.so.6", "libm.so.6", "libmvec.so.1", "libdl.so.2",
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
