#!/usr/bin/env python3
"""Write the tables of the reference pages that are made from code, such as options and tensors.

A page has a marker for each table, such as ``<!-- options: tools/reference.py writes this -->``.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("env", "client", "model_repository/vllm/1")]

from loadtest import options as client  # noqa: E402 - found by the line above
from triton_vllm.base.dialect import Dialect  # noqa: E402
from triton_vllm.base.limits import Limits  # noqa: E402
from triton_vllm.request import contract  # noqa: E402
from triton_vllm.startup.settings import Settings  # noqa: E402
from vllm_env.cli import parser as packager  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_NAMES = ("command_line.md", "parameters.md", "tensors.md", "vllm_versions.md")
PAGES = tuple(ROOT / "docs" / name for name in _NAMES)
PATCHED = (ROOT / "model_repository/vllm/1/triton_vllm", ROOT / "env/vllm_env")
"""The folders of the code that may have patches."""
_PROFILES = ("cpu", "cuda")
_COMMON = ("json", "quiet", "verbose")
"""The options of every subcommand, by destination."""


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or with ``--check`` only compare them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1: not equal"
    )
    options = parser.parse_args(arguments)
    changed = [page for page in PAGES if page.read_text("utf-8") != renewed(page)]
    for page in changed:
        print(f"{page.relative_to(ROOT)}: {'differs' if options.check else 'written'}")
        if not options.check:
            page.write_text(renewed(page), "utf-8")
    return 1 if changed and options.check else 0


def renewed(page: Path) -> str:
    """Return a page with the tables as the code has them now, each between its two markers."""
    return re.sub(
        r"(?s)(<!-- ([\w ]+): tools/reference\.py [^>]*-->\n).*?(<!-- end of \2 -->)",
        lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}",
        page.read_text("utf-8"),
    )


def _table(head: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table; ``head`` has the names of the columns, separated by bars."""
    columns = head.count("|") + 1
    lines = [f"| {head} |", "|---" * columns + "|"]
    lines += ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    # If the last cell is empty, one space stays in front of the last bar, not two.
    return re.sub(r" +\|$", " |", "\n".join(lines), flags=re.MULTILINE) + "\n"


def _options(parser: argparse.ArgumentParser) -> str:
    """Return a table for each group of a parser's options, with its title."""
    tables = []
    for group in parser._action_groups:  # noqa: SLF001 - argparse has no public way
        rows = [_option(action) for action in _shown(group._group_actions)]  # noqa: SLF001
        if rows:
            title = (group.title or "").removesuffix(":")
            tables.append(
                f"**{title[:1].upper()}{title[1:]}**\n\n{_table('option | meaning', rows)}"
            )
    return "\n".join(tables)


def _shown(actions: Iterable[argparse.Action]) -> Iterator[argparse.Action]:
    """Yield the options that ``--help-all`` explains, without the help itself."""
    for action in actions:
        if action.dest not in {"help", "version"} and action.help != argparse.SUPPRESS:
            yield action


def _option(action: argparse.Action) -> tuple[str, str]:
    """Return the two cells of an option: its names as in "`-u`, `--url HOST:PORT`", and its help.

    A positional argument has no names. Its first cell is the argument itself.
    """
    argument = "|".join(map(str, action.choices)) if action.choices else action.metavar
    # A flag takes no argument.
    if action.nargs == 0:
        argument = ""
    # Only the last name has the argument next to it.
    *names, last = action.option_strings or [""]
    names.append(f"{last} {argument or ''}".strip())
    help_text = (action.help or "") % {"default": action.default}
    return ", ".join(f"`{name}`" for name in names), help_text


def _of_subcommands() -> str:
    """Return the table of the subcommands: what each does, and the options that only some have."""
    rows = []
    for name, make in sorted(packager._PARSERS.items()):  # noqa: SLF001 - the table of all parsers
        parser = make()
        actions = list(_shown(parser._actions))  # noqa: SLF001
        # The subcommand with its positional arguments.
        words = [name, *(str(action.metavar) for action in actions if not action.option_strings)]
        options = [_option(action)[0] for action in actions if action.dest not in _COMMON]
        own = ", ".join(option for option in options if option.startswith("`-"))
        if name == "build":
            own = "[all below](#options)"
        # A subcommand that can be told what to pin has all options of a build.
        elif "`--vllm X.Y.Z`" in options:
            own = "as `build`"
        rows.append((f"`{' '.join(words)}`", " ".join((parser.description or "").split()), own))
    return _table("subcommand | what it does | options", rows)


def _rules() -> str:
    """Return the table of the rules by which files of the environment are left out.

    They are read from the source of ``prune``, whose import needs pyelftools.
    """
    source = ROOT / "env/vllm_env/prefix/prune.py"
    rows = []
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != "Rule":
            continue
        # The call is Rule(name, reason, pattern, profiles).
        name, reason = (ast.literal_eval(argument) for argument in node.args[:2])
        by_keyword = [keyword.value for keyword in node.keywords if keyword.arg == "profiles"]
        given = [*node.args[3:], *by_keyword]
        profiles = ast.literal_eval(given[0]) if given else _PROFILES
        rows.append((f"`{name}`", ", ".join(profiles), reason))
    return _table("rule | profiles | why", rows)


