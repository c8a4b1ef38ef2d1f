"""The cost of a build in bytes to fetch and in disk space, for ``--dry-run``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_env.base.report import Console
from vllm_env.base.workspace import Workspace
from vllm_env.plan import TMP, UNKNOWN, BuildRequest, Plan, standing
from vllm_env.prefix.prefix import BUILD_SPACE, has_prefix


@dataclass(frozen=True)
class Forecast:
    """The cost of a build.

    Attributes:
        fetch: bytes to fetch; None if the lock is not known yet.
        unsized: number of wheels without a size in the lock.
        space: bytes needed, by folder.
    """

    fetch: int | None
    unsized: int
    space: dict[str, int]


def forecast(workspace: Workspace, request: BuildRequest, plan: Plan) -> Forecast:
    """Return the cost of a build; files that the cache or the repository already has cost nothing."""
    spec, lock = plan.spec, plan.lock
    served = request.smoke or request.warm
    extracted = request.layout.extracted_space(spec.profile)
    space = {TMP: extracted} if served and extracted else {}
    if standing(request.model_folder, plan.key) or (
        lock and has_prefix(workspace, lock, request.keep)
    ):
        return Forecast(0, 0, space)
    space = {str(workspace.cache.root): BUILD_SPACE[spec.profile], **space}
    if copied := request.layout.copied_space(spec.profile):
        space[str(request.repository)] = copied
    if lock is None:
        return Forecast(None, 0, space)
    unsized = sum(not wheel.size for wheel in lock.wheels)
    return Forecast(lock.download_size, unsized, space)


def print_forecast(facts: Mapping[str, object], cost: Forecast, *, as_json: bool) -> None:
    """Print the plan of a build and its cost, as JSON or as text."""
    if as_json:
        bytes_of = {
            "bytes_to_fetch": cost.fetch,
            "wheels_of_unknown_size": cost.unsized,
            "bytes_needed": cost.space,
        }
        Console.result(json.dumps({**facts, **bytes_of}, indent=2))
        return
    fetch = UNKNOWN
    if cost.fetch is not None:
        more = f", and {cost.unsized} wheels of unknown size" if cost.unsized else ""
        fetch = f"{cost.fetch / 1e6:.0f} MB of wheels{more}"
    space = (
        ", ".join(f"{size / 1e9:.1f} GB in {place}" for place, size in cost.space.items())
        or "nothing more"
    )
    for name, value in (*facts.items(), ("fetch", fetch), ("space", space)):
        Console.result(f"{name:<14} {value}")
