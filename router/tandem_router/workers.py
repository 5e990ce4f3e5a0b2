"""Several router processes on one port, and the supervisor that keeps them running.

    await supervise(settings, file, configuration, arguments)

Each worker is a whole router. They accept from the same listening socket, and tell each other what
they place and learn by the channel between an EPP's replicas (`tandem_epp.peers`), over loopback.
The supervisor is the sidecar's: it binds the sockets, replaces a worker that exits, and answers the
admin port for all. It reads the configuration only to check it: a file that cannot be used reaches
no worker.

Errors: `CannotListen`; `WorkerFailed`: a worker exited before it served.
"""

import asyncio
import secrets
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tandem_epp.configuration import Configuration, FileWatch
from tandem_sidecar.process.admin import serve_admin
from tandem_sidecar.process.listen import bound_address, listen, listen_for_clients
from tandem_sidecar.process.run import StopSignals, wait_for_first
from tandem_sidecar.process.supervisor import Supervisor, WorkerCommand
from tandem_sidecar.settings import Settings

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
        for_admin = listen(settings.admin, "--admin")
        for listener in (*for_clients, *for_admin):
            stack.callback(listener.close)
        descriptors = tuple(peer.fileno() for peer in bind(settings.workers, stack))
        command = WorkerCommand(
            (*arguments, "--peer-sockets", ",".join(map(str, descriptors))),
            module="tandem_router.main",
            sockets=descriptors,
            environment={KEY_VARIABLE: secrets.token_hex(32)},
        )
        supervisor = Supervisor(settings, command, for_clients)
        signals = StopSignals()
        signals.install()
        # Before the workers start: until they serve, probes get 503, not a refused connection.
        async with serve_admin(WorkersAdmin(supervisor), for_admin):
            try:
                await supervisor.start()
                addresses = (
                    bound_address(settings.listen, for_clients),
                    bound_address(settings.admin, for_admin),
                )
                print_ready(*addresses, configuration, settings.workers)
                await _follow_until_drain(signals, file, supervisor)
                await wait_for_first(supervisor.stop(), signals.exit_now.wait())
            finally:
                # Also after an error at the start: no worker may outlive its supervisor.
                await supervisor.kill()


async def _follow_until_drain(signals: StopSignals, file: Path, supervisor: Supervisor) -> None:
    """Have the workers reload a changed file that can be used, until the drain begins."""

    def reload() -> None:
        if reloaded(file) is not None:
            supervisor.reload()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    following = loop.create_task(FileWatch(file, reload).run())
    await signals.drain.wait()
    following.cancel()
