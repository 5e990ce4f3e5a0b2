"""What Prometheus sees of the process itself, read from its parts at each scrape."""

import asyncio
from collections.abc import Iterable

from tandem_contract import metrics as names

from ..handoff.breaker import Breakers, Condition
from ..handoff.lifecycle import Lifecycle
from ..http.server import Server
from ..observability.metrics import Metrics, Sample


def export(metrics: Metrics, lifecycle: Lifecycle, clients: Server, breakers: Breakers) -> None:
    """Have `metrics` show them; what several workers show adds up."""
    metrics.watch(
        "tandem_sidecar_draining",
        "1 while nothing new is taken.",
        lambda: [((), float(lifecycle.draining))],
    )
    metrics.watch(
        "tandem_sidecar_connections",
        "Clients connected.",
        lambda: [((), float(len(clients.clients)))],
    )
    metrics.watch(
        "tandem_sidecar_tunnels",
        "Connections that switched to another protocol, such as websockets.",
        lambda: [((), float(_tunnels(lifecycle)))],
    )
    metrics.watch(
        "tandem_sidecar_breaker_open",
        "1 while a prefill pod is left alone, 0 once it answers; one never in trouble has none.",
        lambda: _open(breakers),
        [names.BACKEND_LABEL],
    )


def _open(breakers: Breakers) -> Iterable[Sample]:
    pods = breakers.snapshot(asyncio.get_running_loop().time())
    for address, standing in pods.items():
        yield (address,), float(standing.condition is not Condition.CLOSED)


def _tunnels(lifecycle: Lifecycle) -> int:
    return sum(work.describe().get("phase") == "tunnel" for work in lifecycle.work)
