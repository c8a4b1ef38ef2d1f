"""A copy of the checkout has what is written, not what is built."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from support import repositories

BUILT = (
    "model_repository/vllm/vllm_engine_args.json",
    "model_repository/vllm/vllm_env/bin/python",
    "model_repository/vllm/.vllm_env_1/x",
    "model_repository/vllm/triton_python_backend_stub",
    ".triton/bin/tritonserver",
    ".tools/venv/x",
    "env/__pycache__/x.pyc",
)
WRITTEN = ("gen_vllm_env.sh", ".gitignore", "env/new.py", "model_repository/vllm/vllm_engine_args.example.json")


@pytest.mark.parametrize("git", [True, False])
def test_a_copied_checkout_has_what_is_written_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, git: bool) -> None:
    """With its modes, what git does not know yet too; the tools are those of the checkout."""
    source = tmp_path / "source"
    for name in (*BUILT, *WRITTEN):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (source / ".gitignore").write_bytes((repositories.CHECKOUT / ".gitignore").read_bytes())
    (source / "gen_vllm_env.sh").chmod(0o755)
    if git:
        subprocess.run(["git", "init", "-q", source], check=True)
    else:
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setattr(repositories, "CHECKOUT", source)
    copy = repositories.copied_checkout(tmp_path / "copy")
    found = {str(Path(folder, name).relative_to(copy)) for folder, _, names in os.walk(copy) for name in names}
    assert found == set(WRITTEN)
    assert stat.S_IMODE((copy / "gen_vllm_env.sh").stat().st_mode) == 0o755
    assert (copy / ".tools" / "venv" / "x").is_file()


def test_the_builder_runs_in_a_copy(tmp_path: Path) -> None:
    """With the checkout's own environment for it: no second one is made."""
    copy = repositories.copied_checkout(tmp_path / "copy")
    if not list((repositories.CHECKOUT / ".tools").glob("venv-*")):
        pytest.skip("the packager's environment is not made yet: ./gen_vllm_env.sh --help")
    done = subprocess.run(
        [copy / "gen_vllm_env.sh", "doctor", "--help"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "tools" not in done.stderr
