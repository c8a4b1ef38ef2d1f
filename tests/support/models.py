"""Models made for the tests: tiny, in seconds, with the packed environment's torch and transformers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from support.reference import run_reference
from support.small_fixtures import workspace_in
from vllm_env.base.cache import cache_root
from vllm_env.serve.standin import Recipe, ensure_standin

if TYPE_CHECKING:
    from pathlib import Path

LONG_POSITIONS = 65_536


@dataclass(frozen=True)
class MadeModels:
    """Folders in Hugging Face format; the adapters are for the Llama."""

    llama: Path
    adapters: tuple[Path, Path]
    embedding: Path
    cross_encoder: Path


def long_standin(environment: Path) -> Path:
    """Return a stand-in whose answers can last more than half a minute: for tests of what happens in the middle of one."""
    return _standin(environment, Recipe(positions=LONG_POSITIONS))


def llama(environment: Path) -> Path:
    """Return a stand-in of Llama's architecture."""
    return _standin(environment, Recipe(architecture="llama", hidden=128))


def _standin(environment: Path, recipe: Recipe) -> Path:
    return ensure_standin(workspace_in(cache_root()), environment / "bin" / "python", recipe)


def make_models(environment: Path, folder: Path) -> MadeModels:
    """Make a Llama with two LoRA adapters and two BERTs, with random weights but for the Llama's."""
    base = llama(environment)
    made = MadeModels(base, (folder / "adapter_one", folder / "adapter_two"), folder / "embedding", folder / "cross_encoder")
    request = {name: [str(p) for p in value] if isinstance(value, tuple) else str(value) for name, value in asdict(made).items()}
    run_reference(environment, "model_maker.py", request)
    return made
