"""The layout ``directory``: the prefix itself. Triton uses it without unpacking."""

import shutil
from collections.abc import Generator
from pathlib import Path

from vllm_env.base.filesystem import link_or_copy, make_readable, tree_size
from vllm_env.base.workspace import Workspace
from vllm_env.prefix.prefix import EXTRACTED_SPACE, Prefix

from .layout import EnvironmentRecord, Layout, Packed, Tree


class Directory(Layout):
    """A folder that is a copy of the prefix."""

    name = "directory"
    environment = "vllm_env"
    files = (environment,)

    def key(self, prefix_key: str) -> str:
        """Return the prefix's own key: packing changes nothing."""
        return prefix_key

    def pack(self, workspace: Workspace, prefix: Prefix) -> Packed:
        """Return the prefix."""
        record = EnvironmentRecord(self.environment, key=prefix.key)
        return Packed(prefix.path, (record,), reused=prefix.reused)

    def open(
        self, packed: Packed, triton: Path | None, scratch: Path, *, keep: bool = False
    ) -> Generator[Tree, None, None]:
        """Yield the folder itself."""
        yield Tree(packed.path)

    def place(self, environment: Path, folder: Path, *, linked: bool = False) -> None:
        """Copy the folder, or link its files if ``linked``."""
        target = folder / self.environment
        # A user may edit a copy, and the cache must not change with it.
        copy = link_or_copy if linked else shutil.copy2
        shutil.copytree(environment, target, symlinks=True, copy_function=copy)
        # Hard links share their mode with the cache, which must not change.
        if not linked:
            make_readable(target)

    def bytes_to_copy(self, environment: Path, receiver: Path) -> int:
        """Return the size of the folder."""
        return tree_size(environment)

    def copied_space(self, profile: str) -> int:
        """Return the size of an environment."""
        return EXTRACTED_SPACE[profile]
