import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tandem_local.process import Process, tail

from .pods import group_is_gone, until

pytestmark = pytest.mark.component
ROOT = Path(__file__).parents[2]


async def start_driver(tmp_path: Path, dispositions: str) -> asyncio.subprocess.Process:
    """A runner process with one pod. `dispositions`: an option of `env` about signals.

    A process inherits ignored signals from its parent: under nohup these tests, and the driver
    that they start, would ignore SIGHUP. So each test sets the disposition of its driver.
    """
    return await asyncio.create_subprocess_exec(
        *("env", dispositions, sys.executable, "-m", "tests.local.driver", str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=ROOT,
    )


async def running_group(driver: asyncio.subprocess.Process) -> int:
    """The process group of the driver's pod, once it runs."""
    assert driver.stdout is not None
    group = int(await driver.stdout.readline())
    assert not group_is_gone(group)
    return group


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_nothing_outlives_the_runner(tmp_path: Path, number: signal.Signals) -> None:
    driver = await start_driver(tmp_path, "--default-signal=HUP,INT,TERM")
    group = await running_group(driver)
    driver.send_signal(number)
    await driver.wait()
    await until(lambda: group_is_gone(group))


async def test_a_runner_started_with_nohup_ignores_sighup(tmp_path: Path) -> None:
    driver = await start_driver(tmp_path, "--ignore-signal=HUP")
    group = await running_group(driver)
    driver.send_signal(signal.SIGHUP)
    driver.send_signal(signal.SIGTERM)
    # The kernel delivers SIGHUP (1) before SIGTERM (15).
    assert await driver.wait() == -signal.SIGTERM
    await until(lambda: group_is_gone(group))


async def run(tmp_path: Path, *command: str) -> tuple[int, list[str]]:
    log = tmp_path / "log"
    process = await Process.start(command, env=dict(os.environ), cwd=None, log=log)
    return await process.wait(), tail(log)


async def test_exit_code_and_output(tmp_path: Path) -> None:
    assert await run(tmp_path, "sh", "-c", "echo out; echo err >&2; exit 5") == (5, ["out", "err"])


async def test_the_exit_code_of_a_killed_command_is_128_plus_the_signal(tmp_path: Path) -> None:
    assert await run(tmp_path, "sh", "-c", "kill -9 $$") == (137, [])


async def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    code, log = await run(tmp_path, "/no/such/program")
    assert (code, log) == (127, ["/no/such/program: No such file or directory"])


async def test_children_of_a_command_are_killed_when_it_ends(tmp_path: Path) -> None:
    process = await Process.start(
        ("sh", "-c", "sleep 600 & exit 0"), env=dict(os.environ), cwd=None, log=tmp_path / "log"
    )
    assert await process.wait() == 0
    await until(lambda: group_is_gone(process.pid))


async def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    await run(tmp_path, "true")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await run(tmp_path, "true")
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff\n" + b"\n".join(b"line %d" % i for i in range(100)))
    assert tail(log, 2) == ["line 98", "line 99"]
    assert tail(tmp_path / "none") == []
