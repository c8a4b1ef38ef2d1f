"""What a build would cost in bytes to fetch, space and time, for ``--dry-run``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_env.base.report import Console
from vllm_env.base.workspace import Workspace
from vllm_env.plan import TMP, UNKNOWN, BuildRequest, Plan, standing
from vllm_env.prefix.prefix import BUILD_SPACE, has_prefix

BYTES_A_SECOND = 25_000_000
"""A registry's speed that a forecast reckons with."""
# Seconds on two cores, as measured with vLLM 0.32 (benchmarks/results); packing includes the verification.
_PREFIX_SECONDS, _PACK_SECONDS = {"cpu": 30, "cuda": 75}, {"cpu": 40, "cuda": 95}
_STUB_SECONDS, _SERVE_SECONDS = 120, 60


@dataclass(frozen=True)
class Forecast:
    """What a build would cost; bytes and seconds are None where the lock is not known yet.

    ``space`` has the bytes that each folder must take. ``unsized`` counts the wheels whose size the lock does not have.
    """

    fetch: int | None
    unsized: int
    space: dict[str, int]
    seconds: int | None


def forecast(workspace: Workspace, request: BuildRequest, plan: Plan) -> Forecast:
    """Return what a build would cost, from what the cache and the repository have already."""
    spec, lock = plan.spec, plan.lock
    served = request.smoke or request.warm
    extracted = request.layout.extracted_space(spec.profile)
    space = {TMP: extracted} if served and extracted else {}
    serving = (_SERVE_SECONDS if request.smoke else 0) + (_SERVE_SECONDS if request.warm else 0)
    stands = standing(request.model_folder, plan.key)
    if stands or (lock and has_prefix(workspace, lock, request.keep)):
        rest = 0 if stands else _PACK_SECONDS[spec.profile]
        return Forecast(0, 0, space, serving + rest)
    space = {str(workspace.cache.root): BUILD_SPACE[spec.profile], **space}
    if copied := request.layout.copied_space(spec.profile):
        space[str(request.repository)] = copied
    if lock is None:
        return Forecast(None, 0, space, None)
    stub = 0 if plan.stub.prebuilt else _STUB_SECONDS
    building = _PREFIX_SECONDS[spec.profile] + _PACK_SECONDS[spec.profile] + stub
    unsized = sum(1 for wheel in lock.wheels if not wheel.size)
    return Forecast(lock.download_size, unsized, space, lock.download_size // BYTES_A_SECOND + building + serving)


def print_forecast(facts: Mapping[str, object], cost: Forecast, *, as_json: bool) -> None:
    """Print what a build would do and what it would cost, as JSON or for a reader."""
    if as_json:
        bytes_of = {"bytes_to_fetch": cost.fetch, "wheels_of_unknown_size": cost.unsized, "bytes_needed": cost.space}
        Console.result(json.dumps({**facts, **bytes_of, "seconds": cost.seconds}, indent=2))
        return
    fetch = time = UNKNOWN
    if cost.fetch is not None and cost.seconds is not None:
        more = f", and {cost.unsized} wheels of unknown size" if cost.unsized else ""
        fetch = f"{cost.fetch / 1e6:.0f} MB of wheels{more}"
        time = f"about {max(1, round(cost.seconds / 60))} min on two cores at {BYTES_A_SECOND / 1e6:.0f} MB/s"
    space = ", ".join(f"{size / 1e9:.1f} GB in {place}" for place, size in cost.space.items()) or "nothing more"
    for name, value in (*facts.items(), ("fetch", fetch), ("space", space), ("time", time)):
        Console.result(f"{name:<14} {value}")
