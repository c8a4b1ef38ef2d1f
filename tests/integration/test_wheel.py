"""The packager as a wheel: it brings the model, the client and the locks, and works without a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from support.repositories import CHECKOUT


def test_a_wheel_of_the_packager_works_without_a_checkout(tmp_path: Path) -> None:
    """Its help, its default spec with the locks, and what a model is completed from; it writes below the current folder."""
    uv = Path(sys.executable).parent / "uv"
    subprocess.run([uv, "build", "-q", "--wheel", "--out-dir", tmp_path, CHECKOUT], check=True)
    (wheel,) = tmp_path.glob("vllm_env-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        names = {name.partition("/checkout/")[2] for name in archive.namelist()}
    assert {"env/pylock.vllm_env-cpu.toml", "env/pylock.vllm_env-cuda.toml", "client/client.py", "prompts.txt"} <= names
    assert {"model_repository/vllm/config.pbtxt", "model_repository/vllm/1/model.py"} <= names
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "vllm_env"]
    done = subprocess.run([*command, "inspect"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert f"{tmp_path}/model_repository/vllm holds no built environment" in done.stderr
    assert f"build this model: vllm-env --model-repository {tmp_path}/model_repository" in done.stderr
    shown = subprocess.run([*command, "--version"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("vllm-env ")
    helped = subprocess.run([*command, "--help-all"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert helped.stdout.startswith("usage: vllm-env [SUBCOMMAND]")
    assert "gen_vllm_env.sh" not in helped.stdout
