"""Messages between the parent process and a worker.

The parent writes JSON lines to the worker's stdin: a `Job`, then, when all workers are `Ready`,
`Start`, perhaps `Stop`, and `Check` when the run has ended. The end of stdin ends the worker.

The worker writes MessagePack to stdout, each message after its length in four bytes: `Ready` or
`Refused`, then every 100 ms a `Batch`, and `Ended`; with a reference, it then answers a `Check`
with a `Verdict` for each of its answers, and `Checked`.
"""

import asyncio
from collections import Counter
from typing import Final

import msgspec

from ..figures.histogram import Histogram
from ..records import Outcome, Record
from .options import Reference
from .spec import RunSpec

LENGTH: Final = 4
"""Bytes of the length, big-endian."""


class Job(msgspec.Struct, frozen=True, tag=True):
    """What to send."""

    spec: RunSpec
    reference: Reference | None = None


class Start(msgspec.Struct, frozen=True, tag=True):
    """Begin."""

    at: float
    """Time on CLOCK_MONOTONIC that is 0 in records."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Send nothing more."""

    grace: float
    """Seconds for which requests in flight may still end."""


class Check(msgspec.Struct, frozen=True, tag=True):
    """Compare the answers with the reference's. To one worker at a time: questions that the
    reference is asked alone, or few at a time, are so for all workers together."""

    concurrency: int
    """Requests at a time when the reference is asked again under load."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Prompts are prepared."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The workload cannot be made; the worker ends."""

    message: str


class Batch(msgspec.Struct, frozen=True, tag=True):
    """What happened since the last batch."""

    records: list[Record]
    begun: int
    """Sessions since the start; they begin in the order of the schedule."""
    sent: int
    """Requests since the start."""
    in_flight: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Every request has its record."""

    read_lag: dict[int, int]
    """Bucket of `figures.histogram.Histogram` → count."""
    lag_total: float
    lag_minimum: float
    lag_maximum: float
    cpu_share: float
    peak_in_flight: int

    def lag(self) -> Histogram:
        """The read lag as a histogram."""
        histogram = Histogram()
        histogram.counts = Counter(self.read_lag)
        histogram.count = sum(self.read_lag.values())
        if histogram.count:
            histogram.total = self.lag_total
            histogram.minimum, histogram.maximum = self.lag_minimum, self.lag_maximum
        return histogram


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """What the reference says of an answer."""

    index: int
    turn: int
    outcome: Outcome | None
    """`ok`, `wrong` or `differs`; None: the reference did not answer."""
    error: str
    """Why it is not `ok`."""


class Checked(msgspec.Struct, frozen=True, tag=True):
    """Every answer of the worker has its verdict."""


FromParent = Job | Start | Stop | Check
FromWorker = Ready | Refused | Batch | Ended | Verdict | Checked

_from_parent: Final = msgspec.json.Decoder(FromParent)
_from_worker: Final = msgspec.msgpack.Decoder(FromWorker)
_json: Final = msgspec.json.Encoder()
_msgpack: Final = msgspec.msgpack.Encoder()


def to_worker(message: FromParent) -> bytes:
    """A line for the worker's stdin."""
    return _json.encode(message) + b"\n"


async def read_from_parent(reader: asyncio.StreamReader) -> FromParent | None:
    """The parent's next message; None when the parent has gone."""
    line = await reader.readline()
    # Without its end, the line is what a parent wrote that died meanwhile.
    message: FromParent | None = _from_parent.decode(line) if line.endswith(b"\n") else None
    return message


def to_parent(message: FromWorker) -> bytes:
    """A message with its length, for the parent."""
    body = _msgpack.encode(message)
    return len(body).to_bytes(LENGTH, "big") + body


async def read_from_worker(reader: asyncio.StreamReader) -> FromWorker | None:
    """The worker's next message; None when the worker has gone."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH), "big")
        message: FromWorker = _from_worker.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        return None
    return message
