import asyncio
from time import monotonic

import pytest

from tandem_loadtest.run.events import LINES, Commands
from tandem_loadtest.run.options import TimedCommand

pytestmark = pytest.mark.component


def at(time: float, command: str) -> TimedCommand:
    return TimedCommand(at=time, command=command)


async def test_a_command_is_an_event_with_its_status_and_its_last_lines(tmp_path: object) -> None:
    fifo = f"{tmp_path}/done"
    script = f"for i in $(seq 50); do echo line $i; done; printf end >&2; echo > {fifo}; exit 3"
    commands = (at(0.02, script), at(0.01, "true"))
    async with Commands(commands) as runner:
        await (await asyncio.create_subprocess_exec("mkfifo", fifo)).wait()
        runner.start(monotonic())
        await (await asyncio.create_subprocess_exec("cat", fifo)).wait()
        await asyncio.wait(runner.tasks)
        events, warnings = await runner.stop()
    assert warnings == []
    assert [(event.command, event.exit_status) for event in events] == [("true", 0), (script, 3)]
    assert events[1].at >= 0.02
    assert events[1].seconds is not None
    *lines, last = events[1].output.splitlines()
    assert lines == [f"line {number}" for number in range(52 - LINES, 51)]
    assert last == "end"


async def test_a_command_that_still_runs_at_the_end_is_stopped_with_its_children(
    tmp_path: object,
) -> None:
    fifo = f"{tmp_path}/alive"
    await (await asyncio.create_subprocess_exec("mkfifo", fifo)).wait()
    # The child holds the pipe open until it ends.
    command = f"(echo begun; sleep 1000) > {fifo} & wait"
    async with Commands((at(0.0, command),)) as runner:
        runner.start(monotonic())
        reader = await asyncio.create_subprocess_exec("cat", fifo, stdout=asyncio.subprocess.PIPE)
        assert reader.stdout
        assert await reader.stdout.readline() == b"begun\n"
        (event,), _ = await runner.stop()
        assert await reader.stdout.read() == b""
        await reader.wait()
    assert (event.seconds, event.exit_status) == (None, None)


async def test_a_command_after_the_end_is_a_warning() -> None:
    async with Commands((at(1000.0, "true"),)) as runner:
        runner.start(monotonic())
        events, (warning,) = await runner.stop()
    assert events == []
    assert warning == "--at 1000s 'true' was not run: the run had ended before"
