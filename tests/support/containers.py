"""Real containers: the pages' ``docker`` lines under podman, on an image like Triton's that is made of Debian's packages."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import string
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.patience import wait_for
from support.repositories import BUILD_SECONDS, CHECKOUT, triton_root
from support.small_fixtures import workspace_in
from vllm_env.base.network import Network
from vllm_env.serve.server import free_ports
from vllm_env.triton.provision import provision
from vllm_env.triton.root import open_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_TOOLS = ("podman", "runc", "conmon", "netavark", "iptables", "mmdebstrap")
_REGISTRY_TOOLS = ("docker-registry", "skopeo", "umoci")
_DEBIAN = "bookworm"
_PACKAGES = ("python3", "python3-pip", "python3-venv", "libpython3.11", "ca-certificates")
_PATH = "/opt/tritonserver/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SETTINGS = Path(__file__).with_suffix(".conf")
_CERTIFICATES = ("/etc/ssl/certs", "/usr/local/share/ca-certificates", "/usr/share/ca-certificates")
_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
_OFFICIAL = "nvcr.io/nvidia/tritonserver:YY.MM-py3"


def require_podman() -> None:
    """Install podman and what makes its images where root can; skip the test, with apt's reason, where it cannot be had."""
    _require(("podman", "runc", "mmdebstrap", "iptables"), _TOOLS)


def require_registry() -> None:
    """Do the same for a registry and two programs that copy and read images."""
    _require(_REGISTRY_TOOLS, _REGISTRY_TOOLS)


