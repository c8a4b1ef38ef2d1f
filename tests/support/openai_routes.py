"""Print the paths of vLLM's own OpenAI application and the types of their bodies as JSON: ``python openai_routes.py FOLDER``.

The environment's Python runs it. FOLDER has the model's ``triton_vllm``.
The application has all tasks, and the routes for developers.
"""

from __future__ import annotations

import json
import os
import sys
import types
import typing

POOLING = types.SimpleNamespace(get_pooling_task=lambda tasks: "embed", score_type="bi-encoder", is_cross_encoder=False)
"""What vLLM asks a model before it serves the paths for pooling."""


def main() -> None:
    """Make the application without an engine."""
    sys.path.insert(0, sys.argv[1])
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    from vllm.tasks import SupportedTask  # type: ignore[import-not-found, unused-ignore]

    from triton_vllm.vllm_api import openai  # type: ignore[import-not-found, unused-ignore]
    from triton_vllm.vllm_api.bodies import body_types  # type: ignore[import-not-found, unused-ignore]

    parser = openai._find("make_arg_parser")(openai._find("FlexibleArgumentParser")())
    build = openai._find("build_app")
    given = {"args": parser.parse_args([]), "supported_tasks": tuple(names(SupportedTask)), "model_config": POOLING}
    app = build(**openai._taken(build, given))
    bodies = body_types(app).items()
    found = {path: {"classes": [one.__name__ for one in body.classes], "fields": sorted(body.fields)} for path, body in bodies}
    print(json.dumps({"paths": sorted(set(paths(app.routes))), "bodies": found}))


def names(hint: typing.Any) -> list[str]:
    """Return the texts of nested literals."""
    found = typing.get_args(hint)
    return [name for one in found for name in (names(one) if typing.get_args(one) else [one])]


def paths(routes: typing.Any, above: str = "") -> typing.Iterator[str]:
    """Yield the paths of routes, and of those below them."""
    for route in routes:
        path = above + getattr(route, "path", "")
        yield path
        yield from paths(getattr(route, "routes", None) or (), path)


if __name__ == "__main__":
    main()
