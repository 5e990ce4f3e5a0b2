"""The program beside Envoy that lets it leave without cutting a stream.

    python3 -m tandem_operator.routing.router_drain SECONDS [HOST:PORT of Envoy's admin]

It does nothing until it is told to stop. Then Envoy's readiness goes, its connections are asked to
move on as their answers end, and once no request is left, or after SECONDS, this program ends.
Envoy runs as a native sidecar, so that it is stopped only after this.

Envoy by itself ends at once when told to, whatever is under way; and its image may hold no shell
that could ask it to drain.
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
"""Seconds in which new connections may still come: the cluster learns of a pod's leaving late."""
_POLL: Final = 0.5
_TIMEOUT: Final = 5.0
_ACTIVE: Final = "http.clients.downstream_rq_active"
_log: Final = logging.getLogger(__name__)


def drain(host: str, port: int, *, settle: float, limit: float) -> int:
    """Have the Envoy whose admin is at `host:port` finish; how many requests are left in the end.

    Takes `settle` seconds at least and `limit` at most. Raises OSError or HTTPException when Envoy
    does not answer: it is gone, or cannot be helped.
    """
    started = time.monotonic()
    _call(host, port, "POST", "/healthcheck/fail")
    # Listeners stay open: a client that has not heard yet is served, and told to close.
    _call(host, port, "POST", "/drain_listeners?graceful&skip_exit")
    while True:
        left, passed = _active(host, port), time.monotonic() - started
        if passed >= limit or (left == 0 and passed >= settle):
            return left
        time.sleep(min(_POLL, limit - passed))


def _active(host: str, port: int) -> int:
    """Requests under way on the clients' listener."""
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
    _log.info("waiting to be told to stop")
    stopping.wait()
    try:
        left = drain(host, port, settle=min(SETTLE, limit), limit=limit)
    except (OSError, http.client.HTTPException) as err:
        _log.warning("Envoy does not answer, so nothing is waited for: %s", err)
    else:
        _log.info("Envoy may go: %d requests are left", left)


def _arguments(words: list[str]) -> tuple[float, str, int]:
    """Seconds, and the admin's host and port; ends the process when they are none."""
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
