"""Asks engines and sidecars over HTTP. How they are reached is the caller's: `Ask`.

Errors: `NoAnswer`, raised by an `Ask`; it becomes a fact.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from tandem_contract import endpoints, environment, metrics, ports
from tandem_contract.commandline import HostPort
from tandem_contract.paths import Role
from tandem_planner.fabrics import Fabric

from . import side_channel
from .facts import Declared, Engine, Sidecar, SideChannel

Ask = Callable[[str], Awaitable[bytes]]
"""GET of a path. Raises NoAnswer."""

_AT_ONCE: Final = 16
"""Pods asked at a time: on a cluster each goes through the API server."""
_VLLM: Final = "vllm"
"""`owned_by` of its models. The reference engine's side channel speaks a protocol of its own."""
_BOOTSTRAP_PORT: Final = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
_LABELLED: Final = {
    metrics.ERRORS: metrics.PHASE_LABEL,
    metrics.REQUESTS: metrics.ROUTING_PATH_LABEL,
}
"""Metrics of a sidecar kept apart by a label."""


class NoAnswer(Exception):
    """Who was asked cannot be reached, or says no; the message says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """A pod to look at."""

    pod: str
    role: Role
    group: str
    address: HostPort
    """Of its engine."""
    ask_engine: Ask
    ask_sidecar: Ask | None
    declared: Declared | None
    compat: str = ""
    """By which the router pairs, where it is labelled."""
    fabrics: frozenset[Fabric] | None = None
    reaches: bool = True
    """Whether other ports of the pod can be reached from here."""


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


@dataclass(frozen=True, slots=True)
class _Page:
    """A metrics page: sums by name, and the labels of the engine's cache."""

    sums: Mapping[str, float]
    cache: Mapping[str, str]


async def gather(places: Sequence[Place]) -> tuple[tuple[Engine, ...], tuple[Sidecar, ...]]:
    """What every engine and sidecar says of itself."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(place: Place) -> tuple[Engine, Sidecar | None]:
        async with turns:
            return await _engine(place), await _sidecar(place)

    asked = await asyncio.gather(*map(one, places))
    return (
        tuple(engine for engine, _ in asked),
        tuple(sidecar for _, sidecar in asked if sidecar is not None),
    )


async def _engine(place: Place) -> Engine:
    try:
        await place.ask_engine(endpoints.HEALTH)
        page = _page(await place.ask_engine(endpoints.METRICS))
        models = msgspec.json.decode(await place.ask_engine("/v1/models"), type=_Models).data
    except (NoAnswer, ValueError) as err:
        address = str(place.address)
        return Engine(
            place.pod,
            place.role,
            place.group,
            address,
            compat=place.compat,
            trouble=str(err),
            declared=place.declared,
        )
    base = next((model for model in models if model.parent is None), None)
    return Engine(
        place.pod,
        place.role,
        place.group,
        str(place.address),
        compat=place.compat,
        version=await _version(place.ask_engine),
        model=(base.root or base.id) if base else None,
        adapters=frozenset(model.id for model in models if model.parent is not None),
        max_model_len=base.max_model_len if base else None,
        cache=page.cache,
        counters=page.sums,
        declared=place.declared,
        side_channel=await _side_channel(place, base.owned_by if base else ""),
        fabrics=place.fabrics,
    )


async def _version(ask: Ask) -> str | None:
    """None: an engine, or a proxy in front of it, without the endpoint."""
    try:
        return msgspec.json.decode(await ask("/version"), type=_Version).version
    except (NoAnswer, ValueError):
        return None


async def _side_channel(place: Place, maker: str) -> SideChannel | None:
    if not place.reaches or place.declared is None or not place.declared.transfer:
        return None
    address = hand_off_address(place.declared, place.role, place.address.host)
    if address is None:
        return None
    nixl = maker == _VLLM and place.declared.uses("Nixl")
    return await (side_channel.ask_nixl if nixl else side_channel.ask_port)(address)


def hand_off_address(declared: Declared, role: Role, host: str) -> HostPort | None:
    """Where a reader of its KV begins, by its connector; None: nowhere."""
    told = declared.environment
    if declared.uses("Nixl"):
        port = _port(told.get(environment.SIDE_CHANNEL_PORT), ports.SIDE_CHANNEL)
        return HostPort(told.get(environment.SIDE_CHANNEL_HOST) or host, port)
    if declared.uses("Mooncake"):
        port = _port(told.get(_BOOTSTRAP_PORT), ports.MOONCAKE_BOOTSTRAP)
        return HostPort(host, port) if role is Role.PREFILL else None
    return None


def _port(text: str | None, default: int) -> int:
    return int(text) if text and text.isdecimal() else default


async def _sidecar(place: Place) -> Sidecar | None:
    if place.ask_sidecar is None:
        return None
    try:
        page = _page(await place.ask_sidecar(endpoints.METRICS))
    except (NoAnswer, ValueError) as err:
        return Sidecar(place.pod, trouble=str(err))
    not_ready = None
    try:
        await place.ask_sidecar(endpoints.READY)
    except NoAnswer as err:
        not_ready = str(err)
    return Sidecar(place.pod, not_ready=not_ready, counters=page.sums)


def _page(text: bytes) -> _Page:
    sums: defaultdict[str, float] = defaultdict(float)
    cache: dict[str, Any] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            if sample.name == metrics.ENGINE_CACHE_CONFIG:
                cache = dict(sample.labels)
            label = _LABELLED.get(sample.name)
            key = f"{sample.name}{{{sample.labels.get(label, '')}}}" if label else sample.name
            if not sample.name.endswith(("_bucket", "_created")):
                sums[key] += sample.value
    return _Page(dict(sums), cache)
