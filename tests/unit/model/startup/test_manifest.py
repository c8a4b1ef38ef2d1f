"""A model loads only with the archive and the stub that were built with it, on a server of their release."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from support.fake_log import FakeLog
from triton_vllm.base.errors import ConfigError
from triton_vllm.startup.manifest import check


@pytest.fixture
def model(tmp_path):
    """A model directory with a manifest and both files, as the packager leaves it."""
    (tmp_path / "vllm_env.tar.gz").write_bytes(b"x" * 10)
    (tmp_path / "triton_python_backend_stub").write_bytes(b"y" * 5)
    manifest = {
        "archive": {"name": "vllm_env.tar.gz", "size": 10},
        "stub": {"name": "triton_python_backend_stub", "size": 5},
        "vllm": {"version": "0.32.0", "commit": "abc"},
        "python": "3.12",
        "triton_release": "24.10",
        "built_at": "2026-01-01",
    }
    (tmp_path / "vllm_env.json").write_text(json.dumps(manifest))
    return tmp_path


def test_a_whole_model_is_described(model):
    """The log line has the vLLM version, its commit and the Triton release."""
    log = FakeLog()
    check(model, "24.10", log)
    (line,) = log.lines
    assert all(part in line for part in ("0.32.0", "abc", "24.10", "3.12"))


@pytest.mark.parametrize("name", ["vllm_env.tar.gz", "triton_python_backend_stub"])
def test_a_file_of_another_build_is_refused(model, name):
    """A half-copied repository fails at load with the file's name, not later with a crash."""
    (model / name).write_bytes(b"z")
    with pytest.raises(ConfigError, match=f"{name} has 1 bytes"):
        check(model, "24.10", FakeLog())


def test_an_unpacked_environment_and_no_manifest_pass(model):
    """A directory layout has no archive, and a model made by hand no manifest."""
    (model / "vllm_env.tar.gz").unlink()
    log = FakeLog()
    check(model, "24.10", log)
    (model / "vllm_env.json").unlink()
    check(model, "26.07", log)
    assert "nothing to check" in log.lines[-1]
    assert log.warnings == []


@pytest.mark.parametrize(
    ("spec", "machine", "built_for", "here"),
    [
        ({"platform": "linux/arm64"}, "x86_64", "linux/arm64", "linux/amd64"),
        ({"profile": "cpu"}, "aarch64", "linux/amd64", "linux/arm64"),
    ],
)
def test_a_model_for_other_machines_is_refused(model, monkeypatch, spec, machine, built_for, here):
    """With a stub that starts here, such as the server's own; manifests for x86-64 name no platform."""
    file = model / "vllm_env.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "spec": spec}))
    theirs, ours = (SimpleNamespace(machine=name) for name in ({"x86_64": "aarch64", "aarch64": "x86_64"}[machine], machine))
    monkeypatch.setattr("os.uname", lambda: theirs)
    check(model, "24.10", FakeLog())
    monkeypatch.setattr("os.uname", lambda: ours)
    with pytest.raises(ConfigError, match=f"built for {built_for}, and this machine is {here}: build it again"):
        check(model, "24.10", FakeLog())


@pytest.mark.parametrize("lost", ["mode", "link"])
def test_an_unpacked_environment_from_an_object_store_is_refused(model, lost):
    """The message says which layout comes through one."""
    (model / "vllm_env.tar.gz").unlink()
    python = model / "vllm_env.tar.gz/bin/python"
    python.parent.mkdir(parents=True)
    (python.parent / "python3.11").touch(0o755)
    python.symlink_to("python3.11")
    check(model, "24.10", FakeLog())
    python.resolve().chmod(0o644) if lost == "mode" else python.unlink()
    with pytest.raises(ConfigError, match=r"bin/python is no program: .* --layout parts$"):
        check(model, "24.10", FakeLog())


def test_a_broken_manifest_is_refused(model):
    """It says which file."""
    (model / "vllm_env.json").write_text("{")
    with pytest.raises(ConfigError, match=r"vllm_env\.json cannot be read"):
        check(model, "24.10", FakeLog())
    (model / "vllm_env.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"vllm_env\.json holds no JSON object"):
        check(model, "24.10", FakeLog())


def changed(model, **values):
    """Change the model's manifest; None removes a value."""
    file = model / "vllm_env.json"
    manifest = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({name: value for name, value in manifest.items() if value is not None}))
    return model


@pytest.mark.parametrize(
    ("built_for", "python", "server", "remedies"),
    [
        ("24.10", "3.12.1", "26.07", ["--profile cpu --triton-release 26.07,", "./gen_vllm_env.sh in its container"]),
        ("24.10", "3.11.7", "26.07", ["--profile cpu --triton-release 26.07 --python 3.12,"]),
        ("26.07", "3.12.1", "24.10", ["./gen_vllm_env.sh in its container, or with --triton-root DIR"]),
        ("24.10", "3.11.7", "24.09", ["./gen_vllm_env.sh in its container, or with --triton-root DIR"]),
    ],
)
def test_a_stub_of_another_release_is_refused(model, built_for, python, server, remedies):
    """In one sentence, which names both releases and what to type."""
    changed(model, triton_release=built_for, python=python, spec={"profile": "cpu"})
    with pytest.raises(ConfigError) as caught:
        check(model, server, FakeLog())
    said = str(caught.value)
    assert said.startswith(f"this model was built for Triton {built_for}, and its stub cannot talk to this server")
    assert f"nvcr.io/nvidia/tritonserver:{built_for}-py3" in said
    assert all(remedy in said for remedy in remedies)
    assert ("--triton-release" in said) == (server >= "24.11")


def test_a_release_that_is_not_known_is_a_warning(model):
    """A server may hide it, and older builds did not record it."""
    log = FakeLog()
    check(model, "", log)
    (warning,) = log.warnings
    assert "the release of this server is not known; the model was built for Triton 24.10" in warning
    check(changed(model, triton_release=None), "26.07", log)
    assert len(log.warnings) == 2
    assert "names no release of Triton" in log.warnings[1]


@pytest.mark.parametrize(
    ("servers", "fits", "refused", "newer"),
    [
        (("26.06", "", "26.07"), ["26.06", "26.07"], ["24.10", "26.05"], ["26.08", "27.01"]),
        (("25.08", "26.06", "26.07"), ["25.08", "25.12", "26.05"], ["24.10", "25.07", "26.06", "26.07"], ["26.08"]),
    ],
)
def test_a_model_without_a_stub_fits_releases_with_its_rules(model, servers, fits, refused, newer):
    """The server's own stub is of the right release. A newer release than any that was known may have other rules."""
    (model / "triton_python_backend_stub").unlink()
    record = dict(zip(("since", "before", "known"), servers, strict=True))
    changed(model, triton_release=fits[-1], servers=record, stub={"name": "triton_python_backend_stub", "size": 0})
    log = FakeLog()
    for release in fits:
        check(model, release, log)
    assert log.warnings == []
    for release in refused:
        with pytest.raises(ConfigError, match=f"other rules hold for this server, which is Triton {release}: build it again"):
            check(model, release, log)
    for number, release in enumerate(newer, 1):
        check(model, release, log)
        assert len(log.warnings) == number
        assert f"Triton {release} is newer than 26.07" in log.warnings[-1]


def test_a_stub_next_to_a_model_that_has_none_is_refused(model):
    """Triton would take it; it is of another build."""
    changed(model, stub={"name": "triton_python_backend_stub", "size": 0})
    with pytest.raises(ConfigError, match="triton_python_backend_stub has 5 bytes"):
        check(model, "24.10", FakeLog())
