"""One router process: binds its sockets, serves until a signal, drains, exits.

uvloop.run(run(settings, epp, file, configuration))
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tandem_contract.api_keys import ApiKeys
from tandem_contract.commandline import HostPort
from tandem_epp.process.configuration import Configuration, FileWatch
from tandem_epp.process.discovery import Discovery, connect
from tandem_epp.replicas.peers.channel import PeerChannel
from tandem_epp.settings import Settings as EppSettings
from tandem_epp.supervised import run_until_one_ends
from tandem_sidecar.process.listen import WorkerSockets
from tandem_sidecar.process.run import StopSignals, serve, wait_for_first
from tandem_sidecar.settings import Settings

from .components import Components
from .configuration import reloaded
from .peers import WorkerPeers
from .ready import print_ready

log = logging.getLogger(__name__)


_INFORMED_SECONDS: Final = 0.02
"""Seconds between two looks at whether the other workers have told what they know."""


@dataclass(frozen=True)
class Worker:
    """What a process is given that is one of several workers."""

    sockets: WorkerSockets
    peers: WorkerPeers


@dataclass(frozen=True)
class RunningRouter:
    """A started router; the addresses have the ports that were bound."""

    listen: HostPort
    admin: HostPort
    components: Components
    discovery: Discovery | None
    """Keeps the backends current while it runs; None: the file lists them."""


@asynccontextmanager
async def start(
    settings: Settings,
    epp: EppSettings,
    configuration: Configuration,
    worker: Worker | None = None,
    api_keys: ApiKeys | None = None,
) -> AsyncIterator[RunningRouter]:
    """A router that listens, stopped on exit. Raises CannotListen and NotConfigured (no cluster),
    with nothing left started."""
    async with AsyncExitStack() as stack:
        sockets, peers = (None, None) if worker is None else (worker.sockets, worker.peers)
        components = Components(settings, epp, configuration, peers, api_keys)
        discovery = None
        if epp.pods is not None:
            discovery = components.find_pods(await connect(stack), epp)
        components.open(stack)
        if components.channel is not None:
            await stack.enter_async_context(components.channel.running())
            # Before the first request, so that others' placements are known to its decision. In a
            # cluster pods must be known first: no request comes before `Readiness`.
            if discovery is None:
                await _until_informed(components.channel)
        if components.sharing is not None and worker is None:
            stack.callback(components.sharing.fleet.leave)
        listen, admin = await serve(components, settings, sockets, stack)
        yield RunningRouter(listen, admin, components, discovery)


async def _until_informed(channel: PeerChannel) -> None:
    """Wait for the snapshots of the other workers, at most `peers.channel.JOIN_SECONDS`."""
    while not channel.is_informed:  # noqa: ASYNC110 - it may become so by time alone
        await asyncio.sleep(_INFORMED_SECONDS)


async def run(
    settings: Settings,
    epp: EppSettings,
    file: Path,
    configuration: Configuration,
    worker: Worker | None = None,
    *,
    drain_delay: float = 0.0,
    api_keys: ApiKeys | None = None,
) -> None:
    """Serve with `configuration` of `file` until a signal, drain, return. `drain_delay`: seconds
    between both. `api_keys`: of the clients that are served; None: all are. Raises CannotListen and
    NotConfigured."""
    # Installed before anything is started: a signal during the start leads to a drain, too.
    signals = StopSignals()
    if worker is None:
        signals.install()
    else:
        signals.install_in_worker()
    async with start(settings, epp, configuration, worker, api_keys) as running:
        components = running.components

        def reload() -> None:
            new = reloaded(file, lists_backends=epp.lists_backends, is_worker=worker is not None)
            if new is not None:
                components.apply(new)

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, reload)
        followed: list[Coroutine[Any, Any, None]] = []
        if running.discovery is not None:
            followed.append(running.discovery.run())
        if epp.mutual_tls is not None:
            reload_tls = components.decisions.load_mutual_tls
            followed.append(FileWatch(epp.mutual_tls, reload_tls).run())
        if api_keys is not None:
            followed.append(FileWatch(api_keys.directory, api_keys.reload).run())
        if worker is None:
            followed.append(FileWatch(file, reload).run())
            print_ready(running.listen, running.admin, configuration, 1)
        else:
            # The supervisor waits for this byte. It follows the file for all workers.
            os.write(sys.stdout.fileno(), b"\n")
        # Pods and files are followed during the drain, too: streams move from backends that end.
        await run_until_one_ends(_until_drained(signals, components, drain_delay), *followed)


async def _until_drained(signals: StopSignals, components: Components, delay: float) -> None:
    """Wait for the signal, and then `delay` seconds, in which clients learn of the end: those that
    are told to connect to this router no more, and those that keep connections to it. Then drain
    until no request runs, or a second signal comes: the stack of `start` cuts those that still
    run."""
    await signals.drain.wait()
    if delay > 0:
        components.leave()
        await wait_for_first(asyncio.sleep(delay), signals.exit_now.wait())
        components.server.close_idle()
    components.lifecycle.drain()
    await components.decisions.flow.close()
    await wait_for_first(components.lifecycle.idle(), signals.exit_now.wait())
