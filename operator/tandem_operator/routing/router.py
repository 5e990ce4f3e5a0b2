"""A routing endpoint: the objects that bring a request to a pod. Pure.

plan_endpoint(observed, settings) -> what to write      is_up_to_date(live, desired) -> already so?
router_state(observed)            -> RouterReady        conflicts(pools)      -> who disagrees

router_observed   what is seen and set          router_wants     what the pools ask together
router_objects    what all objects share, keys, InferencePool, HTTPRoute
router_envoy, envoy*                            router_epp       plan_keys
"""

from collections.abc import Iterator
from typing import Final

from ..observed import Body
from ..planning.drift import is_up_to_date
from .plan_keys import Rotation, keys_in, rotate
from .router_envoy import envoy_objects
from .router_epp import epp_objects
from .router_objects import Names, Object, http_route, inference_pool, plan_key_object
from .router_observed import (
    CHILD_KINDS,
    HTTP_ROUTE,
    OPTIONAL_KINDS,
    ApiKind,
    EndpointPlan,
    EndpointPool,
    ObservedEndpoint,
    Ref,
    RouterSettings,
    UnreadPool,
)
from .router_status import RouterReason, has_inference_pools, router_state
from .router_wants import Wants, conflicts, wants

__all__ = [
    "CHILD_KINDS",
    "OPTIONAL_KINDS",
    "ApiKind",
    "EndpointPlan",
    "EndpointPool",
    "ObservedEndpoint",
    "Ref",
    "RouterReason",
    "RouterSettings",
    "UnreadPool",
    "conflicts",
    "is_up_to_date",
    "plan_endpoint",
    "ref_of",
    "router_state",
]

_SECRET: Final = "Secret"  # noqa: S105 - a kind
_SOONEST: Final = 1.0


def ref_of(body: Body) -> Ref:
    """What an object is called."""
    return Ref(body["apiVersion"], body["kind"], body["metadata"]["name"])


def plan_endpoint(observed: ObservedEndpoint, settings: RouterSettings) -> EndpointPlan:
    """What to write so that the endpoint is as its pools ask; nothing once it is.

    Without a pool that can be read: its objects go, unless one that cannot be read names it, which
    keeps all as it is. Raises ValueError when a plan key is due and `observed.secret` is too short.
    """
    if not observed.pools:
        return EndpointPlan(delete=() if observed.unread else tuple(observed.children))
    wanted = wants(observed.pools)
    rotation = _rotation(observed, settings) if wanted.epp else None
    desired = {ref_of(one): one for one in _objects(observed, wanted, settings, rotation)}
    return EndpointPlan(
        apply=tuple(
            one
            for ref, one in desired.items()
            if ref not in observed.children or not is_up_to_date(observed.children[ref], one)
        ),
        delete=()
        if observed.unread
        else tuple(ref for ref in observed.children if ref not in desired),
        requeue_after=max(_SOONEST, rotation.next - observed.now) if rotation else None,
    )


def _rotation(observed: ObservedEndpoint, settings: RouterSettings) -> Rotation:
    ref = Ref("v1", _SECRET, Names(observed.key.name).plan_keys)
    keys = keys_in(observed.children.get(ref))
    return rotate(keys, observed.now, observed.secret, settings.key_period)


def _objects(
    observed: ObservedEndpoint,
    wanted: Wants,
    settings: RouterSettings,
    rotation: Rotation | None,
) -> Iterator[Object]:
    """Every object there is to be, those that others need first."""
    if rotation:
        yield plan_key_object(observed, rotation.keys)
        yield from epp_objects(observed, wanted, settings)
    if wanted.envoy:
        yield from envoy_objects(observed, wanted, settings)
    if wanted.inference_pool and has_inference_pools(observed):
        yield inference_pool(observed, Names(observed.key.name).epp)
        if wanted.gateways and HTTP_ROUTE in observed.kinds:
            yield http_route(observed, wanted.gateways)
