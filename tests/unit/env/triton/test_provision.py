"""The CPU Triton out of its wheel; a small wheel of the same layout stands for the 100 MB."""

from __future__ import annotations

import os
import subprocess
import threading
import zipfile
from typing import TYPE_CHECKING

import pytest

from support.patience import LIMIT
from support.small_fixtures import workspace_in
from vllm_env.base.errors import CommandError
from vllm_env.base.network import Network, NetworkError
from vllm_env.base.report import Console, reporting_to
from vllm_env.triton import provision as module
from vllm_env.triton.provision import provision

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.base.workspace import Workspace

pytestmark = pytest.mark.long

_SERVER = '#!/bin/sh\necho "libraries $LD_LIBRARY_PATH"\nprintf "argument %s\\n" "$@"\n'


_OPEN = "/proc/self/fd/9"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of that name and layout which pip finds, and nothing else that it could take."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    file = folder / "nvidia_pytriton-0.7.0-py3-none-manylinux_2_35_x86_64.whl"
    info = "nvidia_pytriton-0.7.0.dist-info"
    files = {
        "pytriton/tritonserver/bin/tritonserver": _SERVER,
        "pytriton/tritonserver/backends/python/libtriton_python.so": "backend",
        "pytriton/tritonserver/python_backend_stubs/3.10/triton_python_backend_stub": "stub 3.10",
        "pytriton/tritonserver/python_backend_stubs/3.11/triton_python_backend_stub": "stub 3.11",
        "pytriton/tritonserver/caches/local/libtritoncache_local.so": "cache",
        "nvidia_pytriton.libs/libx.so": "library",
        "pytriton/client/client.py": "not needed",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: nvidia-pytriton\nVersion: 0.7.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return file


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A cache that nothing needs here, and a network: pip itself has only the folder of ``wheel``."""
    return workspace_in(tmp_path / "cache", Network())


def test_the_root_is_laid_out_like_that_of_a_container(workspace: Workspace, wheel: Path, tmp_path: Path) -> None:
    """Server, backend with a stub, stubs by version, libraries, release; programs are executable."""
    root = tmp_path / "triton"
    provision(workspace, root)
    assert (root / "RELEASE").read_text() == "24.10\n"
    assert (root / "TRITON_VERSION").read_text() == "2.51.0\n"
    assert (root / "backends/python/triton_python_backend_stub").read_text() == "stub 3.10"
    assert (root / "lib/libx.so").is_file()
    for program in ("bin/tritonserver", "libexec/tritonserver", "python_backend_stubs/3.11/triton_python_backend_stub"):
        assert os.access(root / program, os.X_OK)
    assert not (root / "client").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["triton", "wheels"]


def test_another_user_can_start_it(workspace: Workspace, wheel: Path, tmp_path: Path) -> None:
    """Whatever the umask of the one who has provisioned it."""
    before = os.umask(0o077)
    try:
        provision(workspace, tmp_path / "triton")
    finally:
        os.umask(before)
    root = tmp_path / "triton"
    modes = {str(p): p.stat().st_mode & 0o777 for p in (root, *root.rglob("*"))}
    assert set(modes.values()) == {0o755, 0o644}
    assert modes[str(root / "backends")] == 0o755


@pytest.mark.parametrize(("folder", "place"), [("", ""), ("a folder", _OPEN), ("d\N{LATIN SMALL LETTER E WITH ACUTE}j", _OPEN)])
def test_the_launcher_starts_it_from_anywhere(workspace: Workspace, wheel: Path, tmp_path: Path, folder: str, place: str) -> None:
    """Also through a link: its libraries and backends, then the user's arguments.

    The Python backend mistakes a path with a space or with other letters than ASCII. So it gets an open file's instead.
    """
    root = tmp_path / folder / "triton"
    root.parent.mkdir(exist_ok=True)
    provision(workspace, root)
    (tmp_path / "link").symlink_to(root / "bin/tritonserver")
    answer = subprocess.check_output(
        [tmp_path / "link", "--model-store=/x y"], text=True, env={"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/own"}
    )
    named = place or root
    assert answer.splitlines() == [
        f"libraries {named}/lib:/own",
        f"argument --backend-directory={named}/backends",
        f"argument --cache-directory={named}/caches",
        "argument --model-store=/x y",
    ]


def test_a_torn_root_is_made_again(workspace: Workspace, wheel: Path, tmp_path: Path) -> None:
    """RELEASE is written last: without it the root is not whole."""
    root = tmp_path / "triton"
    (root / "bin").mkdir(parents=True)
    (root / "junk").touch()
    provision(workspace, root)
    assert (root / "RELEASE").is_file()
    assert not (root / "junk").exists()


class _Noticing(Console):
    """Remembers that something was said to the user."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.said = threading.Event()

    def note(self, text: str) -> None:
        """Remember it."""
        self.said.set()


def test_two_builds_with_caches_of_their_own_provision_one(
    workspace: Workspace, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes while the first unpacks: it says that it waits, and finds the first one's Triton."""
    root, real, laid_out, console = tmp_path / "triton", module._lay_out, [], _Noticing()

    def provision_too() -> None:
        with reporting_to(console):
            provision(workspace, root)

    second = threading.Thread(target=provision_too)

    def observed(file: Path, folder: Path) -> None:
        laid_out.append(folder)
        if len(laid_out) == 1:
            second.start()
            assert console.said.wait(LIMIT)
        real(file, folder)

    monkeypatch.setattr(module, "_lay_out", observed)
    provision(workspace, root)
    second.join(LIMIT)
    assert (len(laid_out), second.is_alive()) == (1, False)
    assert (root / "RELEASE").is_file()


def test_no_wheel_is_an_error_and_leaves_nothing(workspace: Workspace, wheel: Path, tmp_path: Path) -> None:
    """The message names the wheel and the other way, --triton-root."""
    wheel.unlink()
    with pytest.raises(CommandError, match="nvidia-pytriton") as caught:
        provision(workspace, tmp_path / "triton")
    assert "--triton-root" in caught.value.remedy
    assert [p.name for p in tmp_path.iterdir()] == ["wheels"]


def test_an_interrupt_leaves_nothing(workspace: Workspace, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it is unpacked."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_env.triton.provision._lay_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        provision(workspace, tmp_path / "triton")
    assert [p.name for p in tmp_path.iterdir()] == ["wheels"]


@pytest.mark.parametrize("with_wheelhouse", [False, True])
def test_offline_refuses_to_fetch_it_by_name(wheel: Path, tmp_path: Path, with_wheelhouse: bool) -> None:
    """Neither cache nor wheelhouse has it: the message names the wheel, pip is not started, and nothing is left."""
    house = tmp_path / "wheels" / "house"
    house.mkdir()
    network = Network(offline=True, wheelhouse=house if with_wheelhouse else None)
    with pytest.raises(NetworkError, match=r"--offline: cannot download nvidia-pytriton==0\.7\.0"):
        provision(workspace_in(tmp_path / "cache", network), tmp_path / "triton")
    assert [p.name for p in tmp_path.iterdir()] == ["wheels"]
