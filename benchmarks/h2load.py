"""Load from h2load (nghttp2), and what it counted.

Errors: `NotInstalled`: h2load is missing; `Unreadable`: it printed something unexpected.
"""

import asyncio
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HOW: Final = (
    "h2load is not installed: apt-get install nghttp2-client (Debian, Ubuntu), "
    "dnf install nghttp2 (Fedora), brew install nghttp2 (macOS)"
)
_FINISHED: Final = re.compile(r"finished in .*?, ([\d.]+) req/s")
_STATUS: Final = re.compile(r"status codes: (\d+) 2xx")
_DATA: Final = re.compile(r"\((\d+)\) data")


class NotInstalled(RuntimeError):
    """The message says how to install it."""


class Unreadable(RuntimeError):
    """The message is what h2load printed."""


@dataclass(frozen=True, slots=True)
class Load:
    """POSTs of one body over HTTP/1.1."""

    body: Path
    headers: tuple[str, ...]
    """`name: value` each."""
    requests: int
    clients: int = 8
    rate: float | None = None
    """Requests per second of all clients together; None: as fast as answers come."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came back."""

    good: int
    """Whole answers with a 2xx."""
    data: int
    """Bytes of all bodies, the chunked coding taken off."""
    per_second: float
    latencies: tuple[float, ...]
    """Milliseconds from request to end of answer, ascending."""

    def quantile(self, share: float) -> float:
        """Milliseconds that `share` of the answers took at most."""
        return self.latencies[min(len(self.latencies) - 1, int(share * len(self.latencies)))]


def find() -> str:
    """The program. Raises NotInstalled."""
    if (program := shutil.which("h2load")) is None:
        raise NotInstalled(_HOW)
    return program


async def drive(url: str, load: Load, scratch: Path) -> Outcome:
    """Send `load` to `url` and wait for its end. Raises NotInstalled, Unreadable."""
    log = scratch / "latencies"
    log.unlink(missing_ok=True)
    command = [find(), "--h1", "-c", str(load.clients), "-n", str(load.requests)]
    command += ["-d", str(load.body), "--log-file", str(log), "-N", "10"]
    command += [part for header in load.headers for part in ("-H", header)]
    if load.rate is not None:
        command += ["--rps", f"{load.rate / load.clients:g}"]
    process = await asyncio.create_subprocess_exec(*command, url, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return _read(output.decode(), log)


def _read(printed: str, log: Path) -> Outcome:
    finished, status, data = (p.search(printed) for p in (_FINISHED, _STATUS, _DATA))
    if not (finished and status and data):
        raise Unreadable(printed)
    rows = (line.split("\t") for line in log.read_text().splitlines())
    latencies = sorted(int(row[2]) / 1000 for row in rows if row[1] == "200")
    return Outcome(int(status[1]), int(data[1]), float(finished[1]), tuple(latencies))
