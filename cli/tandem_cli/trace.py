"""`tandem trace`: asks EPPs and sidecars what became of one request, and prints it as one story.

witnesses of a local stack, or of a namespace ──ask each──► timeline.Heard ──► timeline
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import click
import msgspec

from tandem_contract import ports
from tandem_contract.commandline import fail
from tandem_contract.trace import DecisionTrace, SidecarTrace, trace_path
from tandem_kube.errors import ApiError, NotFound
from tandem_kube.resources import PODS
from tandem_local.router import EPP
from tandem_local.state import State

from .options import command
from .source import Source, source_options
from .timeline import Decided, Heard, Served, Silent, lines, to_json, unknown

_TIMEOUT: Final = aiohttp.ClientTimeout(total=5)
_AT_ONCE: Final = 32
"""Asked at a time: in a cluster each goes through the API server."""

_decisions: Final = msgspec.json.Decoder(tuple[DecisionTrace, ...])
_accounts: Final = msgspec.json.Decoder(tuple[SidecarTrace, ...])


class NoAnswer(Exception):
    """A witness that cannot be asked; the message says why."""


@dataclass(frozen=True)
class Witness:
    """An EPP, or the sidecar of a pod."""

    name: str
    """The pod's."""
    is_epp: bool
    ask: Callable[[str], Awaitable[bytes]]
    """What it answers to GET of a path; empty for 404. Raises NoAnswer."""


@command("trace")
@click.argument("request_id")
@source_options
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def trace(
    *,
    request_id: str,
    as_json: bool,
    **where: Any,
) -> None:
    """Show what became of REQUEST_ID: where it was sent and why, each attempt, how it ended.

    The id is in the response header x-request-id, and in the logs. Without -n, --kubeconfig and
    --context the stack that tandem up or tandem demo runs here is asked, if one does; otherwise a
    namespace of a cluster, through its API server: that takes the right to get pods/proxy.

    Exit status: 0 it is known, 1 it is not, or nobody can be asked, 2 wrong usage.
    """
    source = Source(**where)
    with source.explained():
        state = source.stack()
        asked = _cluster(source) if state is None else _stack(state)
        heard = asyncio.run(_heard(asked, request_id))
    if not heard.decided and not heard.served:
        fail(unknown(request_id, heard))
    if as_json:
        click.echo(msgspec.json.encode(to_json(request_id, heard)))
    else:
        click.echo("\n".join(lines(request_id, heard)).rstrip())


async def _heard(source: AbstractAsyncContextManager[Sequence[Witness]], request_id: str) -> Heard:
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(witness: Witness) -> Heard:
        async with places:
            return await _asked(witness, request_id)

    async with source as witnesses:
        all_heard = await asyncio.gather(*map(one, witnesses))
    return Heard(
        tuple(each for heard in all_heard for each in heard.decided),
        tuple(each for heard in all_heard for each in heard.served),
        tuple(each for heard in all_heard for each in heard.silent),
        tuple(each for heard in all_heard for each in heard.asked),
    )


async def _asked(witness: Witness, request_id: str) -> Heard:
    name = witness.name
    try:
        answer = await witness.ask(trace_path(request_id)) or b"[]"
        if witness.is_epp:
            decided = tuple(Decided(name, each) for each in _decisions.decode(answer))
            return Heard(decided=decided, asked=(name,))
        served = tuple(Served(name, each) for each in _accounts.decode(answer))
        return Heard(served=served, asked=(name,))
    except NoAnswer as err:
        return Heard(silent=(Silent(name, str(err)),), asked=(name,))
    except msgspec.MsgspecError as err:
        return Heard(silent=(Silent(name, f"its answer cannot be read: {err}"),), asked=(name,))


@asynccontextmanager
async def _stack(state: State) -> AsyncIterator[Sequence[Witness]]:
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:

        def asking(base: str) -> Callable[[str], Awaitable[bytes]]:
            return lambda path: _get(http, base + path)

        found = []
        for pod in state.pods:
            if pod.name == EPP:
                base = f"http://{pod.address}:{ports.EPP_METRICS}"
                found.append(Witness(pod.name, True, asking(base)))
            elif pod.sidecar_metrics is not None:
                base = f"http://{pod.address}:{ports.SIDECAR_ADMIN}"
                found.append(Witness(pod.name, False, asking(base)))
        yield found


async def _get(http: aiohttp.ClientSession, url: str) -> bytes:
    try:
        async with http.get(url) as answer:
            if answer.status not in (200, 404):
                raise NoAnswer(f"status {answer.status}")
            return await answer.read() if answer.status == 200 else b""
    except TimeoutError:
        raise NoAnswer(f"no answer within {_TIMEOUT.total:.0f} s") from None
    except aiohttp.ClientError as err:
        raise NoAnswer(str(err)) from err


@asynccontextmanager
async def _cluster(source: Source) -> AsyncIterator[Sequence[Witness]]:
    # Only here: the client takes two seconds to import.
    from tandem_kube.client import connect  # noqa: PLC0415

    async with await connect(source.kubeconfig, source.context) as api:
        where = source.namespace or api.namespace

        def asking(pod: str, port: int) -> Callable[[str], Awaitable[bytes]]:
            async def ask(path: str) -> bytes:
                try:
                    return await api.proxied(pod, where, port, path)
                except NotFound:
                    return b""
                except ApiError as err:
                    raise NoAnswer(err.message) from err

            return ask

        listed = await api.list(PODS, where, fields="status.phase=Running")
        yield [
            Witness(name, is_epp, asking(name, port))
            for name, is_epp, port in witnesses_among(listed.items)
        ]


def witnesses_among(pods: Iterable[dict[str, Any]]) -> list[tuple[str, bool, int]]:
    """Name, whether it is an EPP, and the port to ask, of those pods that are one or have a
    sidecar. Told by the ports they declare, whoever made them."""
    found = []
    for pod in pods:
        spec = pod["spec"]
        containers = [*spec.get("initContainers", ()), *spec["containers"]]
        listens = {port["containerPort"] for each in containers for port in each.get("ports", ())}
        name = pod["metadata"]["name"]
        if ports.SIDECAR_ADMIN in listens:
            found.append((name, False, ports.SIDECAR_ADMIN))
        elif {ports.EPP_GRPC, ports.EPP_METRICS} <= listens:
            found.append((name, True, ports.EPP_METRICS))
    return found
