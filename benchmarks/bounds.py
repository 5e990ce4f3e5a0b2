"""What one client can take from the others: how long its requests stall them, how much memory they
take, and how long a newcomer waits at a server whose places all are taken.

Each section starts its own servers on this machine and names its limits. Stalls are the longest of
many waits, so other work on the machine shows in them.
"""

import gzip
import json
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Final

import anyio
import click

from tandem_contract.connections import raise_descriptor_limit
from tandem_engine.tiny import make_tiny_model
from tandem_local.ports import free_port

from .epp_stacks import router
from .figures import Figure, at_least, at_most, progress, report, without_target
from .floods import of_floods, of_names
from .large_bodies import running_epp
from .proxies import Server, server

_HOST: Final = "127.0.0.1"
_WORDS: Final = "the quick brown fox jumps over a lazy dog "
PROMPTS: Final = (1_000_000, 5_000_000, 15_000_000)
"""Bytes of the engine's long prompts."""
UPLOADS: Final = 50
UPLOAD_SIZE: Final = 32_000_000
"""Bytes; the servers take 32 MiB."""
LONGEST: Final = 20.0
"""Seconds that a newcomer waits."""
PLACES: Final = 1024
"""Connections of a full server: the default of the store and of the EPP."""


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
async def store(scratch: Path, *flags: str) -> AsyncIterator[Server]:
    """A `tandem store`."""
    port = free_port(_HOST)
    program = str(Path(sys.executable).with_name("tandem"))
    command = (
        program,
        "store",
        "--dir",
        str(scratch / "objects"),
        "--listen",
        f"{_HOST}:{port}",
        *flags,
    )
    async with server("store", port, command, scratch / "store.log") as started:
        yield started


@asynccontextmanager
async def proxy(kind: str, scratch: Path, *flags: str) -> AsyncIterator[Server]:
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
        server(kind, port, (program, *own, *listen, *flags), scratch / f"{kind}.log") as started,
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
    """The memory that unfinished uploads take in sidecar, router and reference engine."""
    figures = []
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        servers = {
            "sidecar": proxy("sidecar", scratch),
            "router": proxy("router", scratch),
            "torch engine": torch_engine(scratch),
        }
        for kind, context in servers.items():
            progress(f"unfinished uploads at the {kind}")
            async with context as started:
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


def newcomer(port: int, path: str) -> float:
    """Seconds until a client is answered at a server to which others have connected before; at most
    about `LONGEST`."""
    others = [socket.create_connection((_HOST, port)) for _ in range(PLACES)]
    started, seconds = time.perf_counter(), 0.0
    is_answered = False
    while not is_answered and seconds < LONGEST:
        with suppress(OSError):
            urllib.request.urlopen(f"http://{_HOST}:{port}{path}", timeout=LONGEST).close()
            is_answered = True
        seconds = time.perf_counter() - started
    for other in others:
        other.close()
    return seconds


async def full(rounds: int) -> list[Figure]:
    """How long a newcomer waits where clients that send nothing have taken all places."""
    figures = []
    raise_descriptor_limit()
    with tempfile.TemporaryDirectory() as directory:
        scratch, flag = Path(directory), ("--max-connections", str(PLACES))
        servers: dict[str, tuple[AbstractAsyncContextManager[Server], str]] = {
            "store": (store(scratch, *flag), "/healthz"),
            "sidecar": (proxy("sidecar", scratch, *flag), "/v1/models"),
            "router": (proxy("router", scratch, *flag), "/v1/models"),
            "EPP": (epp(scratch), "/healthz"),
        }
        for kind, (context, path) in servers.items():
            progress(f"a newcomer at a full {kind}")
            async with context as started:
                find = partial(newcomer, started.port, path)
                seconds = [await anyio.to_thread.run_sync(find) for _ in range(rounds)]
                name = f"{kind}, {PLACES} idle clients: wait of a newcomer"
                figures.append(at_most(name, seconds, "s", 5))
    return figures


def size_of(directory: Path) -> float:
    """MB in the files of `directory`."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) / 1e6


async def coded_objects(_: int) -> list[Figure]:
    """What a gzip body that inflates to much more takes from the store."""
    progress("a gzip body at the store")
    body = gzip.compress(bytes(400_000_000))
    with tempfile.TemporaryDirectory() as directory:
        async with store(Path(directory)) as started:
            before = started.resident()
            request = urllib.request.Request(f"http://{_HOST}:{started.port}/bench/x", body)
            request.method = "PUT"
            request.add_header("Content-Encoding", "gzip")
            with suppress(urllib.error.HTTPError):
                await anyio.to_thread.run_sync(lambda: urllib.request.urlopen(request).close())
            stored = await anyio.to_thread.run_sync(size_of, Path(directory, "objects"))
            taken = started.resident() - before
    name = f"store, {len(body) / 1e6:.1f} MB of gzip"
    return [
        at_most(f"{name}: on the disk", stored, "MB", 1),
        at_most(f"{name}: RSS over before", taken, "MB", 10),
    ]


@asynccontextmanager
async def epp(scratch: Path) -> AsyncIterator[Server]:
    """An EPP with its defaults."""
    async with running_epp(scratch) as (started, _):
        yield started


async def at_the_epp(rounds: int) -> list[Figure]:
    """Floods of frames, and model names that clients invent."""
    with tempfile.TemporaryDirectory() as directory:
        async with running_epp(Path(directory)) as (started, metrics):
            port = started.port
            figures = await anyio.to_thread.run_sync(lambda: list(of_floods(port, rounds)))
            names = await anyio.to_thread.run_sync(lambda: list(of_names(port, metrics, rounds)))
            return figures + names


SECTIONS: Final = {
    "prompts": long_prompts,
    "uploads": uploads,
    "full": full,
    "coded": coded_objects,
    "epp": at_the_epp,
}


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
