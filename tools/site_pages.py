#!/usr/bin/env python3
"""Build the site of the documentation from the pages of the repository.

The pages link to files next to ``docs``. zensical reads one folder and follows no links to folders.
In a checkout with built environments it did not end within ten minutes. So it gets copies of the
pages, in their places. The site is in ``.tools/site``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / ".tools" / "site"
PAGES = ("*.md", "LICENSE", "docs/*.md", "docs/pictures/*", "benchmarks/results/*.md")
# Of the many results, a search finds only those that other pages have.
UNSEARCHED = "benchmarks/results/.meta.yml"


def main() -> int:
    """Build the site; return zensical's exit code, which is not 0 after a warning."""
    with tempfile.TemporaryDirectory() as work:
        code = build(ROOT, Path(work))
        if code == 0:
            shutil.rmtree(SITE, ignore_errors=True)
            shutil.copytree(Path(work, "site"), SITE)
            print(f"{SITE / 'index.html'}: built")
    return code


def build(checkout: Path, work: Path) -> int:
    """Build a checkout's site in the folder ``work/site``; return zensical's exit code.

    Args:
        checkout: has the pages and ``mkdocs.yml``.
        work: an empty folder. The copies of the pages are in ``work/pages``.
    """
    for pattern in PAGES:
        for page in checkout.glob(pattern):
            copy = work / "pages" / page.relative_to(checkout)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, copy)
            if page.suffix == ".md":
                copy.write_text(with_tabs(page.read_text("utf-8")), "utf-8")
    Path(work, "pages", UNSEARCHED).write_text("search: {exclude: true}\n", "utf-8")
    shutil.copyfile(checkout / "mkdocs.yml", work / "mkdocs.yml")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    # Without NO_COLOR, zensical colours each letter of a warning.
    return subprocess.run(
        command, cwd=work, env={**os.environ, "NO_COLOR": "1"}, check=False
    ).returncode


def with_tabs(text: str) -> str:
    """Make tabs of the headings between the marks of a page; on GitHub they stay headings."""
    return re.sub(r"<!-- tabs -->\n(.*?)<!-- end of tabs -->\n", _tabs, text, flags=re.DOTALL)


def _tabs(found: re.Match[str]) -> str:
    lines = [f"    {line}" if line.strip() else "" for line in found[1].splitlines()]
    return "\n".join(re.sub(r"^    ### (.*)", r'=== "\1"', line) for line in lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
