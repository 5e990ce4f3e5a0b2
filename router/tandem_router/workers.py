"""Several router processes on one port, and the supervisor that keeps them running.

    await supervise(settings, file, configuration, arguments)

Each worker is a whole router. They accept from the same listening socket, and tell each other what
they place and learn by the channel between an EPP's replicas (`tandem_epp.replicas.peers`), over
loopback. The supervisor is the sidecar's: it binds the sockets, replaces a worker that exits, and
answers the admin port for all. It checks a changed configuration, so that a file that cannot be
used reaches no worker, and reads the decode engines' counters, once for all.

Errors: `CannotListen`; `WorkerFailed`: a worker exited before it served.
"""

import asyncio
import secrets
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tandem_epp.process.configuration import Configuration, FileWatch, listed_backends
from tandem_epp.supervised import run_until_one_ends
from tandem_http1.upstream import Pool
from tandem_sidecar.process.admin import serve_admin
from tandem_sidecar.process.engine_client import fetch_all_metrics
from tandem_sidecar.process.listen import bound_address, listen_for_admin, listen_for_clients
from tandem_sidecar.process.run import StopSignals, reload_credentials, wait_for_first
from tandem_sidecar.process.supervisor import Supervisor, WorkerCommand
from tandem_sidecar.settings import Settings

from .backends import KnownBackends
from .configuration import reloaded
from .peers import KEY_VARIABLE, bind
from .ready import print_ready
from .workers_admin import WorkersAdmin


async def supervise(
    settings: Settings, file: Path, configuration: Configuration, arguments: Sequence[str]
) -> None:
    """Serve with `settings.workers` processes until SIGTERM or SIGINT, then drain.

    A second signal ends all at once. `arguments`: the command line, which workers get, too. Raises
    CannotListen and WorkerFailed, with no process left.
    """
    with ExitStack() as stack:
        # Bound before any worker starts: a port in use is one error, not one per worker.
        for_clients = listen_for_clients(settings.listen, 1)
        for_admin = listen_for_admin(settings.admin)
        for listener in (*for_clients, *for_admin):
            stack.callback(listener.close)
        supervisor = Supervisor(settings, _worker_command(settings, arguments, stack), for_clients)
        backends = KnownBackends(settings, listed_backends(configuration))
        pool = Pool(backends.tls_for)
        stack.callback(pool.close)
        admin = WorkersAdmin(supervisor, lambda: fetch_all_metrics(pool, backends.decode_engines()))

        def reload() -> None:
            if (new := reloaded(file)) is not None:
                backends.apply(listed_backends(new))
                supervisor.reload()

        signals = StopSignals()
        signals.install()
        # Before the workers start: until they serve, probes get 503, not a refused connection.
        async with serve_admin(admin, for_admin):
            try:
                await supervisor.start()
                addresses = (
                    bound_address(settings.listen, for_clients),
                    bound_address(settings.admin, for_admin),
                )
                # First: a program that waits for the line below may send SIGHUP at once, which
                # would end a process without a handler.
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
                print_ready(*addresses, configuration, settings.workers)
                follow = (
                    FileWatch(file, reload).run(),
                    admin.counters.follow(),
                    # The workers follow the files themselves; this process reads metrics.
                    reload_credentials(backends.credentials),
                )
                # During the drain, too: streams move from a backend that the file no longer lists.
                await run_until_one_ends(_until_drained(signals, supervisor), *follow)
            finally:
                # Also after an error at the start: no worker may outlive its supervisor.
                await supervisor.kill()


async def _until_drained(signals: StopSignals, supervisor: Supervisor) -> None:
    """Wait for the signal, then drain the workers until they end, or a second signal comes."""
    await signals.drain.wait()
    await wait_for_first(supervisor.stop(), signals.exit_now.wait())


def _worker_command(
    settings: Settings, arguments: Sequence[str], stack: ExitStack
) -> WorkerCommand:
    """How workers start, each with a socket for the others, which `stack` closes."""
    descriptors = tuple(peer.fileno() for peer in bind(settings.workers, stack))
    return WorkerCommand(
        (*arguments, "--peer-sockets", ",".join(map(str, descriptors))),
        module="tandem_router.main",
        sockets=descriptors,
        environment={KEY_VARIABLE: secrets.token_hex(32)},
    )
