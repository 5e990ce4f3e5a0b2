"""What `tandem-epp` costs while no request comes: it scrapes the metrics of 100 idle backends.

The backends are servers of one other process. Each answers `/metrics` with a page of vLLM's size,
in which only the CPU time and a timestamp change. CPU is that of the EPP's process, from /proc.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Final, cast

import aiohttp
import click
import uvloop
import yaml

from tandem_contract import metrics as names
from tandem_local.ports import free_port

from .figures import Figure, at_least, at_most, progress, report

BACKENDS: Final = 100
_SETTLE: Final = 15.0
"""Seconds until the intervals of idle backends have grown to their end."""
_HISTOGRAMS: Final = (
    names.ENGINE_TTFT_SECONDS,
    names.ENGINE_ITL_SECONDS,
    names.ENGINE_E2E_SECONDS,
    names.ENGINE_QUEUE_SECONDS,
    names.ENGINE_PREFILL_SECONDS,
    names.ENGINE_DECODE_SECONDS,
    names.ENGINE_PREFILL_TOKENS,
    *(f"vllm:request_example_{number}" for number in range(7)),
)
_BUCKETS: Final = 20
_LABELS: Final = 'engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"'


def page() -> bytes:
    """A page of about 35 KB with vLLM's names; `%b` stands for a value that changes."""
    lines = [
        b"process_start_time_seconds 1.7672256e+09",
        b"process_cpu_seconds_total %b",
        *(
            f"{name}{{{_LABELS}}} 0.0".encode()
            for name in (names.ENGINE_RUNNING, names.ENGINE_WAITING, names.ENGINE_KV_USAGE)
        ),
    ]
    for name in _HISTOGRAMS:
        lines.append(f"# HELP {name} Histogram of an engine's requests.".encode())
        lines += [f'{name}_bucket{{{_LABELS},le="{2**n}.0"}} 0.0'.encode() for n in range(_BUCKETS)]
        lines += [f"{name}_{part}{{{_LABELS}}} 0.0".encode() for part in ("count", "sum")]
    config = f'{names.ENGINE_CACHE_CONFIG}{{block_size="16",num_gpu_blocks="8192",{_LABELS}}} 1.0'
    return b"\n".join((*lines, config.encode(), b""))


class _FakeEngine(asyncio.Protocol):
    """Answers every GET with the page, and counts them."""

    served = 0
    page = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        # A scrape is one small segment, and its client sends the next one after the answer.
        if data.endswith(b"\r\n\r\n"):
            _FakeEngine.served += 1
            body = _FakeEngine.page.replace(b"%b", b"%.2f" % time.process_time())
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n"
            self._transport.write(head % len(body) + body)


def _serve(pipe: Connection) -> None:
    """The process of the fake engines: sends their ports, then answers each message with the
    number of pages served."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        _FakeEngine.page = page()
        servers = [await loop.create_server(_FakeEngine, "127.0.0.1", 0) for _ in range(BACKENDS)]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        loop.add_reader(pipe.fileno(), answer)
        await asyncio.Event().wait()

    def answer() -> None:
        pipe.recv()
        pipe.send(_FakeEngine.served)

    uvloop.run(run())


@contextlib.asynccontextmanager
async def _epp(ports: list[int], scratch: Path) -> AsyncIterator[int]:
    """A `tandem-epp` with these backends, once it is ready; yields its process id."""
    backends = [
        {"name": f"engine-{n}", "url": f"http://127.0.0.1:{port}"} for n, port in enumerate(ports)
    ]
    file = scratch / "config.yaml"
    file.write_text(yaml.safe_dump({"backends": backends}))
    command = [sys.executable, "-m", "tandem_epp", "--config", str(file), "--log-level", "warning"]
    health = free_port("127.0.0.1")
    for flag, port in (
        ("--health", health),
        ("--listen", free_port("127.0.0.1")),
        ("--metrics", free_port("127.0.0.1")),
    ):
        command += [flag, f"127.0.0.1:{port}"]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        await _become_ready(f"http://127.0.0.1:{health}/readyz")
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


async def _become_ready(url: str) -> None:
    """Wait until the readiness probe succeeds. Raises TimeoutError after 30 s."""
    async with asyncio.timeout(30), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)


def _cpu(pid: int) -> float:
    """Seconds of CPU time of a process."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


async def measure(rounds: int, seconds: float) -> list[Figure]:
    """The figures, of `rounds` measurements of `seconds` each."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    ports = ours.recv()

    def served() -> int:
        ours.send(None)
        count: int = ours.recv()
        return count

    cores, rates = [], []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            async with _epp(ports, Path(scratch)) as pid:
                progress(f"waiting {_SETTLE:g} s until the backends count as idle")
                await asyncio.sleep(_SETTLE)
                for number in range(rounds):
                    progress(f"round {number + 1} of {rounds}: {seconds:g} s")
                    cpu, pages, start = _cpu(pid), served(), time.monotonic()
                    await asyncio.sleep(seconds)
                    elapsed = time.monotonic() - start
                    cores.append((_cpu(pid) - cpu) / elapsed)
                    rates.append((served() - pages) / elapsed)
    finally:
        process.terminate()
        process.join()
    progress(f"{median(rates):.1f} pages of {len(page()) / 1000:.0f} KB per second")
    return [
        at_most(f"CPU to scrape {BACKENDS} idle backends", cores, "cores", 0.05),
        # A low cost would mean nothing if the EPP had stopped to look.
        at_least("scrapes of each idle backend", [r / BACKENDS for r in rates], "1/s", 0.4),
    ]


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=20.0, show_default=True, help="duration of a round")
def main(file: Path | None, rounds: int, seconds: float) -> None:
    """Measure what scraping idle backends costs."""
    report(uvloop.run(measure(rounds, seconds)), file)


if __name__ == "__main__":
    main()
