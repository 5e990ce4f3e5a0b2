"""CPU of the EPP per request and per response chunk: our HTTP/2 server, grpcio, and Envoy alone.

A fake engine answers for ten pods, five that prefill and five that decode. In each round, h2load
sends the same requests through Envoy as a bare proxy, and through Envoy with an EPP of each kind;
the EPP runs with all features and decides by cost. Figures are ratios of CPU time, from /proc, in
a round: that of the EPP's process over that of the bare proxy's. A third EPP has our server and
places every request on one pod (`ext_proc_server`): what is left is the transport. A fourth does so
with TLS.

Response chunks (`response_body_mode: FULL_DUPLEX_STREAMED`) come from a client of this benchmark
instead (`ext_proc_client`), because Envoy combines chunks as it likes. They go to the same EPPs, on
32 streams, with one chunk in each write, and with eight, as Envoy sends when it is busy.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import trustme

from tandem_contract.server_tls import CERTIFICATE, KEY
from tandem_local.addresses import free_port
from tandem_local.errors import SetupError
from tandem_local.router import find_envoy, write_plan_key
from tandem_operator.routing.envoy.bootstrap import EnvoySettings, envoy_bootstrap
from tandem_operator.routing.envoy.clusters import EPP, TYPE, Json

from . import ext_proc_client, fake_engine, h2load, programs
from .figures import Figure, at_most, progress, report, without_target
from .proxies import Server, bare_proxy, server

KINDS: Final = ("http2", "grpcio")
"""Values of `--ext-proc-server`."""
TRANSPORT: Final = "transport"
"""The EPP without a decision, on our server."""
TLS: Final = "transport with TLS"
PODS: Final = 10
_HOST: Final = "127.0.0.1"
_WORDS: Final = "the quick brown fox jumps over a lazy dog "
_BODY_LIMIT: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """A size of request, and the highest ratio that our server may have."""

    name: str
    size: int
    """Bytes of the prompt."""
    requests: int
    ceiling: float

    def body(self) -> bytes:
        """The request body."""
        text = (_WORDS * (self.size // len(_WORDS) + 1))[: self.size]
        request = {"model": "bench", "max_tokens": 16, "messages": [{"role": "user"}]}
        request["messages"][0]["content"] = text  # type: ignore[index]
        return json.dumps(request, separators=(",", ":")).encode()


CASES: Final = (
    Case("1 KB", 900, 6000, 2.5),
    Case("16 KB", 16_000, 3000, 3.3),
    Case("220 KB", 220_000, 600, 8),
)


@dataclass(frozen=True, slots=True)
class Stack:
    """An EPP and the Envoy that asks it."""

    epp: Server
    envoy: Server


@dataclass(frozen=True, slots=True)
class Stacks:
    """Everything that runs."""

    bare: Server
    """Envoy without an EPP."""
    by_kind: dict[str, Stack]


@asynccontextmanager
async def running(scratch: Path) -> AsyncIterator[Stacks]:
    """Start the servers, and end them afterwards. Raises SetupError, RuntimeError."""
    program = str(find_envoy())
    write_plan_key(scratch / "keys")
    async with AsyncExitStack() as stack:

        async def start(name: str, port: int, *command: str) -> Server:
            log = scratch / f"{name}.log"
            return await stack.enter_async_context(server(name, port, command, log))

        async def envoy(name: str, port: int, bootstrap: object) -> Server:
            file = scratch / f"{name}.json"
            file.write_text(json.dumps(bootstrap))
            # One worker thread, as the EPP has; a dynamic base id lets other Envoys run here.
            flags = ("--concurrency", "1", "--use-dynamic-base-id", "-l", "error")
            return await start(name, port, program, "-c", str(file), *flags)

        engines = [free_port(_HOST) for _ in range(PODS)]
        for port in engines:
            command = (sys.executable, "-m", "benchmarks.fake_engine", str(port))
            await start(f"engine-{port}", port, *command)
        file = scratch / "router.yaml"
        file.write_text(json.dumps(router(engines)))
        port = free_port(_HOST)
        bare = await envoy("bare", port, bare_proxy(port, engines[-1]))
        stacks = {}
        for kind in (*KINDS, TRANSPORT, TLS):
            port = free_port(_HOST)
            if kind in KINDS:
                command = _epp(kind, port, scratch)
            else:
                command = _transport(port, engines[-1], _certificate(scratch, kind))
            epp = await start(f"epp-{kind}", port, *command)
            settings = EnvoySettings(
                epp_address=_HOST,
                epp_port=epp.port,
                fallback=(f"{_HOST}:{engines[-1]}",),
                listen_address=_HOST,
                listen_port=free_port(_HOST),
                admin_port=free_port(_HOST),
                body_mode="BUFFERED",
                body_limit=_BODY_LIMIT,
            )
            bootstrap = envoy_bootstrap(settings)
            if kind == TLS:
                _use_tls(bootstrap)
            front = await envoy(f"envoy-{kind}", settings.listen_port, bootstrap)
            stacks[kind] = Stack(epp, front)
        yield Stacks(bare, stacks)


def router(engines: list[int]) -> dict[str, object]:
    """The EPP's configuration: half of the pods prefill, half decode."""
    backends = [
        {
            "name": f"pod-{n}",
            "url": f"http://{_HOST}:{port}",
            "role": "decode" if n % 2 else "prefill",
            "models": ["bench"],
        }
        for n, port in enumerate(engines)
    ]
    return {"backends": backends, "disaggregated_serving": {"enabled": True}}


