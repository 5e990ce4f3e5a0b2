"""llm-d's programs, and what stands around them, as processes of a test."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem_contract.commandline import HostPort
from tandem_local.ports import free_port

from ..cluster.fixtures import LEFT_OUT

FOLDER = "TANDEM_LLMD_BIN"
Configuration = dict[str, Any]

SPLITTING: Configuration = {
    "types": {
        **{name: {} for name in ("queue-scorer", "max-score-picker", "always-disagg-pd-decider")},
        **{name: {} for name in ("prefill-filter", "decode-filter")},
        "disagg-profile-handler": {"deciders": {"prefill": "always-disagg-pd-decider"}},
    },
    "profiles": {
        phase: (f"{phase}-filter", "queue-scorer", "max-score-picker")
        for phase in ("prefill", "decode")
    },
}
"""Prefill and decode on two pods, as in llm-d's sample for that."""
SECONDS = 60


def program(name: str) -> Path:
    """llm-d's program of this name; without it the test is skipped, which the summary says."""
    path = Path(os.environ.get(FOLDER, "/nonexistent")) / name
    if not os.access(path, os.X_OK):
        pytest.skip(
            f"{LEFT_OUT}NO {name} OF LLM-D. TO RUN THEM: in a checkout of llm-d-router run"
            f" `go build -o bin/ ./cmd/epp ./cmd/pd-sidecar`, and set {FOLDER} to its bin"
            " (docs/project/testing.md)"
        )
    return path


class Running:
    """A process with a log."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.log = log


@asynccontextmanager
async def running(log: Path, *command: str | Path, **environment: str) -> AsyncIterator[Running]:
    """A process that is stopped with SIGTERM at the end; both outputs go to `log`."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            env={**os.environ, **environment},
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
        )
    try:
        yield Running(process, log)
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()


async def listens(address: HostPort, started: Running) -> None:
    """Return once something accepts connections at `address`."""
    async with asyncio.timeout(SECONDS):
        while True:
            assert started.process.returncode is None, started.log.read_text()
            try:
                _, writer = await asyncio.open_connection(*address)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            writer.close()
            return


@asynccontextmanager
async def relay(target: HostPort) -> AsyncIterator[HostPort]:
    """A port of 127.0.0.1 that leads to `target`: llm-d's sidecar expects its engine there."""
    tasks: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        ends = [writer]
        try:
            there_reader, there_writer = await asyncio.open_connection(*target)
            ends.append(there_writer)
            await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for end in ends:
                end.close()
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield HostPort("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def llmd_sidecar(
    program: Path, directory: Path, engine: HostPort, *flags: str
) -> AsyncIterator[HostPort]:
    """llm-d's sidecar before `engine`, in clear text unless `flags` say otherwise."""
    listen = HostPort("127.0.0.1", free_port("127.0.0.1"))
    async with relay(engine) as there:
        command = (
            *(program, f"--port={listen.port}", f"--vllm-port={there.port}"),
            *("--kv-connector=nixlv2", "--secure-proxy=false", *flags),
        )
        async with running(directory / "pd-sidecar.log", *command) as started:
            await listens(listen, started)
            yield listen


@asynccontextmanager
async def llmd_epp(
    program: Path,
    directory: Path,
    pods: Sequence[tuple[str, str, HostPort]],
    plugins: Configuration | None = None,
) -> AsyncIterator[int]:
    """llm-d's EPP for `pods` (name, role, address), without a cluster; yields its gRPC port.

    `plugins`: its plugins and profiles, and further `sections`; None: prefill and decode on two
    pods.
    """
    file = directory / "endpoints.yaml"
    endpoints = [
        {
            "name": name,
            "address": address.host,
            "port": str(address.port),
            "labels": {"llm-d.ai/role": role},
        }
        for name, role, address in pods
    ]
    file.write_text(json.dumps({"endpoints": endpoints}))
    grpc, health, metrics = (free_port("127.0.0.1") for _ in range(3))
    command = (
        *(program, "--config-text", json.dumps(endpoint_picker_config(file, plugins or SPLITTING))),
        *("--pool-name=pool", "--pool-namespace=default", "--secure-serving=false"),
        *(f"--grpc-port={grpc}", f"--grpc-health-port={health}", f"--metrics-port={metrics}"),
        *("--metrics-endpoint-auth=false", "--tracing=false"),
    )
    async with running(directory / "epp.log", *command) as started:
        await listens(HostPort("127.0.0.1", grpc), started)
        yield grpc


def endpoint_picker_config(endpoints: Path, plugins: Configuration) -> Configuration:
    """The whole configuration, with pods from the file `endpoints`."""
    sources = {"metrics-data-source": {}, "core-metrics-extractor": {}}
    discovery = {"file-discovery": {"path": str(endpoints)}}
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [
            {"type": name, "parameters": parameters}
            for name, parameters in {**plugins["types"], **sources, **discovery}.items()
        ],
        "schedulingProfiles": [
            {"name": name, "plugins": [{"pluginRef": plugin} for plugin in names]}
            for name, names in plugins["profiles"].items()
        ],
        "dataLayer": {
            "discovery": {"pluginRef": "file-discovery"},
            "sources": [
                {
                    "pluginRef": "metrics-data-source",
                    "extractors": [{"pluginRef": "core-metrics-extractor"}],
                }
            ],
        },
        **plugins.get("sections", {}),
    }
