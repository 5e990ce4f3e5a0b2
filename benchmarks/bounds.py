"""What one client can take from the others: how long its requests stall them, and how much memory.

Each section starts its own servers on this machine and names its limits. Stalls are the longest of
many waits, so other work on the machine shows in them.
"""

import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Final

import anyio
import click

from tandem_engine.tiny import make_tiny_model
from tandem_local.ports import free_port

from .figures import Figure, at_most, progress, report
from .proxies import Server, server

_HOST: Final = "127.0.0.1"
_WORDS: Final = "the quick brown fox jumps over a lazy dog "
PROMPTS: Final = (1_000_000, 5_000_000, 15_000_000)
"""Bytes of the engine's long prompts."""


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


SECTIONS: Final = {"prompts": long_prompts}


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
