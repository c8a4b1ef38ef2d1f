"""Which lock is taken, and what is said when none fits; resolving is tested with the real uv in tests/integration."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from support.small_fixtures import workspace_in
from vllm_env.base.errors import UsageError, VllmEnvError
from vllm_env.interpreter.layer import REMOTE_CHANNEL, CondaLayer
from vllm_env.lock import lock as module
from vllm_env.lock.lock import LockOptions, inputs_of, make_lock
from vllm_env.lock.pins import PinnedVllm
from vllm_env.lock.pylock import Lock, LockedWheel, read_pylock, write_pylock
from vllm_env.lock.spec import Overrides, Pin, Spec, check_save, load_spec, only_profile, save_spec
from vllm_env.triton.root import rules_of

if TYPE_CHECKING:
    from pathlib import Path

    from support.small_fixtures import Channel

_TEXT = '[profile.cpu]\nvllm = "0.99.0"\npython = "3.11"\nrequirements = ["setuptools"]\n'
_PINNED = PinnedVllm("vllm==0.99.0", origin="release")
_WHEELS = (
    LockedWheel("numpy", "1.26.4", "numpy-1.26.4-cp311-cp311-manylinux_2_17_x86_64.whl", "1" * 64, 10),
    LockedWheel("setuptools", "84.2.1", "setuptools-84.2.1-py3-none-any.whl", "2" * 64, 20),
    LockedWheel("torch", "2.13.0+cpu", "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "3" * 64, 30, "pytorch"),
    LockedWheel("vllm", "0.99.0", "vllm-0.99.0-py3-none-any.whl", "4" * 64, 40),
)


@pytest.fixture
def root(channel: Channel, tmp_path: Path) -> Path:
    """A cache with the local channel."""
    shutil.copytree(channel.root / "conda/channel", tmp_path / "cache/conda/channel")
    return tmp_path / "cache"


@pytest.fixture
def spec(channel: Channel, tmp_path: Path) -> Spec:
    """A spec with a lock beside it, as the resolver would have written it."""
    (tmp_path / "s.toml").write_text(_TEXT)
    spec = load_spec("cpu", Overrides(), tmp_path / "s.toml")
    lock = Lock(spec, _PINNED, channel.layer, _WHEELS, inputs_of(spec, _PINNED))
    write_pylock(lock, tmp_path / "pylock.s-cpu.toml")
    return spec


def _make(spec: Spec, root: Path, release: str = "24.10", **options: Any) -> Lock:
    return make_lock(workspace_in(root), spec, rules_of(release), LockOptions(**options))


def test_a_password_is_in_no_lock(spec: Spec) -> None:
    """Nor in the manifest, which has the same inputs; and none is saved."""
    secret = "https://me:secret@mirror.example"
    pinned = PinnedVllm(f"vllm @ {secret}/vllm-0.32.0-py3-none-any.whl", origin="wheel")
    changed = dataclasses.replace(spec, wheel_index=secret, git_url=f"{secret}/v.git", requirements=(f"x @ {secret}/x.whl",))
    assert "secret" not in str(inputs_of(changed, pinned))
    with pytest.raises(UsageError, match=r"--save .* has a password") as refused:
        check_save(changed, spec.path.with_name("mine.toml"))
    assert "secret" not in str(refused.value)
    check_save(dataclasses.replace(spec, git_url="ssh://git@host/v.git"), spec.path.with_name("mine.toml"))


def test_a_lock_of_an_older_triton_fits_a_newer_one_and_not_the_other_way(spec: Spec, root: Path) -> None:
    """NumPy 1 serves every release; NumPy 2 breaks the rule of a release before 24.11, which is named."""
    assert _make(spec, root, "25.08", locked=True).versions()["numpy"] == "1.26.4"
    file = spec.path.with_name("pylock.s-cpu.toml")
    file.write_text(file.read_text().replace("1.26.4", "2.2.0"))
    assert _make(spec, root, "25.08", locked=True).versions()["numpy"] == "2.2.0"
    with pytest.raises(VllmEnvError) as caught:
        _make(spec, root, "24.10", locked=True)
    assert "numpy is 2.2.0, and Triton since 23.05 needs numpy<2" in caught.value.cause


def test_a_lock_whose_wheels_need_a_newer_glibc_does_not_fit(spec: Spec, root: Path) -> None:
    """It would install, and its libraries would not load in the older container; the oldest glibc of a wheel counts."""
    file = spec.path.with_name("pylock.s-cpu.toml")
    file.write_text(file.read_text().replace("manylinux_2_17_x86_64", "manylinux_2_17_x86_64.manylinux_2_39_x86_64"))
    assert _make(spec, root, "24.10", locked=True).versions()["numpy"] == "1.26.4"
    file.write_text(file.read_text().replace("manylinux_2_17_x86_64.", ""))
    assert _make(spec, root, "25.08", locked=True).versions()["numpy"] == "1.26.4"
    with pytest.raises(VllmEnvError) as caught:
        _make(spec, root, "24.10", locked=True)
    assert "manylinux_2_39_x86_64.whl needs glibc 2.39, and Triton since 23.05 has 2.35" in caught.value.cause


def test_locked_says_that_the_interpreter_is_this_machines(
    spec: Spec, root: Path, channel: Channel, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wheels are the lock's wherever the interpreter comes from, and what is not locked is said."""
    _make(spec, root, locked=True)
    said = capsys.readouterr().err
    assert f"the lock does not pin the interpreter of this machine: Python {channel.layer} is used" in said


