"""The first process of a container: runs the command, and kills the group if the runner ends.

    python -I -S init.py LIFELINE COMMAND [ARG …]

LIFELINE is the read end of a pipe; only the runner holds the write end. When the pipe closes
because the runner has ended, for whatever reason, init sends SIGKILL to every process of its
group. Init forwards SIGTERM to the command alone, as Kubernetes signals only a container's first
process. It exits with the command's exit code, or 128 + the signal that ended the command.
It is run by path and without site-packages, so that it starts in milliseconds.
"""

import os
import signal
import sys
import threading
from types import FrameType

NOT_FOUND = 127
"""Exit code if the command cannot be executed, as in shells."""


def main(lifeline: int, command: list[str]) -> int:
    """Run `command`; returns the exit code for this process."""
    # Fork before the thread starts: the child of a process with threads may deadlock.
    child = os.fork()
    if child == 0:
        os.close(lifeline)
        try:
            os.execvp(command[0], command)  # noqa: S606 - running this command is the purpose
        except OSError as err:
            os.write(2, f"{command[0]}: {err.strerror}\n".encode())
            os._exit(NOT_FOUND)

    def forward(number: int, _frame: FrameType | None) -> None:
        os.kill(child, number)

    signal.signal(signal.SIGTERM, forward)
    threading.Thread(target=_kill_group_at_eof, args=(lifeline,), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _kill_group_at_eof(lifeline: int) -> None:
    # The runner never writes: read() returns only when the write end is closed.
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    # os._exit: end at once, although a thread still reads the lifeline.
    os._exit(main(int(sys.argv[1]), sys.argv[2:]))
