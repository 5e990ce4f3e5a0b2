"""What one client can take from the others: how long its requests stall them, and how much memory.

Each section starts its own servers on this machine and names its limits. Stalls are the longest of
many waits, so other work on the machine shows in them.
"""

import json
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Final

import anyio
import click

from tandem_engine.tiny import make_tiny_model
from tandem_local.ports import free_port

from .epp_stacks import router
from .figures import Figure, at_least, at_most, progress, report, without_target
from .proxies import Server, server

_HOST: Final = "127.0.0.1"
_WORDS: Final = "the quick brown fox jumps over a lazy dog "
PROMPTS: Final = (1_000_000, 5_000_000, 15_000_000)
"""Bytes of the engine's long prompts."""
UPLOADS: Final = 50
UPLOAD_SIZE: Final = 32_000_000
"""Bytes; the proxies take 32 MiB."""


@asynccontextmanager
async def torch_engine(scratch: Path, *flags: str) -> AsyncIterator[Server]:
    """The reference engine with a tiny model of 8,192 tokens."""
    model, port = scratch / "model", free_port(_HOST)
    make_tiny_model(model)
    command = (
        *(str(Path(sys.executable).with_name("tandem-engine")), "--model", str(model)),
        *("--served-model-name", "bench", "--host", _HOST, "--port", str(port), *flags),
    )
    async with server("engine", port, command, scratch / "engine.log") as engine:
        yield engine


def post(port: int, path: str, body: object) -> tuple[int, float]:
    """The status of the answer, and the seconds until it came."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://{_HOST}:{port}{path}", data)
    request.add_header("Content-Type", "application/json")
    started = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            status = response.status
    except urllib.error.HTTPError as err:
        status = err.code
    return status, time.perf_counter() - started


def longest_wait(port: int, path: str, action: Callable[[], object]) -> float:
    """The longest time in seconds that a GET of `path` took while `action` ran."""
    ended, waits = Event(), list[float]()

    def probe() -> None:
        while not ended.is_set():
            started = time.perf_counter()
            urllib.request.urlopen(f"http://{_HOST}:{port}{path}", timeout=300).close()
            waits.append(time.perf_counter() - started)

    thread = Thread(target=probe)
    thread.start()
    action()
    ended.set()
    thread.join()
    return max(waits)


async def long_prompts(rounds: int) -> list[Figure]:
    """Prompts that exceed the model's length many times, at the reference engine."""
    figures = []
    with tempfile.TemporaryDirectory() as directory:
        async with torch_engine(Path(directory)) as engine:
            for size in PROMPTS:
                progress(f"prompt of {size / 1e6:.0f} MB")
                text = _WORDS * (size // len(_WORDS))
                body = {"model": "bench", "messages": [{"role": "user", "content": text}]}
                send = partial(post, engine.port, "/v1/chat/completions", body)
                answers, waits = [], []
                for _ in range(rounds):
                    status, seconds = await anyio.to_thread.run_sync(send)
                    if status != 400:
                        raise RuntimeError(f"the engine answered {status}")
                    answers.append(1e3 * seconds)
                    wait = partial(longest_wait, engine.port, "/health", send)
                    waits.append(1e3 * await anyio.to_thread.run_sync(wait))
                name = f"torch engine, chat of {size / 1e6:.0f} MB"
                figures.append(at_most(f"{name}: time to its 400", answers, "ms", 1000))
                figures.append(at_most(f"{name}: longest wait of /health", waits, "ms", 500))
    return figures


@asynccontextmanager
async def proxy(kind: str, scratch: Path) -> AsyncIterator[Server]:
    """A sidecar or a router before a fake engine; `kind` says which."""
    engine, port, admin = (free_port(_HOST) for _ in range(3))
    fake = (sys.executable, "-m", "benchmarks.fake_engine", str(engine))
    program = str(Path(sys.executable).with_name(f"tandem-{kind}"))
    own = ("--engine", f"http://{_HOST}:{engine}")
    if kind == "router":
        file = scratch / "router.yaml"
        file.write_text(json.dumps(router([f"{_HOST}:{engine}"])))
        own = ("--config", str(file))
    listen = ("--listen", f"{_HOST}:{port}", "--admin", f"{_HOST}:{admin}")
    async with (
        server("engine", engine, fake, scratch / f"{kind}-engine.log"),
        server(kind, port, (program, *own, *listen), scratch / f"{kind}.log") as started,
    ):
        yield started


def stalled_uploads(port: int) -> tuple[list[socket.socket], int]:
    """`UPLOADS` connections, each with a body that lacks its last byte, and how many got a 503."""
    connections, refused = [], 0
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {UPLOAD_SIZE}\r\n\r\n"
    for _ in range(UPLOADS):
        connection = socket.create_connection((_HOST, port))
        # A refused upload is answered, and the connection closed, before all of it is sent.
        with suppress(ConnectionError):
            connection.sendall(head.encode() + bytes(UPLOAD_SIZE - 1))
        connections.append(connection)
    for connection in connections:
        connection.settimeout(0.05)
        with suppress(TimeoutError, ConnectionError):
            refused += connection.recv(12) == b"HTTP/1.1 503"
    return connections, refused


async def uploads(_: int) -> list[Figure]:
    """The memory that unfinished uploads take in the sidecar and in the router."""
    figures = []
    with tempfile.TemporaryDirectory() as directory:
        for kind in ("sidecar", "router"):
            progress(f"unfinished uploads at the {kind}")
            async with proxy(kind, Path(directory)) as started:
                before = started.resident()
                connections, refused = await anyio.to_thread.run_sync(stalled_uploads, started.port)
                name = f"{kind}, {UPLOADS} unfinished uploads of {UPLOAD_SIZE / 1e6:.0f} MB"
                taken = started.resident() - before
                figures.append(at_most(f"{name}: RSS over before", taken, "MB", 700))
                figures.append(without_target(f"{name}: answered with 503", refused, "uploads"))
                status, _seconds = await anyio.to_thread.run_sync(
                    partial(post, started.port, "/v1/completions", {"prompt": "hello"})
                )
                answered = float(status == 200)
                figures.append(at_least(f"{name}: a small request served", answered, "", 1))
                for connection in connections:
                    connection.close()
    return figures


SECTIONS: Final = {"prompts": long_prompts, "uploads": uploads}


async def measure(rounds: int, sections: tuple[str, ...]) -> list[Figure]:
    """The figures of `sections`."""
    return [figure for name in sections for figure in await SECTIONS[name](rounds)]


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--rounds", default=3, show_default=True, help="rounds; a figure is their median")
@click.option(
    "--section",
    "sections",
    type=click.Choice(list(SECTIONS)),
    multiple=True,
    default=tuple(SECTIONS),
    help="what to measure; default: everything",
)
def main(file: Path | None, rounds: int, sections: tuple[str, ...]) -> None:
    """Measure what one client can take from the others."""
    report(anyio.run(measure, rounds, sections), file)


if __name__ == "__main__":
    main()
