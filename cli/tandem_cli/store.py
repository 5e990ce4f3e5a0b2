"""`tandem store`: serves a directory as an HTTP store for KV tensors."""

import asyncio
import logging
import signal
from pathlib import Path

import click
from aiohttp import web

from tandem_contract.commandline import DURATION, HOST_PORT, HostPort, fail
from tandem_kvstore.server.app import (
    DEFAULT_CAPACITY,
    DEFAULT_MAX_OBJECT,
    Conditions,
    StoreServer,
    StoreSettings,
)

from .options import command


@command("store")
@click.option(
    "--listen",
    type=HOST_PORT,
    default="0.0.0.0:8080",
    show_default=True,
    help="Address to listen on.",
)
@click.option(
    "--dir",
    "directory",
    required=True,
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    help="Directory of the objects; created if it does not exist.",
)
@click.option(
    "--capacity-bytes",
    type=click.IntRange(min=1),
    default=DEFAULT_CAPACITY,
    show_default=True,
    help="Most bytes of all objects together; above it the least recently used chunks are removed.",
)
@click.option(
    "--max-object-bytes",
    type=click.IntRange(min=1),
    default=DEFAULT_MAX_OBJECT,
    show_default=True,
    help="Bytes of one object; a larger one is answered with 413.",
)
@click.option(
    "--max-age",
    type=DURATION,
    help="Time after which an unused chunk is removed.  [default: no age limit]",
)
@click.option(
    "--no-conditional",
    type=click.Choice(["refuse", "ignore"]),
    help="For tests: treat If-None-Match and If-Match as a store without conditional writes does,"
    " with 501 or by writing in any case.  [default: check them]",
)
def store(
    listen: HostPort,
    directory: Path,
    *,
    capacity_bytes: int,
    max_object_bytes: int,
    max_age: float | None,
    no_conditional: str | None,
) -> None:
    """Serve a directory as an HTTP store for KV tensors.

    Engines use it with the endpoint http://HOST:PORT. It has no access control: run it in a network
    that only engines reach. At SIGTERM it finishes running downloads for at most two minutes, and
    ends uploads that are incomplete after one minute.
    """
    logging.basicConfig(level=logging.WARNING)
    settings = StoreSettings(
        directory,
        max_object_bytes,
        capacity_bytes,
        max_age,
        conditions=Conditions(no_conditional or "check"),
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        asyncio.run(_serve(settings, listen))
    except OSError as err:
        fail(f"cannot serve {directory} on {listen}: {err.strerror or err}")


async def _serve(settings: StoreSettings, listen: HostPort) -> None:
    runner = web.AppRunner(StoreServer(settings).app(), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, listen.host, listen.port, backlog=1024)
        await site.start()
        # The port may have been 0.
        host, port = runner.addresses[0][:2]
        click.echo(f"listening on http://{host}:{port}")
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await stopped.wait()
    finally:
        await runner.cleanup()
