"""A source tree of vLLM: what identifies it, and a copy of it to build in.

vLLM's build writes into its tree: a precompiled wheel's libraries, ``_version.py``, objects. So the
user's tree is only read, and its wheel is built in a copy. The digest covers exactly the files that
are copied.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from vllm_env.base.errors import CommandError, UsageError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.process import run

GIT_VARIABLES = {
    "GIT_CONFIG_COUNT": "2",
    # git refuses a tree of another owner. In a container, the mounted tree always has another one.
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    # Otherwise git starts a monitor for a copy that soon is gone, and the monitor stays.
    "GIT_CONFIG_KEY_1": "core.fsmonitor",
    "GIT_CONFIG_VALUE_1": "false",
}
"""The variables with which git reads a source tree."""
# At the top of a tree, builds leave these. setuptools would pack the old files of a build folder.
# Deeper folders of these names are sources: vLLM has requirements/build.
_BUILD_FOLDERS = frozenset({"build", "dist", ".deps"})
_NEVER_SOURCES = frozenset({".git", "__pycache__"})
# One of these files marks a folder as a cache (pytest, mypy, cargo, uv) or a virtual environment.
_MARKS_OF_TOOLS = ("CACHEDIR.TAG", "pyvenv.cfg")


def tree_digest(tree: Path) -> str:
    """Return the SHA-256 of the files of a source tree: names, contents and modes.

    Files that git ignores count, too: they can get into the wheel, such as a compiled ``vllm-rs``.

    Raises:
        UsageError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for place, source in _source_files(tree):
        if source.is_symlink():
            content = f"link {source.readlink()}"
        else:
            # The wheel records whether a file can be executed.
            content = f"{source.stat().st_mode & 0o111:o} {file_sha256(source)}"
        # fsencode: a file's name may have bytes that are not UTF-8.
        digest.update(os.fsencode(f"{place}\0{content}\0"))
    return digest.hexdigest()


def copy_tree(tree: Path, copy: Path) -> None:
    """Copy a source tree with its git history into a new folder.

    The copy shares no file with the tree by hard links: a build may write into a file in place.

    Raises:
        UsageError: a file cannot be read.
    """
    copy.mkdir()
    for place, source in _source_files(tree):
        target = copy / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        else:
            # Without the owner: the copy may be root's, and the tree another user's.
            shutil.copy2(source, target)
            # A build may write into it, also if the original is read-only.
            target.chmod(target.stat().st_mode | 0o200)
    if (tree / ".git").exists():
        _lend_history(tree, copy)


def _source_files(tree: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the files and links of a tree, in a fixed order: the place in the tree and the file.

    Raises:
        UsageError: a folder cannot be read.
    """
    # In a git checkout, an egg-info is a leftover of an earlier installation: git lists the files
    # to pack. A source archive has no git, and needs its egg-info, which lists the data files.
    left_out = {".egg-info"} if (tree / ".git").exists() else set()
    # Resolved, so that a tree may be named through a link.
    tree = tree.resolve()
    try:
        for path in sorted(tree.iterdir()):
            if path.name not in _BUILD_FOLDERS and path.suffix not in left_out:
                yield from _files_below(path, Path(path.name), (tree,))
    except OSError as error:
        raise UsageError(
            f"The source tree {tree} cannot be read: {error.strerror}: {error.filename}.",
            remedy="Change the permissions, or name another folder.",
        ) from error


def _files_below(source: Path, place: Path, above: tuple[Path, ...]) -> Iterator[tuple[Path, Path]]:
    """Yield the files and links at or below a path of a tree, each with its place in the copy.

    Args:
        source: the path.
        place: its place in the copy, relative to the tree.
        above: the folders that lead to it, the tree first. A link may lead to one of them again.

    Raises:
        UsageError: a link leads to a folder above itself.
    """
    if source.name in _NEVER_SOURCES:
        return
    if source.is_symlink():
        if _stays_within(source, above[0]):
            yield place, source
            return
        # The copy gets the content. The link would lead nowhere, or a build would write there.
        source = source.resolve()
    if source.is_dir():
        if any(folder.is_relative_to(source) for folder in above):
            raise UsageError(
                f"The source tree {above[0]} contains itself: {place} leads to {source}.",
                remedy="Remove this link.",
            )
        if any((source / mark).is_file() for mark in _MARKS_OF_TOOLS):
            return
        for path in sorted(source.iterdir()):
            yield from _files_below(path, place / path.name, (*above, source))
    # Sockets and pipes cannot be copied.
    elif source.is_file():
        yield place, source


def _stays_within(link: Path, tree: Path) -> bool:
    """Return whether a link, if it is copied, leads to the same file of the copy."""
    target = link.readlink()
    return not target.is_absolute() and (link.parent / target).resolve().is_relative_to(tree)


def commit_of(tree: Path) -> str:
    """Return the commit of a source tree; "" if it is no git checkout or has changes."""
    # Untracked files count, too: a new module gets into the wheel. The leftovers of builds do not.
    leftovers = [f":(exclude,top){name}" for name in (*sorted(_BUILD_FOLDERS), "*.egg-info/")]
    # --no-optional-locks: git status would otherwise write the refreshed index into the tree.
    changes = _git(tree, "--no-optional-locks", "status", "--porcelain", "--", ".", *leftovers)
    # None if it is no checkout.
    if changes != "":
        return ""
    return _git(tree, "rev-parse", "HEAD") or ""


def history_of(tree: Path) -> str:
    """Return what setuptools-scm makes the version from: the commit and the nearest tag, if any."""
    describe = ("describe", "--tags", "--long", "--always", "--abbrev=40", "--match", "v[0-9]*")
    return _git(tree, *describe) or ""


def _git(tree: Path, *arguments: str) -> str | None:
    """Return what git prints about a tree; None if the tree is no checkout with a commit."""
    # git itself would also take a checkout around the tree.
    if not (tree / ".git").exists():
        return None
    try:
        return run(["git", "-C", tree, *arguments], what="read the tree", env=GIT_VARIABLES).strip()
    except CommandError:
        return None


def _lend_history(tree: Path, copy: Path) -> None:
    """Give a copy a git repository of its own, which reads the objects of the tree's repository.

    setuptools-scm makes the version from it. vLLM's build may fetch into it. Without a commit in
    the tree, the copy stays without a repository.
    """
    head = _git(tree, "rev-parse", "HEAD")
    objects = _git(tree, "rev-parse", "--git-path", "objects")
    shallow = _git(tree, "rev-parse", "--git-path", "shallow")
    if head is None or objects is None or shallow is None:
        return
    what = "copy the history of the source tree"
    # No template: the user's hooks must not run here.
    run(["git", "init", "--quiet", "--template=", copy], what=what, env=GIT_VARIABLES)
    repository = copy / ".git"
    (repository / "objects" / "info").mkdir(exist_ok=True)
    # git prints these paths relative to the tree; in a worktree, they are in another checkout.
    borrowed = (tree / objects).resolve()
    (repository / "objects" / "info" / "alternates").write_text(f"{borrowed}\n", "utf-8")
    if (tree / shallow).is_file():
        shutil.copy(tree / shallow, repository / "shallow")
    tags = _git(tree, "for-each-ref", "--format=%(objectname) %(refname)", "refs/tags")
    (repository / "packed-refs").write_text(f"{tags}\n" if tags else "", "utf-8")
    (repository / "HEAD").write_text(f"{head}\n", "utf-8")
    # Fill the index. Without it, every file counts as changed.
    run(["git", "-C", copy, "reset", "--quiet"], what=what, env=GIT_VARIABLES)
