"""`tandem trace`: asks EPPs and sidecars for their records of one request, and prints its history.

trace endpoints of a local stack or of a namespace ──GET /requests/ID──► records ──► timeline
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import aiohttp
import click
import msgspec

from tandem_contract import ports
from tandem_contract.commandline import fail
from tandem_contract.endpoints import DEBUG_DECISIONS
from tandem_contract.trace import DecisionTrace, SidecarTrace, trace_path
from tandem_doctor.pod_http import TIMEOUT, Get, NoAnswer, direct, proxied
from tandem_kube.resources import PODS
from tandem_local.router import EPP
from tandem_local.state import State

from .options import command
from .target import Target, target_options
from .timeline import EppRecord, NoReply, Records, SidecarRecord, lines, not_found_message, to_json

_CONCURRENCY: Final = 32
"""Pods asked at a time: in a cluster each request goes through the API server."""

_decisions: Final = msgspec.json.Decoder(tuple[DecisionTrace, ...])
_sidecar_traces: Final = msgspec.json.Decoder(tuple[SidecarTrace, ...])


@dataclass(frozen=True)
class TraceEndpoint:
    """The EPP, or the sidecar of a pod, that may have records of the request."""

    pod: str
    is_epp: bool
    get: Get
    is_router: bool = False
    """Whether one process is both: its decisions have another path, and its records are of no
    single pod."""


@command("trace")
@click.argument("request_id")
@target_options
@click.option("--router", metavar="URL", help="Ask the tandem-router with this admin port.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def trace(
    *,
    request_id: str,
    as_json: bool,
    router: str | None,
    **options: Any,
) -> None:
    """Show the history of REQUEST_ID: where it was sent and why, each attempt, and its end.

    The id is in the response header x-request-id, and in the logs. Without -n, --kubeconfig and
    --context, asks the stack that tandem up or tandem demo runs on this machine. If none runs, or
    with one of these options, asks a namespace of a cluster through its API server; that takes the
    right to get pods/proxy.

    Exit status: 0 if the request was found, 1 if it was not or no component could be asked, 2 for
    wrong usage.
    """
    target = Target(**options)
    with target.exit_on_error():
        # Nothing is connected yet: errors of the connection are raised in `_collect`.
        if router is not None:
            source = _router(router.rstrip("/"))
        elif (state := target.stack()) is None:
            source = _cluster(target)
        else:
            source = _stack(state)
        records = asyncio.run(_collect(source, request_id))
    if not records.decisions and not records.sidecar_records:
        fail(not_found_message(request_id, records))
    if as_json:
        click.echo(msgspec.json.encode(to_json(request_id, records)))
    else:
        click.echo("\n".join(lines(request_id, records)).rstrip())


async def _collect(
    source: AbstractAsyncContextManager[Sequence[TraceEndpoint]], request_id: str
) -> Records:
    """Ask all endpoints of `source`, and join their records."""
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def ask(endpoint: TraceEndpoint) -> Records:
        async with limit:
            return await _ask(endpoint, request_id)

    async with source as endpoints:
        # `_ask` raises nothing: a component that fails must not hide the others' records.
        answers = await asyncio.gather(*map(ask, endpoints))
    return Records(
        tuple(decision for answer in answers for decision in answer.decisions),
        tuple(record for answer in answers for record in answer.sidecar_records),
        tuple(no_reply for answer in answers for no_reply in answer.no_replies),
        tuple(name for answer in answers for name in answer.components),
    )


async def _ask(endpoint: TraceEndpoint, request_id: str) -> Records:
    pod = endpoint.pod
    try:
        path = trace_path(request_id)
        if endpoint.is_router and endpoint.is_epp:
            path = f"{DEBUG_DECISIONS}?request_id={quote(request_id, safe='')}"
        answer = await _get(endpoint.get, path)
        if endpoint.is_epp:
            decisions = tuple(EppRecord(pod, trace) for trace in _decisions.decode(answer))
            return Records(decisions=decisions, components=(pod,))
        sidecar_records = tuple(
            SidecarRecord(_decode_name(trace) if endpoint.is_router else pod, trace)
            for trace in _sidecar_traces.decode(answer)
        )
        return Records(sidecar_records=sidecar_records, components=(pod,))
    except NoAnswer as err:
        return Records(no_replies=(NoReply(pod, err.reason),), components=(pod,))
    # Another version's record is reported like a missing one: the others are still shown.
    except msgspec.MsgspecError as err:
        return Records(no_replies=(NoReply(pod, f"unreadable answer: {err}"),), components=(pod,))


def _decode_name(trace: SidecarTrace) -> str:
    """The backend that decoded first, by which the record is joined with its decision."""
    return next((leg.backend for leg in trace.legs if leg.phase == "decode"), "")


async def _get(get: Get, path: str) -> bytes:
    try:
        return await get(path)
    except NoAnswer as err:
        # A component without records of the id answers 404 and an empty list.
        if err.is_not_found:
            return b"[]"
        raise


@asynccontextmanager
async def _router(url: str) -> AsyncIterator[Sequence[TraceEndpoint]]:
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
        get = direct(http, url)
        yield [TraceEndpoint(url, is_epp, get, is_router=True) for is_epp in (True, False)]


@asynccontextmanager
async def _stack(state: State) -> AsyncIterator[Sequence[TraceEndpoint]]:
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
        endpoints = []
        for pod in state.pods:
            if pod.name == EPP:
                get = direct(http, f"http://{pod.address}:{ports.EPP_METRICS}")
                endpoints.append(TraceEndpoint(pod.name, True, get))
            elif pod.sidecar_metrics is not None:
                get = direct(http, f"http://{pod.address}:{ports.SIDECAR_ADMIN}")
                endpoints.append(TraceEndpoint(pod.name, False, get))
        yield endpoints


@asynccontextmanager
async def _cluster(target: Target) -> AsyncIterator[Sequence[TraceEndpoint]]:
    # Imported here, because the Kubernetes client takes two seconds.
    from tandem_kube.client import connect  # noqa: PLC0415

    async with await connect(target.kubeconfig, target.context) as api:
        namespace = target.namespace or api.namespace
        listing = await api.list(PODS, namespace, fields="status.phase=Running")
        yield [
            TraceEndpoint(
                found.pod,
                found.is_epp,
                proxied(api, namespace, found.pod, found.port),
                found.is_router,
            )
            for found in find_trace_ports(listing.items)
        ]


class TracePort(NamedTuple):
    """Where a pod is asked for what it knows of a request."""

    pod: str
    is_epp: bool
    """Whether it knows decisions; False: what a sidecar served."""
    port: int
    is_router: bool = False
    """Whether a router decides there, of which only the decisions are asked: in a cluster sidecars
    serve its requests."""


def find_trace_ports(pods: Iterable[dict[str, Any]]) -> list[TracePort]:
    """The pods with an EPP, a router or a sidecar.

    Recognized by the ports that their containers declare, not by labels: this works for pods of the
    operator and of users alike.
    """
    trace_ports = []
    for pod in pods:
        spec = pod["spec"]
        # A sidecar that the operator adds is an init container that restarts.
        containers = [*spec.get("initContainers", ()), *spec["containers"]]
        listen_ports = {port["containerPort"] for c in containers for port in c.get("ports", ())}
        name = pod["metadata"]["name"]
        if ports.SIDECAR_ADMIN in listen_ports:
            trace_ports.append(TracePort(name, False, ports.SIDECAR_ADMIN))
        elif {ports.EPP_GRPC, ports.EPP_METRICS} <= listen_ports:
            trace_ports.append(TracePort(name, True, ports.EPP_METRICS))
        elif {ports.ROUTER, ports.ROUTER_ADMIN, ports.EPP_PEERS} <= listen_ports:
            trace_ports.append(TracePort(name, True, ports.ROUTER_ADMIN, True))
    return trace_ports
