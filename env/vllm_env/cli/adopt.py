"""``adopt``: make a model of this project from a model folder of the official backend."""

import argparse
import dataclasses
import json
import os
from pathlib import Path

from vllm_env.base.errors import UsageError
from vllm_env.base.report import Console
from vllm_env.base.workspace import TEMPLATE
from vllm_env.build import build
from vllm_env.model.manifest import MANIFEST_NAME
from vllm_env.publish.adopt import Adoption, read_adoption, stage_template
from vllm_env.publish.publish import check_writable

from .answers import answer_facts, answer_lines
from .mistakes import check_model_name
from .next_steps import next_lines
from .options import open_workspace, request_of


def adopt(options: argparse.Namespace, console: Console) -> int:
    """Build a model from ``SOURCE``; with ``--dry-run``, only show the changes."""
    if options.count:
        raise UsageError(
            "--count: an adopted model keeps its instances.",
            remedy="Omit it. Once the model is adopted, a build of it takes the option.",
        )
    # Not Path.resolve(): it raises an error for a loop of links, which is reported later.
    source = Path(os.path.realpath(options.folder))
    options.model = options.model or source.name
    check_model_name(options.model)
    request = request_of(options)
    adoption = read_adoption(
        source=source,
        target=request.model_folder,
        template=TEMPLATE,
        environment=request.layout.environment,
    )
    check_writable(request.repository, request.model)
    # The difference is the result of a dry run, so --quiet does not hide it.
    show = console.error if options.dry_run else console.note
    for line in _describe_changes(adoption, request.model_folder):
        show(line)
    facts: dict[str, object] = {
        "source": str(source),
        "model": str(request.model_folder),
        "difference": adoption.difference,
        "left": [str(path) for path in adoption.left],
        "changed": not options.dry_run,
    }
    lines: list[str] = []
    if not options.dry_run:
        workspace = open_workspace(options)
        # The build publishes a template. Here it is the adopted model, which exists nowhere yet.
        with workspace.cache.staging() as staging:
            template = stage_template(adoption, TEMPLATE, staging / request.model)
            request = dataclasses.replace(request, adoption=adoption, template=template)
            result = build(workspace, request)
        facts |= answer_facts(result)
        lines += answer_lines(result)
        lines.append(
            f"{request.model_folder}: adopted from {source}, "
            "which is unchanged and keeps the weights"
        )
        lines += next_lines(result, request)
    if options.json:
        lines = [json.dumps(facts, indent=2)]
    for line in lines:
        console.result(line)
    return 0


def _describe_changes(adoption: Adoption, target: Path) -> list[str]:
    """Return the lines that the user sees before the build."""
    lines = adoption.difference.splitlines()
    # The weights stay in SOURCE, where the new model finds them.
    lines += [f"stays where it is: {path}" for path in adoption.left]
    if (target / MANIFEST_NAME).is_file():
        lines.append(
            f"{target} was adopted before: "
            "its environment and code are replaced, its other files stay"
        )
    return lines
