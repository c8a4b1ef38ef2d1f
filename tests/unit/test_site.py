"""tools/site_pages.py: the site is built without a warning, and shows the pages as GitHub does."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

import site_pages
from support.repositories import CHECKOUT

pytestmark = pytest.mark.long  # building the site takes seconds of a core
COUNTED = ("h1", "h2", "h3", "li", "tr", "pre", "blockquote")


class Page(HTMLParser):
    """What the tests compare: where a page's links and pictures lead, and how often it has an element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.elements: Counter[str] = Counter()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.elements[tag] += tag in COUNTED
        self.elements["callout"] += "admonition" in (found.get("class") or "").split()
        self.anchors.add(found.get("id") or "")
        self.targets += [target for name in ("href", "src", "srcset") if (target := found.get(name))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of this checkout."""
    work = tmp_path_factory.mktemp("site")
    assert site_pages.build(CHECKOUT, work) == 0
    return work / "site"


def article(text: str) -> str:
    """What a page of the site has from its Markdown."""
    return text[text.index("<article") : text.index("</article>")]


def test_every_page_can_be_reached(site: Path) -> None:
    """The strict build has checked the links that are Markdown; these are all, as a browser sees them."""
    pages = {path.relative_to(site): Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            # 404.html has addresses from the site's root
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            there = (site / path.parent / unquote(parts.path)).resolve() if parts.path else site / path
            there = there / "index.html" if there.is_dir() else there
            assert there.is_file(), (path, target)
            if parts.fragment and there.suffix == ".html":
                assert unquote(parts.fragment) in pages[there.relative_to(site.resolve())].anchors, (path, target)


def test_the_menu_has_every_page_of_docs() -> None:
    menu = (CHECKOUT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"^  - .+: (\S+)$", menu, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {path for path in listed if path.startswith("docs/")} == {f"docs/{page.name}" for page in CHECKOUT.glob("docs/*.md")}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in CHECKOUT.glob("docs/*.md"))])
def test_a_page_has_the_lists_tables_and_notes_that_github_shows(site: Path, page: str) -> None:
    """The two dialects of Markdown differ, for example if a list follows a line of text."""
    text = (CHECKOUT / page).read_text("utf-8")
    built = site / re.sub(r"README\.md$", "index.md", page)
    ours = Page(article(built.with_suffix(".html").read_text("utf-8"))).elements
    theirs = Page(MarkdownIt("commonmark").enable("table").render(text)).elements
    notes = len(re.findall(r"^> \[!(?:NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]$", text, re.MULTILINE))
    assert ours["callout"] == notes
    theirs["blockquote"] -= notes
    for tabs in re.findall(r"<!-- tabs -->(.*?)<!-- end of tabs -->", text, re.DOTALL):
        theirs["h3"] -= len(re.findall(r"^### ", tabs, re.MULTILINE))
    assert {name: ours[name] for name in COUNTED} == {name: theirs[name] for name in COUNTED}


def test_laptop_docker_and_kubernetes_are_tabs(site: Path) -> None:
    """Each has its commands; on GitHub they are three sections."""
    text = article((site / "docs" / "index.html").read_text("utf-8"))
    labels = re.findall(r'<label for="[^"]+">(\w+)</label>', text)
    assert labels == ["Laptop", "Docker", "Kubernetes"]
    assert text.count("tabbed-block") == 3
    assert "end of tabs" not in text
