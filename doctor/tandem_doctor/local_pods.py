"""The pods of this machine's stack to check."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import aiohttp

from tandem_contract import endpoints, ports
from tandem_contract.commandline import HostPort
from tandem_contract.paths import Role
from tandem_local.router import EPP
from tandem_local.state import PodState, State
from tandem_planner.fabrics import Fabric

from . import processes
from .gather import TargetPod, Targets
from .pod_http import TIMEOUT, direct

_ENGINE: Final = "engine"
"""Name of the engine's container."""
_NO_GROUP: Final = -1
"""Process group of an engine that does not run now; matches no process."""


@asynccontextmanager
async def targets_of(state: State) -> AsyncIterator[Targets]:
    """The pods with an engine, and the EPP."""
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
        pods = [pod for pod in state.pods if pod.role is not None]
        fabrics = processes.ucx_fabrics({pod.pids.get(_ENGINE, _NO_GROUP) for pod in pods})
        epps = [
            (pod.name, direct(http, f"http://{pod.address}:{ports.EPP_METRICS}"))
            for pod in state.pods
            if pod.name == EPP
        ]
        targets = [_target_pod(http, pod, fabrics) for pod in pods]
        yield Targets(targets, epps, frozenset({EPP}))


def _target_pod(
    http: aiohttp.ClientSession, pod: PodState, fabrics: Mapping[int, frozenset[Fabric] | None]
) -> TargetPod:
    group = pod.pids.get(_ENGINE, _NO_GROUP)
    port = ports.ENGINE_PREFILL if pod.role is Role.PREFILL else ports.ENGINE_DECODE
    engine = (pod.engine_metrics or "").removesuffix(endpoints.METRICS)
    sidecar = (pod.sidecar_metrics or "").removesuffix(endpoints.METRICS)
    return TargetPod(
        pod=pod.name,
        role=pod.role or Role.UNIFIED,
        group=pod.model,
        address=HostPort(pod.address, port),
        get_engine=direct(http, engine),
        get_sidecar=direct(http, sidecar) if sidecar else None,
        command=processes.engine_command(group),
        fabrics=fabrics[group],
        listening=processes.listening_ports(group),
    )
