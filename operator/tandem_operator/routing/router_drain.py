"""The program beside Envoy that drains it before the pod stops, so that no stream is cut off.

    python3 -m tandem_operator.routing.router_drain SECONDS [HOST:PORT of Envoy's admin]

It waits for SIGTERM. Then it makes Envoy fail its readiness check and close each client connection
after the response under way, and it exits when no request is left, or after SECONDS. Envoy runs as
a native sidecar (an init container), so the kubelet stops it only after this program has exited.

On SIGTERM Envoy itself would exit at once and cut off running requests. Its distroless image has no
shell for a preStop hook that could request a drain.
"""

import http.client
import logging
import signal
import sys
import threading
import time
from typing import Final

from tandem_contract import ports

SETTLE: Final = 5.0
"""Seconds for which Envoy accepts new connections in any case: the pod's removal from the endpoints
of its Service reaches all nodes late. Too low: clients get refused connections."""
_POLL: Final = 0.5
_TIMEOUT: Final = 5.0
_ACTIVE: Final = "http.clients.downstream_rq_active"
_log: Final = logging.getLogger(__name__)


def drain(host: str, port: int, *, settle: float, limit: float) -> int:
    """Drain the Envoy with the admin interface `host:port`; return the number of running requests.

    Takes at least `settle` and at most `limit` seconds. Raises OSError or HTTPException when Envoy
    does not answer.
    """
    started = time.monotonic()
    _call(host, port, "POST", "/healthcheck/fail")
    # Graceful: listeners keep accepting, and responses ask clients to close their connections. A
    # client on a node that still routes to this pod is served.
    _call(host, port, "POST", "/drain_listeners?graceful&skip_exit")
    while True:
        active, elapsed = _active(host, port), time.monotonic() - started
        if elapsed >= limit or (active == 0 and elapsed >= settle):
            return active
        time.sleep(min(_POLL, limit - elapsed))


def _active(host: str, port: int) -> int:
    """Number of running requests on the listener for clients; 0 if Envoy has no such statistic."""
    stats = _call(host, port, "GET", f"/stats?filter=^{_ACTIVE}$")
    name, _, value = stats.strip().partition(": ")
    return int(value) if name == _ACTIVE else 0


def _call(host: str, port: int, method: str, path: str) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
    try:
        connection.request(method, path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def main() -> None:
    """Wait for SIGTERM or SIGINT, then drain the Envoy of this pod."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    limit, host, port = _arguments(sys.argv[1:])
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    _log.info("waiting for SIGTERM")
    stopping.wait()
    try:
        running = drain(host, port, settle=min(SETTLE, limit), limit=limit)
    except (OSError, http.client.HTTPException) as err:
        _log.warning("exiting without a drain: Envoy's admin interface does not answer: %s", err)
    else:
        _log.info("drain ended: %d requests still running, Envoy stops next", running)


def _arguments(words: list[str]) -> tuple[float, str, int]:
    """Seconds, and the admin's host and port. Exits with status 2 when they are invalid."""
    match words:
        case [seconds] if seconds.isdecimal():
            return float(seconds), "127.0.0.1", ports.ENVOY_ADMIN
        case [seconds, admin] if seconds.isdecimal() and admin.rpartition(":")[2].isdecimal():
            host, _, port = admin.rpartition(":")
            return float(seconds), host, int(port)
    sys.stderr.write(f"{__doc__}\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
