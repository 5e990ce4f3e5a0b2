"""`tandem store`: serves a directory as an HTTP store for KV tensors."""

import asyncio
import logging
import signal
from pathlib import Path
from typing import Any, Final

import click

from tandem_contract.commandline import DURATION, HOST_PORT, HostPort, fail, settings_of
from tandem_contract.durations import format_duration
from tandem_kvstore.server.app import Conditions, StoreSettings
from tandem_kvstore.server.listener import StoreListener

from .options import command

_DEFAULTS: Final = StoreSettings(Path())


@command("store")
@click.option(
    "--listen",
    type=HOST_PORT,
    default=str(_DEFAULTS.listen),
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
    default=_DEFAULTS.capacity_bytes,
    show_default=True,
    help="Most bytes of all objects together; above it the least recently used chunks are removed.",
)
@click.option(
    "--max-object-bytes",
    type=click.IntRange(min=1),
    default=_DEFAULTS.max_object_bytes,
    show_default=True,
    help="Bytes of one object; a larger one is answered with 413.",
)
@click.option(
    "--max-age",
    type=DURATION,
    help="Time after which an unused chunk is removed.  [default: no age limit]",
)
@click.option(
    "--max-connections",
    type=click.IntRange(min=1),
    default=_DEFAULTS.max_connections,
    show_default=True,
    help="Clients connected at once; more wait in the kernel's backlog. An engine opens up to 64.",
)
@click.option(
    "--idle-timeout",
    type=DURATION,
    default=format_duration(_DEFAULTS.idle_timeout),
    show_default=True,
    help="Time without a byte, sent or received, after which a connection is closed.",
)
@click.option(
    "--body-timeout",
    type=DURATION,
    default=format_duration(_DEFAULTS.body_timeout),
    show_default=True,
    help="Time that the body of an upload or a download may take.",
)
@click.option(
    "--drain-timeout",
    type=DURATION,
    default=format_duration(_DEFAULTS.drain_timeout),
    show_default=True,
    help="Time that running requests get at SIGTERM; those that take longer are cut.",
)
@click.option(
    "--no-conditional",
    type=click.Choice(["refuse", "ignore"]),
    help="For tests: treat If-None-Match and If-Match as a store without conditional writes does,"
    " with 501 or by writing in any case.  [default: check them]",
)
def store(**flags: Any) -> None:
    """Serve a directory as an HTTP store for KV tensors.

    Engines use it with the endpoint http://HOST:PORT. It has no access control: run it in a network
    that only engines reach. At SIGTERM it accepts no more connections, and running requests get
    --drain-timeout to end.
    """
    logging.basicConfig(level=logging.WARNING)
    if flags["max_age"] == 0:
        fail("--max-age must be above 0: every chunk is older than that")
    conditions = Conditions(flags["no_conditional"] or "check")
    settings = settings_of(StoreSettings, flags, conditions=conditions)
    try:
        settings.directory.mkdir(parents=True, exist_ok=True)
        asyncio.run(_serve(settings))
    except OSError as err:
        fail(f"cannot serve {settings.directory} on {settings.listen}: {err.strerror or err}")


async def _serve(settings: StoreSettings) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    listener = StoreListener(settings)
    try:
        # The port may have been 0.
        address = HostPort(*await listener.start(*settings.listen))
        click.echo(f"listening on http://{address}")
        await stopped.wait()
    finally:
        await listener.close()
