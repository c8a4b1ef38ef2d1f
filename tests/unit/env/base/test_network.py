"""The way to the network: refused with --offline by the name of what was wanted, and called a network failure when it is one."""

from __future__ import annotations

import hashlib
import http.server
import socket
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_env.base import network as module
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.network import Network, NetworkError, PipConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLOSED = "http://127.0.0.1:9"  # the discard port, on which nothing listens


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """An HTTP server of the folder ``served``."""
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "file").write_bytes(b"abc")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path / "served"))

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    module._connects.cache_clear()


def test_offline_refuses_every_way_by_name(tmp_path: Path) -> None:
    """pip, git, another program and a download are refused before they start, each by what it would have fetched."""
    offline = Network(offline=True)
    ways = {
        "download nothing": lambda: offline.pip_command(["download", "x"], "download nothing"),
        "clone nothing": lambda: offline.git(["clone", "x"], "clone nothing"),
        "configure nothing": lambda: offline.program(["/no/such/program"], "configure nothing"),
        "fetch file": lambda: offline.download(f"{CLOSED}/file", "0" * 64, tmp_path / "file"),
    }
    for what, way in ways.items():
        with pytest.raises(NetworkError, match=f"--offline: cannot {what}") as caught:
            way()
        assert "wheelhouse" in caught.value.remedy
    assert not offline.answers(CLOSED)


@pytest.mark.parametrize(
    ("network", "ends"),
    [
        (Network(), ["--torch-backend", "cu129"]),
        (Network(torch_index="https://mirror.test"), ["--index", "https://mirror.test"]),
        (Network(wheelhouse=Path("/house")), ["--find-links", "/house"]),
    ],
)
def test_another_build_of_torch_is_not_taken_from_the_registries(
    network: Network, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the version that is asked for, for another CUDA version: PyTorch's index or its mirror is asked at once."""
    commands: list[list[str]] = []
    monkeypatch.setattr(module, "run", lambda argv, **_: commands.append([str(a) for a in argv]) or "")
    network.uv(["lock"], "resolve", torch_backend="cu129", is_torch_elsewhere=True)
    assert [command[-2:] for command in commands] == [ends]


def test_a_program_that_fails_for_another_reason_is_no_network_failure() -> None:
    """Only words of the network make a network failure."""
    with pytest.raises(CommandError) as caught:
        Network().program(["sh", "-c", "echo no such option; exit 3"], "do something")
    assert not isinstance(caught.value, NetworkError)


def test_a_download_is_whole_and_the_locks_or_not_there(server: str, tmp_path: Path) -> None:
    """The digest decides; a refused file leaves nothing behind."""
    target = tmp_path / "sub" / "file"
    network = Network()
    with pytest.raises(VllmEnvError, match="SHA-256 differs"):
        network.download(f"{server}/file", "0" * 64, target)
    with pytest.raises(NetworkError, match="cannot be fetched"):
        network.download(f"{server}/none", "0" * 64, target)
    assert not target.parent.exists()
    network.download(f"{server}/file", hashlib.sha256(b"abc").hexdigest(), target)
    assert target.read_bytes() == b"abc"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", "97 more expected"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\nabc", "IncompleteRead"),
        (b"no such protocol\r\n\r\n", "no such protocol"),
        (None, "timed out"),
    ],
)
def test_a_download_that_is_cut_off_is_a_network_failure(
    answer: bytes | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not another file than the lock's, nor a traceback; a host that never answers is not waited for."""
    if answer is None:
        monkeypatch.setattr(module, "_READ_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as host:

        def reply() -> None:
            with host.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(answer or b"")
                connection.shutdown(socket.SHUT_WR) if answer else connection.recv(1)  # until the other side gives up

        thread = threading.Thread(target=reply, daemon=True)
        thread.start()
        with pytest.raises(NetworkError, match=told):
            Network().download(f"http://127.0.0.1:{host.getsockname()[1]}/file", "0" * 64, tmp_path / "sub" / "file")
        thread.join()
    assert not (tmp_path / "sub").exists()


def test_who_is_asked_behind_a_proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy's host is connected to, also when it is written without a scheme, and not for hosts in NO_PROXY."""
    monkeypatch.setenv("https_proxy", server.removeprefix("http://"))
    assert Network().answers("https://no-such-host.invalid/channel")
    monkeypatch.setenv("no_proxy", "no-such-host.invalid")
    assert not Network().answers("https://no-such-host.invalid/channel")
    module._connects.cache_clear()
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("https_proxy", "127.0.0.1:9")
    assert not Network().answers("https://no-such-host.invalid/channel")


def _torch_wheel(folder: Path) -> None:
    """The smallest wheel that calls itself torch 9.9.9+cpu."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "torch-9.9.9+cpu-py3-none-any.whl", "w") as wheel:
        info = "torch-9.9.9+cpu.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9+cpu\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def _resolve_torch(network: Network, folder: Path) -> str:
    (folder / "in.txt").write_text("torch==9.9.9+cpu\n")
    command = ["pip", "compile", "--quiet", "--no-cache", "--output-file", folder / "out.txt", folder / "in.txt"]
    network.uv(command, "resolve torch", torch_backend="cpu")
    return (folder / "out.txt").read_text()


def test_a_mirror_stands_in_for_pytorchs_index(server: str, tmp_path: Path) -> None:
    """VLLM_ENV_TORCH_INDEX is asked for the build that the configured sources lack."""
    _torch_wheel(tmp_path / "served" / "torch")
    (tmp_path / "empty").mkdir()
    pip = PipConfig(index_url=(tmp_path / "empty").as_uri())
    assert "torch==9.9.9+cpu" in _resolve_torch(Network(pip, torch_index=server), tmp_path)


def _wheel(folder: Path, name: str, version: str) -> None:
    """The smallest wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def _resolve_tool(network: Network, folder: Path) -> str:
    (folder / "in.txt").write_text("tool\n")
    command = ["pip", "compile", "--quiet", "--no-cache", "--no-config", "--output-file", folder / "out.txt", folder / "in.txt"]
    network.uv(command, "resolve a tool", env={"UV_HTTP_RETRIES": "0"})
    return (folder / "out.txt").read_text()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UV_CONSTRAINT", "older.txt"),
        ("UV_CONFIG_FILE", "uv.toml"),
        ("UV_RESOLUTION", "lowest"),
    ],
)
def test_no_setting_of_uv_changes_what_is_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Each would lead to another version, or to none."""
    for version in ("1.0", "2.0", "3.0rc1"):
        _wheel(tmp_path / "wheels", "tool", version)
    (tmp_path / "older.txt").write_text("tool<2\n" if name != "UV_EXCLUDE" else "tool\n")
    (tmp_path / "uv.toml").write_text('[pip]\nresolution = "lowest"\n')
    monkeypatch.setenv(name, str(tmp_path / value) if "." in value else value)
    pip = PipConfig(no_index=True, find_links=(str(tmp_path / "wheels"),))
    assert "tool==2.0\n" in _resolve_tool(Network(pip), tmp_path)


@pytest.mark.parametrize("name", ["UV_DEFAULT_INDEX", "UV_INDEX_URL"])
def test_the_registries_that_uv_is_configured_with_count(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A company's index, for example; but not next to a wheelhouse."""
    _wheel(tmp_path / "served" / "simple" / "tool", "tool", "2.0")
    _wheel(tmp_path / "house", "tool", "1.0")
    monkeypatch.setenv(name, f"{server}/simple")
    assert "tool==2.0\n" in _resolve_tool(Network(), tmp_path)
    assert "tool==1.0\n" in _resolve_tool(Network(wheelhouse=tmp_path / "house"), tmp_path)


