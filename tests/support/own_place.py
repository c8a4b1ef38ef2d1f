"""Starts a test run that neither reads nor writes the user's files: ``python own_place.py CHECKOUT FOLDER COMMAND…``.

    FOLDER/checkout/       the checkout's files as a new clone has them, in a git repository of their own; COMMAND runs here
    FOLDER/checkout-2/     the same for a second run at the same time
    FOLDER/home/           the home, with copies of the user's settings of pip, uv and git
    FOLDER/home/.cache/    all caches, filled from the user's

If the path of CHECKOUT has a space or the like, the copies are in its own ``.tools/test-data``: the product must work there.

Standard library only. A second run takes over the files of the first one.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping

SETTINGS = (".npmrc", ".config/pip", ".config/uv", ".config/git", ".pip", ".netrc", ".gitconfig")
# of the builder's cache; not its locks, its staging folders and what it has unpacked
ENTRIES = ("prefixes", "archives", "stubs", "standins", "wheels", "sources", "verified", "contract", "conda", "locks", "inductor")
BUILT = ("vllm_env", "vllm_cache", "vllm_engine_args.json", "triton_python_backend_stub", "stub_lib", "standin")
KEPT = {".git", ".tools", ".triton"}  # of the copy; all else that the checkout lacks is removed
# variables that lead to the user's caches, models and repositories
ASTRAY: tuple[str, ...] = ("HF_", "VLLM_", "XDG_", "TORCHINDUCTOR_", "TRITON_HOME", "TRITON_CACHE_DIR", "ZIG_", "CUDA_CACHE_PATH")
ASTRAY += ("TRANSFORMERS_CACHE", "PIP_CACHE_DIR", "UV_CACHE_DIR", "CONDA_PKGS_DIRS")
ASTRAY += ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_PREFIX")  # of a hook
# Users do not set it, and it hid a fault of the packager. Without bytecode each process also compiles all sources again.
ASTRAY += ("PYTHONDONTWRITEBYTECODE",)
OURS = "VLLM_ENV_TEST_"
STRANGE = re.compile(r"[^\w@%+=:,./-]", re.ASCII)  # as in triton/root.py
# where programs of the user's are that find each other by the home
PROGRAMS = {"PYENV_ROOT": ".pyenv", "RUSTUP_HOME": ".rustup", "CARGO_HOME": ".cargo"}


def main(checkout: Path, folder: Path, command: list[str]) -> NoReturn:
    """Prepare the folder, and become the command."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = checkout / ".tools" / "test-data" if STRANGE.search(str(checkout)) else folder
    copies.mkdir(parents=True, exist_ok=True)
    copy = free_copy(copies)
    prepare(checkout, folder, copy)
    variables = own_variables(os.environ, checkout, folder)
    os.chdir(copy)
    os.execvpe(command[0], command, variables)


