"""The lock's file and digest; resolving is tested with the real uv in tests/integration."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING

import pytest

from support.small_build import small_lock
from vllm_env.base.errors import VllmEnvError
from vllm_env.lock import lock as module
from vllm_env.lock.lock import LockOptions, make_lock, source_arguments
from vllm_env.lock.pip_config import PipConfig
from vllm_env.lock.spec import Overrides, Pin, Spec, load_spec
from vllm_env.triton.root import rules_of

if TYPE_CHECKING:
    from pathlib import Path

    from support.small_fixtures import Channel

_TEXT = '[profile.cpu]\nvllm = "0.99.0"\npython = "3.11"\nrequirements = ["setuptools"]\n'
_REQUIREMENTS = f"setuptools==84.2.1 \\\n    --hash=sha256:{'2' * 64}\nvllm==0.99.0 \\\n    --hash=sha256:{'4' * 64}\n"


@pytest.fixture
def root(channel: Channel, tmp_path: Path) -> Path:
    """A cache with the local channel."""
    shutil.copytree(channel.root / "conda/channel", tmp_path / "cache/conda/channel")
    return tmp_path / "cache"


@pytest.fixture
def spec(channel: Channel, root: Path, tmp_path: Path) -> Spec:
    """A spec with a lock beside it, as the resolver would have written it."""
    (tmp_path / "s.toml").write_text(_TEXT)
    spec = load_spec("cpu", Overrides(), tmp_path / "s.toml")
    pinned = module.PinnedVllm("vllm==0.99.0", origin="release")
    inputs = module._inputs(spec, rules_of("24.10"), pinned)
    module._write(module.Lock(spec, pinned, channel.layer, _REQUIREMENTS, inputs), tmp_path / "s.cpu.lock")
    return spec


def _make(spec: Spec, root: Path, release: str = "24.10", **options: bool) -> module.Lock:
    return make_lock(spec, rules_of(release), root, PipConfig(), LockOptions(offline=True, **options))


def test_a_lock_that_fits_is_taken_without_resolving(spec: Spec, root: Path, channel: Channel) -> None:
    """What is read is what was written: requirements, conda layer, versions."""
    lock = _make(spec, root, locked=True)
    assert lock.requirements == _REQUIREMENTS
    assert lock.conda == channel.layer
    assert lock.versions() == {"setuptools": "84.2.1", "vllm": "0.99.0"}
    assert lock.python == channel.layer.packages[0].version


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"requirements": ("setuptools", "ray")}, "requirements was ['setuptools'] and is ['setuptools', 'ray']"),
        ({"pin": Pin("release", "1.0.0")}, "pin was 'vllm==0.99.0' and is 'vllm==1.0.0'"),
        ({"python": "3.12"}, "python was '3.11' and is '3.12'"),
        ({"torch_backend": "cpu"}, "torch_backend was '' and is 'cpu'"),
    ],
)
def test_locked_names_what_drifted(spec: Spec, root: Path, change: dict[str, object], named: str) -> None:
    """Each input that differs, with both values."""
    with pytest.raises(VllmEnvError, match="--locked") as caught:
        _make(dataclasses.replace(spec, **change), root, locked=True)  # type: ignore[arg-type]
    assert named in caught.value.cause


def test_another_release_of_triton_is_drift_if_its_rules_differ(spec: Spec, root: Path) -> None:
    """The NumPy bound comes from the release."""
    _make(spec, root, "23.05", locked=True)
    with pytest.raises(VllmEnvError) as caught:
        _make(spec, root, "25.08", locked=True)
    assert "triton was 'numpy<2' and is ''" in caught.value.cause


def test_locked_refuses_another_interpreter(spec: Spec, root: Path) -> None:
    """The lock's Python is not what this machine has: refused, and without --locked taken with a note."""
    file = spec.path.with_name("s.cpu.lock")
    digest = module._read(file)[1].packages[0].sha256  # type: ignore[index]
    file.write_text(file.read_text().replace(digest, "0" * 64))
    with pytest.raises(VllmEnvError, match="is not to be had on this machine"):
        _make(spec, root, locked=True)
    notes: list[str] = []
    lock = make_lock(spec, rules_of("24.10"), root, PipConfig(), LockOptions(offline=True), notes.append)
    assert lock.conda.packages[0].sha256 == digest
    assert "000000000000" in notes[0]
    assert digest[:12] in notes[0]


def test_a_lock_of_another_form_is_resolved_anew_and_a_damaged_one_refused(spec: Spec, root: Path) -> None:
    """An older tool's file is no error; a broken one is, and stays for the person to look at."""
    file = spec.path.with_name("s.cpu.lock")
    text = file.read_text()
    file.write_text(text.replace("# vllm_env lock 1", "# vllm_env lock 0"))
    assert module._read(file) is None
    file.write_text(text.replace('"sha256"', '"sha"'))
    with pytest.raises(VllmEnvError, match="is damaged"):
        _make(spec, root)


def test_the_digest_is_of_what_is_locked_and_not_of_where_it_lies() -> None:
    """Equal for another folder of the same wheel, different for another wheel."""
    lock = small_lock()
    assert small_lock(folder="/elsewhere").digest == lock.digest
    changed = dataclasses.replace(lock, requirements=lock.requirements.replace("4" * 64, "5" * 64))
    assert changed.digest != lock.digest


def test_versions_of_every_form_of_a_requirement() -> None:
    """Extras, markers, local versions, names that are normalised, and files."""
    text = (
        "Foo_Bar[extra]==1.0 ; python_version > '3'\n"
        "torch==2.13.0+cpu \\\n    --hash=sha256:x\n"
        "vllm @ https://host.test/a/vllm-0.99.0%2Bcpu-cp311-abi3-linux_x86_64.whl#sha256=1\n"
    )
    lock = dataclasses.replace(small_lock(), requirements=text)
    assert lock.versions() == {"foo-bar": "1.0", "torch": "2.13.0+cpu", "vllm": "0.99.0+cpu"}


def test_a_wheelhouse_is_the_only_source(tmp_path: Path) -> None:
    """With --wheelhouse no index and no configured folder is asked."""
    pip = PipConfig("https://index.test/simple", find_links=("/wheels",))
    arguments = source_arguments(pip, LockOptions(wheelhouse=tmp_path))
    assert arguments == ["--offline", "--no-index", "--find-links", str(tmp_path)]
    assert "https://index.test/simple" in source_arguments(pip, LockOptions())
    assert source_arguments(pip, LockOptions(offline=True))[0] == "--offline"
