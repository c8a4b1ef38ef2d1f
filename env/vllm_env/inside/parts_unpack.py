"""Unpacks an environment's parts on all cores into a folder of this machine, once, and leads this interpreter there.

    PLACE/KEY/            the whole environment, as `--layout directory` has it; it appears by rename
    PLACE/KEY/.whole      written last: which boot of the machine wrote it, and whether the disk has it
    PLACE/KEY.XXXXXX/     what a start unpacks, or what one that was killed left, which the next one removes
    PLACE/KEY.lock        held (flock) exclusively to unpack and to remove, shared while a process uses the environment

Copied into the small archive's site-packages as ``_vllm_env_unpack.py``; only the standard library is there. Run as a
program it unpacks one part: processes, because tarfile and the creation of 60,000 files hold the interpreter's lock.
Parts are gzip: zlib takes 9 s of processor time for 1.7 GB, as much as GNU tar, and 16 cores write 7.6 GB with CUDA in 8 to 12 s
where one takes 61 to 74 s (tar on an H200's host). zstd would need a decoder of its own in every environment.
"""

import ctypes
import fcntl
import hashlib
import importlib
import json
import mmap
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from typing import Any

VARIABLE = "VLLM_ENV_UNPACKED"
FOLDER = "vllm_env.parts"
MARK = ".whole"
DESCRIPTION = "_vllm_env_parts.json"
OWN = ("01_vllm_env_parts.pth", "_vllm_env_parts.py", "_vllm_env_unpack.py", DESCRIPTION)
"""What the small archive has and the whole environment has not."""
KEPT = 1  # environments beside the one in use: the last one, to which a deployment may go back
_ENVIRONMENT = re.compile(
    r"""\bkey\s*:\s*(["'])EXECUTION_ENV_PATH\1[\s,;]*value\s*:?\s*[{<]\s*string_value\s*:\s*(["'])(.*?)\2"""
)
_LOCK = re.compile(r"([0-9a-f]{32})\.lock")  # `key_of` makes such keys
_ROUNDS = 5  # of waiting for other starts, each until one of them has ended
_MARGIN = 64 * 2**20  # bytes; folders and the last block of 60,000 files
_MOST_WORKERS = 32
_PERIOD_S = 5.0
_held: list[int] = []  # locks of the environments in use, held until this process ends
_used_here: list[str] = []  # the folder to which this interpreter has been led
_lock = threading.RLock()  # what a .pth file imports may ask for a part
_site = os.path.dirname(os.path.abspath(__file__))
_prefix = os.path.abspath(os.path.join(_site, "..", "..", ".."))


class UnpackError(ImportError):
    """The parts cannot be used; the message names the cause and the remedy."""


def own_model() -> str:
    """Return the folder of the model that this stub serves; its first argument is ``MODEL/VERSION/model.py``."""
    with open("/proc/self/cmdline", "rb") as stream:
        arguments = stream.read().split(b"\0")
    return (
        os.path.dirname(os.path.dirname(os.path.abspath(os.fsdecode(arguments[1]))))
        if len(arguments) > 1
        else ""
    )


def parts_of(model: str) -> str:
    """Return the folder with a model's parts: beside the archive that its configuration names, or beside that itself."""
    named: list[tuple[str, ...]] = []
    with (
        suppress(OSError),
        open(os.path.join(model, "config.pbtxt"), encoding="utf-8", errors="replace") as stream,
    ):
        named = _ENVIRONMENT.findall(re.sub(r"(?m)^\s*#.*$", "", stream.read()))
    archive = (
        named[-1][2].replace("$$TRITON_MODEL_DIRECTORY", model) if named else ""
    )  # the last one counts
    return os.path.join(os.path.dirname(archive) or model, FOLDER)


def use(model: str, tell: Callable[[str], object] | None = None) -> str:
    """Unpack the parts of a model, unless a start before has done so, and lead this interpreter there; return the folder.

    ``tell`` takes lines about the progress; the default is standard error, which Triton's log is.

    Raises:
        UnpackError: a part is missing or is not what was built, or no place takes them.
    """
    with _lock, open(os.path.join(_site, DESCRIPTION), encoding="utf-8") as stream:
        facts = json.load(stream)
        if not _used_here:
            tree = find(facts, parts_of(model), tell or _to_stderr)
            _switch(tree)
            _used_here.append(tree)
        return _used_here[0]


