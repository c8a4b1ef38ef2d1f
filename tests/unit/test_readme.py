"""The README and the documentation agree with the program and with each other."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from support.pages import IN_CONTAINERS, PASTED_PAGES, TYPED, TYPED_PAGES, blocks_in
from support.reports import FIRST_MINUTE, LATER_FIRST_MINUTES, measured
from vllm_env import __version__
from vllm_env.cli.commands import COMMANDS
from vllm_env.cli.next_steps import next_commands
from vllm_env.lock.pylock import read_pylock
from vllm_env.prefix.prefix import BUILD_SPACE, EXTRACTED_SPACE
from vllm_env.prefix.prune import RULES
from vllm_env.serve.standin import FACTS
from vllm_env.sketch import BuildRequest
from vllm_env.triton.root import TritonRoot, rules_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
"""Each block of code of these is run by a test, or the page says why not."""
NEEDS_MORE = r"GPU|hub|machines|GB|MB|adapter|picture|embedding model|chat template|second server"
"""What a block needs, by its reason, that the machine of the tests has not."""


def test_the_pinned_versions_of_the_readme_are_those_of_the_spec():
    """The profile that the README shows as an example is the one that the spec pins."""
    readme = (ROOT / "README.md").read_text("utf-8")
    spec = (ROOT / "env" / "vllm_env.toml").read_text("utf-8")
    shown = re.search(r"built, vLLM (\S+) for Triton", readme)
    assert shown
    assert f'vllm = "{shown[1]}"' in spec
    (another,) = re.findall(r"--vllm (\S+)`", readme)
    assert another != shown[1]


def test_the_rules_table_is_that_of_the_program():
    """Every rule by which something is left out is in docs/command_line.md with its profiles and its reason, and no other."""
    table = (ROOT / "docs/command_line.md").read_text("utf-8").split("<!-- rules")[1].split("<!-- end of rules")[0]
    documented = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+) \|$", table, re.MULTILINE)
    assert documented == [(rule.name, ", ".join(rule.profiles), rule.reason) for rule in RULES]


def test_every_subcommand_is_named():
    """docs/command_line.md names each subcommand."""
    page = (ROOT / "docs/command_line.md").read_text("utf-8")
    section = page.split("\n## Subcommands\n")[1].split("\n## ")[0]
    assert all(re.search(rf"^\| `{name}[ `]", section, re.MULTILINE) for name in COMMANDS), COMMANDS


def test_what_a_page_leads_to_is_there():
    """Links with their headings, and files of this repository that are named in backquotes."""
    pages = [*(ROOT / page for page in PAGES), ROOT / "benchmarks/results/README.md"]
    assert [f"{page.name}: {target}" for page in pages for target in dead_links(page)] == []


def dead_links(page: Path) -> list[str]:
    """Return the links of a page whose file or heading is missing, and the files that it names and that are not there."""
    text = page.read_text("utf-8")
    dead = [target for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text) if not is_there(page, target)]
    dead += [
        name
        for name in re.findall(r"`((?:docs|tests|tools|env|client|benchmarks)/[\w./-]*\w)`", text)
        if not (ROOT / name).exists()
    ]
    for name in re.findall(r"`(\w+\.(?:md|svg))`", text):
        if not (ROOT / "benchmarks/results" / name).is_file() and not (ROOT / name).is_file():
            dead.append(name)
    return dead


def is_there(page: Path, target: str) -> bool:
    """Return whether a link leads to a file, and to a heading of it."""
    name, _, heading = target.partition("#")
    file = page.parent / name if name else page
    if not file.is_file():
        return False
    headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
    return not heading or heading in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}


def test_nothing_that_a_build_leaves_is_for_git():
    """Each file and folder of the table in docs/command_line.md; an ignored file is not added by accident."""
    section = (ROOT / "docs/command_line.md").read_text("utf-8").split("\n## What a build leaves\n")[1].split("\n## ")[0]
    names = re.findall(r"^\| `([\w.]+/?)` \|", section, re.MULTILINE)
    assert len(names) > 5
    for name in [*names, "vllm_env/", "vllm_engine_args.json"]:
        assert is_ignored(f"vllm/{name}"), name


def test_a_model_of_the_users_is_not_for_git():
    """``adopt`` and ``--model`` make one next to this project's own, whose files are."""
    assert is_ignored("opt/1/model.json")
    assert not is_ignored("vllm/a_new_file")


