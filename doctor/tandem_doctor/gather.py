"""Asks engines and sidecars over HTTP and returns their answers as facts.

An engine or sidecar that does not answer becomes a fact with an `error`; nothing is raised.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from tandem_contract import endpoints, environment, metrics, ports
from tandem_contract.commandline import HostPort
from tandem_contract.metrics_page import MetricsPage
from tandem_contract.paths import Role
from tandem_contract.pod_reports import PodReport
from tandem_planner.fabrics import Fabric

from . import side_channel
from .data_ports import parse_range
from .facts import Engine, EngineCommand, EppReport, Sidecar, SideChannel
from .pod_http import Get, NoAnswer
from .storage_use import read_storage_use

_CONCURRENCY: Final = 16
"""Pods asked at a time: from outside a cluster each request goes through the API server."""
_VLLM: Final = "vllm"
"""`owned_by` of vLLM's models. The reference engine's side channel has a protocol of its own."""
_BOOTSTRAP_PORT: Final = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
_SPLIT_BY_LABEL: Final = {
    metrics.ERRORS: metrics.PHASE_LABEL,
    metrics.REQUESTS: metrics.ROUTING_PATH_LABEL,
    metrics.LOOPBACK_SIDE_CHANNELS: metrics.BACKEND_LABEL,
}
"""Metrics of a sidecar that are summed for each value of a label."""


@dataclass(frozen=True, slots=True)
class TargetPod:
    """A pod to check."""

    pod: str
    role: Role
    group: str
    """Engines hand off to each other only within a group."""
    address: HostPort
    """Address of its engine."""
    get_engine: Get
    get_sidecar: Get | None
    """None if the pod has no sidecar."""
    command: EngineCommand | None
    compat: str = ""
    """Label `tandem.dev/kv-compat`, by which the EPP pairs engines; empty without it."""
    has_plan_keys: bool | None = None
    """As in `Sidecar`."""
    fabrics: frozenset[Fabric] | None = None
    """Fabrics that connect it with other engines; None if not visible from here."""
    has_gpu: bool = False
    """Whether the engine's container asks for GPUs."""
    listening: frozenset[int] | None = None
    """As in `Engine`."""
    is_reachable: bool = True
    """Whether this process can connect to all ports of the pod."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What to ask."""

    pods: Sequence[TargetPod]
    epps: Sequence[tuple[str, Get]] = ()
    """Pod name of each EPP, and how its metrics port is read."""
    behind_envoy: frozenset[str] = frozenset()
    """The EPPs that Tandem's own Envoy asks."""


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    owned_by: str = ""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Version(msgspec.Struct):
    version: str | None = None


_reports: Final = msgspec.json.Decoder(tuple[PodReport, ...])


async def gather_facts(
    targets: Sequence[TargetPod],
) -> tuple[tuple[Engine, ...], tuple[Sidecar, ...]]:
    """Read from every engine and sidecar the facts that it reports about itself."""
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def gather_pod(target: TargetPod) -> tuple[Engine, Sidecar | None]:
        # One place for all requests of a pod, which are sent one after the other.
        async with limit:
            engine = await _engine(target)
            if target.get_sidecar is None:
                return engine, None
            sidecar = await gather_sidecar(target.pod, target.get_sidecar)
            return engine, replace(sidecar, has_plan_keys=target.has_plan_keys)

    answers = await asyncio.gather(*map(gather_pod, targets))
    return (
        tuple(engine for engine, _ in answers),
        tuple(sidecar for _, sidecar in answers if sidecar is not None),
    )


async def gather_estimates(
    epps: Sequence[tuple[str, Get]], behind_envoy: Collection[str] = ()
) -> tuple[EppReport, ...]:
    """Read what each EPP tells of its pods and gateways; the parameters as in `Targets`."""
    reports = await asyncio.gather(*(_estimates(name, get) for name, get in epps))
    return tuple(replace(each, is_behind_envoy=each.epp in behind_envoy) for each in reports)


async def _estimates(epp: str, get: Get) -> EppReport:
    try:
        pods = _reports.decode(await get(endpoints.DEBUG_PODS))
        page = MetricsPage.parse((await get(endpoints.METRICS)).decode())
        return EppReport(epp, pods, page.totals.get(metrics.EPP_FLOW_ASKED, 0.0))
    except NoAnswer as err:
        return EppReport(epp, error=err.reason)
    # The answer of another version.
    except (msgspec.MsgspecError, ValueError) as err:
        return EppReport(epp, error=f"unreadable answer: {err}")


