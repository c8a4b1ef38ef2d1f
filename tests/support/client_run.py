"""Run client/client.py as a user does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

CLIENT = CHECKOUT / "client" / "client.py"
SCHEMA = json.loads((CLIENT.parent / "loadtest" / "report.schema.json").read_text("utf-8"))
PROMPTS = "Hello, my name is\nThe capital of France is\n"


def run(*arguments: object, cwd: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run the client in a folder and return what it printed."""
    argv = [python, str(CLIENT), *map(str, arguments)]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def matches(value: Any, schema: dict[str, Any]) -> None:
    """Check a value against a schema, as far as this project's schema goes."""
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": int | float,
        "boolean": bool,
        "null": type(None),
    }
    names = schema.get("type", list(kinds))
    assert any(isinstance(value, kinds[name]) for name in ([names] if isinstance(names, str) else names)), (value, schema)
    if isinstance(value, dict) and "properties" in schema:
        assert set(schema.get("required", ())) <= set(value)
        patterns = schema.get("patternProperties", {})
        for name, inner in value.items():
            found = [schema["properties"][name]] if name in schema["properties"] else []
            found += [each for pattern, each in patterns.items() if re.search(pattern, name)]
            assert found, f"{name} is not in the schema"
            for each in found:
                matches(inner, each)
