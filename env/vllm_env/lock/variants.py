"""CUDA variants: the builds of torch and vLLM for drivers that the registry's builds do not run on.

torch's variants are on PyTorch's own index, vLLM's on vLLM's own, each below the variant's name
(``cu129`` for CUDA 12.9). Their wheels have the name as local version: ``0.33.0+cu129``.
"""

import re
from collections.abc import Mapping

from packaging.requirements import Requirement

from vllm_env.base.errors import UsageError

# What the profile and vLLM ask for is for CUDA 13. Two packages of it do not fit CUDA 12:
# - cuda-python 13 needs cuda-bindings 13, and torch for CUDA 12 needs cuda-bindings 12. Before
#   12.9, cuda-python had files of its own that cuda-bindings has, too.
_OVERRIDES_FOR_CUDA_12 = ("cuda-python>=12.9,<13",)
# - A vLLM that asks for nvidia-cutlass-dsl[cu13] gets these libraries. They need libcudart.so.13,
#   which is not there. nvidia-cutlass-dsl always brings those for CUDA 12.
_DROPPED_FOR_CUDA_12 = ("nvidia-cutlass-dsl-libs-cu13",)


def variant_of(cuda: str) -> str:
    """Return the variant's name for a CUDA version: ``cu129`` for ``12.9``.

    Raises:
        UsageError: it is not a CUDA version.
    """
    if not re.fullmatch(r"\d\d\.\d", cuda):
        raise UsageError(
            f"--cuda {cuda} is not a CUDA version.", remedy="Write it like 12.9 or 13.0."
        )
    return f"cu{cuda.replace('.', '')}"


def cuda_of(variant: str) -> str:
    """Return the CUDA version of a variant: ``12.9`` for ``cu129``; "" for another torch build."""
    match = re.fullmatch(r"cu(\d\d)(\d)", variant)
    return f"{match[1]}.{match[2]}" if match else ""


def overrides_for(variant: str, given: tuple[str, ...]) -> tuple[str, ...]:
    """Return a spec's overrides with those that the variant needs; those of the spec go first."""
    if not cuda_of(variant).startswith("12."):
        return given
    names = {Requirement(text).name for text in given}
    return given + tuple(o for o in _OVERRIDES_FOR_CUDA_12 if Requirement(o).name not in names)


def dropped_for(variant: str, given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the distributions that a spec drops, with those that the variant cannot have."""
    if not cuda_of(variant).startswith("12."):
        return given
    return given + tuple(name for name in _DROPPED_FOR_CUDA_12 if name not in given)


def cuda_of_versions(versions: Mapping[str, str]) -> str:
    """Return the CUDA version that torch is built for; "" for a CPU build, or if it is not known.

    ``versions`` has the version of each distribution of an environment.
    """
    _, _, local = versions.get("torch", "").partition("+")
    if local:
        return cuda_of(local)
    # The registry's torch does not say it. It brings the runtime of its CUDA version: up to
    # CUDA 12 under the first name. The other one may be there, too, for another package.
    for name in ("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"):
        if name in versions:
            return ".".join(versions[name].split(".")[:2])
    return ""