async def _engine(target: TargetPod) -> Engine:
    try:
        # First: its status says best why an engine does not serve.
        await target.get_engine(endpoints.HEALTH)
        page = MetricsPage.parse((await target.get_engine(endpoints.METRICS)).decode())
        models = msgspec.json.decode(await target.get_engine(endpoints.MODELS), type=_Models).data
    except (NoAnswer, ValueError) as err:
        address = str(target.address)
        return Engine(
            target.pod,
            target.role,
            target.group,
            address,
            compat=target.compat,
            error=str(err),
            command=target.command,
        )
    # LoRA adapters name their base model as parent.
    base = next((model for model in models if model.parent is None), None)
    return Engine(
        target.pod,
        target.role,
        target.group,
        str(target.address),
        compat=target.compat,
        version=await _version(target.get_engine),
        # `root` is the model's path; `id` is only the name that it is served under.
        model=(base.root or base.id) if base else None,
        adapters=frozenset(model.id for model in models if model.parent is not None),
        max_model_len=base.max_model_len if base else None,
        cache=page.labels(metrics.ENGINE_CACHE_CONFIG),
        counters=_counters(page),
        storage=read_storage_use(page),
        command=target.command,
        side_channel=await _side_channel(target, base.owned_by if base else ""),
        fabrics=target.fabrics,
        has_gpu=target.has_gpu,
        listening=target.listening,
        data_port_error=await _data_port_error(target),
    )


async def _version(get: Get) -> str | None:
    """None if the engine, or a proxy in front of it, does not have the endpoint."""
    try:
        return msgspec.json.decode(await get("/version"), type=_Version).version
    except (NoAnswer, ValueError):
        return None


async def _side_channel(target: TargetPod, owner: str) -> SideChannel | None:
    # The API server's pod proxy speaks HTTP only, and a side channel does not.
    if not target.is_reachable or target.command is None or not target.command.kv_transfer_config:
        return None
    address = handoff_address(target.command, target.role, target.address.host)
    if address is None:
        return None
    # Only vLLM answers the handshake; of other engines it is enough that the port is open.
    is_nixl = owner == _VLLM and target.command.uses("Nixl")
    return await (side_channel.handshake if is_nixl else side_channel.connect)(address)


async def _data_port_error(target: TargetPod) -> str | None:
    """Why a port of UCX's range does not answer; None if it does, or is not asked."""
    # Where its listeners are visible, the engine runs on this machine, and no network is between.
    if not target.is_reachable or target.command is None or target.listening is not None:
        return None
    allowed = parse_range(target.command.environment.get(environment.DATA_PORTS, ""))
    if allowed is None:
        return None
    return await side_channel.firewall_error(HostPort(target.address.host, allowed.start))


def handoff_address(command: EngineCommand, role: Role, host: str) -> HostPort | None:
    """Where a reader of the engine's KV begins its handshake; None if the connector has none."""
    env = command.environment
    if command.uses("Nixl"):
        port = _port(env.get(environment.SIDE_CHANNEL_PORT), ports.SIDE_CHANNEL)
        return HostPort(env.get(environment.SIDE_CHANNEL_HOST) or host, port)
    if command.uses("Mooncake"):
        port = _port(env.get(_BOOTSTRAP_PORT), ports.MOONCAKE_BOOTSTRAP)
        # Mooncake's decode engines run no bootstrap server.
        return HostPort(host, port) if role is Role.PREFILL else None
    return None


def _port(text: str | None, default: int) -> int:
    return int(text) if text and text.isdecimal() else default


async def gather_sidecar(pod: str, get: Get) -> Sidecar:
    """Read what the sidecar of `pod`, or a router, tells on its admin port."""
    try:
        page = MetricsPage.parse((await get(endpoints.METRICS)).decode())
    except (NoAnswer, ValueError) as err:
        return Sidecar(pod, error=str(err))
    not_ready = None
    try:
        # After the metrics: a sidecar that is not ready still reports its counters.
        await get(endpoints.READY)
    except NoAnswer as err:
        not_ready = str(err)
    return Sidecar(pod, not_ready=not_ready, counters=_counters(page))


def _counters(page: MetricsPage) -> dict[str, float]:
    """Sums by sample name; those of _SPLIT_BY_LABEL by `name{label value}` instead."""
    counters = {
        name: total
        for name, total in page.totals.items()
        # Buckets and creation times are no totals.
        if name not in _SPLIT_BY_LABEL and not name.endswith(("_bucket", "_created"))
    }
    for name, label in _SPLIT_BY_LABEL.items():
        for value, total in page.totals_by_label(name, label).items():
            counters[f"{name}{{{value}}}"] = total
    return counters
