"""The bill of materials: every package once, with the digest that was verified, and the files of no package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from support.small_build import small_lock
from vllm_env.base.filesystem import file_sha256
from vllm_env.interpreter.layer import CondaLayer
from vllm_env.lock.lock import lock_beside
from vllm_env.lock.pins import PinnedVllm
from vllm_env.lock.pylock import Lock, read_pylock
from vllm_env.lock.spec import DEFAULT_SPEC, Overrides, load_spec
from vllm_env.model.sbom import render_sbom
from vllm_env.triton.stub import Stub

if TYPE_CHECKING:
    from pathlib import Path

SERVERS_OWN = Stub(None, "3.12", "26.07", "", 0, "server", libraries=None)


def components(lock: Lock, libraries: dict[str, Path] | None = None, stub: Stub = SERVERS_OWN) -> list[dict]:
    return json.loads(render_sbom(lock, libraries or {}, stub))["components"]


def test_every_package_is_a_component() -> None:
    """The conda layer and each wheel, named by package URL; a server's own stub is no part of the model."""
    document = json.loads(render_sbom(small_lock(), {}, SERVERS_OWN))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    assert {c["purl"] for c in document["components"]} == {
        "pkg:conda/python@3.11.7?build=local_0&subdir=linux-64",
        "pkg:pypi/numpy@1.26.4",
        "pkg:pypi/setuptools@84.2.1",
        "pkg:pypi/vllm@0.99.0",
    }
    assert len({c["bom-ref"] for c in document["components"]}) == 4


def test_every_component_has_the_digest_of_its_file() -> None:
    """The lock has one file for each package: that which is installed."""
    digests = {c["name"]: c["hashes"] for c in components(small_lock())}
    numbers = {"numpy": "1", "python": "0", "vllm": "4", "setuptools": "2"}
    assert digests == {name: [{"alg": "SHA-256", "content": number * 64}] for name, number in numbers.items()}


def test_files_of_no_package_have_their_place(tmp_path: Path) -> None:
    """The stub with its release, the library beside it, and what the build copied into the environment."""
    (tmp_path / "stub_lib").mkdir()
    files = [tmp_path / "triton_python_backend_stub", tmp_path / "stub_lib/libcudart.so.12", tmp_path / "libnuma.so.1"]
    for file in files:
        file.write_text(file.name)
    stub = Stub(files[0], "3.11", "24.10", file_sha256(files[0]), 26, "prebuilt", libraries=files[1].parent)
    listed = {c["bom-ref"]: c for c in components(small_lock(), {"lib/libnuma.so.1": files[2]}, stub)}
    places = ("triton_python_backend_stub", "stub_lib/libcudart.so.12", "lib/libnuma.so.1")
    for file, place in zip(files, places, strict=True):
        component = listed[place]
        assert component["evidence"]["occurrences"] == [{"location": place}]
        assert component["hashes"] == [{"alg": "SHA-256", "content": file_sha256(file)}]
    assert listed[places[0]]["purl"] == "pkg:github/triton-inference-server/python_backend@r24.10"


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_the_locks_of_the_checkout(profile: str) -> None:
    """Each wheel of the lock by its digest; GPU kernels are compiled by ziglang, so its release is known, too."""
    spec = load_spec(profile, Overrides())
    file = read_pylock(lock_beside(DEFAULT_SPEC, profile))
    layer = file.layer or CondaLayer("local", ())
    lock = Lock(spec, PinnedVllm("vllm", "", "release", None), layer, file.wheels, file.inputs)
    listed = components(lock)
    assert {(c["name"], c["hashes"][0]["content"]) for c in listed} >= {(w.name, w.sha256) for w in file.wheels}
    assert any(c["purl"].startswith("pkg:pypi/ziglang@") for c in listed) == (profile == "cuda")
