"""Names of CUDA variants, and what a spec needs for one; with real indexes in tests/integration/test_variants.py."""

from __future__ import annotations

import pytest

from vllm_env.base.errors import UsageError
from vllm_env.lock.pylock import read_pylock, versions_of
from vllm_env.lock.spec import DEFAULT_SPEC, Overrides, load_spec
from vllm_env.lock.variants import cuda_of, cuda_of_versions, variant_of


def test_a_cuda_version_has_a_variant() -> None:
    """As uv, PyTorch and vLLM name it; "cpu" is none."""
    assert variant_of("12.9") == "cu129"
    assert [cuda_of(name) for name in ("cu129", "cu130", "cpu", "")] == ["12.9", "13.0", "", ""]


@pytest.mark.parametrize("cuda", ["12", "cu129", "12.9.1", "9.2"])
def test_another_text_is_no_cuda_version(cuda: str) -> None:
    """The message has the form."""
    with pytest.raises(UsageError, match=f"--cuda {cuda} is not a CUDA version") as caught:
        variant_of(cuda)
    assert "12.9" in caught.value.remedy


@pytest.mark.parametrize(
    ("versions", "cuda"),
    [
        ({"torch": "2.14.0+cu129", "nvidia-cuda-runtime": "13.3.29"}, "12.9"),
        ({"torch": "2.13.0+cpu"}, ""),
        ({"torch": "2.14.0", "nvidia-cuda-runtime": "13.0.96"}, "13.0"),
        ({"torch": "2.9.0", "nvidia-cuda-runtime-cu12": "12.8.90", "nvidia-cuda-runtime": "13.3.29"}, "12.8"),
        ({"torch": "2.14.0"}, ""),
        ({}, ""),
    ],
)
def test_the_cuda_version_of_an_environment_is_that_of_its_torch(versions: dict[str, str], cuda: str) -> None:
    """Its local version says it, else the runtime that it brings; packages of other versions may be there, too."""
    assert cuda_of_versions(versions) == cuda


@pytest.mark.parametrize(("profile", "cuda"), [("cuda", "13.0"), ("cpu", "")])
def test_the_committed_locks_say_their_cuda_version(profile: str, cuda: str) -> None:
    """Doctor reads it there."""
    lock = read_pylock(DEFAULT_SPEC.with_name(f"pylock.vllm_env-{profile}.toml"))
    assert cuda_of_versions(versions_of(lock.wheels)) == cuda


def test_a_spec_gets_what_cuda_12_needs_once() -> None:
    """The user's own override of the same package stays; CUDA 13 needs nothing."""
    spec = load_spec("cuda", Overrides(torch_backend="cu129"))
    assert spec.overrides == ("cuda-python>=12.9,<13",)
    assert spec.drop == ("nvidia-cutlass-dsl-libs-cu13",)
    assert not spec.is_default
    assert load_spec("cuda", Overrides(torch_backend="cu130")).overrides == ()


def test_a_saved_spec_of_a_variant_is_read_as_it_was_written(tmp_path) -> None:
    """What was added is in the file; it is not added again, and an override of the user's stays."""
    file = tmp_path / "cuda.toml"
    own = '["cuda-python==12.8.0"]'
    file.write_text(f'[profile.cuda]\nvllm = "0.33.0"\ntorch_backend = "cu129"\noverrides = {own}\n')
    spec = load_spec("cuda", Overrides(), file)
    assert spec.overrides == ("cuda-python==12.8.0",)
    assert spec.drop == ("nvidia-cutlass-dsl-libs-cu13",)
    assert spec.is_default


@pytest.mark.parametrize(("profile", "allowed"), [("cuda", True), ("cpu", False)])
def test_the_option_is_for_the_cuda_profile(profile: str, allowed: bool) -> None:
    """And then vLLM's index may be another one for a release, too."""
    overrides = Overrides(torch_backend="cu129", wheel_index="http://mirror.test")
    if allowed:
        assert load_spec(profile, overrides).wheel_index == "http://mirror.test"
        return
    with pytest.raises(UsageError, match=r"--cuda 12.9 has no effect with --profile cpu"):
        load_spec(profile, overrides)
