"""The stack of this machine as places to look at."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import aiohttp

from tandem_contract import endpoints, ports
from tandem_contract.commandline import HostPort
from tandem_contract.paths import Role
from tandem_local.state import PodState, State

from . import processes
from .gather import Ask, NoAnswer, Place

_TIMEOUT: Final = aiohttp.ClientTimeout(total=5)
_ENGINE: Final = "engine"
"""Name of its container."""


@asynccontextmanager
async def places(state: State) -> AsyncIterator[Sequence[Place]]:
    """The pods with an engine."""
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:
        yield [_place(http, pod) for pod in state.pods if pod.role is not None]


def _place(http: aiohttp.ClientSession, pod: PodState) -> Place:
    group = pod.pids.get(_ENGINE, -1)
    port = ports.ENGINE_PREFILL if pod.role is Role.PREFILL else ports.ENGINE_DECODE
    engine = (pod.engine_metrics or "").removesuffix(endpoints.METRICS)
    sidecar = (pod.sidecar_metrics or "").removesuffix(endpoints.METRICS)
    return Place(
        pod=pod.name,
        role=pod.role or Role.UNIFIED,
        group=pod.model,
        address=HostPort(pod.address, port),
        ask_engine=_asking(http, engine),
        ask_sidecar=_asking(http, sidecar) if sidecar else None,
        declared=processes.declared(group),
        fabrics=processes.fabrics(group),
    )


def _asking(http: aiohttp.ClientSession, base: str) -> Ask:
    async def ask(path: str) -> bytes:
        try:
            async with http.get(base + path) as answer:
                body = await answer.read()
                if answer.status != 200:
                    said = body[:200].decode(errors="replace").strip()
                    raise NoAnswer(f"{path} answers {answer.status}: {said}")
                return body
        except TimeoutError:
            raise NoAnswer(f"{path}: no answer within {_TIMEOUT.total:.0f} s") from None
        except aiohttp.ClientError as err:
            raise NoAnswer(str(err)) from err

    return ask
