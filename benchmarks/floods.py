"""Floods of one client against the EPP, and what they cost a client on another connection."""

import select
import socket
import time
import urllib.request
from collections.abc import Iterator
from typing import Final

from tandem_epp.server.http2 import frames
from tandem_epp.server.http2.frames import END_HEADERS, FrameType, Setting
from tandem_epp.server.http2.limits import DEFAULT_WINDOW, LARGEST_WINDOW

from .blocking_client import BLOCK, Client, body_message, chunk_message, head_message
from .figures import Figure, at_most, progress, without_target
from .large_bodies import Probe

_HOST: Final = "127.0.0.1"
SECONDS: Final = 3.0
"""Of a flood that is not ended."""
_WRITE: Final = 256 * 1024
"""Bytes that are written at once: what the EPP may read at once."""
NAMES: Final = 20_000
"""Model names that a client invents."""
_TOGETHER: Final = 100
"""Requests that are sent before their answers are awaited."""
_STARTED: Final = 1
_BODIES: Final = 2000
"""Twice the bodies that a client sends on a connection."""


def frame(kind: FrameType, payload: bytes, stream: int = _STARTED) -> bytes:
    """A frame without flags."""
    return frames.frame(kind, 0, stream, payload)


def floods() -> Iterator[tuple[str, bytes, list[bytes]]]:
    """Name, what begins it, and what follows again and again."""
    opened = frames.frame(FrameType.HEADERS, END_HEADERS, _STARTED, BLOCK)
    request = frame(FrameType.DATA, head_message("/v1/completions", end=False))
    unfinished = frame(FrameType.DATA, (1 << 20).to_bytes(5, "big"))
    yield "a message in frames of one byte", opened + unfinished, [frame(FrameType.DATA, b"x")]
    # Each request ends by a mistake that the server answers with RST_STREAM.
    mistakes = [
        frames.frame(FrameType.HEADERS, END_HEADERS, stream, BLOCK)
        + frames.window_update(stream, 0)
        for stream in range(1, 200_001, 2)
    ]
    yield "streams that the server has to reset", b"", mistakes
    chunk = body_message(b"x", end=False)
    yield "messages of a byte", opened + request, [frame(FrameType.DATA, chunk)]
    many = frame(FrameType.DATA, chunk * (16_000 // len(chunk)))
    yield "messages of a byte, many in a frame", opened + request, [many]
    # None has so many that it is refused by itself.
    yield (
        "many bodies of 3,200 messages of a byte",
        b"",
        [
            frames.frame(FrameType.HEADERS, END_HEADERS, stream, BLOCK)
            + frame(FrameType.DATA, head_message("/v1/completions", end=False), stream)
            + frame(FrameType.DATA, chunk * 1600, stream) * 2
            for stream in range(1, _BODIES, 2)
        ],
    )
    placed = frame(FrameType.DATA, head_message("/v1/responses/x/cancel", end=True))
    answered = [frame(FrameType.DATA, chunk_message(b"x"))]
    yield "messages of a byte, each answered", opened + placed, answered


def send(port: int, first: bytes, parts: list[bytes]) -> float:
    """Send `parts` again and again, and read what comes; returns the seconds until the EPP ends the
    connection, at most `SECONDS`."""
    block = parts * max(1, _WRITE // sum(map(len, parts)))
    with socket.create_connection((_HOST, port)) as client:
        client.sendall(
            frames.PREFACE
            + frames.settings({Setting.INITIAL_WINDOW_SIZE: LARGEST_WINDOW})
            + frames.window_update(0, LARGEST_WINDOW - DEFAULT_WINDOW)
            + first
        )
        client.setblocking(False)
        started, waiting = time.perf_counter(), b""
        while (seconds := time.perf_counter() - started) < SECONDS:
            readable, writable, _ = select.select([client], [client], [], SECONDS)
            try:
                if readable and not client.recv(1 << 20):
                    break
                if writable:
                    waiting = waiting or b"".join(block)
                    waiting = waiting[client.send(waiting) :]
            except ConnectionError:
                break
        return seconds


def of_floods(port: int, rounds: int) -> Iterator[Figure]:
    """The longest waits beside floods, and when they end."""
    probe = Probe(port)
    idle = [probe.longest(lambda: time.sleep(SECONDS)) for _ in range(rounds)]
    yield without_target("EPP, longest wait of another client without a flood", idle, "ms")
    for name, first, parts in floods():
        progress(f"EPP: {name}")
        lives: list[float] = []
        waits = [
            probe.longest(lambda: lives.append(send(port, first, parts)))  # noqa: B023
            for _ in range(rounds)
        ]
        yield without_target(f"EPP, {name}: time until it is ended", lives, "s")
        yield at_most(f"EPP, {name}: longest wait of another client", waits, "ms", 100)
    probe.close()


def of_names(port: int, metrics: int, rounds: int) -> Iterator[Figure]:
    """What invented model names do to the metrics."""
    progress("EPP: invented model names")
    client = Client(port)
    for first in range(0, NAMES, _TOGETHER):
        streams = []
        for number in range(first, first + _TOGETHER):
            streams.append(client.open(head_message("/v1/completions", end=False)))
            body = b'{"model": "invented-%d", "prompt": "x"}' % number
            client.send(streams[-1], body_message(body, end=True))
        for stream in streams:
            while not client.is_last(client.answer(stream)):
                pass
            client.end(stream)
    client.close()
    probe, pages, seconds = Probe(port), list[bytes](), list[float]()

    def scrape() -> None:
        started = time.perf_counter()
        with urllib.request.urlopen(f"http://{_HOST}:{metrics}/metrics", timeout=60) as answer:
            pages.append(answer.read())
        seconds.append(1e3 * (time.perf_counter() - started))

    waits = [probe.longest(scrape) for _ in range(rounds)]
    probe.close()
    name = f"EPP, {NAMES:,} invented model names"
    series = sum(not line.startswith(b"#") for line in pages[-1].splitlines())
    yield at_most(f"{name}: series", series, "", 2000)
    yield at_most(f"{name}: time of a scrape", seconds, "ms", 200)
    yield at_most(f"{name}: longest wait beside it", waits, "ms", 100)