def is_ignored(path: str) -> bool:
    """Return whether git ignores a path below model_repository."""
    argv = ["git", "check-ignore", "--quiet", "--no-index", f"model_repository/{path}"]
    return subprocess.run(argv, cwd=ROOT, check=False).returncode == 0


def test_the_readme_names_the_test_command_that_ci_runs():
    """Next to the build, with what it needs; the command is there, and can be run."""
    (command,) = re.findall(r"^exec (\S+)$", (ROOT / ".ci/run").read_text("utf-8"), re.MULTILINE)
    readme = (ROOT / "README.md").read_text("utf-8")
    (paragraph,) = [part for part in readme.split("```") if f"`{command}`" in part]
    for needed in ("`./gen_vllm_env.sh`", "Python 3.10 or newer", "a C compiler", "registries"):
        assert needed in paragraph
    assert os.access(ROOT / command, os.X_OK)


def test_the_readme_is_short():
    """What does not fit is for a page of docs. The bars of tables and the tags of pictures do not count as words."""
    readme = (ROOT / "README.md").read_text("utf-8")
    assert len(readme.splitlines()) <= 130
    assert len([word for word in re.sub(r"<[^>]+>", "", readme).split() if re.search(r"\w", word)]) <= 600


def pages_of(*sections: str) -> list[str]:
    """Return the pages of these sections of the site's menu."""
    menu = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    parts = re.split(r"^- (\w+):\n", menu, flags=re.MULTILINE)[1:]
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    return [page for section in sections for page in re.findall(r": (docs/\w+\.md)$", found[section], re.MULTILINE)]


@pytest.mark.parametrize("page", pages_of("Start", "Guides"))
def test_a_page_shows_before_it_explains(page: str):
    """A block with what it prints among the first ten lines; and code is a fifth of the words."""
    text = (ROOT / page).read_text("utf-8")
    blocks = blocks_in(ROOT / page)
    assert "\n```" in "\n".join(text.splitlines()[:10])
    assert re.search(r"(^|  )# ", blocks[0].text, re.MULTILINE)
    assert sum(len(block.text.split()) for block in blocks) >= 0.2 * len(text.split())


def test_the_pages_are_short():
    """All words of the users' and the developers' pages, without the tables that tools/reference.py writes."""
    written = r"(?s)<!-- ([\w ]+): tools/reference\.py .*?<!-- end of \1 -->"
    texts = [(ROOT / page).read_text("utf-8") for page in (*PAGES, "CHANGELOG.md")]
    assert sum(len(re.sub(written, "", text).split()) for text in texts) <= 17_000


