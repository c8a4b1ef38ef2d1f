"""A Triton that is not on this machine: only its release is known (``--triton-release``).

From 24.11 on, the stub of Triton's container is for Python 3.12. A model with this Python needs no
stub of its own: the server uses the one that it has, which is of the right release.
"""

import re
from dataclasses import dataclass

from vllm_env.base.errors import UsageError

from .root import CONTAINER_ROOT, NEWEST_KNOWN, RELEASES, TritonRoot, rules_of

SERVER_PYTHON = "3.12"
SINCE_RELEASE = next(rules.since for rules in RELEASES if rules.python == SERVER_PYTHON)
"""The first release whose container has a stub for this Python."""
SERVER_ORIGIN = "server"
"""The origin of a stub that the model does not have: the server's own is used."""


@dataclass(frozen=True)
class ServerRecord:
    """The releases of Triton that serve a model with their own stub.

    Attributes:
        since: the first release with the rules of the environment.
        before: the first release with other rules; "" if there is none.
        known: the newest release that is in the table of rules.
    """

    since: str
    before: str
    known: str = NEWEST_KNOWN


def image_of(release: str) -> str:
    """Return the name of a release's container image."""
    return f"nvcr.io/nvidia/tritonserver:{release}-py3"


def triton_elsewhere(release: str) -> TritonRoot:
    """Return the Triton of a release that is not here.

    Raises:
        UsageError: there is no such release, or it has no stub for Python 3.12.
    """
    if not re.fullmatch(r"\d\d\.(0[1-9]|1[0-2])", release):
        raise UsageError(
            f"--triton-release {release} is not a release of Triton.",
            remedy=f"Write year and month, such as {NEWEST_KNOWN}.",
        )
    rules = rules_of(release)
    if rules.python != SERVER_PYTHON:
        raise UsageError(
            f"--triton-release {release}: the option is for releases since {SINCE_RELEASE}.",
            cause=f"The stub of older ones is for Python {rules.python}, so the build needs "
            "another one for this release.",
            remedy=f"Build in the container {image_of(release)}, without the option.",
        )
    return TritonRoot(CONTAINER_ROOT, release, rules, is_elsewhere=True)


def check_python(triton: TritonRoot, python: str) -> None:
    """Raise a UsageError if the stub of a Triton that is not here is for another Python."""
    if python != triton.rules.python:
        raise UsageError(
            f"--triton-release {triton.release}: the environment has Python {python}, "
            f"and the server's own stub is for {triton.rules.python}.",
            remedy=f"Add --python {triton.rules.python}, or build in the container "
            f"{image_of(triton.release)}, without --triton-release.",
        )


def servers_of(release: str) -> ServerRecord:
    """Return the releases that have the same rules as ``release``."""
    since = rules_of(release).since
    # Written YY.MM, they compare as strings.
    later = [rules.since for rules in RELEASES if rules.since > since]
    return ServerRecord(since, min(later, default=""))
