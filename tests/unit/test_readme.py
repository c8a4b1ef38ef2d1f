"""The README's tables and the program agree."""

from __future__ import annotations

import re
from pathlib import Path

from triton_vllm.settings import Settings
from vllm_env.cli import build_parser
from vllm_env.commands import COMMANDS
from vllm_env.prune import RULES

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_options_table_is_that_of_help():
    """Every option of the parser stands in the README with its argument and its help text, and no other does."""
    table = (ROOT / "README.md").read_text("utf-8").split("<!-- options")[1].split("<!-- end of options")[0]
    documented = dict(re.findall(r"^\| `(--.+?)` \| (.+) \|$", table, re.MULTILINE))
    declared = {}
    for action in build_parser()._actions:
        option = action.option_strings[-1]
        if option in ("--help", "--version"):
            continue
        argument = "|".join(action.choices) if action.choices else action.metavar or ""
        declared[f"{option} {argument}".strip().replace("|", r"\|")] = action.help
    assert documented == declared


def test_the_pinned_versions_of_the_readme_are_those_of_the_spec():
    """The profile that the README shows as an example is the one that the spec pins."""
    readme = (ROOT / "README.md").read_text("utf-8")
    spec = (ROOT / "env" / "vllm_env.toml").read_text("utf-8")
    shown = re.search(r"--vllm (\d+\.\d+\.\d+)", readme)
    assert shown
    assert f'vllm = "{shown[1]}"' in spec


def test_the_parameters_table_is_that_of_the_adapter():
    """Every parameter that the adapter reads from config.pbtxt stands in the README with its default, and no other."""
    table = (ROOT / "README.md").read_text("utf-8").split("<!-- parameters")[1].split("<!-- end of parameters")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| .*? \| (?:`(.*)`)? ?\|$", table, re.MULTILINE))
    source = (ROOT / "model_repository/vllm/1/triton_vllm/settings.py").read_text("utf-8")
    read = dict(re.findall(r'value\("(\w+)", \w+, Settings\.(\w+)\)', source))
    plain = {name: getattr(Settings, field) for name, field in read.items()}
    defaults = {n: "" if v == () else str(v).lower() if isinstance(v, bool) else f"{v:g}" for n, v in plain.items()}
    assert documented == defaults


def test_the_rules_table_is_that_of_the_program():
    """Every rule by which something is left out stands in the README with its profiles and its reason, and no other."""
    table = (ROOT / "README.md").read_text("utf-8").split("<!-- rules")[1].split("<!-- end of rules")[0]
    documented = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+) \|$", table, re.MULTILINE)
    assert documented == [(rule.name, ", ".join(rule.profiles), rule.reason) for rule in RULES]


def test_every_subcommand_is_named():
    """The README names each subcommand."""
    readme = (ROOT / "README.md").read_text("utf-8")
    section = readme.split("Subcommands:")[1].split("Exit codes")[0]
    assert all(re.search(rf"`(\./gen_vllm_env\.sh )?{name}[ `]", section) for name in COMMANDS), COMMANDS
