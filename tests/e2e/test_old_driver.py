"""A driver that is too old for the environment: the load says so in one sentence, in place of an error of CUDA."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support import engineless
from support.fake_driver import make_driver
from support.serving import serve
from vllm_env.base.errors import VllmEnvError

if TYPE_CHECKING:
    from pathlib import Path

    from support.serving import Parts

pytestmark = pytest.mark.e2e


def test_a_driver_that_is_too_old_ends_the_load_with_what_to_type(parts: Parts, tmp_path: Path) -> None:
    """An environment for CUDA 13 on a driver of CUDA 12.2. With one for CUDA 12.9, the model is served."""
    environment = engineless.make_environment(parts.environment, tmp_path / "environment")
    (site,) = environment.glob("lib/python3.*/site-packages")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").touch()
    # The stub finds it there and tritonserver does not, which would ask it for GPUs.
    make_driver(environment / "lib", "12.2")
    light = replace(parts, environment=environment, engine=False)
    (site / "torch/version.py").write_text("cuda = '13.0'\n")
    with pytest.raises(VllmEnvError) as caught, serve(light):
        pass
    said = f"{caught.value}"
    assert "runs CUDA up to 12.2, and this environment is for CUDA 13.0." in said
    assert "Build it with ./gen_vllm_env.sh --cuda 12.9, or update the driver to 580.65 or newer." in said
    (site / "torch/version.py").write_text("cuda = '12.9'\n")
    with serve(light):
        pass
