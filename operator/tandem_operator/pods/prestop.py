"""preStop of a prefill engine: wait, within a time, until nobody needs the pod any more.

    python3 -c SOURCE PORT SECONDS METRIC…

This file's text is the command, run in the engine's image: the standard library is all there is.
The pod is idle when the sum of METRIC on its own `/metrics` (running, waiting, KV blocks held for
readers) stays zero for `QUIET` seconds: a picker may choose the pod for a moment longer. An engine
that refuses the connection has ended, and nothing is waited for.
"""

import os
import sys
import time
import urllib.error
import urllib.request

QUIET = 3.0
PERIOD = 0.5
# Without the proxy of the container's environment, which is for addresses outside the cluster.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def busy(page: str, metrics: list[str]) -> bool:
    """Whether a sample of `metrics` on a Prometheus page is not zero; one that is absent is."""
    found = set()
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in metrics:
            found.add(name)
            if float(line.split()[-1]) > 0:
                return True
    return found != set(metrics)


def main(port: str, seconds: str, *metrics: str) -> None:
    """Return once the engine at POD_IP is idle, or after `seconds`."""
    host = os.environ["POD_IP"]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
    end = time.monotonic() + float(seconds)
    idle_since = None
    while time.monotonic() < end:
        try:
            with DIRECT.open(url, timeout=5) as answer:
                idle = not busy(answer.read().decode(), list(metrics))
        except urllib.error.URLError as err:
            if isinstance(err.reason, ConnectionRefusedError):
                return
            idle = False
        except OSError:
            idle = False
        now = time.monotonic()
        idle_since = (idle_since or now) if idle else None
        if idle_since is not None and now - idle_since >= QUIET:
            return
        time.sleep(PERIOD)


if __name__ == "__main__":
    main(*sys.argv[1:])
