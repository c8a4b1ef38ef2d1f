"""Makes the environment work without activation.

This file is copied into site-packages as ``_vllm_env_runtime.py``. A ``.pth`` file runs it in every
interpreter of the environment, before all others. It imports only modules that are loaded already.

Triton sets PATH and LD_LIBRARY_PATH for its stub, and nothing else: since 25.08 it does not source
``activate``. The stub does not configure the locale. Its children inherit all of this.
"""

import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import select


def _use_utf8() -> None:
    """Make UTF-8 the encoding of files and of the standard streams."""
    import _locale

    # The stub embeds Python without a locale. open() then decodes ASCII, and `import torch` fails.
    if _locale.nl_langinfo(_locale.CODESET).upper() != "UTF-8":
        for name in ("C.UTF-8", "C.utf8", "en_US.UTF-8"):
            try:
                _locale.setlocale(_locale.LC_CTYPE, name)
            except Exception:  # noqa: BLE001, S112 - _locale.Error: the system lacks it
                continue
            os.environ["LC_ALL"] = name
            break
    # The streams were opened before. Lines of vLLM's log with a dash or an arrow would be lost.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    os.environ["PYTHONUTF8"] = "1"


def _keep_others_out(prefix: str) -> None:
    """Ignore other packages: the user's, those of PYTHONPATH and of the server's own Python."""
    # 1) In the children.
    os.environ["PYTHONNOUSERSITE"] = "1"
    os.environ.pop("PYTHONHOME", None)
    names = os.environ.pop("PYTHONPATH", "").split(os.pathsep)
    # 2) In this interpreter. site.py makes the paths in sys.path absolute.
    foreign = {os.path.abspath(name) for name in names if name}
    user_packages = os.path.join(os.path.expanduser("~"), ".local", "lib") + os.sep
    own = prefix + os.sep
    sys.path[:] = [
        path
        for path in sys.path
        if path.startswith(own) or not (path in foreign or path.startswith(user_packages))
    ]


def _give_children_their_libraries(prefix: str) -> None:
    """Take the environment's libraries off LD_LIBRARY_PATH; put its programs first in PATH."""
    # Triton puts env/lib first for the stub. With it, a system compiler or git may not even start.
    own = os.path.realpath(os.path.join(prefix, "lib"))
    paths = os.environ.pop("LD_LIBRARY_PATH", "").split(":")
    paths = [path for path in paths if path and os.path.realpath(path) != own]
    if paths:
        os.environ["LD_LIBRARY_PATH"] = ":".join(paths)
    programs = os.path.join(prefix, "bin")
    others = os.environ.get("PATH", os.defpath).split(os.pathsep)
    others = [folder for folder in others if folder != programs]
    os.environ["PATH"] = os.pathsep.join([programs, *others])


def _set_variables(prefix: str) -> None:
    """Set the environment's variables; one that is set already keeps its value."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_vllm_env_variables.txt")
    # Without the file, only the cache of compiled kernels is shared with other environments. An
    # exception would end this hook before its last step, and print a traceback at every start.
    try:
        with open(file, encoding="utf-8") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, value = line.partition("=")
        value = value.replace("{prefix}", prefix).replace("{cache}", cache)
        os.environ.setdefault(name, value)


def _die_with_owner() -> None:
    """End this process as soon as the stub that owns it has ended."""
    # vLLM's EngineCore and Workers outlive a killed parent, and hold memory.
    owner = os.environ.get("TRITON_VLLM_OWNER_PID", "")
    has_owner = owner.isdigit() and int(owner) != os.getpid()
    if not has_owner or not hasattr(os, "pidfd_open"):
        return
    # Ray takes the variables to other machines, where the number means another process.
    if os.environ.get("TRITON_VLLM_OWNER_PLACE", _process_space()) != _process_space():
        return
    try:
        handle = os.pidfd_open(int(owner))
    except ProcessLookupError:
        # The owner has ended already.
        os._exit(1)
    except OSError:
        # Another pid namespace, or no permission: this process cannot see the owner's end.
        return
    # Not imported in the thread: after a fork during the import, the child's thread would wait for
    # its end for ever.
    import _thread
    import select

    poll = select.poll()
    poll.register(handle, select.POLLIN)
    _thread.start_new_thread(_wait_for_end, (poll,))


def _process_space() -> str:
    """Return the machine's boot and the pid namespace, in which a process id means one process.

    It is "" if they are not known. The model sets TRITON_VLLM_OWNER_PLACE to its own.
    """
    # As `process_space` of the model's base/processes.py.
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
    """End this child right after its work and exit handlers, as multiprocessing ends a fork."""
    # Patch exit-of-children: Python takes all objects of a spawned process apart, which took 2.3 s
    # for torch (23 November 2026; multiprocessing/spawn.py calls sys.exit, popen_fork.py os._exit).
    # It may go when vLLM's processes end within a few tenths of a second without it.
    import atexit
    from multiprocessing import process, util

    # Runs the child's work and returns its exit status.
    bootstrap = process.BaseProcess._bootstrap  # type: ignore[attr-defined]  # noqa: SLF001

    def run(*arguments: object) -> None:
        # The child's own forks end as usual.
        process.BaseProcess._bootstrap = bootstrap  # type: ignore[attr-defined]  # noqa: SLF001
        status = bootstrap(*arguments)
        atexit._run_exitfuncs()  # noqa: SLF001
        util._flush_std_streams()  # type: ignore[attr-defined]  # noqa: SLF001
        os._exit(status)

    process.BaseProcess._bootstrap = run  # type: ignore[attr-defined]  # noqa: SLF001


def _collect_seldom() -> None:
    """Let the garbage collector run less often."""
    import gc

    # The import of vLLM makes a million objects that stay. With Python's threshold of 700, the
    # collector took a fifth of its 4.7 s.
    gc.set_threshold(50_000, 10, 10)


def _start() -> None:
    """Prepare this interpreter, and the variables that its children inherit."""
    site_packages = os.path.dirname(os.path.abspath(__file__))
    prefix = os.path.abspath(os.path.join(site_packages, "..", "..", ".."))
    # The model sets this variable for vLLM's processes.
    is_child = "TRITON_VLLM_OWNER_PID" in os.environ
    if is_child or "triton_python_backend_stub" in os.readlink("/proc/self/exe"):
        # Bytecode next to model.py changes the model's folder, and Triton loads the model again.
        sys.dont_write_bytecode = True
    _use_utf8()
    _collect_seldom()
    _die_with_owner()
    # Threads do not survive a fork, and vLLM also forks.
    os.register_at_fork(after_in_child=_die_with_owner)
    _keep_others_out(prefix)
    _give_children_their_libraries(prefix)
    _set_variables(prefix)
    # multiprocessing starts a spawned process with this argument.
    if is_child and "--multiprocessing-fork" in sys.orig_argv:
        _end_as_a_fork()


_start()
