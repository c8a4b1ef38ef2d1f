"""The release of the server that started the process: from the folder above its program, else from its container's variables."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest

from triton_vllm.startup import server_release as module
from triton_vllm.startup.server_release import find, release_of
from vllm_env.base.errors import VllmEnvError
from vllm_env.triton.root import release_of_server

VARIABLES = {"NVIDIA_TRITON_SERVER_VERSION": "25.03", "TRITON_SERVER_VERSION": "2.56.0"}


@pytest.fixture
def server(tmp_path):
    """A process whose program is ``bin/tritonserver`` of a root without files; yields the root and its id."""
    root = tmp_path / "triton"
    (root / "bin").mkdir(parents=True)
    shutil.copy(shutil.which("sleep"), root / "bin" / "tritonserver")
    child = subprocess.Popen([root / "bin" / "tritonserver", "600"])
    try:
        yield root, child.pid
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def test_a_root_says_its_release(server):
    """In the file that the packager writes, or by its server's version, which containers have."""
    root, pid = server
    assert find(pid, VARIABLES) == ""  # the container's variables say nothing of another root
    (root / "TRITON_VERSION").write_text("2.71.0\n")
    assert find(pid, VARIABLES) == "26.07"
    (root / "RELEASE").write_text("26.06\n")
    assert find(pid, {}) == "26.06"


def test_a_container_says_it_in_its_variables(server, monkeypatch):
    """Also to a program that embeds Triton, and where the kernel does not tell the program."""
    root, pid = server
    for known in (os.getpid(), 2**22 + 1):
        assert find(known, VARIABLES) == "25.03"
    monkeypatch.setattr(module, "CONTAINER_ROOT", root)
    assert find(pid, VARIABLES) == "25.03"
    assert find(pid, {"TRITON_SERVER_VERSION": "2.56.0"}) == "25.03"
    assert find(pid, {"NVIDIA_TRITON_SERVER_VERSION": "strange"}) == ""
    assert find(pid, {}) == ""


def test_the_packager_knows_the_same_releases():
    """Both halves have the rule by which a server's version is a release."""
    for minor in range(10, 99):
        for patch in (0, 1):
            version = f"2.{minor}.{patch}"
            try:
                known = release_of_server(version)
            except VllmEnvError:
                continue
            assert release_of(version) == known