def find(facts: dict[str, Any], parts: str, tell: Callable[[str], object]) -> str:
    """Return the folder with the whole environment, in use by this process until it ends; see :func:`use`."""
    refused = []
    candidates = places()
    for place in candidates:
        tree = os.path.join(place, facts["key"])
        if _is_safe(place) and is_whole(tree) and _hold(place, facts["key"]):
            with suppress(OSError):
                os.utime(os.path.join(tree, MARK))
            tell(f"the environment is unpacked in {tree}")
            return tree
    _check_parts(facts, parts)
    for place in candidates:
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
            _require_usable(place)
            return _unpack_once(place, facts, parts, tell)
        except OSError as error:
            refused.append(f"{place}: {error.strerror or error}")
            tell(f"cannot unpack in {refused[-1]}")
    raise UnpackError(
        f"The environment ({facts['unpacked'] / 1e9:.1f} GB) can be unpacked nowhere: {'; '.join(refused)}. "
        f"Let {VARIABLE} name a folder on a local disk with that much space, or build with --layout archive or directory."
    )


def places() -> list[str]:
    """Return where an environment may be unpacked, best first: a named folder, the user's cache, the temporary folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    own = [os.environ.get(VARIABLE, ""), os.path.join(cache, "vllm_env", "unpacked")]
    temporary = [
        os.path.join(folder, f"vllm_env_unpacked_{os.geteuid()}")
        for folder in (tempfile.gettempdir(), "/tmp")  # noqa: S108
    ]
    return list(
        dict.fromkeys(os.path.abspath(p) for p in (*own, *temporary) if p and not p.startswith("~"))
    )


def is_whole(tree: str) -> bool:
    """Tell whether a folder holds a whole environment: the machine has not been restarted before the disk had it."""
    try:
        with open(os.path.join(tree, MARK), encoding="utf-8") as stream:
            mark = json.load(stream)
    except (OSError, ValueError):
        return False
    return bool(mark.get("synced")) or mark.get("boot") == _boot()


def remove_unused(place: str, keep: int = KEPT, *, dry_run: bool = False) -> list[str]:
    """Remove the least recently used environments of a place but the last ``keep`` unused ones; none that is in use.

    What has another name than an environment's is not ours, and a place of another user's is not looked into.
    """
    try:
        names = {
            found[1]
            for found in map(_LOCK.fullmatch, os.listdir(place) if _is_safe(place) else ())
            if found
        }
    except OSError:
        return []
    removed = []
    for key in sorted(names, key=lambda key: _used(os.path.join(place, key)), reverse=True):
        with suppress(OSError), _locked(place, key, fcntl.LOCK_EX | fcntl.LOCK_NB):
            tree = os.path.join(place, key)
            kept = keep > 0 and os.path.isdir(tree)
            keep -= kept
            unused = [path for path in _of_key(place, key) if not (kept and path == tree)]
            removed += unused
            for path in () if dry_run else unused:  # another key's may be in use again by now
                shutil.rmtree(path, ignore_errors=True)
    return removed


def _unpack_once(
    place: str, facts: dict[str, Any], parts: str, tell: Callable[[str], object]
) -> str:
    """Unpack into a place, unless another start does so meanwhile; OSError if the place does not take it."""
    key = facts["key"]
    tree = os.path.join(place, key)
    for _ in range(_ROUNDS):
        with (
            suppress(BlockingIOError),
            _locked(place, key, fcntl.LOCK_EX | fcntl.LOCK_NB) as handle,
        ):
            if not is_whole(tree):
                _unpack(place, facts, parts, tell, handle)
        if not is_whole(tree):
            tell(f"another start unpacks the environment in {tree}; waiting for it")
        # while another start unpacks this waits; the environment is looked for again, because that start may have failed
        if _hold(place, key):
            return tree
        time.sleep(1)
    raise OSError(f"a running process uses {tree}, which is damaged")


def _unpack(
    place: str, facts: dict[str, Any], parts: str, tell: Callable[[str], object], handle: int
) -> None:
    key, began = facts["key"], time.monotonic()
    for left in _of_key(place, key):
        shutil.rmtree(left, ignore_errors=True)
    remove_unused(place)
    if _free(place) < facts["unpacked"] + _MARGIN:
        remove_unused(place, 0)
    if _free(place) < facts["unpacked"] + _MARGIN:
        raise OSError(
            f"{_free(place) / 1e9:.1f} GB are free, {(facts['unpacked'] + _MARGIN) / 1e9:.1f} GB are needed"
        )
    staging = tempfile.mkdtemp(prefix=f"{key}.", dir=place)
    try:
        _run_workers(facts, parts, staging, tell, handle)
        _mark(staging, synced=False)
        os.rename(staging, os.path.join(place, key))
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    tell(f"unpacked {facts['unpacked'] / 1e9:.1f} GB in {time.monotonic() - began:.1f} s")
    threading.Thread(
        target=_sync, args=(os.path.join(place, key),), name="vllm_env-sync", daemon=True
    ).start()


def _run_workers(
    facts: dict[str, Any], parts: str, staging: str, tell: Callable[[str], object], handle: int
) -> None:
    """Unpack all parts, the largest first, and copy what the small archive has; the first failure ends it."""
    jobs = sorted(facts["parts"], key=lambda part: -part["unpacked"])
    workers = min(_MOST_WORKERS, len(jobs) + 1, _cores())
    tell(f"unpacking {facts['unpacked'] / 1e9:.1f} GB with {workers} processes into {staging}")
    done, told = 0, time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(_run_worker, handle, "base", _prefix, staging): 0}
        for part in jobs:
            file = os.path.join(parts, part["name"])
            futures[pool.submit(_run_worker, handle, "part", file, part["sha256"], staging)] = part[
                "unpacked"
            ]
        try:
            for future in as_completed(futures):
                future.result()
                done += futures[future]
                if time.monotonic() - told > _PERIOD_S:
                    told = time.monotonic()
                    tell(f"unpacked {done / facts['unpacked']:.0%} of the environment")
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _run_worker(handle: int, *arguments: str) -> None:
    """Run one worker; it keeps the lock, so that nobody takes what it still writes for left behind."""
    command = [
        os.path.join(_prefix, "bin", "python"),
        "-I",
        "-S",
        "-B",
        os.path.join(_site, OWN[2]),
        *arguments,
    ]
    done = subprocess.run(
        command, capture_output=True, check=False, pass_fds=(handle,), stdin=subprocess.DEVNULL
    )
    if done.returncode == 0:
        return
    said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    number, _, reason = said.partition(" ")
    if number.isdigit():
        raise OSError(int(number), reason)
    raise UnpackError(
        said or f"A process that unpacks ended with status {done.returncode}; free some memory."
    )


def unpack_part(file: str, sha256: str, target: str) -> None:
    """Unpack one part into a folder, once its digest is right; UnpackError if it is not."""
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if hashlib.sha256(data).hexdigest() != sha256:
            raise _changed(file)
        # the buffer of 64 KiB is copied once for each member
        with tarfile.open(
            fileobj=_Inflated(data), mode="r|", bufsize=2**16, copybufsize=2**20
        ) as archive:  # type: ignore[call-overload]
            made: set[str] = set()
            for member in archive:
                path = os.path.join(target, member.name)
                folder = path if member.isdir() else os.path.dirname(path)
                if folder not in made:
                    os.makedirs(folder, exist_ok=True)
                    made.add(folder)
                if member.issym():
                    os.symlink(member.linkname, path)
                elif not member.isdir():
                    archive.makefile(member, path)
                    os.chmod(path, member.mode)
                    os.utime(path, (member.mtime, member.mtime))  # bytecode goes by it


class _Inflated:
    """The bytes of gzip members one after the other; `read` gives what has been asked for, less at the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0
        self._inflater = zlib.decompressobj(31)  # 31: gzip
        self._ready = b""

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        pieces, missing = [], size
        while missing:
            if not self._ready:
                self._ready = self._next()
                if not self._ready:
                    break
            piece, self._ready = self._ready[:missing], self._ready[missing:]
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def _next(self) -> bytes:
        inflated = b""
        while not inflated and self._at < len(self._data):
            taken = self._data[self._at : self._at + 2**18]
            inflated = self._inflater.decompress(taken)
            self._at += len(taken) - len(self._inflater.unused_data)
            if self._inflater.eof:
                self._inflater = zlib.decompressobj(31)
        return inflated


