"""Which wheels fit a Triton release; resolving with the real uv is in tests/integration/test_lock.py."""

from __future__ import annotations

import pytest
from packaging.pylock import Package, PackageArchive, PackageWheel
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from vllm_env.base.errors import VllmEnvError
from vllm_env.lock.pins import PinnedVllm
from vllm_env.lock.resolve import _check_variant, _locked_wheel, _tags
from vllm_env.lock.spec import Overrides, Spec, load_spec

_PINNED = PinnedVllm("vllm==0.99.0", origin="release")


@pytest.fixture
def spec() -> Spec:
    return load_spec("cpu", Overrides())


@pytest.mark.parametrize(
    ("platform", "fits"),
    [
        ("cp311-cp311-manylinux_2_35_x86_64", True),
        ("cp38-abi3-manylinux1_x86_64", True),
        ("py3-none-any", True),
        ("cp311-cp311-manylinux_2_36_x86_64", False),
        ("cp312-cp312-manylinux_2_28_x86_64", False),
        ("cp311-cp311-manylinux_2_28_aarch64", False),
    ],
)
def test_a_wheel_fits_by_its_python_its_platform_and_the_c_library(platform: str, fits: bool) -> None:
    """The C library is that of the Triton release, which may be older than this machine's."""
    _, _, _, tags = parse_wheel_filename(f"demo-1.0-{platform}.whl")
    assert bool(tags & set(_tags("3.11", glibc=35))) is fits


@pytest.mark.parametrize(("version", "index"), [("2.13.0+cpu", "pytorch"), ("2.13.0", "")])
def test_a_local_version_is_on_pytorchs_own_index_only(spec: Spec, version: str, index: str) -> None:
    """Wherever this machine has it from: the lock is for others too."""
    name = f"torch-{version.replace('+', '%2B')}-cp311-cp311-linux_x86_64.whl"
    wheel = PackageWheel(url=f"file:///opt/wheels/{name}", size=5, hashes={"sha256": "1" * 64})
    package = Package(name=canonicalize_name("torch"), version=Version(version), wheels=[wheel])
    locked = _locked_wheel(package, wheel, _PINNED, spec)
    assert (locked.index, locked.size, locked.url) == (index, 5, "")
    assert locked.file == f"torch-{version}-cp311-cp311-linux_x86_64.whl"


def test_a_torchvision_for_another_cuda_version_is_refused() -> None:
    """It would break `import vllm`; a spec without a variant takes what the registry has."""
    versions = {"torch": "2.14.0+cu129", "torchvision": "0.29.0"}
    with pytest.raises(VllmEnvError, match=r"--cuda 12.9: PyTorch's index has no torchvision 0.29.0 for this CUDA version"):
        _check_variant(load_spec("cuda", Overrides(torch_backend="cu129")), versions)
    _check_variant(load_spec("cuda", Overrides(torch_backend="cu129")), {**versions, "torchvision": "0.29.0+cu129"})
    _check_variant(load_spec("cuda", Overrides()), versions)


def test_a_wheel_of_a_url_keeps_the_place(spec: Spec) -> None:
    """No index has it; the version is the one in its file's name."""
    archive = PackageArchive(url="https://files.test/demo-1.2%2Bx-py3-none-any.whl", size=9, hashes={"sha256": "2" * 64})
    locked = _locked_wheel(Package(name=canonicalize_name("demo"), archive=archive), archive, _PINNED, spec)
    assert (locked.version, locked.file, locked.url, locked.size) == ("1.2+x", "demo-1.2+x-py3-none-any.whl", archive.url, 9)
