"""What may be absent from an environment, held against this machine's C library and what is known of packages."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from vllm_env.prefix.needed_libraries import DRIVER_LIBRARIES, SYSTEM_LIBRARIES, likely_package, outside, tolerated


def test_the_machines_part_is_loaded_without_an_environment() -> None:
    """Every library of x86-64's list that a bare interpreter can load is there; none of the driver's is in it."""
    for library in SYSTEM_LIBRARIES:
        ctypes.CDLL(library)
    assert not set(SYSTEM_LIBRARIES) & set(DRIVER_LIBRARIES)


@pytest.mark.parametrize("library", ["libnsl.so.1", "libcrypt.so.1", "libz.so.1", "libgomp.so.1", "libnuma.so.1"])
def test_what_a_bare_container_may_lack_is_not_the_machines(library: str) -> None:
    """They are packages of their own; wheels' authors take some of them for granted (manylinux allows libz)."""
    assert not outside(library, "cuda")
    assert not tolerated("lib/python3.12/site-packages/vllm/_C.abi3.so", library)


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("nvidia/nvshmem/lib/nvshmem_transport_ibgda.so.3", "libmlx5.so.1"),
        ("nvidia/nvshmem/lib/nvshmem_bootstrap_mpi.so.3", "libmpi.so.40"),
        ("nvidia/cu13/lib/libcufile_rdma.so.1", "libibverbs.so.1"),
        ("torchcodec/libtorchcodec_core4.so", "libavcodec.so.58"),
        ("torchcodec/libtorchcodec_custom_ops9.so", "libswscale.so.10"),
        ("bitsandbytes/libbitsandbytes_cuda118.so", "libcudart.so.11.0"),
        ("bitsandbytes/libbitsandbytes_rocm70.so", "libhipblas.so.3"),
        ("numba/np/ufunc/tbbpool.cpython-312-x86_64-linux-gnu.so", "libtbb.so.12"),
    ],
)
def test_what_the_cuda_wheels_go_without(file: str, library: str) -> None:
    """Files of vLLM 0.32 and 0.33 and of bitsandbytes that ask for what no wheel has; each rule gives its reason."""
    assert tolerated(f"lib/python3.12/site-packages/{file}", library)
    assert not tolerated(f"lib/python3.12/site-packages/{file}", "libstrange.so.1")
    assert not tolerated("lib/python3.12/site-packages/vllm/_C.abi3.so", library)


@pytest.mark.skipif(sys.platform != "linux", reason="asks dpkg")
def test_debians_names_follow_from_the_soname() -> None:
    """The rule of Debian's policy, held against what dpkg says of libraries on this machine where there is a dpkg."""
    assert likely_package("libnuma.so.1") == "libnuma1"
    assert likely_package("libtbb2.so.1") == "libtbb2-1"
    assert likely_package("strange") == "strange"
    try:
        listed = subprocess.run(["dpkg", "-S", "*/libcom_err.so.2"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        pytest.skip("no dpkg on this machine")
    if listed:
        assert likely_package("libcom_err.so.2") == listed.split(":")[0]