def copy_base(source: str, target: str) -> None:
    """Copy what Triton has extracted, without what leads from there to the parts."""
    shutil.copytree(
        source,
        target,
        symlinks=True,
        dirs_exist_ok=True,
        ignore=lambda _, names: [n for n in names if n in OWN],
    )


def _check_parts(facts: dict[str, Any], parts: str) -> None:
    """Refuse early what is not there as a whole; digests are compared when a part is unpacked."""
    for part in facts["parts"]:
        file = os.path.join(parts, part["name"])
        try:
            size = os.stat(file).st_size
        except OSError as error:
            raise UnpackError(
                f"{file}: {error.strerror}. Copy the model's folder again as a whole, or build it again."
            ) from None
        if size != part["size"]:
            raise _changed(file)


def _changed(file: str) -> UnpackError:
    return UnpackError(
        f"{file} is not the part that was built. Copy the model's folder again as a whole, or build it again."
    )


def _switch(tree: str) -> None:
    """Let this interpreter and its children find everything in the whole environment instead of the small archive."""

    def moved(text: str) -> str:
        return (
            tree + text[len(_prefix) :]
            if text == _prefix or text.startswith(_prefix + os.sep)
            else text
        )

    sys.path[:] = [moved(path) for path in sys.path]
    for name in (
        "prefix",
        "exec_prefix",
        "base_prefix",
        "base_exec_prefix",
        "executable",
        "_base_executable",
    ):
        setattr(sys, name, moved(getattr(sys, name, "") or ""))
    for name, value in os.environ.items():
        if _prefix in value:
            os.environ[name] = os.pathsep.join(moved(one) for one in value.split(os.pathsep))
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if type(finder).__name__ != "PartsFinder"
    ]
    importlib.invalidate_caches()
    site.addsitedir(moved(_site))  # runs the .pth files of packages


