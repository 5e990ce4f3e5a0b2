"""The first process of a container: runs its command and ends the whole group with the runner.

    python -I -S init.py LIFELINE COMMAND [ARG …]

LIFELINE is the read end of a pipe that the runner alone holds open for writing. When it closes
(the runner is gone, however it ended), every process of this group is killed. SIGTERM goes on to
the command alone, as Kubernetes signals a container's first process; the exit code is the
command's, or 128 + its signal. Runs by path, without site-packages: it starts in milliseconds.
"""

import os
import signal
import sys
import threading
from types import FrameType

NOT_FOUND = 127
"""Exit code when the command cannot be executed, as shells have it."""


def main(lifeline: int, command: list[str]) -> int:
    """Run `command`; the exit code to end with."""
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
    threading.Thread(target=_kill_group_without, args=(lifeline,), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _kill_group_without(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    # At once: the thread on the lifeline must not hold up the end.
    os._exit(main(int(sys.argv[1]), sys.argv[2:]))
