"""The queries of deploy/monitoring."""

from __future__ import annotations

import json
import re

from support.repositories import CHECKOUT

FOLDER = CHECKOUT / "deploy/monitoring"
NAME = r"(?:vllm:|vllm_env_|nv_)\w+"
"""The pattern of a metric's name."""


def queries() -> list[str]:
    """Return the queries of the dashboard, for all models and the last minute."""
    dashboard = json.loads((FOLDER / "dashboard.json").read_text("utf-8"))
    texts = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [text.replace("$model", ".*").replace("$__rate_interval", "1m") for text in texts]


def used() -> set[tuple[str, str]]:
    """Return each metric of the dashboard and the rules with each label by which a query selects; "" for none."""
    text = "\n".join([*queries(), (FOLDER / "alerts.yaml").read_text("utf-8")])
    selections = re.findall(rf"({NAME})(?:\{{([^}}]*)\}})?", text)
    return {(name, label) for name, matchers in selections for label in ["", *re.findall(r"(\w+)=", matchers)]}
