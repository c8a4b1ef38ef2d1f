"""Makes what a test run works on, so that it neither reads nor writes the user's: ``python own_place.py CHECKOUT FOLDER``.

    FOLDER/checkout/   the checkout's files as a new clone has them, in a git repository of their own, with a .triton of their own
    FOLDER/cache/      all caches (XDG_CACHE_HOME), filled from the user's
    FOLDER/home/       the home, with links to the user's settings of pip, uv and git

Standard library only. What the user's cache and .triton hold is hard-linked, or copied where that is not possible: those files
are replaced and never written in place. What is in FOLDER already stays, so a second run has little to do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS = (".config/pip", ".config/uv", ".config/git", ".pip", ".netrc", ".gitconfig")
# of the builder's cache; not its locks, its staging folders and what it has unpacked
ENTRIES = ("prefixes", "archives", "stubs", "standins", "wheels", "sources", "verified", "contract")
WRITTEN = ("conda", "locks", "inductor")  # small, and some of their files are written in place
BUILT = ("vllm_env", "vllm_cache", "vllm_engine_args.json", "triton_python_backend_stub", "standin")
KEPT = {".git", ".tools", ".triton"}  # of the copy; all else that the checkout lacks is removed


def main(checkout: Path, folder: Path) -> None:
    """Bring the folder up to date."""
    copy = folder / "checkout"
    mirror(checkout, copy)
    commit(copy)
    link_once(checkout / ".triton", copy / ".triton")
    with suppress(FileExistsError):
        (copy / ".tools").symlink_to(checkout / ".tools")  # the builder's own environment, made once for both
    fill_cache(folder / "cache")
    for name in SETTINGS:
        link_setting(Path.home() / name, folder / "home" / name)


def mirror(checkout: Path, copy: Path) -> None:
    """Make a copy of the checkout's files, without what is built; files that are the same already are not written again."""
    names = files_of(checkout)
    for name in names:
        source, target = checkout / name, copy / name
        if is_same(source, target):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    for path in sorted(copy.rglob("*"), reverse=True):
        name = path.relative_to(copy)
        if name.parts[0] in KEPT or str(name) in names:
            continue
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # a folder with files of the checkout
                path.rmdir()
        else:
            path.unlink(missing_ok=True)


def files_of(checkout: Path) -> set[str]:
    """Return the names of a checkout's files: those that git tracks or would track, without git all but hidden and built ones."""
    command = ["git", "-C", str(checkout), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no git, no repository, or one of another user
        return {str(path.relative_to(checkout)) for path in unhidden_files(checkout)}
    return {name for name in listed.split("\0") if name and os.path.lexists(checkout / name)}


def unhidden_files(folder: Path) -> list[Path]:
    """Return the files of a folder and those below it, but for hidden and built ones."""
    found = []
    for path in folder.iterdir():
        hidden = path.name.startswith(".") and path.name not in (".gitignore", ".ci")
        if (
            hidden
            or path.name == "__pycache__"
            or (path.parent.parent.name == "model_repository" and path.name.startswith(BUILT))
        ):
            continue
        found += unhidden_files(path) if path.is_dir() else [path]
    return found


def is_same(source: Path, target: Path) -> bool:
    """Tell by type, mode, size and time of change whether a file has been copied before."""
    if not os.path.lexists(target):
        return False
    a, b = source.lstat(), target.lstat()
    return (a.st_mode, a.st_size, a.st_mtime_ns) == (b.st_mode, b.st_size, b.st_mtime_ns)


def commit(copy: Path) -> None:
    """Make the copy a repository with one commit more, if anything has changed: tests clone it."""
    git = ["git", "-C", str(copy), "-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false"]
    with suppress(OSError):  # without git, tests that clone are red by themselves
        if not (copy / ".git").is_dir():
            subprocess.run([*git, "init", "--quiet", "--initial-branch=main"], check=False)
            (copy / ".git" / "info" / "exclude").write_text("/.tools\n")  # a link here, which .gitignore takes for a file
        subprocess.run([*git, "add", "--all"], check=False)
        if subprocess.run([*git, "diff", "--cached", "--quiet"], check=False, stderr=subprocess.DEVNULL).returncode:
            subprocess.run([*git, "commit", "--quiet", "--no-verify", "--message=as tested"], check=False)


def fill_cache(cache: Path) -> None:
    """Take over what the user's caches have and this one lacks."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    users = Path(os.environ.get("VLLM_ENV_CACHE") or usual / "vllm_env")
    for kind in ENTRIES:
        for entry in (users / kind).glob("*"):
            link_once(entry, cache / "vllm_env" / kind / entry.name)
    for kind in WRITTEN:
        link_once(users / kind, cache / "vllm_env" / kind, link=shutil.copy2)
    link_once(Path(os.environ.get("UV_CACHE_DIR") or usual / "uv"), cache / "uv")
    (cache / "uv").mkdir(parents=True, exist_ok=True)


def link_once(source: Path, target: Path, link: Callable[[str, str], object] | None = None) -> None:
    """Have a file or folder under a second name, whole or not at all; what is there already stays."""
    if target.exists() or not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{os.getpid()}")
    copy = link or link_file
    try:
        if source.is_dir():
            shutil.copytree(source, staged, symlinks=True, copy_function=copy)
        else:
            copy(str(source), str(staged))
        staged.rename(target)
    except (OSError, shutil.Error) as error:  # a build may remove it meanwhile, or another run be faster
        print(f"test data  … {source} is not taken over: {str(error)[:200]}", file=sys.stderr)
        shutil.rmtree(staged, ignore_errors=True)
        if not staged.is_dir():
            staged.unlink(missing_ok=True)


def link_file(source: str, target: str) -> str:
    """Hard-link a file, or copy it to another file system, or where the kernel links no files of others."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
    return target


def link_setting(source: Path, target: Path) -> None:
    """Let the own home have a setting of the user's, such as where packages come from."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.exists() and not os.path.lexists(target):
        target.symlink_to(source)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