def test_the_interpreter_of_conda_forge_is_locked(spec: Spec, root: Path, channel: Channel, tmp_path: Path) -> None:
    """Its packages stand in the lock; they are taken where this machine has them, with nothing left to say."""
    layer = CondaLayer(REMOTE_CHANNEL, channel.layer.packages)
    file = spec.path.with_name("pylock.s-cpu.toml")
    write_pylock(Lock(spec, _PINNED, layer, _WHEELS, inputs_of(spec, _PINNED)), file)
    assert read_pylock(file).layer == layer
    assert _make(spec, root, locked=True).conda.channel == "local"
    shutil.copytree(channel.root / "conda/channel", root / "conda" / REMOTE_CHANNEL)
    assert _make(spec, root, locked=True).conda == layer


def test_an_old_lock_is_refused_and_so_is_a_damaged_one(spec: Spec, root: Path) -> None:
    """Each with --upgrade as the remedy; the file stays for the user to look at."""
    file = spec.path.with_name("pylock.s-cpu.toml")
    text = file.read_text()
    broken = {
        "has format 0": text.replace("format = 1", "format = 0"),
        "is damaged": text.replace("[tool.vllm-env.inputs]", "[tool.vllm-env.outputs]"),
        "is damaged: .*sha256": text.replace("sha256", "sha512", 1),
        "damaged": text[: len(text) // 2] + "=",
    }
    for message, content in broken.items():
        file.write_text(content)
        with pytest.raises(VllmEnvError, match=message) as caught:
            _make(spec, root)
        assert "--upgrade" in caught.value.remedy
        assert file.read_text() == content


def _save(spec: Spec, root: Path, file: Path, **options: bool) -> Lock:
    return make_lock(workspace_in(root), spec, rules_of("24.10"), LockOptions(save=file, **options))


def test_a_saved_pin_is_built_again_elsewhere(
    spec: Spec, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spec and lock lie beside each other, the build says where, and --spec FILE --locked needs nothing else."""
    changed = dataclasses.replace(spec, requirements=("setuptools", "ray"), is_default=False)
    monkeypatch.setattr(module, "resolve", lambda *_: _WHEELS)
    file = tmp_path / "kept" / "my pin.toml"
    first = _save(changed, root, file)
    said = capsys.readouterr().err
    assert f"the spec {file}" in said
    assert str(tmp_path / "kept/pylock.my pin-cpu.toml") in said
    shutil.rmtree(root / "locks")
    monkeypatch.setattr(module, "resolve", lambda *_: pytest.fail("it is resolved again"))
    assert only_profile(file) == "cpu"
    again = load_spec("cpu", Overrides(), file)
    assert again.is_default
    assert again == changed
    assert _make(again, root, locked=True).digest == first.digest
    assert _save(changed, root, file, locked=True).digest == first.digest  # the same command on an empty cache
    assert "the cache only" not in capsys.readouterr().err


def test_a_pin_that_is_not_saved_says_where_its_lock_is(
    spec: Spec, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cache of a container goes with it."""
    monkeypatch.setattr(module, "resolve", lambda *_: _WHEELS)
    _make(dataclasses.replace(spec, drop=("ray",), is_default=False), root)
    assert "--save FILE" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "text"), [("s.toml", _TEXT), ("two.toml", f"{_TEXT}[profile.cuda]\n"), ("pin", "")])
def test_no_other_file_is_overwritten(spec: Spec, root: Path, tmp_path: Path, name: str, text: str) -> None:
    """The spec that the build reads, a spec of several profiles, and what is no .toml file."""
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match="--save"):
        _save(spec, root, tmp_path / name)
    assert (tmp_path / name).read_text() == text


def test_a_saved_path_is_relative_to_what_is_saved_beside_it(spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with spec, lock and wheel can be moved; what lies elsewhere is named from the root."""
    monkeypatch.chdir(tmp_path)
    for value, written in (("w/vllm.whl", "w/vllm.whl"), ("/elsewhere/vllm.whl", "/elsewhere/vllm.whl")):
        save_spec(dataclasses.replace(spec, pin=Pin("wheel", value)), tmp_path / "pin.toml")
        assert f'wheel = "{written}"' in (tmp_path / "pin.toml").read_text()
