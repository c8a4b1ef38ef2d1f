#!/usr/bin/env python3
"""Record the quick start of the README: build a model, serve it, ask it. Draw that as an SVG.

    python3 tools/recording.py           # writes docs/pictures/recording-light.svg and -dark.svg
    python3 tools/recording.py --check   # runs it again, and demands the same lines

The lines appear as they came, faster. Times, sizes and what the cache had may differ in a check.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from html import escape, unescape
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "env"))

from vllm_env.serve.server import TritonServer  # noqa: E402 - found by the line above

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PICTURES = ROOT / "docs/pictures"
SECONDS = 10.0
"""How long the picture moves."""
_NOTE = re.compile(r"packed |another build is running|\S+: no model hub answers")
_TEXT = re.compile(r"<text [^>]*>(.*?)</text>")
# Background, text, and the colour of what is typed.
COLOURS = {"light": ("#f6f8fa", "#1f2328", "#0072B2"), "dark": ("#151b23", "#f0f6fc", "#56B4E9")}
_SIZE, _LINE, _MARGIN, _WIDTH = 13, 18, 14, 760


def lines_of(command: Sequence[str | Path]) -> Iterator[str]:
    """Run a command in the checkout, and yield its lines as they come.

    Raises:
        subprocess.CalledProcessError: it fails.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    with subprocess.Popen(command, **options) as child:  # type: ignore[call-overload]
        for line in child.stdout:
            yield line.rstrip()
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)


def record() -> list[tuple[float, str]]:
    """Build a model, serve it and ask it; return what to show of the terminal.

    Returns:
        lines, each with the seconds since the start. Those with a "$" are what the user types.
    """
    shown: list[tuple[float, str]] = []
    began = time.monotonic()

    def show(line: str) -> None:
        shown.append((time.monotonic() - began, line))

    with tempfile.TemporaryDirectory(prefix="vllm_env_recording_") as folder:
        repository = Path(folder) / "model_repository"
        show("$ ./gen_vllm_env.sh")
        build: list[str | Path] = [ROOT / "gen_vllm_env.sh", "--profile", "cpu"]
        for line in lines_of([*build, "--model-repository", repository]):
            # The build ends with the commands to type next. They are typed below.
            if line == "Next:":
                break
            # A stage says its name when it begins, and again with its figures. Notes are long, and
            # depend on the machine.
            if not line.endswith(" …") and not _NOTE.match(line):
                show(line.replace(str(repository), "model_repository"))
        show("$ .triton/bin/tritonserver --model-store=model_repository")
        binary = ROOT / ".triton/bin/tritonserver"
        with TritonServer(binary, repository, log=Path(folder) / "log") as server:
            # Triton's table of its models: the head, and the row of the model vllm.
            table = re.findall(r"^\| (?:Model|vllm) .*\|$", server.log.read_text(), re.MULTILINE)
            for line in table:
                # Without the padding of the columns, which is wider than the picture.
                show(re.sub(" +", " ", line))
            show("$ python3 client/client.py --iterations 10")
            client: list[str | Path] = [sys.executable, ROOT / "client/client.py"]
            for line in lines_of([*client, "--iterations", "10", "-u", server.grpc_url]):
                if line.startswith(("Requests:", "PASS")):
                    show(line)
    return shown


def draw(shown: Sequence[tuple[float, str]], name: str) -> str:
    """Return an SVG in which the lines appear one after the other.

    Args:
        shown: the lines of ``record``, with their seconds.
        name: the picture's colours, a key of ``COLOURS``.
    """
    background, text, typed = COLOURS[name]
    height = 2 * _MARGIN + _LINE * len(shown)
    whole_s = shown[-1][0]
    rows = []
    for number, (when, line) in enumerate(shown):
        position = f'x="{_MARGIN}" y="{_MARGIN + _LINE * number + _SIZE}"'
        colour = typed if line.startswith("$ ") else text
        # A run takes minutes, and the picture moves for ``SECONDS``.
        delay = f"animation-delay:{SECONDS * when / whole_s:.1f}s"
        rows.append(
            f'<text {position} fill="{colour}" style="{delay}" xml:space="preserve">'
            f"{escape(line, quote=False)}</text>"
        )
    # Without animations, or if the reader wants none, all lines are there at once.
    style = (
        f"text{{font:{_SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}}"
        "@media (prefers-reduced-motion:no-preference){text{animation:appear .1s backwards}}"
        "@keyframes appear{from{opacity:.25}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
        f"<title>A build, a server and a client in a terminal</title><style>{style}</style>"
        f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="{background}"/>\n'
        + "\n".join(rows)
        + "\n</svg>\n"
    )


def lines_in(picture: str) -> list[str]:
    """Return a picture's lines."""
    return [unescape(line) for line in _TEXT.findall(picture)]


def comparable(lines: Sequence[str]) -> list[str]:
    """Return lines, sorted, without what differs between two runs of the same code."""
    # The line "Requests: …" ends with the time, as in "in 0.13 s".
    lines = [re.sub(r"in \d+\.\d+ s$", "", line) for line in lines]
    # "smoke run    17.2 s  ready after 16 s": only the stage's name stays.
    lines = [re.sub(r"^(\w+(?: \w+)?) +\d+\.\d s  .*", r"\1", line) for line in lines]
    # Sorted, because two stages run at the same time, and either may end first.
    return sorted(lines)


def main() -> int:
    """Record a run, and draw it or compare it; return 1 if the lines differ from a picture's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if lines differ")
    check = parser.parse_args().check
    shown = record()
    for name in COLOURS:
        file = PICTURES / f"recording-{name}.svg"
        if not check:
            file.write_text(draw(shown, name), encoding="utf-8")
            continue
        before = comparable(lines_in(file.read_text(encoding="utf-8")))
        now = comparable([line for _, line in shown])
        if before != now:
            print(f"{file}: other lines; run tools/recording.py", *now, sep="\n", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
