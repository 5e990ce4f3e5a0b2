"""`tandem up`: runs pools on this machine until interrupted."""

import asyncio
import logging
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from tandem_contract.commandline import DURATION, fail, format_duration
from tandem_contract.config import DisaggregatedServing
from tandem_contract.documents import Document, DocumentError
from tandem_epp.llmd.plugins.config import load_scheduling
from tandem_epp.process.configuration import FileWatch
from tandem_local.errors import SetupError, StartFailed
from tandem_local.pool_files import read_documents, read_pool_sets
from tandem_local.stack import START_TIMEOUT, Stack
from tandem_operator.resources.pools import Pools

from .options import command, files_option, port_option, run_dir_option

_PATH: Final = "spec.routing.epp.config"
_RENDERED: Final = ("backends", "disaggregated_serving")
"""Sections of the EPP's file that follow from the pools, whatever the configuration says."""
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
"""SIGHUP keeps its disposition. Closing the terminal ends this process, and the init processes then
kill the pods; under nohup the stack keeps running."""


def _parse_programs(
    _ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]
) -> dict[str, Path]:
    programs = {}
    for value in values:
        name, _, file = value.partition("=")
        if not name or not os.access(file, os.X_OK) or Path(file).is_dir():
            raise click.BadParameter(f"{value!r}: write NAME=FILE with an executable FILE")
        # Absolute: pods run in directories of their own.
        programs[name] = Path(file).absolute()
    return programs


@command("up")
@files_option
@run_dir_option
@port_option
@click.option(
    "--start-timeout",
    type=DURATION,
    default=format_duration(START_TIMEOUT),
    help="Time limit for all pods to become ready; loading weights takes most of it.",
)
@click.option(
    "--program",
    "programs",
    callback=_parse_programs,
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

    Serves until Ctrl-C. It runs every pod exactly as `tandem render` prints it. When the files
    change, routing settings such as spec.routing.split apply at once; other changes need a restart.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        stack = Stack(
            _read(paths),
            port=port,
            run_dir=run_dir,
            console=Console(),
            start_timeout=start_timeout,
            programs=programs,
        )
        asyncio.run(_serve(stack, paths))
    except (DocumentError, SetupError) as err:
        fail(str(err), status=2)
    except StartFailed as err:
        fail(str(err))


def _read(paths: tuple[Path, ...]) -> Pools:
    """The pools in the files. Raises DocumentError, also for what the EPP would refuse."""
    pool_sets = read_pool_sets(paths)
    check_epp_configs(read_documents(paths))
    return pool_sets


def _update_routing(stack: Stack, paths: tuple[Path, ...]) -> None:
    """Apply changed files as far as that needs no other pods."""
    try:
        is_applied = stack.update_routing(_read(paths))
    except DocumentError as err:
        click.echo(f"The changed pools are not used: {err}", err=True)
        return
    if is_applied:
        click.echo("Applied the settings of the changed pools.")
    else:
        click.echo("The changed pools need other pods: restart tandem up to use them.", err=True)


async def _serve(stack: Stack, paths: tuple[Path, ...]) -> None:
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - a coroutine runs in a task
    loop = asyncio.get_running_loop()

    def stop() -> None:
        # A second signal then has its default effect: it ends this process, and with it the pods.
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
        task.cancel()

    # Made before the start, which takes long: a change meanwhile is noticed after it.
    watches = [FileWatch(path, lambda: _update_routing(stack, paths)) for path in paths]
    for number in _STOP_SIGNALS:
        # Cancels the task, so that `async with` below stops the pods.
        loop.add_signal_handler(number, stop)
    try:
        async with stack:
            click.echo(
                f"Serving at {stack.endpoint}/v1; tandem status shows the load; Ctrl-C stops it."
            )
            async with asyncio.TaskGroup() as tasks:
                for watch in watches:
                    tasks.create_task(watch.run())
    except asyncio.CancelledError:
        click.echo("Stopped.")


def check_epp_configs(documents: Iterable[Document]) -> None:
    """Raises DocumentError, with the line in the pool's file, for the first configuration that the
    EPP would refuse. `documents` are valid pools.

    The pools' schema lets any object pass as `spec.routing.epp.config`. An EPP that runs logs one
    that it cannot use and keeps its last one; a new EPP does not start.
    """
    for document in documents:
        config = document.part(_PATH)
        if config.data is not None:
            fields = {key: value for key, value in config.data.items() if key not in _RENDERED}
            load_scheduling(config, fields, DisaggregatedServing())
