"""The parsers: what is declared, and what is refused with what may have been meant."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, get_args

import pytest

from vllm_env.cli.commands import COMMANDS
from vllm_env.cli.main import main
from vllm_env.cli.parser import _PARSERS, build_parser, parse
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.prefix.prune import RULES
from vllm_env.triton.stub import StubMode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("command", sorted(set(_PARSERS) - {"client"}))  # which has the help of client.py
@pytest.mark.parametrize("ask", [lambda command: [command, "--help"], lambda command: ["help", command]])
def test_every_subcommand_has_help(command: str, ask: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    """Its usage names it, and what it lists is accepted by its parser."""
    with pytest.raises(SystemExit) as caught:
        main(ask(command))
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: gen_vllm_env.sh {command} [")
    assert _listed(out) <= set(_PARSERS[command]()._option_string_actions)


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"], ["help", "--quiet"], ["--json", "--help"]])
def test_the_help_has_what_people_use_first(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A few options, examples that are accepted, and a line for each subcommand; nothing is installed for it."""
    out = _help(words, capsys)
    first = {"--vllm", "--vllm-commit", "--vllm-wheel", "--vllm-source", "--profile", "--triton-release"}
    assert _listed(out) == first | {"--model-repository", "--dry-run", "--help", "--help-all", "--version"}
    examples = [line.partition("  ")[0].split()[1:] for line in re.findall(r"^  (\./gen_vllm_env.sh .*)", out, re.MULTILINE)]
    assert len(examples) == 3
    assert {parse(example)[0] for example in examples} == {"build"}
    _, _, table = out.partition("Subcommands:\n")
    assert [line.split()[0] for line in table.splitlines()] == [*_PARSERS, "help"]
    assert max(map(len, out.splitlines())) <= 100


def test_all_options_are_listed_in_groups_by_help_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the build, for whoever looks for one."""
    out = _help(["--help-all"], capsys)
    assert _listed(out) == {option for option in build_parser()._option_string_actions if option != "-h"}
    groups = ["Pin", "Environment", "Triton", "Output", "Run", "Network"]
    assert re.findall(r"^(\w+):$", out, re.MULTILINE) == [*groups, "Examples", "Subcommands"]


def _help(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(words)
    assert caught.value.code == 0
    return capsys.readouterr().out


def _listed(text: str) -> set[str]:
    """Return the options to which a help gives a line."""
    return set(re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE))


def test_the_help_of_a_wheelhouse_lists_only_what_changes_it() -> None:
    """It takes the rest as well: the same options fill a wheelhouse and build from it."""
    listed = _PARSERS["wheelhouse"]().format_help()
    given = ["--no-smoke-run", "--warm", "--layout", "archive", "--model", "m", "--keep", "tests", "--jobs", "3"]
    assert [option for option in given if option.startswith("--") and option in listed] == []
    assert "--vllm X.Y.Z" in listed
    assert parse(["wheelhouse", "DIR", *given])[1].warm


@pytest.mark.parametrize("command", [[], ["build"], *([name] for name in sorted(set(COMMANDS) - {"client"}))])
def test_options_are_not_abbreviated(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A script with --quie must not change its meaning when an option is added."""
    folder = {"adopt": ["SOURCE"], "export": ["--oci", "DIR"], "unpack": ["DIR"], "wheelhouse": ["DIR"]}
    required = [word for name in command for word in folder.get(name, [])]
    assert main([*command, *required, "--quie"]) == 2
    assert "Did you mean --quiet?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what", "meant"),
    [
        (["--modle", "mine"], "--modle", "Did you mean --model?"),
        (["--modle-repository=x"], "--modle-repository", "Did you mean --model-repository?"),
        (["verify", "--model-repositroy", "x"], "--model-repositroy", "Did you mean --model-repository?"),
        (["verify", "--warm"], "--warm", "It is an option of the build. See gen_vllm_env.sh verify --help."),
        (["verify", "--bogus"], "--bogus", "See gen_vllm_env.sh verify --help."),
        (["--frobnicate"], "--frobnicate", "See gen_vllm_env.sh --help-all."),
        (["inpsect"], "'inpsect'", "Did you mean inspect?"),
        (["xyz"], "'xyz'", "There are: build, doctor, verify, "),
        (["0.32.0"], "'0.32.0'", "For a version: --vllm 0.32.0."),
        (["build", "0.32.0"], "0.32.0", "For a version: --vllm 0.32.0."),
        (["verify", "0.32.0"], "0.32.0", "See gen_vllm_env.sh verify --help."),
        (["a1b2c3d"], "'a1b2c3d'", "For a commit: --vllm-commit a1b2c3d."),
        (["wheels/vllm-0.32.0-py3-none-any.whl"], ".whl'", "For a wheel: --vllm-wheel wheels/vllm-0.32.0-py3-none-any.whl."),
        (["help", "inpsect"], "'inpsect'", "Did you mean inspect?"),
        (["a" * 300], "aaa", "There are: build, "),
        (["--model", "/" + "a" * 300], "is not a model's name", "Omit --model, and name the weights"),
        (["--keep", "test"], "--keep test names no rule", "Did you mean tests?"),
        (["--keep", "x"], "--keep x names no rule", f"There are: {', '.join(rule.name for rule in RULES)}."),
    ],
)
def test_a_misspelt_word_is_answered_with_the_near_one(
    arguments: list[str], what: str, meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option, a subcommand and a rule; where nothing is near, with where to look. Nothing is begun."""
    assert main(arguments) == 2
    message, *_, remedy = capsys.readouterr().err.splitlines()
    assert message.startswith("error: ")
    assert what in message
    assert remedy.startswith(f"  fix: {meant}")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("file", "option"), [("vllm/__init__.py", "--vllm-source"), ("opt/config.pbtxt", "--model-repository")])
def test_a_folder_without_an_option_is_recognised(
    file: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A source tree of vLLM, and a model repository; another folder is just no subcommand."""
    assert main([str(tmp_path)]) == 2
    assert "There are: build" in capsys.readouterr().err
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).touch()
    assert main([str(tmp_path)]) == 2
    assert f": {option} {tmp_path}." in capsys.readouterr().err


def test_every_subcommand_is_parsed_and_run() -> None:
    """The parser's table, which knows nothing of what is run, and the table of what is run."""
    assert set(_PARSERS) == {*COMMANDS, "build"}


def test_the_choices_are_those_of_the_request() -> None:
    """The parser names them itself, since it imports nothing but the standard library."""
    choices = {action.option_strings[-1]: action.choices for action in build_parser()._actions}
    assert choices["--layout"] == tuple(LAYOUTS)
    assert choices["--stub"] == get_args(StubMode)