def _epp(kind: str, port: int, scratch: Path) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "tandem_epp", "--ext-proc-server", kind),
        *("--config", str(scratch / "router.yaml"), "--plan-key-dir", str(scratch / "keys")),
        *("--listen", f"{_HOST}:{port}", "--health", f"{_HOST}:{free_port(_HOST)}"),
        *("--metrics", f"{_HOST}:{free_port(_HOST)}", "--max-body", str(_BODY_LIMIT)),
        *("--no-warm-up", "--log-level", "warning"),
    )


def _transport(port: int, engine: int, certificate: tuple[str, ...]) -> tuple[str, ...]:
    module = "benchmarks.ext_proc_server"
    return (sys.executable, "-m", module, str(port), f"{_HOST}:{engine}", *certificate)


def _certificate(scratch: Path, kind: str) -> tuple[str, ...]:
    """The flag that names a new certificate; none without TLS."""
    if kind != TLS:
        return ()
    directory = scratch / "tls"
    directory.mkdir()
    pair = trustme.CA().issue_cert("localhost")
    pair.cert_chain_pems[0].write_to_path(directory / CERTIFICATE)
    pair.private_key_pem.write_to_path(directory / KEY)
    return ("--tls-dir", str(directory))


def _use_tls(bootstrap: Json) -> None:
    """Have Envoy call the EPP with TLS, whatever its certificate."""
    context = TYPE + "extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    for cluster in bootstrap["static_resources"]["clusters"]:
        if cluster["name"] == EPP:
            cluster["transport_socket"] = {
                "name": "envoy.transport_sockets.tls",
                "typed_config": {
                    "@type": context,
                    "common_tls_context": {"alpn_protocols": ["h2"]},
                },
            }


class Bench:
    """The samples: milliseconds of CPU per request, microseconds per chunk."""

    def __init__(self, stacks: Stacks, scratch: Path) -> None:
        self.samples: dict[tuple[str, str], list[float]] = {}
        self.lost = 0
        self._stacks, self._scratch = stacks, scratch

    async def requests(self, name: str, case: Case, clients: int = 8) -> None:
        """Send the requests of `case` through the server `name`: `bare` or a kind of EPP."""
        stack = self._stacks.by_kind.get(name)
        front = stack.envoy if stack else self._stacks.bare
        measured = stack.epp if stack else front
        file = self._scratch / "body"
        file.write_bytes(case.body())
        load = h2load.Load(file, ("content-type: application/json",), case.requests, clients)
        before = measured.cpu()
        url = f"http://{_HOST}:{front.port}/v1/chat/completions"
        outcome = await h2load.drive(url, load, self._scratch)
        cpu = measured.cpu() - before
        if stack:
            self.lost += case.requests - outcome.good
            self.lost += abs(outcome.data - case.requests * len(fake_engine.PLAIN)) > 0
        self._add(name, case.name, 1e3 * cpu / case.requests)

    async def chunks(self, kind: str, batch: int) -> None:
        """Send response chunks to an EPP, `batch` in a write."""
        epp = self._stacks.by_kind[kind].epp
        before = epp.cpu()
        count = await ext_proc_client.send_chunks(epp.port, batch)
        self._add(kind, f"chunk, {batch} per write", 1e6 * (epp.cpu() - before) / count)

    def ratios(self, case: str, over: str, under: str) -> list[float]:
        """The ratio of two servers in each round."""
        pairs = zip(self.samples[over, case], self.samples[under, case], strict=True)
        return [a / b for a, b in pairs]

    def _add(self, name: str, case: str, value: float) -> None:
        self.samples.setdefault((name, case), []).append(value)