def _tensors(tensors: Iterable[contract.Tensor], head: str = "input", last: str = "content") -> str:
    """Return a table of tensors with type, shape and content.

    Args:
        tensors: those of the table.
        head: the heading of the first column, which has the names.
        last: the heading of the last column.
    """
    rows = []
    for tensor in tensors:
        data_type = tensor.data_type.removeprefix("TYPE_")
        official = "✓" if tensor.is_official else ""
        rows.append(
            (f"`{tensor.name}`", data_type, f"`{list(tensor.dims)}`", official, tensor.content)
        )
    table = _table(f"{head} | type | shape | official | {last}", rows)
    # An empty cell has one space, not two.
    return re.sub(r"\|  \|", "| |", table)


# A comment that begins with "Patch NAME:", up to its end or to the next one.
_PATCH = r"# Patch ([a-z-]+): (.*(?:\n *# (?!Patch ).*)*)"


def _patches() -> str:
    """Return the table of the patches of something private: their names, modules and comments."""
    rows = []
    for folder in PATCHED:
        for module in sorted(folder.rglob("*.py")):
            for name, comment in re.findall(_PATCH, module.read_text("utf-8")):
                reason = " ".join(line.strip(" #") for line in comment.splitlines())
                rows.append((f"`{name}`", f"`{module.relative_to(folder)}`", reason))
    return _table("patch | in | why, since when, until when", rows)


def _behaviour() -> str:
    """Return the table of the parameters that set no limit."""
    rows = []
    meanings = _meanings(Settings)
    for field in fields(Settings):
        if field.name != "limits":
            # Settings describes a field as "PARAMETER. Its meaning.".
            name, _, text = meanings[field.name].partition(". ")
            rows.append((name, text, field.default))
    # Defaults for requests are fields of Limits, too.
    rows += [row for row in _limits() if row[0].startswith("DEFAULT_")]
    return _parameters(rows)


def _permissions() -> str:
    """Return the parameters that are lists of names."""
    return _parameters(row for row in _limits() if isinstance(row[2], tuple))


def _numbers() -> str:
    """Return the parameters that are limits."""
    return _parameters(row for row in _limits() if row[0].startswith("MAX_"))


def _limits() -> Iterator[tuple[str, str, Any]]:
    """Yield name, meaning and default of each field of Limits."""
    meanings = _meanings(Limits)
    for field in fields(Limits):
        yield field.name.upper(), meanings[field.name], field.default


def _parameters(rows: Iterable[tuple[str, str, Any]]) -> str:
    """Return a table of parameters, from their names, meanings and defaults."""
    cells = []
    for name, text, default in rows:
        meaning = f"{text[:1].upper()}{text[1:]}"
        # In a table, a single sentence has no full stop.
        if ". " not in meaning:
            meaning = meaning.removesuffix(".")
        value = _shown_default(default)
        cells.append((f"`{name}`", meaning, f"`{value}`" if value else ""))
    return _table("parameter | meaning | default", cells)


def _meanings(described: type) -> dict[str, str]:
    """Return what a class's docstring says of each attribute, in one line of Markdown."""
    _, _, section = (inspect.getdoc(described) or "").partition("Attributes:\n")
    found = re.findall(r"(?ms)^    (\w+): (.+?)(?=^    \w+: |\Z)", section)
    return {name: " ".join(text.split()).replace("``", "`") for name, text in found}


def _shown_default(value: Any) -> str:
    """Return a parameter's default as one writes it in config.pbtxt; "" if the table shows none."""
    # The default Dialect means that COMPATIBILITY is not set, for which there is no value to write.
    if value is None or isinstance(value, Dialect):
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:.12g}"


TABLES: dict[str, Callable[[], str]] = {
    "options": lambda: _options(packager.build_parser()),
    "subcommands": _of_subcommands,
    "client options": lambda: _options(client.build_parser()),
    "rules": _rules,
    "patches": _patches,
    "prompt inputs": lambda: _tensors(contract.PROMPT_INPUTS),
    "chat inputs": lambda: _tensors(contract.CHAT_INPUTS),
    "media inputs": lambda: _tensors(contract.MEDIA_INPUTS),
    "other inputs": lambda: _tensors(contract.OTHER_INPUTS),
    "flags": lambda: _tensors(contract.FLAG_INPUTS, last="adds"),
    "outputs": lambda: _tensors(contract.OUTPUTS, head="output"),
    "behaviour": _behaviour,
    "permissions": _permissions,
    "limits": _numbers,
}

if __name__ == "__main__":
    sys.exit(main())
