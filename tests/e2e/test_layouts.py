"""The layouts that a model's start does not unpack, on the stock tritonserver; test_parts.py has the third."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from support.bucket import from_bucket
from support.mapped import libraries_of
from support.parts_fixtures import ANSWER, LIBRARY, answer, server_of, with_standin
from vllm_env.base.errors import CommandError

if TYPE_CHECKING:
    from pathlib import Path

    from support.parts_fixtures import Packager
    from support.serving import Parts

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif("VLLM_ENV_TEST_ENVIRONMENT" in os.environ, reason="serves an environment that was not built"),
]

# Without its mode, bin/python is not found. Then the stub takes the library of another Python if PATH has one, or none. If it
# guesses right, the model's own check refuses the folder.
LOST = "--layout parts|No module named '(_struct|encodings)'"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["archive", "directory"])
def test_a_layout_is_served_as_it_was_built(
    packager: Packager, light_parts: Parts, disk_folder: Path, no_leftovers: None, layout: str
) -> None:
    """Triton extracts an archive to /tmp, and uses a folder where it is; that one does not survive an object store."""
    models = disk_folder / "models"
    packager.run("--no-smoke-run", "--model-repository", str(models), layout=layout)
    model = with_standin(models / "vllm", light_parts)
    with server_of(light_parts, models, {}, disk_folder / "log") as server:
        assert answer(server) == ANSWER
        (library,) = libraries_of(server, LIBRARY)
    expected = {"archive": r"/tmp/python_env_\w+/0", "directory": re.escape(str(model / "vllm_env"))}
    assert re.match(f"{expected[layout]}/lib/python3", library), library
    # A copy: files of the folder may be hard links of the cache's, which have one mode for all.
    with from_bucket(light_parts, models) as lost:
        if layout == "directory":
            with pytest.raises(CommandError), lost:
                pass
            log = lost.log.read_text(errors="replace")
            assert re.search(LOST, log), [line for line in log.splitlines() if "vllm" in line]
        else:
            with lost as server:
                assert answer(server) == ANSWER
