"""The pinned vLLM's sources, and copies of them with a fault."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from api_contract import fetch
from vllm_env.base.cache import cache_root
from vllm_env.lock.spec import Overrides, load_spec

# what the tool reads of a vLLM: a copy of this much is enough
READ = (
    *("_version.py", "__init__.py", "exceptions.py", "outputs.py", "logprobs.py", "envs.py", "logger.py", "sampling_params.py"),
    *("utils/argparse_utils.py", "utils/torch_utils.py"),
    *("pooling_params.py", "config", "engine", "inputs", "lora", "renderers", "tokenizers", "usage", "platforms"),
    *(
        "entrypoints",
        "parser",
        "reasoning",
        "tool_parsers",
        "multimodal/media",
        "v1/engine",
        "v1/serial_utils.py",
        "v1/structured_output",
        "v1/executor",
        "v1/metrics/loggers.py",
    ),
)


@pytest.fixture(scope="session")
def contract_cache() -> Path:
    """Where the sources of versions are kept."""
    return cache_root() / "contract"


@pytest.fixture(scope="session")
def pinned_release() -> str:
    """The default pin of the CPU profile, which is what the end-to-end tests serve."""
    spec = load_spec("cpu", Overrides())
    return f"{spec.distribution}=={spec.pin.value}"


@pytest.fixture(scope="session")
def pinned_folder(pinned_release, contract_cache) -> Path:
    """Its sources."""
    with fetch.sources_of(pinned_release, contract_cache) as sources:
        return sources.root


@pytest.fixture
def planted(pinned_folder, tmp_path):
    """Return a function that makes a copy of the pinned vLLM with faults: a module, a text, and what replaces it.

    None for the last adds the text at the module's end.
    """

    def plant(*faults: tuple[str, str, str | None]) -> Path:
        for name in READ:
            source, target = pinned_folder / "vllm" / name, tmp_path / "vllm" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, copy_function=_link)
            else:
                _link(source, target)
        for module, text, instead in faults:
            path = tmp_path / "vllm" / module
            written = path.read_text(encoding="utf-8")
            assert instead is None or text in written, f"the pinned vLLM's {module} has no {text!r}: plant another fault"
            path.unlink()  # it may be a link to the real one
            path.write_text(written + text if instead is None else written.replace(text, instead), encoding="utf-8")
        return tmp_path

    return plant


@pytest.fixture
def small(tmp_path):
    """Return a function that makes a vLLM of a version that has these modules and no others, which is soon read."""

    def make(version: str, **modules: str) -> Path:
        texts = {"__init__": "", "_version": f"__version__ = version = {version!r}\n", **modules}
        for name, text in texts.items():
            path = tmp_path.joinpath("small", "vllm", *name.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path / "small"

    return make


def _link(source, target):
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)
