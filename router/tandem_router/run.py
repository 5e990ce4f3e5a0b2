"""One router process: binds its sockets, serves until a signal, drains, exits.

uvloop.run(run(settings, epp, file, configuration))
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tandem_contract.commandline import HostPort
from tandem_contract.documents import DocumentError
from tandem_epp.configuration import Configuration, FileWatch, log_notices
from tandem_epp.settings import Settings as EppSettings
from tandem_sidecar.process.run import StopSignals, serve, wait_for_first
from tandem_sidecar.settings import Settings

from .components import Components
from .configuration import load

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunningRouter:
    """A started router; the addresses have the ports that were bound."""

    listen: HostPort
    admin: HostPort
    components: Components


@asynccontextmanager
async def start(
    settings: Settings, epp: EppSettings, configuration: Configuration
) -> AsyncIterator[RunningRouter]:
    """A router that listens, stopped on exit. Raises CannotListen, with nothing left started."""
    async with AsyncExitStack() as stack:
        components = Components(settings, epp, configuration)
        components.open(stack)
        listen, admin = await serve(components, settings, None, stack)
        yield RunningRouter(listen, admin, components)


async def run(
    settings: Settings, epp: EppSettings, file: Path, configuration: Configuration
) -> None:
    """Serve with `configuration` of `file` until a signal, drain, return. Raises CannotListen."""
    # Installed before anything is started: a signal during the start leads to a drain, too.
    signals = StopSignals()
    signals.install()
    async with start(settings, epp, configuration) as running:
        components = running.components

        def reload() -> None:
            new = reloaded(file)
            if new is not None:
                components.apply(new)

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, reload)
        following = loop.create_task(FileWatch(file, reload).run())
        _print_ready(running, configuration)
        await signals.drain.wait()
        components.lifecycle.drain()
        # After a second signal the stack of `start` unwinds and cuts the requests that still run.
        await wait_for_first(components.lifecycle.idle(), signals.exit_now.wait())
        following.cancel()


def reloaded(file: Path) -> Configuration | None:
    """The configuration that `file` holds now; None, and a line in the log, if it is unusable."""
    try:
        configuration = load(file, os.environ)
    except DocumentError as err:
        log.error("the configuration was not reloaded, the last good one stays: %s", err)
        return None
    log.info("%s: reloaded, %d backends", file, len(configuration.router.backends))
    log_notices(configuration)
    return configuration


def _print_ready(running: RunningRouter, configuration: Configuration) -> None:
    """Print the readiness line, for people and for the program that started the process."""
    print(  # noqa: T201 - the readiness line
        f"tandem-router: serving on {running.listen}, admin on {running.admin},"
        f" {len(configuration.router.backends)} backends",
        file=sys.stderr,
        flush=True,
    )
