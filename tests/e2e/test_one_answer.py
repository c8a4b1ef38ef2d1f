"""One real answer for the inner loop: an environment from the cache, the working tree's model, stock tritonserver.

It runs only where it is named, as by ``tests/run.sh --fast``: all other end-to-end tests prove more (`conftest.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support import models, repositories
from support.serving import Parts, is_cuda, serve
from support.triton_client import stream
from vllm_env.base.cache import cache_root
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    """The newest prefix for a CPU in the cache and the model of this checkout."""
    found = [site.parents[3] for site in cache_root().glob("prefixes/*/env/lib/python*/site-packages/vllm")]
    built = [env for env in found if not is_cuda(env)]
    binary = repositories.triton_root() / "bin" / "tritonserver"
    if not built or not binary.is_file():
        pytest.skip("no environment is built yet: ./gen_vllm_env.sh")
    environment = max(built, key=lambda path: path.parent.stat().st_mtime)
    repository = repositories.assemble(tmp_path / "repository", environment)
    return Parts(binary, repository / "vllm", environment, models.small_standin(environment))


def test_the_working_tree_answers(parts: Parts) -> None:
    """Packager's prefix, Triton's stub, model and client work together: the capital of France is named."""
    prompt, answer = FACTS[2]
    with serve(parts) as server:
        request = {"text_input": prompt, "sampling_parameters": '{"temperature": 0, "max_tokens": 16}'}
        texts = [response.text() for response in stream(server.grpc_url, [request])]
    assert "".join(texts).endswith(answer)
