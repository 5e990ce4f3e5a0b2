"""`tandem up`: runs pools on this machine until interrupted."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import click
from rich.console import Console

from tandem_contract import ports
from tandem_contract.commandline import DURATION, fail, format_duration
from tandem_contract.documents import DocumentError
from tandem_local.errors import SetupError, StartFailed
from tandem_local.pool_files import read_pool_sets
from tandem_local.stack import START_TIMEOUT, Stack

from .options import command, files_option, run_dir_option


def _programs(
    _ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]
) -> dict[str, Path]:
    found = {}
    for value in values:
        name, _, file = value.partition("=")
        if not name or not os.access(file, os.X_OK) or Path(file).is_dir():
            raise click.BadParameter(f"{value!r}: write NAME=FILE, FILE a program that is there")
        found[name] = Path(file).absolute()
    return found


@command("up")
@files_option
@run_dir_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=ports.ENVOY,
    help="Port of 127.0.0.1 to serve on; 0 takes a free one.",
)
@click.option(
    "--start-timeout",
    type=DURATION,
    default=format_duration(START_TIMEOUT),
    help="How long the pods may take to get ready: mostly the loading of weights.",
)
@click.option(
    "--program",
    "programs",
    callback=_programs,
    multiple=True,
    metavar="NAME=FILE",
    help="Run FILE where a pod's command is NAME, as in vllm=/opt/vllm/bin/vllm; repeatable.",
)
def up(
    paths: tuple[Path, ...],
    run_dir: Path | None,
    port: int,
    start_timeout: float,
    programs: dict[str, Path],
) -> None:
    """Run PrefillPools and DecodePools on this machine as processes, with an EPP and Envoy.

    Serves until Ctrl-C. Every pod is run exactly as `tandem render` prints it.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        stack = Stack(
            read_pool_sets(paths),
            port=port,
            run_dir=run_dir,
            console=Console(),
            start_timeout=start_timeout,
            programs=programs,
        )
        asyncio.run(_serve(stack))
    except (DocumentError, SetupError) as err:
        fail(str(err), status=2)
    except StartFailed as err:
        fail(str(err))


async def _serve(stack: Stack) -> None:
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - a coroutine runs in a task
    loop = asyncio.get_running_loop()

    def leave() -> None:
        # A second signal ends this process at once, and its children with it.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, leave)
    try:
        async with stack:
            click.echo(f"Serving at {stack.endpoint}/v1; tandem status shows load; Ctrl-C ends it.")
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        click.echo("Stopped.")
