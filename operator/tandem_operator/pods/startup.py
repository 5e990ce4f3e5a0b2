"""startupProbe of engine, sidecar and EPP: wait, within a time, until the server answers.

    python3 -c SOURCE PORT PATH SECONDS TIMEOUT

This file's text is the command, run in the container's image: the standard library is all there is.
A probe of type httpGet fails at each period in which nothing listens yet, and each failure counts
in an event `Unhealthy`. This one fails when SECONDS have passed. TIMEOUT: seconds for one answer.
"""

import http.client
import os
import socket
import sys
import time

PERIOD = 0.5


def problem(port: str, path: str, timeout: str) -> str:
    """Why GET `path` is not answered as a probe wants; empty: it is."""
    # An EPP has no POD_IP. The kubelet's /etc/hosts has the pod's address for its host name.
    host = os.environ.get("POD_IP") or socket.gethostname()
    connection = http.client.HTTPConnection(host, int(port), timeout=float(timeout))
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as err:
        return str(err)
    finally:
        connection.close()
    return "" if 200 <= status < 400 else f"status {status}"


def main(port: str, path: str, seconds: str, timeout: str) -> None:
    """Return once the server of this pod answers; exit with 1 and the reason after `seconds`."""
    end = time.monotonic() + float(seconds)
    while reason := problem(port, path, timeout):
        if time.monotonic() >= end:
            sys.exit(f"GET {path} on port {port}: {reason}")
        time.sleep(PERIOD)


if __name__ == "__main__":
    main(*sys.argv[1:])