def test_a_setting_stays_if_it_only_says_how_to_get_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and passwords of an index have its name in theirs."""
    kept = (
        "UV_INDEX_COMPANY_USERNAME", "UV_INDEX_COMPANY_PASSWORD", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS",
        "UV_KEYRING_PROVIDER", "UV_INSECURE_HOST", "UV_HTTP_TIMEOUT", "UV_CACHE_DIR", "UV_PYTHON_INSTALL_MIRROR",
    )  # fmt: skip
    for name in (*kept, "UV_EXCLUDE_NEWER", "UV_TORCH_BACKEND", "UV_NEW_SETTING"):
        monkeypatch.setenv(name, "x")
    changes = module.without_uv_settings()
    assert set(changes) >= {"UV_EXCLUDE_NEWER", "UV_TORCH_BACKEND", "UV_NEW_SETTING", "VIRTUAL_ENV"}
    assert not set(changes) & set(kept)


@pytest.fixture
def sources_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Network], list[str]]:
    """What uv is started with after its own arguments, by the way to the network."""
    monkeypatch.setattr("vllm_env.base.network.run", lambda argv, **_: "\n".join(map(str, argv)))
    return lambda network: network.uv(["lock"], "resolve", torch_backend="cpu").splitlines()[2:]


def test_offline_uv_is_told_so(sources_of: Callable[[Network], list[str]]) -> None:
    """uv may use its cache and folders, so it runs, with its own --offline."""
    assert "--offline" in sources_of(Network(offline=True))
    assert "--offline" not in sources_of(Network())


def test_a_wheelhouse_is_the_only_source(tmp_path: Path, sources_of: Callable[[Network], list[str]]) -> None:
    """With --wheelhouse no index and no configured folder is asked, and no mirror of PyTorch's index either."""
    pip = PipConfig("https://index.test/simple", find_links=("/wheels",))
    sources = sources_of(Network(pip, wheelhouse=tmp_path, torch_index="https://mirror.test/cpu"))
    assert sources == ["--offline", "--no-index", "--find-links", str(tmp_path)]
    assert {"https://index.test/simple", "https://mirror.test/cpu"} <= {
        *sources_of(Network(pip, torch_index="https://mirror.test/cpu"))
    }
