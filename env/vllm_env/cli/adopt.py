"""``adopt``: shows what will change in a model's folder of the official backend, and changes it; or back."""

import argparse
import dataclasses
import json
import os
from pathlib import Path

from vllm_env.base.errors import UsageError
from vllm_env.base.report import Console
from vllm_env.build import BuildResult, build
from vllm_env.plan import TEMPLATE
from vllm_env.publish.adopt import BACKUP_NAME, read_adoption, undo, undo_difference

from .options import layout_of, open_workspace, request_of


def adopt(options: argparse.Namespace, console: Console) -> int:
    """Take over a model's folder in place, or give it back with ``--undo``; ``--dry-run`` shows the changes only."""
    if options.model_repository or options.model:
        raise UsageError("adopt takes no --model-repository and no --model.", remedy="Name the model's folder as PATH.")
    folder = Path(os.path.realpath(options.folder))  # Path.resolve() raises at a loop of links
    if options.undo:
        difference = undo_difference(folder, TEMPLATE)
    else:
        adoption = read_adoption(folder, TEMPLATE, layout_of(options).environment)
        difference = adoption.diff
    for line in difference.splitlines() or [f"nothing in {folder} will change but the environment"]:
        console.error(line) if options.dry_run else console.note(line)
    facts: dict[str, object] = {"model": str(folder), "difference": difference, "changed": not options.dry_run}
    lines: list[str] = []
    if options.undo and not options.dry_run:
        undo(open_workspace(options), folder)
        lines.append(f"{folder}: as it was before it was adopted")
    elif not options.dry_run:
        options.model_repository, options.model = folder.parent, folder.name
        result = build(open_workspace(options), dataclasses.replace(request_of(options), adoption=adoption))
        answers = result.smoke.answers if isinstance(result, BuildResult) and result.smoke else ()
        facts["smoke_run"] = [{"prompt": prompt, "answer": answer} for prompt, answer in answers]
        lines += [f"{prompt!r} -> {answer!r}" for prompt, answer in answers]
        lines.append(f"{folder}: adopted; {BACKUP_NAME}/ in it holds what it was, which adopt --undo puts back")
    for line in [json.dumps(facts, indent=2)] if options.json else lines:
        console.result(line)
    return 0