def free_copy(folder: Path) -> Path:
    """Return the first copy that no other run uses. This process keeps its lock, also as the command."""
    number = 1
    while True:
        copy = folder / ("checkout" if number == 1 else f"checkout-{number}")
        handle = os.open(f"{copy}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            number += 1
            continue
        os.set_inheritable(handle, True)
        return copy


def own_variables(environment: Mapping[str, str], checkout: Path, folder: Path) -> dict[str, str]:
    """Return a run's variables: the user's, but for those that lead to the user's files."""
    found = {name: value for name, value in environment.items() if name.startswith(OURS) or not name.startswith(ASTRAY)}
    for name, place in PROGRAMS.items():
        if (Path.home() / place).is_dir():
            found.setdefault(name, str(Path.home() / place))
    return {**found, "HOME": str(folder / "home"), f"{OURS}DATA": str(folder), f"{OURS}CHECKOUT": str(checkout)}


def prepare(checkout: Path, folder: Path, copy: Path) -> None:
    """Bring a copy, the caches and the home up to date."""
    mirror(checkout, copy)
    name_the_archive(copy / "model_repository/vllm/config.pbtxt")
    commit(copy)
    if release_of(checkout / ".triton") not in ("", release_of(copy / ".triton")):  # without one, the tests provision their own
        shutil.rmtree(copy / ".triton", ignore_errors=True)
    take_over(checkout / ".triton", copy / ".triton")
    with suppress(FileExistsError):
        (copy / ".tools").symlink_to(checkout / ".tools")  # the builder's own environment, made once for both
    fill_cache(folder / "home" / ".cache")
    for name in SETTINGS:
        take_over(Path.home() / name, folder / "home" / name, link=False)


def mirror(checkout: Path, copy: Path) -> None:
    """Copy the checkout's files, but no built ones. A file that has been copied before is not written again."""
    names = files_of(checkout)
    for path in sorted(copy.rglob("*"), reverse=True):
        name = path.relative_to(copy)
        if name.parts[0] not in KEPT:
            remove_unless_wanted(path, wanted=str(name) in names or is_bytecode(name, names))
    for wanted in names:
        source, target = checkout / wanted, copy / wanted
        if not is_same(source, target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def name_the_archive(config: Path) -> None:
    """Undo in the copy what `--layout directory` writes into the checkout's own configuration, which git tracks."""
    text = config.read_text(encoding="utf-8")
    if '/vllm_env"' in text:
        config.write_text(text.replace('/vllm_env"', '/vllm_env.tar.gz"'), encoding="utf-8")


def is_bytecode(name: Path, names: set[str]) -> bool:
    """Tell whether a file is the bytecode of one of these sources. It is kept, as compiling all tests again takes seconds."""
    return name.parent.name == "__pycache__" and str(name.parents[1] / f"{name.name.partition('.')[0]}.py") in names


def remove_unless_wanted(path: Path, *, wanted: bool) -> None:
    """Remove a file that the checkout lacks, a folder in a file's place, or an empty folder."""
    is_folder = path.is_dir() and not path.is_symlink()
    if is_folder and wanted:
        shutil.rmtree(path)
    elif is_folder:
        with suppress(OSError):  # it holds files of the checkout
            path.rmdir()
    elif not wanted:
        path.unlink(missing_ok=True)


def files_of(checkout: Path) -> set[str]:
    """Return the names of a checkout's files: those that git tracks or would track, without git all but hidden and built ones."""
    command = ["git", "-C", str(checkout), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = ""
    if (checkout / ".git").exists():
        with suppress(OSError):  # no git; where it belongs to another user, git lists nothing
            listed = subprocess.run(command, capture_output=True, check=False, text=True, env=without_git()).stdout
    if not listed:
        return {str(path.relative_to(checkout)) for path in unhidden_files(checkout)}
    return {name for name in listed.split("\0") if name and os.path.lexists(checkout / name)}


def unhidden_files(folder: Path) -> list[Path]:
    """Return the files of a folder and those below it, but for hidden and built ones."""
    found = []
    for path in folder.iterdir():
        hidden = path.name.startswith(".") and path.name not in (".gitignore", ".ci")
        built = path.name.startswith(BUILT) and path.parent.parent.name == "model_repository"
        if hidden or built or path.name == "__pycache__":
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
            subprocess.run([*git, "init", "--quiet", "--initial-branch=main"], check=False, env=without_git())
            (copy / ".git" / "info" / "exclude").write_text("/.tools\n")  # a link here, which .gitignore takes for a file
        subprocess.run([*git, "add", "--all"], check=False, env=without_git())
        changed = subprocess.run([*git, "diff", "--cached", "--quiet"], check=False, capture_output=True, env=without_git())
        if changed.returncode:
            message = ["--quiet", "--no-verify", "--message=as tested"]
            subprocess.run([*git, "commit", *message], check=False, env=without_git())


def without_git() -> dict[str, str]:
    """Return the variables without those that a hook of git has: they would go before ``git -C``."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ASTRAY)}


def release_of(triton: Path) -> str:
    """Return a provisioned Triton's release, or nothing."""
    file = triton / "RELEASE"
    return file.read_text("utf-8") if file.is_file() else ""


def fill_cache(cache: Path) -> None:
    """Take over what the user's caches have and this one lacks."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    users = Path(os.environ.get("VLLM_ENV_CACHE") or usual / "vllm_env")
    for kind in ENTRIES:
        for entry in (users / kind).glob("*"):
            take_over(entry, cache / "vllm_env" / kind / entry.name)
    uv = Path(os.environ.get("UV_CACHE_DIR") or usual / "uv")
    if list((users / "prefixes").glob("*")):
        for found in uv.glob("simple-*"):  # the wheels are in the prefix
            take_over(found, cache / "uv" / found.name)
    else:
        take_over(uv, cache / "uv")


def take_over(source: Path, target: Path, *, link: bool = True) -> None:
    """Copy a file or folder, whole or not at all. An existing target stays.

    In a folder, the files of its folders are hard links if ``link`` is set: nobody writes them in place. Its own files are
    copied: their times say when an entry was last used, and a link would change the time of an archive that a server may poll.
    """
    if target.exists() or not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if source.is_dir():
            staged.mkdir()
            for child in source.iterdir():
                copy(child, staged / child.name, link=link and child.is_dir())
        else:
            copy(source, staged, link=False)
        staged.rename(target)
    except (OSError, subprocess.CalledProcessError) as error:  # a build may remove it meanwhile, or another run be faster
        print(f"test data  … {source} is not taken over: {str(error)[:200]}", file=sys.stderr)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        if staged.is_file():
            staged.unlink()


def copy(source: Path, target: Path, *, link: bool) -> None:
    """Copy a file or folder with its times; link its files where the file system, and the kernel for files of others, let it."""
    if link:
        linked = subprocess.run(["cp", "--archive", "--link", source, target], check=False, capture_output=True)
        if linked.returncode == 0:
            return
        shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "--archive", "--reflink=auto", source, target], check=True, capture_output=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:])
