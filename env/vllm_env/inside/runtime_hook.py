"""Makes the environment work without activation; a ``.pth`` file runs this in every interpreter of it, first of all.

Embedded or spawned, an interpreter started by Triton has no more than PATH and LD_LIBRARY_PATH: the stub does not
configure the locale, nothing sources ``activate``, and children inherit what was meant for the stub alone.
This file is copied into site-packages as ``_vllm_env_runtime.py``; it imports what is already loaded and nothing else.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import select


def _use_utf8() -> None:
    """The stub initialises Python without a locale, so open() would decode ASCII and ``import torch`` fail."""
    import _locale

    if _locale.nl_langinfo(_locale.CODESET).upper() != "UTF-8":
        for name in ("C.UTF-8", "C.utf8", "en_US.UTF-8"):
            try:
                _locale.setlocale(_locale.LC_CTYPE, name)
            except Exception:  # noqa: BLE001, S112 - _locale.Error: the system lacks it
                continue
            os.environ["LC_ALL"] = name
            break
    # They were opened before this runs: what vLLM logs with a dash or an arrow in it, also in a fork, would be lost.
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "encoding", "utf-8").lower() != "utf-8" and hasattr(
            stream, "reconfigure"
        ):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    os.environ["PYTHONUTF8"] = "1"


def _keep_others_out(prefix: str) -> None:
    """Packages of the user's site, of PYTHONPATH and of the server's own Python must not shadow those pinned here."""
    os.environ["PYTHONNOUSERSITE"] = "1"
    foreign = {
        os.path.abspath(p) for p in os.environ.pop("PYTHONPATH", "").split(os.pathsep) if p
    }  # as site has them
    home = os.path.join(os.path.expanduser("~"), ".local", "lib") + os.sep
    own = prefix + os.sep
    sys.path[:] = [
        p for p in sys.path if p.startswith(own) or not (p in foreign or p.startswith(home))
    ]
    os.environ.pop("PYTHONHOME", None)


def _give_children_their_libraries(prefix: str) -> None:
    """LD_LIBRARY_PATH has ``env/lib`` first for the stub; a system compiler or git started with it may not even run."""
    own = os.path.join(prefix, "lib")
    paths = [
        p
        for p in os.environ.get("LD_LIBRARY_PATH", "").split(":")
        if p and os.path.realpath(p) != os.path.realpath(own)
    ]
    os.environ.pop("LD_LIBRARY_PATH", None)
    if paths:
        os.environ["LD_LIBRARY_PATH"] = ":".join(paths)
    programs = os.path.join(prefix, "bin")
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([programs, *(p for p in path if p != programs)])


def _set_variables(prefix: str) -> None:
    """Set what the packages' ``activate.d`` scripts would have set; a variable that is there already stays."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_vllm_env_variables.txt")
    if os.path.exists(file):
        with open(file, encoding="utf-8") as lines:
            for line in lines:
                name, _, value = line.rstrip("\n").partition("=")
                os.environ.setdefault(
                    name, value.replace("{prefix}", prefix).replace("{cache}", cache)
                )


def _die_with_owner() -> None:
    """End this process when the stub that owns it is gone: vLLM's EngineCore and Workers outlive a killed parent."""
    owner = os.environ.get("TRITON_VLLM_OWNER_PID", "")
    if not owner.isdigit() or int(owner) == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    if os.environ.get("TRITON_VLLM_OWNER_PLACE", _place()) != _place():
        return  # Ray has brought the variables to another machine, whose process ids are others
    try:
        handle = os.pidfd_open(int(owner))
    except ProcessLookupError:
        os._exit(1)
    except (
        OSError
    ):  # another pid namespace, or no permission: the owner's death cannot be seen from here
        return
    # Imported here and not in the thread: a fork in the midst of that would leave the child's thread waiting for the import.
    import _thread
    import select

    poll = select.poll()
    poll.register(handle, select.POLLIN)
    _thread.start_new_thread(_wait_for_end, (poll,))


def _place() -> str:
    """Where a process id means the same process; what the adapter's `guard.place` returns."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _wait_for_end(poll: "select.poll") -> None:
    while not poll.poll(None):
        pass
    os.kill(os.getpid(), 9)  # SIGKILL


def _end_as_a_fork() -> None:
    """End this child once its work and exit handlers are done, as multiprocessing ends a fork: taking torch apart takes 2.3 s."""
    import atexit
    from multiprocessing import process, util

    bootstrap = process.BaseProcess._bootstrap  # type: ignore[attr-defined]  # noqa: SLF001

    def run(*arguments: object) -> None:
        process.BaseProcess._bootstrap = bootstrap  # type: ignore[attr-defined]  # noqa: SLF001 - for forks of its own
        status = bootstrap(*arguments)
        atexit._run_exitfuncs()  # noqa: SLF001
        util._flush_std_streams()  # type: ignore[attr-defined]  # noqa: SLF001
        os._exit(status)

    process.BaseProcess._bootstrap = run  # type: ignore[attr-defined]  # noqa: SLF001


def _collect_seldom() -> None:
    """Importing vLLM makes a million objects that stay: at Python's threshold of 700, a fifth of its 4.7 s was collection."""
    import gc

    gc.set_threshold(50_000, 10, 10)


def _start() -> None:
    prefix = os.path.abspath(
        os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")
    )
    if (
        "triton_python_backend_stub" in os.readlink("/proc/self/exe")
        or "TRITON_VLLM_OWNER_PID" in os.environ
    ):  # its child
        sys.dont_write_bytecode = (
            True  # beside model.py: Triton takes the folder for changed and starts a second engine
        )
    _use_utf8()
    _collect_seldom()
    _die_with_owner()
    os.register_at_fork(
        after_in_child=_die_with_owner
    )  # threads do not survive a fork, and vLLM also forks
    _keep_others_out(prefix)
    _give_children_their_libraries(prefix)
    _set_variables(prefix)
    if (
        "--multiprocessing-fork" in sys.orig_argv and "TRITON_VLLM_OWNER_PID" in os.environ
    ):  # spawned by the stub
        _end_as_a_fork()


_start()
