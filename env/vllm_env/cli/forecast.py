"""The cost of a build in bytes to fetch and in disk space, for ``--dry-run``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_env.base.report import Console
from vllm_env.base.workspace import Workspace
from vllm_env.plan import UNKNOWN, Preview, published_with
from vllm_env.prefix.prefix import BUILD_SPACE, build_space, has_prefix
from vllm_env.sketch import TMP


@dataclass(frozen=True)
class Forecast:
    """The cost of a build.

    Attributes:
        fetch: bytes to fetch; None if the lock is not known yet.
        space: bytes needed, by folder.
        unsized: number of wheels without a size in the lock.
    """

    fetch: int | None
    space: dict[str, int]
    unsized: int = 0


def forecast(workspace: Workspace, known: Preview) -> Forecast:
    """Return the cost of a build; what the cache or the repository already has costs nothing."""
    request = known.sketch.request
    profile = known.sketch.spec.profile
    lock = known.lock
    is_served = request.smoke or request.warm
    space = {}
    extracted = request.layout.extracted_space(profile)
    # The server of this build extracts the environment, even if the model is up to date.
    if is_served and extracted:
        space[TMP] = extracted
    is_published = published_with(request.model_folder, known.key)
    if is_published or (lock and has_prefix(workspace, lock, request.keep)):
        return Forecast(fetch=0, space=space)
    needed = build_space(lock) if lock else BUILD_SPACE[profile]
    space = {str(workspace.cache.root): needed, **space}
    if copied := request.layout.copied_space(profile):
        space[str(request.repository)] = copied
    # The requirements of a vLLM that has no wheel yet are known only after it is built.
    if lock is None:
        return Forecast(fetch=None, space=space)
    # Not every index tells the size of a wheel.
    unsized = sum(not wheel.size for wheel in lock.wheels)
    return Forecast(fetch=lock.download_size, space=space, unsized=unsized)


def print_forecast(facts: Mapping[str, object], cost: Forecast, *, as_json: bool) -> None:
    """Print the plan of a build and its cost, as JSON or as text."""
    if as_json:
        document = {
            **facts,
            "bytes_to_fetch": cost.fetch,
            "wheels_of_unknown_size": cost.unsized,
            "bytes_needed": cost.space,
        }
        Console.result(json.dumps(document, indent=2))
        return
    fetch = UNKNOWN
    if cost.fetch is not None:
        more = f", and {cost.unsized} wheels of unknown size" if cost.unsized else ""
        fetch = f"{cost.fetch / 1e6:.0f} MB of wheels{more}"
    places = [f"{size / 1e9:.1f} GB in {place}" for place, size in cost.space.items()]
    space = ", ".join(places) or "nothing more"
    for name, value in {**facts, "fetch": fetch, "space": space}.items():
        Console.result(f"{name:<14} {value}")
