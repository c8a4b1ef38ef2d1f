"""What models in parts have unpacked on this machine (parts_unpack.py), and no process uses."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from vllm_env.base.filesystem import tree_size
from vllm_env.inside.parts_unpack import places, remove_unused


def find_unpacked() -> list[tuple[Path, int, Callable[[], object]]]:
    """Return each folder, its size in bytes, and what frees it unless a server has taken it into use meanwhile."""
    found = [(place, Path(path)) for place in places() for path in remove_unused(place, 0, dry_run=True)]
    return [(path, tree_size(path), partial(remove_unused, place, 0)) for place, path in found]