@functools.cache
def _require(programs: tuple[str, ...], packages: tuple[str, ...]) -> None:
    if all(shutil.which(program, path=_search_path()) for program in programs):
        return
    if os.geteuid() != 0:
        pytest.skip(f"{programs[0]} is not installed, and only root can install it")
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    try:
        update = subprocess.run(["apt-get", "update"], capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
        done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
    except FileNotFoundError:
        pytest.skip(f"{programs[0]} is not installed, and there is no apt-get to install it")
    if done.returncode != 0:
        pytest.skip(f"{programs[0]} cannot be installed: {(update.stderr + done.stderr).strip()[-500:]}")


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Run an image registry on 127.0.0.1 until the block ends; yield its address."""
    require_registry()
    port = free_ports().http
    settings = folder / "registry.yml"
    storage = json.dumps({"filesystem": {"rootdirectory": str(folder / "registry")}})
    settings.write_text(f"version: 0.1\nstorage: {storage}\nhttp: {{addr: '127.0.0.1:{port}'}}\n")
    with (folder / "registry.log").open("wb") as log:
        server = subprocess.Popen(["docker-registry", "serve", settings], stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: _answers(port) or server.poll() is not None, "the registry")
        assert server.poll() is None, (folder / "registry.log").read_text()
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@functools.cache
def image() -> str:
    """Return the name of a minimal Debian with Triton in /opt/tritonserver; it is made once for each recipe and kept.

    It has Python with pip and certificates, but no git, cmake, compiler or libnuma.
    """
    require_podman()
    root = triton_root()
    if not (root / "bin" / "tritonserver").is_file():
        with tempfile.TemporaryDirectory() as folder:
            provision(workspace_in(Path(folder), Network()), root)
    changes = [f"ENV NVIDIA_TRITON_SERVER_VERSION={open_root(root).release}", f"ENV PATH={_PATH}"]
    recipe = repr([_DEBIAN, _PACKAGES, changes, (root / "TRITON_VERSION").read_text()])
    name = f"localhost/vllm-env-test:{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if _podman("image", "exists", name).returncode == 0:
        return name
    with tempfile.TemporaryDirectory(prefix="vllm_env_test_") as folder:
        tree = Path(folder) / "tree.tar"
        triton = f'cp -a {shlex.quote(str(root))} "$1/opt/tritonserver" && rm -f "$1/opt/tritonserver/RELEASE"'
        options = ["--quiet", "--variant=minbase", f"--include={','.join(_PACKAGES)}", f"--customize-hook={triton}"]
        subprocess.run(["mmdebstrap", *options, _DEBIAN, tree], check=True, timeout=BUILD_SECONDS)
        _podman("import", *(f"--change={change}" for change in changes), str(tree), name, check=True)
    return name


def run_in(
    where: str, *command: object, options: tuple[object, ...] = (), network: str = "host", seconds: float = BUILD_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run a command in a new container of the image ``where`` to its end; ``options`` are those of ``docker run``.

    Its stdout and stderr are apart. The container is gone afterwards, also one that has not ended within ``seconds``.
    """
    return run_line(["--network", network, *map(str, options), where, *map(str, command)], seconds)


def run_line(arguments: list[str], seconds: float = BUILD_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run ``docker run``'s arguments, image and command included, to the container's end."""
    with _named() as name:
        return _podman("run", "--name", name, *_machine(), *arguments, seconds=seconds)


@contextlib.contextmanager
def running(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``docker run``'s arguments until the block ends; ``log`` receives what the container prints."""
    with _named() as name, log.open("wb") as output:
        argv = ["podman", "run", "--name", name, *_machine(), *arguments]
        yield subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, env=_environment())


def page_line(pattern: str) -> str:
    """Return the one line that runs docker or the packager, with the lines that continue it, in which a pattern is found.

    README comes first: docs/docker.md has further lines that serve.

    Raises:
        ValueError: there is none, or several.
    """
    found: list[str] = []
    for page in ("README.md", "docs/docker.md"):
        text = (CHECKOUT / page).read_text("utf-8")
        commands = re.findall(r"^(?:docker run|\./gen_vllm_env\.sh) (?:.*\\\n)*.*$", text, re.MULTILINE)
        found = found or [line for line in (command.replace("\\\n", " ") for command in commands) if re.search(pattern, line)]
    (line,) = found
    return line


def as_podman(line: str, variables: Mapping[str, str], *, ports: Mapping[int, int] | None = None) -> list[str]:
    """Return the arguments after ``run`` of a ``docker run`` line, for this machine.

    The image is the one made here, ``variables`` (``PWD``, ``HOME``) are substituted, the host's side of published
    ports is on 127.0.0.1 and free; ``--gpus all`` goes where there is no GPU, ``-it`` because there is no terminal.
    """
    words = [string.Template(word).substitute({"TRITON": "YY.MM", **variables}) for word in shlex.split(line)]
    if words[:2] != ["docker", "run"] or _OFFICIAL not in words or "-it" not in words:
        raise ValueError(f"not as the page had it: {line}")
    words.remove("-it")
    if not Path("/proc/driver/nvidia/version").exists():
        where = words.index("--gpus")
        del words[where : where + 2]
    published = {f"{inside}:{inside}": f"127.0.0.1:{outside}:{inside}" for inside, outside in (ports or {}).items()}
    return [image() if word == _OFFICIAL else published.get(word, word) for word in words[2:]]


def host_ports() -> dict[int, int]:
    """Return a free port of 127.0.0.1 for each of Triton's three ports."""
    free = free_ports()
    return {8000: free.http, 8001: free.grpc, 8002: free.metrics}


def _machine() -> list[str]:
    """Return what the container gets of this machine: the certificates that it trusts, and nothing of pip's."""
    mounts = [part for folder in _CERTIFICATES if Path(folder).is_dir() for part in ("--volume", f"{folder}:{folder}:ro")]
    names = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")
    return [*mounts, *(part for name in names for part in ("--env", f"{name}={_BUNDLE}"))]


@contextlib.contextmanager
def _named() -> Iterator[str]:
    name = f"vllm-env-test-{uuid.uuid4().hex[:12]}"
    try:
        yield name
    finally:
        _podman("rm", "--force", "--ignore", "--time", "0", name)


def _podman(*arguments: str, check: bool = False, seconds: float = BUILD_SECONDS) -> subprocess.CompletedProcess[str]:
    argv = ["podman", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=check, timeout=seconds, env=_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _search_path(), "CONTAINERS_CONF": str(_SETTINGS)}


def _search_path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"  # Debian has runc and iptables there