@contextmanager
def _locked(place: str, key: str, operation: int) -> Iterator[int]:
    handle = os.open(
        os.path.join(place, f"{key}.lock"),
        os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
        0o600,
    )
    try:
        fcntl.flock(handle, operation)
        yield handle
    finally:
        os.close(handle)


def _hold(place: str, key: str) -> bool:
    """Wait until nobody unpacks or removes an environment and keep others from that until this process ends."""
    path = os.path.join(place, f"{key}.lock")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    fcntl.flock(handle, fcntl.LOCK_SH)
    if not is_whole(os.path.join(place, key)):
        os.close(handle)
        return False
    _held.append(handle)
    return True


def _of_key(place: str, key: str) -> list[str]:
    return [
        os.path.join(place, n)
        for n in os.listdir(place)
        if n.partition(".")[0] == key and not n.endswith(".lock")
    ]


def _is_safe(place: str) -> bool:
    """Tell whether what lies in a place was put there by this user or root: it will be run."""
    with suppress(OSError):
        status = os.stat(place)
        owners = {
            status.st_uid,
            os.lstat(place).st_uid,
        }  # of a link, too: in /tmp anybody can make one
        return owners <= {0, os.geteuid()} and not status.st_mode & 0o022
    return False


def _require_usable(place: str) -> None:
    if not _is_safe(place):
        raise PermissionError(
            f"it belongs to another user, or others may write there; chmod go-w {place}"
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(f"user {os.geteuid()} may not write there")
    if os.statvfs(place).f_flag & os.ST_NOEXEC:
        raise PermissionError("it is mounted noexec, and libraries are run from there")


def _free(place: str) -> int:
    return shutil.disk_usage(place).free


def _used(tree: str) -> float:
    try:
        return os.stat(os.path.join(tree, MARK)).st_mtime
    except OSError:
        return 0.0


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _mark(tree: str, *, synced: bool) -> None:
    new = os.path.join(tree, f"{MARK}.new")
    with open(new, "w", encoding="utf-8") as stream:
        json.dump({"boot": _boot(), "synced": synced}, stream)
    os.rename(new, os.path.join(tree, MARK))


def _sync(tree: str) -> None:
    """Have the disk write what was unpacked, behind the start; until then another boot of the machine trusts nothing of it."""
    with suppress(OSError):
        handle = os.open(tree, os.O_RDONLY)
        try:
            if ctypes.CDLL(None).syncfs(handle) == 0:
                _mark(tree, synced=True)
        finally:
            os.close(handle)


def _cores() -> int:
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max", encoding="ascii") as stream:
        quota, period = stream.read().split()
        cores = min(cores, max(1, -(-int(quota) // int(period))))
    return cores


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"vllm_env: {line}\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> int:
    """Do a worker's job, or unpack the parts of a model's folder and print where they are."""
    try:
        if arguments[0] == "part":
            unpack_part(*arguments[1:])
        elif arguments[0] == "base":
            copy_base(*arguments[1:])
        else:
            sys.stdout.write(f"{use(os.path.abspath(arguments[0]))}\n")
    except UnpackError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except (shutil.Error, OSError) as error:
        sys.stderr.write(f"{error.errno or 5} {error.strerror or error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
