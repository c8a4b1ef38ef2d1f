"""Paths that every Triton can use: a folder whose path Triton mistakes gets a link to it."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_env.triton.root import is_plain

PlainPath = Callable[[Path], Path]
"""Returns a path by which every Triton can use a folder."""


def plain_temporary() -> Path:
    """Return the folder for temporary files whose path every Triton can use."""
    folder = Path(tempfile.gettempdir())
    # Triton itself extracts to /tmp.
    return folder if is_plain(folder) else Path("/tmp")  # noqa: S108


def plain_repository(repository: Path, scratch: Path) -> Path:
    """Return a repository's path, or a link to it in ``scratch`` if Triton mistakes the path."""
    repository = repository.absolute()
    if is_plain(repository):
        return repository
    link = scratch / "models"
    link.symlink_to(repository)
    return link


@contextlib.contextmanager
def plain_links() -> Iterator[PlainPath]:
    """Yield a function that returns a folder, or a link to it if Triton mistakes its path.

    The links last until the block ends.
    """
    with tempfile.TemporaryDirectory(prefix="vllm_env_links_", dir=plain_temporary()) as place:

        def plain(folder: Path) -> Path:
            if is_plain(folder):
                return folder
            link = Path(tempfile.mkdtemp(dir=place)) / "folder"
            link.symlink_to(folder)
            return link

        yield plain
