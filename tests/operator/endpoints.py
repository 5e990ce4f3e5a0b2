"""Endpoints for tests: DecodePools that name endpoint chat, as observed by the operator."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tandem_operator.observed import Body, EndpointKey
from tandem_operator.resources.pools import DecodePool
from tandem_operator.routing.endpoint.observed import EndpointPool, ObjectRef, ObservedEndpoint

from .pool_yaml import decode_pool, parsed_pools, prefill_pool

KEY = EndpointKey("default", "chat")
NOW = 1_800_000_000.0
SECRET = bytes(range(32))


def decode(name: str = "d", **spec: Any) -> DecodePool:
    """A DecodePool of a pair that names endpoint chat, with these spec fields added."""
    spec["routing"] = {"endpoint": KEY.name, **spec.get("routing", {})}
    body = decode_pool(**spec)
    body["metadata"]["name"] = name
    (pool_set,) = parsed_pools(prefill_pool(), body)
    return pool_set.decodes[0]


def unified(name: str = "u", **spec: Any) -> DecodePool:
    """A DecodePool that stands alone."""
    spec["routing"] = {"endpoint": KEY.name, **spec.get("routing", {})}
    spec["model"] = {"name": "org/model", **spec.get("model", {})}
    body = decode_pool(role="unified", **spec)
    del body["spec"]["prefillRef"]
    body["metadata"]["name"] = name
    (pool_set,) = parsed_pools(body)
    return pool_set.decodes[0]


def endpoint(*pools: DecodePool, **fields: Any) -> ObservedEndpoint:
    """An endpoint that `pools` (one by default) name and that has no objects yet."""
    named = tuple(EndpointPool(f"uid-{pool.name}", pool) for pool in pools or (decode(),))
    defaults: dict[str, Any] = {"key": KEY, "now": NOW, "pools": named, "secret": SECRET}
    return ObservedEndpoint(**(defaults | fields))


def with_children(observed: ObservedEndpoint, bodies: Iterable[Body]) -> ObservedEndpoint:
    """The endpoint with these objects, and without random bytes for a new key."""
    children = {**observed.children, **{ObjectRef.of(body): body for body in bodies}}
    return replace(observed, children=children, secret=b"")


def by_name(bodies: Iterable[Body]) -> dict[ObjectRef, Any]:
    return {ObjectRef.of(body): body for body in bodies}