def schedule(number: int) -> Iterator[tuple[str, Case]]:
    """The loads of round `number`; those that are compared follow each other."""
    for case in CASES:
        names = ("bare", *((TLS,) if case is CASES[0] else ()), TRANSPORT, *KINDS)
        for name in reversed(names) if number % 2 else names:
            yield name, case


async def measure(rounds: int) -> list[Figure]:
    """All figures."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        async with running(scratch) as stacks:
            bench = Bench(stacks, scratch)
            # Not measured: the first requests fill caches and fits.
            for kind in (*KINDS, TRANSPORT, TLS):
                await Bench(stacks, scratch).requests(kind, CASES[0])
            for number in range(rounds):
                for name, case in schedule(number):
                    progress(f"round {number + 1} of {rounds}: {case.name}, {name}")
                    await bench.requests(name, case)
                for kind in KINDS:
                    progress(f"round {number + 1} of {rounds}: response chunks, {kind}")
                    for batch in (1, 8):
                        await bench.chunks(kind, batch)
            results = list(figures(bench))
            # Last, because it raises the memory.
            for kind in KINDS:
                progress(f"220 KB, 32 clients: {kind}")
                await bench.requests(kind, CASES[-1], clients=32)
                resident = stacks.by_kind[kind].epp.resident()
                name = f"RSS after 220 KB x 32 clients, {kind}"
                results.append(without_target(name, resident, "MB"))
            return [*results, at_most("requests lost, all runs", bench.lost, "requests", 0)]


def figures(bench: Bench) -> Iterator[Figure]:
    """The figures of the samples."""
    for case in CASES:
        ours = bench.ratios(case.name, "http2", "bare")
        yield at_most(f"CPU, {case.name}, EPP over bare Envoy", ours, "ratio", case.ceiling)
        yield without_target("  with grpcio", bench.ratios(case.name, "grpcio", "bare"), "ratio")
        transport = bench.ratios(case.name, TRANSPORT, "bare")
        yield without_target("  our transport alone", transport, "ratio")
        for name in ("bare", TRANSPORT, *KINDS):
            yield without_target(f"  {name}", bench.samples[name, case.name], "ms/request")
    tls = bench.ratios(CASES[0].name, TLS, TRANSPORT)
    yield at_most(f"CPU, {CASES[0].name}, transport with TLS over without", tls, "ratio", 1.5)
    for batch in (8, 1):
        name = f"chunk, {batch} per write"
        ours = bench.samples["http2", name]
        # With a chunk in each write, most of the time is the kernel's.
        target = at_most if batch > 1 else None
        label = f"CPU, response {name}"
        yield target(label, ours, "µs", 8) if target else without_target(label, ours, "µs")
        yield without_target("  with grpcio", bench.samples["grpcio", name], "µs")


def missing_programs() -> list[str]:
    """Programs that this benchmark starts and this machine lacks, with how to install them."""
    return programs.missing([h2load.find, find_envoy])


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--rounds", default=3, show_default=True, help="rounds; a figure is their median")
def main(file: Path | None, rounds: int) -> None:
    """Compare the EPP's servers; exit status 2 when h2load or Envoy is missing."""
    try:
        h2load.find()
        results = asyncio.run(measure(rounds))
    except (h2load.NotInstalled, SetupError) as err:
        click.echo(f"benchmarks.ext_proc: {err}", err=True)
        sys.exit(2)
    report(results, file)


if __name__ == "__main__":
    main()
