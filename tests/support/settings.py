"""Changes to a copied model's files before it is served."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vllm_env.serve.server import free_ports

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.serve.server import TritonServer


def with_parameter(model: Path, name: str, value: str) -> None:
    """Set a parameter in a model's config.pbtxt, in place of the one that is there."""
    config = model / "config.pbtxt"
    text = config.read_text(encoding="utf-8")
    without = re.sub(rf'parameters\s*{{\s*key: "{name}".*?}}\s*}}\s*', "", text, flags=re.DOTALL)
    entry = f'parameters {{\n  key: "{name}"\n  value: {{ string_value: "{value}" }}\n}}\n'
    config.write_text(f"{without}\n{entry}", encoding="utf-8")


def with_metrics(model: Path) -> None:
    """Turn REPORT_CUSTOM_METRICS on."""
    with_parameter(model, "REPORT_CUSTOM_METRICS", "yes")


def with_openai(model: Path) -> None:
    """Serve vLLM's OpenAI API, too, on a free port, which ``openai_url`` finds."""
    with_parameter(model, "OPENAI_PORT", str(free_ports().http))


def openai_url(server: TritonServer, model: str = "vllm") -> str:
    """Return ``http://127.0.0.1:PORT`` of that API."""
    text = (server.repository / model / "config.pbtxt").read_text(encoding="utf-8")
    found = re.search(r'"OPENAI_PORT"\s*value: { string_value: "(\d+)" }', text)
    assert found
    return f"http://127.0.0.1:{found[1]}"


def with_line(model: Path, line: str, *, after: str) -> None:
    """Put a line into a model's model.py, after the one line that is ``after``."""
    entry = model / "1" / "model.py"
    text = entry.read_text(encoding="utf-8")
    assert text.count(f"{after}\n") == 1
    entry.write_text(text.replace(f"{after}\n", f"{after}\n{line}\n"), encoding="utf-8")
