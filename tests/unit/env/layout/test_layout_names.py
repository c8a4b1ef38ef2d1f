"""The names of the layouts, which the command line checks before anything is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from vllm_env.layout.layouts import LAYOUT_FILES
from vllm_env.model.manifest import MANIFEST_NAME
from vllm_env.publish.model_folder import BUILT_NAMES

ENV = Path(__file__).parents[4] / "env"


def test_all_that_a_layout_places_is_replaced_together():
    """What another layout has left in a model's folder is known, and the manifest comes last."""
    assert {*LAYOUT_FILES} <= {*BUILT_NAMES}
    assert BUILT_NAMES[-1] == MANIFEST_NAME


def test_the_names_need_nothing_installed():
    """No site-packages: a misspelt layout is refused before the tool's own environment is made."""
    code = f"import sys; sys.path.insert(0, {str(ENV)!r}); from vllm_env.cli.parser import build_parser; build_parser()"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
