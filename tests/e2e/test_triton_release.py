"""A model and a server of another release: refused before the first request, which would end the server. And Tritons elsewhere.

The servers are the real one in copies of its root that say another release, in the files that a Triton root has for it.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from typing import TYPE_CHECKING

import pytest

from support import engineless, small_build
from support.instances import said
from support.model_control import load
from support.once import once
from support.parts_fixtures import ANSWER, Packager, answer, copy_into, server_of, trees_in, unpacking_in
from support.serving import EXPLICIT, serve
from support.small_fixtures import workspace_in
from vllm_env.base.errors import VllmEnvError
from vllm_env.interpreter.layer import local_layer
from vllm_env.model.files import CONFIG_NAME
from vllm_env.model.manifest import MANIFEST_NAME, read_manifest
from vllm_env.triton.root import STUB_LIBRARIES, STUB_NAME, open_root
from vllm_env.triton.stub import make_self_starting

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.serving import Parts
    from support.small_fixtures import Channel

pytestmark = pytest.mark.e2e
RELEASE = "26.07"
"""A release whose container has a stub for Python 3.12, for builds."""


@pytest.fixture
def provisioned(light_parts: Parts) -> Path:
    """The Triton root, if this project made it: others have no stub for Python 3.12 next to their own."""
    root = light_parts.binary.parents[1]
    if not (root / "libexec").is_dir():
        pytest.skip("this Triton was not provisioned")
    return root


def copy_root(root: Path, folder: Path, files: dict[str, str]) -> Path:
    """Copy a Triton root, with links to what is large; ``files`` are all that say its release. Return its program."""
    folder.mkdir()
    for path in root.iterdir():
        if path.name in ("bin", "libexec"):  # the release is looked for next to the folder of the program
            shutil.copytree(path, folder / path.name)
        elif path.name not in ("RELEASE", "TRITON_VERSION"):
            (folder / path.name).symlink_to(path)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    return folder / "bin" / "tritonserver"


def saying(release: str) -> Callable[[Path], None]:
    """Return a function that makes a model one that was built for another release."""

    def change(model: Path) -> None:
        file = model / MANIFEST_NAME
        manifest = {**json.loads(file.read_text()), "triton_release": release}
        file.write_text(json.dumps(manifest))

    return change


def refusal(parts: Parts, prepare: Callable[[Path], None] | None = None) -> tuple[str, str]:
    """Return why a load is refused, and what the server has logged; the server lives on."""
    with serve(parts, {"max_model_len": 64}, arguments=(EXPLICIT,), prepare=prepare) as server:
        status, body = load(server)
        assert status == 400, body
        return str(json.loads(body)["error"]), said(server)


@pytest.mark.parametrize("files", [{"TRITON_VERSION": "2.71.0"}, {"TRITON_VERSION": "2.51.0", "RELEASE": "26.07"}])
def test_a_newer_server_is_refused_before_vllm_is_imported(
    light_parts: Parts, provisioned: Path, tmp_path: Path, files: dict[str, str], no_leftovers: None
) -> None:
    """With a model that was built for 24.10, by the version that containers have, and by the release that we write."""
    program = copy_root(provisioned, tmp_path / "newer", files)
    why, log = refusal(dataclasses.replace(light_parts, binary=program))
    assert "this model was built for Triton 24.10, and its stub cannot talk to this server, which is Triton 26.07" in why
    assert "--profile cpu --triton-release 26.07 --python 3.12" in why
    assert "nvcr.io/nvidia/tritonserver:24.10-py3" in why
    assert "importing vLLM" not in log


def test_an_older_server_is_refused(light_parts: Parts, no_leftovers: None) -> None:
    """A model for 27.01 on the real server, whatever that is."""
    release = open_root(light_parts.binary.parents[1]).release
    why, log = refusal(light_parts, saying("27.01"))
    assert f"this model was built for Triton 27.01, and its stub cannot talk to this server, which is Triton {release}" in why
    assert "importing vLLM" not in log


def test_a_server_that_hides_its_release_is_warned_about(light_parts: Parts, provisioned: Path, tmp_path: Path) -> None:
    """One line, and the model serves."""
    parts = dataclasses.replace(light_parts, binary=copy_root(provisioned, tmp_path / "hidden", {}))
    with serve(parts) as server:
        assert answer(server) == ANSWER
        lines = [line for line in said(server).splitlines() if "the release of this server is not known" in line]
    assert len(lines) == 1
    assert "the model was built for Triton 24.10" in lines[0]


@pytest.fixture(scope="module")
def for_release(channel: Channel, session_folder: Path) -> Packager:
    """Packs the vLLM without an engine for Triton 26.07, with a NumPy that the stub of 24.10 takes, too."""
    try:
        local_layer(workspace_in(channel.root), "3.12")
    except VllmEnvError as error:
        pytest.skip(f"no interpreter: {error.what}")
    wheel = once("parts/wheel", engineless.make_wheel)
    spec = small_build.make_spec(session_folder / "release", wheel)
    options = ("--spec", str(spec), "--python", "3.12", "--with", "numpy<2", "--triton-release", RELEASE)
    return Packager(small_build.environment(channel.root), options)


def root_with_own_stub(root: Path, folder: Path, release: str, environment: Path) -> Path:
    """Copy a root whose own stub is for Python 3.12, as that of containers since 24.11; return its program."""
    program = copy_root(root, folder, {"RELEASE": release})
    backend = folder / "backends" / "python"
    (folder / "backends").unlink()
    shutil.copytree(root / "backends", folder / "backends")
    # In a container the stub finds the system's libpython.
    stub = make_self_starting(
        workspace_in(folder / "cache"), root / "python_backend_stubs" / "3.12" / STUB_NAME, environment, root / "lib"
    )
    shutil.copy(stub, backend)
    shutil.copytree(stub.parent / STUB_LIBRARIES, backend / STUB_LIBRARIES)
    return program


@pytest.mark.slow
def test_a_model_for_a_triton_elsewhere_is_served_by_the_servers_own_stub(
    for_release: Packager, light_parts: Parts, provisioned: Path, disk_folder: Path, no_leftovers: None
) -> None:
    """Built without a Triton of its release, and not served then; refused where other rules hold."""
    models = disk_folder / "models"
    place = ("--model-repository", str(models))
    done = for_release.run(*place)
    assert f"not served here: Triton {RELEASE} is not on this machine" in done.stdout
    assert f"nvcr.io/nvidia/tritonserver:{RELEASE}-py3 tritonserver --model-store=/models" in done.stdout
    model = models / "vllm"
    manifest = read_manifest(model)
    assert manifest
    assert (manifest.triton_release, manifest.stub.origin, manifest.python[:5]) == (RELEASE, "server", "3.12.")
    assert manifest.spec["triton_release"] == RELEASE
    assert not {STUB_NAME, STUB_LIBRARIES} & {path.name for path in model.iterdir()}
    assert "unchanged, vLLM" in for_release.run(*place).stdout

    assert "the server's own, Python 3.12" in for_release.plain("inspect", *place).stdout
    assert "verified" in for_release.plain("verify", *place).stdout

    environment = disk_folder / "environment"
    for_release.plain("unpack", str(environment), *place)
    variables = unpacking_in(disk_folder / "unpacked")
    parts = dataclasses.replace(light_parts, model=model, environment=environment)
    served = copy_into(disk_folder / "served", parts).parent
    assert (served / "vllm" / CONFIG_NAME).is_file()
    for release, reason in ((RELEASE, ""), ("26.06", ""), ("25.12", "other rules hold for this server, which is Triton 25.12")):
        program = root_with_own_stub(provisioned, disk_folder / release, release, environment)
        server = server_of(dataclasses.replace(parts, binary=program), served, variables, disk_folder / f"{release}.log")
        if reason:
            with pytest.raises(VllmEnvError), server:
                pass
            assert reason in server.log.read_text(errors="replace")
            continue
        with server:
            assert answer(server) == ANSWER
            assert "is newer than" not in said(server)
    assert len(trees_in(disk_folder / "unpacked")) == 1


@pytest.mark.slow
def test_a_triton_root_anywhere_serves_the_smoke_run(
    packager: Packager, light_parts: Parts, provisioned: Path, disk_folder: Path, no_leftovers: None
) -> None:
    """A server that looks for its backends in /opt/tritonserver, as one that is installed elsewhere does."""
    root = disk_folder / "anywhere"
    copy_root(provisioned, root, {"TRITON_VERSION": "2.51.0"})
    (root / "libexec").rename(root / "program")
    program = root / "bin" / "tritonserver"
    program.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={root}/lib exec {root}/program/tritonserver "$@"\n')
    place = ("--triton-root", str(root), "--model-repository", str(disk_folder / "models"))
    done = packager.run("--smoke-model", str(light_parts.standin), *place, **unpacking_in(disk_folder / "unpacked"))
    assert "PASS: vLLM example" in done.stdout
    lines = done.stdout.splitlines()
    (serve_line,) = [line for line in lines if "--model-store" in line]
    assert shlex.split(serve_line)[:2] == [str(program), f"--backend-directory={root}/backends"]
