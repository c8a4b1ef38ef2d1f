"""Run a program that receives a signal when its parent, the process that started it, ends.

This is a program of its own and not a ``preexec_fn``: code between fork and exec may abort in a
process with threads. The fork handlers of gRPC and py-rattler did: SIGABRT ended a child before it
became the program.

``base.process.start`` runs ``launch.py PARENT SIGNAL PIPE CHANGES PROGRAM ARGUMENT...``:

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
    # prctl(2) has no wrapper in the standard library. exec keeps this setting.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    # The parent ended before prctl() took effect, so no signal would come.
    if os.getppid() != int(parent):
        sys.exit(1)
    # Python ignores these signals, and exec would pass that on: a closed pipe would end no program.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    # exec then closes the pipe, which tells the parent that the program has started.
    os.set_inheritable(int(pipe), False)  # noqa: FBT003 - the standard library's order
    for name, value in json.loads(changes).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # execvp() looks in the PATH that the program gets, not in the packager's.
    try:
        os.execvp(program[0], program)  # noqa: S606 - no shell is wanted
    except OSError as error:
        os.write(int(pipe), str(error.errno).encode())
        sys.exit(1)


if __name__ == "__main__":
    main()
