"""Run a program that receives a signal when the process that started it ends (PR_SET_PDEATHSIG, prctl(2)).

This is a program of its own and not a ``preexec_fn``: code between fork and exec may abort in a process with threads.
The fork handlers of gRPC and py-rattler did (seen: SIGABRT ended a child before it became the program).

:func:`vllm_env.base.process.start` runs ``python -I -S launch.py PARENT SIGNAL PIPE CHANGES PROGRAM ARGUMENT...``:

    PARENT    the process id of the parent
    SIGNAL    the number of the signal
    PIPE      a file descriptor that receives the error number if the program does not start
    CHANGES   the changes to the environment as a JSON object; null removes a variable
"""

import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then become the program."""
    parent, number, pipe, changes, *program = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    # The parent ended before prctl() took effect, so no signal would come.
    if os.getppid() != int(parent):
        sys.exit(1)
    for ignored in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):  # Python ignores these signals, and exec would pass that on to the program
        signal.signal(ignored, signal.SIG_DFL)
    os.set_inheritable(int(pipe), False)  # noqa: FBT003 - the standard library's order
    for name, value in json.loads(changes).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        os.execvp(program[0], program)  # noqa: S606 - no shell is wanted
    except OSError as error:
        os.write(int(pipe), str(error.errno).encode())
        sys.exit(1)


if __name__ == "__main__":
    main()