def test_a_tag_is_the_version_that_the_changelog_begins_with():
    """The wheel has the version of the code. A commit may have no tag, and a copy no repository."""
    (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest == __version__
    tags = subprocess.run(["git", "-C", ROOT, "tag", "--points-at"], capture_output=True, text=True, check=False)
    assert set(re.findall(r"^v(\d.*)$", tags.stdout, re.MULTILINE)) <= {newest}


def test_each_page_is_in_the_index():
    """docs/README.md leads to all the others."""
    index = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs/README.md").read_text("utf-8")))
    assert index == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_run_or_says_why_not(page):
    """A command that no test runs has to get one, or a reason."""
    blocks = [block for block in blocks_in(ROOT / page) if not block.reason]
    assert {block.language for block in blocks} <= {"sh"}
    assert [command for block in blocks for command in block.commands if not (page in TYPED_PAGES and is_run(command))] == []


def test_most_of_what_is_typed_is_pasted_by_a_test():
    """All but what needs a GPU, a hub, a cluster, a container or long downloads; and the list of pages is the right one."""
    blocks = [(page, block) for page in PAGES for block in blocks_in(ROOT / page) if block.language == "sh"]
    possible = [block for _, block in blocks if not re.search(NEEDS_MORE, block.reason)]
    done = [block for block in possible if block.pasted or not block.reason]
    assert len(done) >= 0.8 * len(possible), [block.text for block in possible if block not in done]
    assert {page for page, block in blocks if block.pasted} == set(PASTED_PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_what_is_typed_can_be_pasted(page):
    """A shell takes a placeholder in angle brackets for a file. So a variable with a value stands for what the reader chooses."""
    text = (ROOT / page).read_text("utf-8")
    typed = [block.text for block in blocks_in(ROOT / page) if block.language in {"sh", "bash", "console"}]
    typed += re.findall(r"`((?:\./|python3 |docker |git |curl |tritonserver )[^`\n]+)`", text)
    assert [line for part in typed for line in part.splitlines() if re.search(r"<[A-Za-z][^>\n]*>", line)] == []


def is_run(command: str) -> bool:
    """Return whether a test runs a command; `support.pages.requests_in` takes each of its `curl` lines."""
    return command.startswith("curl ") or command in TYPED or any(re.search(line, command) for line in IN_CONTAINERS)


def test_what_is_run_is_in_the_pages():
    """Each command that a test is said to type is there, and so is the test."""
    commands = [command for page in TYPED_PAGES for block in blocks_in(ROOT / page) for command in block.commands]
    assert set(TYPED) <= set(commands)
    assert all((ROOT / "tests/e2e" / test).is_file() for test in TYPED.values())
    assert all(any(re.search(line, command) for command in commands) for line in IN_CONTAINERS)


def test_the_pages_type_what_a_build_names_next(monkeypatch):
    """The commands after "Next:", which test_published.py runs."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("vllm_env.cli.next_steps.TOOLS", ROOT / ".tools/venv/bin")
    built: Any = SimpleNamespace(triton=TritonRoot(ROOT / ".triton", "24.10", rules_of("24.10")))
    request = BuildRequest(repository=ROOT / "model_repository")
    assert {shlex.join(command) for command in next_commands(built, request)} <= set(TYPED)


def test_the_readme_shows_real_answers():
    """Those that the stand-in was taught, which the end-to-end tests receive."""
    readme = (ROOT / "README.md").read_text("utf-8")
    assert re.findall(r"^# ('.+' -> '.+')$", readme, re.MULTILINE) == [f"{prompt!r} -> {answer!r}" for prompt, answer in FACTS]
    assert re.findall(r'"text_output":"(.+)"', readme) == ["".join(FACTS[2])]


def test_the_price_is_that_of_locks_and_reports():
    """Bytes by the locks, space as the build asks for it, and builds and starts of the reports."""
    table = (ROOT / "docs/why.md").read_text("utf-8").split("<!-- price")[1].split("<!-- end of price")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    cost = {name: [cpu, cuda] for name, cpu, cuda in rows}
    profiles = ("cpu", "cuda")
    locks = [read_pylock(ROOT / f"env/pylock.vllm_env-{profile}.toml") for profile in profiles]
    assert cost["wheels to download"] == [f"{sum(wheel.size for wheel in lock.wheels) / 1e6:,.0f} MB" for lock in locks]
    for row, space in (("free disk for the build", BUILD_SPACE), ("free disk to unpack, on each machine", EXTRACTED_SPACE)):
        assert cost[row] == [f"{space[profile] / 1e9:g} GB" for profile in profiles]
    seconds: dict[str, list[float]] = {}
    speed = (ROOT / "benchmarks/results/README.md").read_text("utf-8")
    for report in (FIRST_MINUTE, *LATER_FIRST_MINUTES):
        assert f"`{report}`" in speed
        for one in measured(report):
            if one["commit"] != "1f45eb2":
                seconds.setdefault(one["step"], []).append(one["seconds"])
    ends = {step: [f"{end(values):.0f}" for end in (min, max)] for step, values in seconds.items()}
    shown = {step: f"{' to '.join(dict.fromkeys(both))} s" for step, both in ends.items()}
    builds = {"build, empty cache": "empty", "build, wheels in the cache": "wheels"}
    for row, step in (builds | {"first start": "first", "later starts": "later"}).items():
        assert cost[row][0] == shown[step]


def test_messages_that_are_explained_exist():
    """The pieces of each message in docs/troubleshooting.md are in the sources; Triton's own are in tests."""
    sources = "\n".join(read_sources())
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    cells = re.findall(r"^\| (.+?) \| ", page, re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r"`(.+?)`", cell)]
    assert len(messages) > 10
    assert [message for message in messages if any(piece not in sources for piece in message.split("…"))] == []


def read_sources() -> Iterator[str]:
    """Yield the product's sources and one test's, with strings that go over several lines joined."""
    folders = ("env/vllm_env", "model_repository/vllm/1", "client")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    for file in (*files, ROOT / "gen_vllm_env.sh", ROOT / "tests/e2e/test_model_chat.py"):
        yield re.sub(r'"\s*\n\s*f?"', "", file.read_text("utf-8"))
