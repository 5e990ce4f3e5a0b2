"""The stack of this machine as places to look at."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import aiohttp

from tandem_contract import endpoints, ports
from tandem_contract.commandline import HostPort
from tandem_contract.paths import Role
from tandem_local.state import PodState, State
from tandem_planner.fabrics import Fabric

from . import processes
from .direct import TIMEOUT, asking
from .gather import Place

_ENGINE: Final = "engine"
"""Name of its container."""
_NO_GROUP: Final = -1


@asynccontextmanager
async def places(state: State) -> AsyncIterator[Sequence[Place]]:
    """The pods with an engine."""
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
        pods = [pod for pod in state.pods if pod.role is not None]
        joined = processes.fabrics({pod.pids.get(_ENGINE, _NO_GROUP) for pod in pods})
        yield [_place(http, pod, joined) for pod in pods]


def _place(
    http: aiohttp.ClientSession, pod: PodState, joined: Mapping[int, frozenset[Fabric] | None]
) -> Place:
    group = pod.pids.get(_ENGINE, _NO_GROUP)
    port = ports.ENGINE_PREFILL if pod.role is Role.PREFILL else ports.ENGINE_DECODE
    engine = (pod.engine_metrics or "").removesuffix(endpoints.METRICS)
    sidecar = (pod.sidecar_metrics or "").removesuffix(endpoints.METRICS)
    return Place(
        pod=pod.name,
        role=pod.role or Role.UNIFIED,
        group=pod.model,
        address=HostPort(pod.address, port),
        ask_engine=asking(http, engine),
        ask_sidecar=asking(http, sidecar) if sidecar else None,
        declared=processes.declared(group),
        fabrics=joined[group],
    )
