"""Becomes a program that gets a signal when the process that started it ends (PR_SET_PDEATHSIG, prctl(2)).

A program of its own and no ``preexec_fn``: what runs between fork and exec may abort in a process with threads, and
gRPC's and py-rattler's fork handlers did (seen: a child ended by SIGABRT before it ever was the program).

Started by :func:`vllm_env.base.process.start` as ``python -I -S launch.py PARENT SIGNAL PIPE CHANGES PROGRAM ARGUMENT...``:
the process id of the parent, the signal's number, a file descriptor that receives the error number if the program does
not start, and the changes to the environment as a JSON object, where null removes a variable.
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
    if os.getppid() != int(parent):
        sys.exit(1)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and an ignored signal outlives exec
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
