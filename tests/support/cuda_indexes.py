"""Three indexes on 127.0.0.1 that have a vLLM and a torch for CUDA 13 and for CUDA 12.9, as the public ones do.

The registry has the builds for CUDA 13. vLLM's index has ``0.99.0/cu129``, and PyTorch's has ``torch-9.9.0+cu129``.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from support.package_index import PackageIndex, serving
from support.wheels import write_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VLLM = ("torch==9.9.0", "nvidia-cutlass-dsl[cu13]==4.8.0")
TORCH_13 = ("cuda-bindings>=13,<14", "nvidia-cuda-runtime==13.0.96")
SPEC = """\
[profile.cuda]
vllm = "0.99.0"
python = "3.11"
requirements = ["setuptools", "cuda-python>=13"]
"""


@dataclass(frozen=True)
class CudaIndexes:
    """The addresses of the indexes."""

    registry: str
    torch: str
    vllm: str

    @property
    def variables(self) -> dict[str, str]:
        """The variables of a build that knows no other index than these."""
        return {
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": self.registry,
            "PIP_FIND_LINKS": "",
            "VLLM_ENV_TORCH_INDEX": self.torch,
        }


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and writes no log."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def serving_folder(folder: Path, handler: type[Quiet] = Quiet) -> Iterator[str]:
    """Serve a folder on a free port of 127.0.0.1 and yield its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _package(folder: Path, name: str, version: str, *requires: str, extras: tuple[str, ...] = ()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    module = {f"{name}/__init__.py": f'__version__ = "{version}"\n'.encode()}
    write_wheel(folder, name, version, module, requires, extras)


def _fill_registry(folder: Path, torch_needs: tuple[str, ...]) -> None:
    _package(folder, "vllm", "0.99.0", *VLLM)
    _package(folder, "torch", "9.9.0", *torch_needs)
    _package(folder, "nvidia_cuda_runtime", "13.0.96")
    _package(folder, "nvidia_cuda_runtime_cu12", "12.9.79")
    for version in ("12.9.4", "13.0.1"):
        _package(folder, "cuda_bindings", version)
        _package(folder, "cuda_python", version, f"cuda-bindings~={version}")
    cutlass = ("nvidia-cutlass-dsl-libs-cu12==4.8.0", 'nvidia-cutlass-dsl-libs-cu13==4.8.0; extra == "cu13"')
    _package(folder, "nvidia_cutlass_dsl", "4.8.0", *cutlass, extras=("cu13",))
    _package(folder, "nvidia_cutlass_dsl_libs_cu12", "4.8.0")
    _package(folder, "nvidia_cutlass_dsl_libs_cu13", "4.8.0")
    _package(folder, "setuptools", "9999.0")
    _package(folder, "numpy", "1.999.0")


@contextlib.contextmanager
def cuda_indexes(folder: Path, *, has_torch: bool = True, torch_needs: tuple[str, ...] = TORCH_13) -> Iterator[CudaIndexes]:
    """Fill and serve the indexes; without ``has_torch``, PyTorch's has no torch. The registry's torch has ``torch_needs``."""
    _fill_registry(folder / "registry", torch_needs)
    (folder / "torch").mkdir()
    if has_torch:
        _package(folder / "torch", "torch", "9.9.0+cu129", "cuda-bindings>=12.9.4,<13", "nvidia-cuda-runtime-cu12==12.9.79")
    variant = folder / "vllm/0.99.0/cu129/vllm"
    _package(variant, "vllm", "0.99.0+cu129", *VLLM)
    wheel = next(variant.glob("*.whl")).name
    (variant / "index.html").write_text(f'<a href="{quote(wheel)}">{wheel}</a>')
    with (
        serving(PackageIndex(folder / "registry")) as registry,
        serving(PackageIndex(folder / "torch")) as torch,
        serving_folder(folder / "vllm") as vllm,
    ):
        yield CudaIndexes(registry, torch, vllm)
