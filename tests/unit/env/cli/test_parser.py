"""The parsers: what is declared, and what is refused with what may have been meant."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest

from vllm_env.base.errors import UsageError
from vllm_env.cli.commands import COMMANDS
from vllm_env.cli.main import main
from vllm_env.cli.parser import _PARSERS, build_parser, parse
from vllm_env.layout import LAYOUTS
from vllm_env.prefix.prune import RULES
from vllm_env.triton.stub import StubMode

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("arguments", [["--vllm", "1", "--vllm-source", "x"], ["--locked", "--upgrade"], ["--jobs", "x"]])
def test_what_the_arguments_alone_tell_is_refused_by_the_parser(arguments: list[str]) -> None:
    """It runs before anything is installed."""
    with pytest.raises(UsageError):
        parse(arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_subcommand_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each says its own name and takes --json."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"gen_vllm_env.sh {command}" in out
    assert "--json" in out


def test_the_help_of_adopt_names_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """The folder that it reads, and the place of the new model, whose name is that of the folder."""
    with pytest.raises(SystemExit):
        main(["adopt", "--help"])
    out = capsys.readouterr().out
    assert "SOURCE" in out
    assert "--model-repository" in out
    assert "default: the name of SOURCE" in out
    assert "default: vllm" not in out
    assert "--undo" not in out


@pytest.mark.parametrize("command", [[], ["build"], *([name] for name in COMMANDS)])
def test_options_are_not_abbreviated(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A script with --quie must not change its meaning when an option is added."""
    assert main([*command, *(["DIR"] if command in (["adopt"], ["unpack"], ["wheelhouse"]) else []), "--quie"]) == 2
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
        (["xyz"], "'xyz'", "There are: adopt, doctor, inspect, verify, unpack, clean, wheelhouse, build."),
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
    assert choices["--layout"] == tuple(LAYOUTS)
    assert choices["--stub"] == get_args(StubMode)
