"""Starts what `benchmarks.epp` compares: fake engines, and EPPs, each with its own Envoy."""

import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import trustme

from tandem_contract.server_tls import CERTIFICATE, KEY
from tandem_local.ports import free_port
from tandem_local.router import find_envoy, write_plan_key
from tandem_operator.routing.envoy.bootstrap import EnvoySettings, envoy_bootstrap
from tandem_operator.routing.envoy.clusters import EPP, TYPE, Json

from .proxies import Server, bare_proxy, server

HOST: Final = "127.0.0.1"
BODY_LIMIT: Final = 4 << 20
PODS: Final = 10
EVENT_SECONDS: Final = 0.004
"""Between the events of a stream, so that Envoy passes each on by itself."""
_ENGINES: Final = 10
"""Processes. With more pods than that, each answers at several loopback addresses."""


@dataclass(frozen=True, slots=True)
class Variant:
    """An EPP to start, and how its Envoy asks it."""

    pods: int = PODS
    server: Literal["http2", "grpcio", "transport"] = "http2"
    """Value of `--ext-proc-server`; `transport`: our server without a decision."""
    tls: bool = False
    duplex: bool = False
    """Whether the bodies of responses are sent, in FULL_DUPLEX_STREAMED. Those of requests are sent
    in BUFFERED: the fake engine reads no chunked ones."""
    relayed: bool = False
    """Whether a `relay` stands between Envoy and EPP."""
    start: tuple[str, ...] = ()
    """What starts the EPP's Python, such as one with another checkout's packages."""


@dataclass(frozen=True, slots=True)
class Stack:
    """An EPP and the Envoy that asks it."""

    epp: Server
    envoy: Server
    relay: Server | None = None


@dataclass(frozen=True, slots=True)
class Stacks:
    """Everything that runs."""

    bare: Server
    """Envoy without an EPP."""
    by_name: Mapping[str, Stack]


@asynccontextmanager
async def running(
    scratch: Path, variants: Mapping[str, Variant], python: str = sys.executable
) -> AsyncIterator[Stacks]:
    """Start the servers, the EPPs with the interpreter `python`, and end them afterwards. Raises
    SetupError, RuntimeError."""
    find_envoy()
    write_plan_key(scratch / "keys")
    async with AsyncExitStack() as stack:
        starter = _Starter(stack, scratch, python)
        addresses = await starter.engines(max(variant.pods for variant in variants.values()))
        port = free_port(HOST)
        bare = await starter.envoy("bare", port, bare_proxy(port, int(addresses[-1].split(":")[1])))
        stacks = {}
        for name, variant in variants.items():
            stacks[name] = await starter.stack(name, variant, addresses[: variant.pods])
        yield Stacks(bare, stacks)


class _Starter:
    """Starts processes that end with `stack`."""

    def __init__(self, stack: AsyncExitStack, scratch: Path, python: str) -> None:
        self._stack, self._scratch, self._python = stack, scratch, python

    async def engines(self, pods: int) -> list[str]:
        """Start the fake engines; returns the addresses of `pods` pods."""
        hosts = [f"127.0.0.{n + 1}" for n in range(-(-pods // _ENGINES))]
        ports = [free_port(HOST) for _ in range(_ENGINES)]
        for port in ports:
            flags = [part for host in hosts for part in ("--host", host)]
            flags += ["--interval", f"{EVENT_SECONDS:g}"]
            command = (sys.executable, "-m", "benchmarks.fake_engine", str(port), *flags)
            await self._start(f"engine-{port}", port, *command)
        return [f"{host}:{port}" for host in hosts for port in ports][:pods]

    async def envoy(self, name: str, port: int, bootstrap: object) -> Server:
        """Start an Envoy."""
        file = self._scratch / f"{name}.json"
        file.write_text(json.dumps(bootstrap))
        # One worker thread, as the EPP has; a dynamic base id lets other Envoys run here.
        flags = ("--concurrency", "1", "--use-dynamic-base-id", "-l", "error")
        return await self._start(name, port, str(find_envoy()), "-c", str(file), *flags)

    async def stack(self, name: str, variant: Variant, addresses: Sequence[str]) -> Stack:
        """Start an EPP for pods at `addresses`, and its Envoy."""
        file, port = f"epp-{name}".replace(" ", "-"), free_port(HOST)
        tls = self._certificate(file) if variant.tls else ()
        if variant.server == "transport":
            module = "benchmarks.epp_transport"
            command = (self._python, "-m", module, str(port), addresses[-1], *tls)
        else:
            config = self._scratch / f"{file}.yaml"
            config.write_text(json.dumps(router(addresses)))
            flags = _epp(variant.server, port, config, self._scratch / "keys")
            command = (*(variant.start or (self._python,)), "-m", "tandem_epp", *flags, *tls)
        epp = await self._start(file, port, *command)
        relay = await self._relay(f"relay-{file}", port) if variant.relayed else None
        settings = EnvoySettings(
            epp_address=HOST,
            epp_port=relay.port if relay else port,
            fallback=(addresses[-1],),
            listen_address=HOST,
            listen_port=free_port(HOST),
            admin_port=free_port(HOST),
            body_mode="BUFFERED",
            body_limit=BODY_LIMIT,
            response_bodies=variant.duplex,
        )
        bootstrap = envoy_bootstrap(settings)
        if variant.tls:
            _use_tls(bootstrap)
        envoy = await self.envoy(f"envoy-{file}", settings.listen_port, bootstrap)
        return Stack(epp, envoy, relay)

    async def _relay(self, name: str, epp_port: int) -> Server:
        port = free_port(HOST)
        command = (self._python, "-m", "benchmarks.relay", str(port), str(epp_port))
        return await self._start(name, port, *command)

    async def _start(self, name: str, port: int, *command: str) -> Server:
        log = self._scratch / f"{name}.log"
        return await self._stack.enter_async_context(server(name, port, command, log))

    def _certificate(self, name: str) -> tuple[str, ...]:
        """The flag that names a new certificate."""
        directory = self._scratch / f"{name}-tls"
        directory.mkdir()
        pair = trustme.CA().issue_cert("localhost")
        pair.cert_chain_pems[0].write_to_path(directory / CERTIFICATE)
        pair.private_key_pem.write_to_path(directory / KEY)
        return ("--tls-dir", str(directory))


def router(addresses: Sequence[str]) -> dict[str, Any]:
    """The EPP's configuration: half of the pods prefill, half decode."""
    backends = [
        {
            "name": f"pod-{n}",
            "url": f"http://{address}",
            "role": "decode" if n % 2 else "prefill",
            "models": ["bench"],
        }
        for n, address in enumerate(addresses)
    ]
    return {"backends": backends, "disaggregated_serving": {"enabled": True}}


def _epp(kind: str, port: int, config: Path, keys: Path) -> tuple[str, ...]:
    return (
        *("--ext-proc-server", kind),
        *("--config", str(config), "--plan-key-dir", str(keys)),
        *("--listen", f"{HOST}:{port}", "--health", f"{HOST}:{free_port(HOST)}"),
        *("--metrics", f"{HOST}:{free_port(HOST)}", "--max-body", str(BODY_LIMIT)),
        *("--no-warm-up", "--log-level", "warning"),
    )


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
