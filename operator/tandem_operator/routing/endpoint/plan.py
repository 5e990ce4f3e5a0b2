"""Plan the objects of a routing endpoint, and the status that its DecodePools get. Pure.

    plan_endpoint(observed, settings) -> EndpointPlan    objects to apply and delete
    router_state(observed)            -> RouterState     condition RouterReady and status.endpoint

Both start from `combine_requirements(observed.pools)`; `routing.objects` builds the manifests.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, Final

from tandem_contract import ports

from ...observed import RouterState
from ...planning.drift import is_up_to_date
from ...planning.key_rotation import Rotation, keys_in, rotate
from ..objects.common import (
    ENVOY,
    EPP,
    ROUTER,
    Names,
    Object,
    api_key_secret,
    plan_key_object,
)
from ..objects.envoy import client_service, envoy_objects
from ..objects.epp import (
    account_objects,
    epp_objects,
    http_route,
    inference_pool,
    present_section,
)
from ..objects.policies import network_policies
from ..objects.router import router_objects
from .flow_control import priority_obstacles
from .front import Fronts, available, is_ending, plan_fronts, selected_front
from .observed import (
    HTTP_ROUTE,
    INFERENCE_POOL,
    INFERENCE_POOL_ALPHA,
    EndpointPlan,
    ObjectRef,
    ObservedEndpoint,
)
from .requirements import (
    EndpointRequirements,
    combine_requirements,
    find_conflicts,
    resume_obstacles,
    with_pools_settings,
)
from .settings import RouterSettings
from .unused import outdated_notes, own_children, plan_unused

_SECRET: Final = "Secret"  # noqa: S105 - a kind
_MIN_REQUEUE: Final = 1.0
"""Seconds; keeps a key that is due this very moment from causing a busy loop."""


class RouterReason(StrEnum):
    """Reasons of the condition RouterReady, besides those of refused writes (`Failure.reason`)."""

    ROUTER_READY = "RouterReady"
    EXTERNAL = "External"
    """Ready: the pools ask the operator to run neither EPP nor Envoy."""
    SETTINGS_DIFFER = "SettingsDiffer"
    """Ready, but pools of the endpoint have conflicting settings."""
    PENDING = "Pending"
    EPP_UNAVAILABLE = "EppUnavailable"
    ENVOY_UNAVAILABLE = "EnvoyUnavailable"
    ROUTER_UNAVAILABLE = "RouterUnavailable"
    FRONT_CHANGING = "FrontChanging"
    """Requests are routed by the front before, until the new one's pods are available."""
    NO_SUCH_KIND = "NoSuchKind"
    UNREAD = "Unread"


def plan_endpoint(observed: ObservedEndpoint, settings: RouterSettings) -> EndpointPlan:
    """The writes that bring an endpoint to what its pools require; empty once it is there.

    An endpoint without a readable pool loses its objects (`plan_unused`), unless an unreadable pool
    still names it: then everything stays as it is. Raises ValueError when a plan key is due and
    `observed.secret` is too short.
    """
    if not observed.pools:
        if observed.unreadable_pools:
            return EndpointPlan(notes=outdated_notes(observed))
        return plan_unused(observed)
    required = combine_requirements(observed.pools)
    settings = with_pools_settings(settings, observed.pools)
    if observed.unreadable_pools:
        required = _with_what_others_may_ask(observed, required)
    # Only our EPP signs plans: without it there is no key to rotate.
    rotation = _rotation(observed, settings) if required.epp else None
    fronts = plan_fronts(observed, required) if required.has_front else None
    objects = _objects(observed, required, settings, rotation, fronts)
    ended = [ObjectRef("apps/v1", "Deployment", name) for name in fronts.ended] if fronts else []
    desired = {ref: body for body in objects if (ref := ObjectRef.of(body)) not in ended}
    own = own_children(observed)
    return EndpointPlan(
        apply=tuple(
            body
            for ref, body in desired.items()
            if ref not in observed.children or not is_up_to_date(observed.children[ref], body)
        ),
        delete=()
        if observed.unreadable_pools
        else tuple(ref for ref in own if ref not in {*desired, *ended}),
        end=tuple(ref for ref in ended if ref in own and not is_ending(observed.children[ref])),
        notes=outdated_notes(observed),
        requeue_after=_requeue_after(observed, rotation, fronts),
    )


def _with_what_others_may_ask(
    observed: ObservedEndpoint, required: EndpointRequirements
) -> EndpointRequirements:
    """The requirements of the readable pools, with what an unreadable one may have asked for as it
    is: a typing error must neither open an endpoint nor turn `resume`, flow control or objectives
    on or off."""
    names = Names(observed.key.name)
    secret = required.api_key_secret
    if not secret:
        fronts_now = (ObjectRef("apps/v1", "Deployment", n) for n in (names.envoy, names.router))
        secrets = (api_key_secret(observed.children.get(ref)) for ref in fronts_now)
        secret = next(filter(None, secrets), None)
    files = [ObjectRef("v1", "ConfigMap", name) for name in (names.epp, names.router)]

    def present(name: str, otherwise: Mapping[str, Any]) -> Mapping[str, Any]:
        sections = (present_section(observed.children.get(ref), name) for ref in files)
        return next((each for each in sections if each is not None), otherwise)

    return replace(
        required,
        api_key_secret=secret,
        resume=present("resume", required.resume),
        flow_control=present("flow_control", required.flow_control),
        slo=present("slo", required.slo),
    )


def _requeue_after(
    observed: ObservedEndpoint, rotation: Rotation | None, fronts: Fronts | None
) -> float | None:
    # The answer to the write of the Service is no event that would enqueue the endpoint.
    if fronts is not None and fronts.is_moving:
        return _MIN_REQUEUE
    return max(_MIN_REQUEUE, rotation.next - observed.now) if rotation else None


def _rotation(observed: ObservedEndpoint, settings: RouterSettings) -> Rotation:
    ref = ObjectRef("v1", _SECRET, Names(observed.key.name).plan_keys)
    keys = keys_in(observed.children.get(ref))
    return rotate(keys, observed.now, observed.secret, settings.key_period)


def _objects(
    observed: ObservedEndpoint,
    required: EndpointRequirements,
    settings: RouterSettings,
    rotation: Rotation | None,
    fronts: Fronts | None,
) -> Iterator[Object]:
    """Every object that should exist, in an order in which each finds what it refers to; `fronts`:
    None where the operator runs none."""
    running = _components(required, fronts)
    # First: pods are protected before they serve.
    if settings.network_policy:
        yield from network_policies(observed, required, settings.network_policy, running)
    if rotation:
        yield plan_key_object(observed, rotation.keys)
        yield from account_objects(observed, required)
    if EPP in running:
        yield from epp_objects(observed, required, settings)
    if ROUTER in running:
        yield from router_objects(observed, required, settings)
    if fronts is not None:
        yield client_service(observed, required, fronts.serving)
    if ENVOY in running:
        yield from envoy_objects(observed, required, settings)
    if required.inference_pool and has_inference_pools(observed):
        yield inference_pool(observed)
        if required.gateways and HTTP_ROUTE in observed.kinds:
            yield http_route(observed, required)


def _components(required: EndpointRequirements, fronts: Fronts | None) -> frozenset[str]:
    """Those of EPP, Envoy and router that run."""
    running = frozenset[str]() if fronts is None else fronts.running
    has_epp = required.epp and (fronts is None or ENVOY in running)
    return running | {EPP} if has_epp else running


def has_inference_pools(observed: ObservedEndpoint) -> bool:
    """Whether the cluster serves any version of InferencePool."""
    return not observed.kinds.isdisjoint({INFERENCE_POOL, INFERENCE_POOL_ALPHA})


def router_state(observed: ObservedEndpoint) -> RouterState:
    """Whether requests reach the pods as the pools require, and at which URL.

    The URL is that of the front; None where clients come through a gateway of the cluster.
    """
    service_url = f"http://{observed.key.name}.{observed.key.namespace}.svc:{ports.ENVOY}"
    if not observed.pools:
        front = selected_front(observed)
        message = "none of the endpoint's pools can be read"
        if front is not None:
            programs = "its routers" if front == ROUTER else "Envoy and EPP"
            message += f": {programs} keep running with their last configuration"
        url = service_url if front is not None else None
        return RouterState(False, RouterReason.UNREAD, message, url)
    required = combine_requirements(observed.pools)
    url = service_url if required.has_front else None
    for reason, message in _problems(observed, required):
        return RouterState(False, reason, message, url)
    return RouterState(True, *_ready_reason(observed, required), url)


def _ready_reason(observed: ObservedEndpoint, required: EndpointRequirements) -> tuple[str, str]:
    # The router works, so this is no problem; but the user should learn which value counts.
    if lines := find_conflicts(observed.pools):
        return RouterReason.SETTINGS_DIFFER, "; ".join(lines)
    if not (required.epp or required.has_front):
        message = "routing is external: the pools enable neither EPP nor Envoy"
        return RouterReason.EXTERNAL, message
    message = "requests are routed"
    if lines := resume_obstacles([pool.pool for pool in observed.pools]):
        message += (
            f"; a stream whose engine dies ends with an error (routing.resume): {', '.join(lines)}"
        )
    if lines := priority_obstacles([pool.pool for pool in observed.pools]):
        message += (
            "; engines are not told priorities (routing.flowControl.propagatePriority): "
            f"{', '.join(lines)}"
        )
    return RouterReason.ROUTER_READY, message


def _problems(
    observed: ObservedEndpoint, required: EndpointRequirements
) -> Iterator[tuple[str, str]]:
    """Reason and message of each problem, the root cause before its consequences."""
    for ref, failure in sorted(observed.failures.items(), key=lambda item: str(item[0])):
        yield failure.reason, f"{ref.kind} {ref.name}: {failure.message}"
    missing = "%s is enabled but the cluster lacks its kind: install the CRDs of %s"
    if required.inference_pool and not has_inference_pools(observed):
        extension = "the Gateway API Inference Extension"
        yield RouterReason.NO_SUCH_KIND, missing % ("inferencePool", extension)
    if required.gateways and HTTP_ROUTE not in observed.kinds:
        yield RouterReason.NO_SUCH_KIND, missing % ("gatewayRef", "the Gateway API")
    names = Names(observed.key.name)
    fronts = plan_fronts(observed, required) if required.has_front else None
    if fronts is not None and fronts.serving == ROUTER:
        yield from _unavailable(observed, names.router, RouterReason.ROUTER_UNAVAILABLE, "")
    else:
        # Envoy first: without it no request is served, without the EPP alone every request still
        # is.
        if fronts is not None:
            yield from _unavailable(observed, names.envoy, RouterReason.ENVOY_UNAVAILABLE, "")
        if required.epp:
            effect = ": Envoy balances over the decode pods meanwhile" if fronts else ""
            yield from _unavailable(observed, names.epp, RouterReason.EPP_UNAVAILABLE, effect)
    if fronts is not None and fronts.waits_for:
        yield RouterReason.FRONT_CHANGING, _changing(observed, fronts)


def _changing(observed: ObservedEndpoint, fronts: Fronts) -> str:
    """How far the start of the wanted front is."""
    name = fronts.waits_for[0]
    ready, replicas = available(observed.children.get(ObjectRef("apps/v1", "Deployment", name)))
    before = "the router serves" if fronts.serving == ROUTER else "Envoy serves"
    return f"{ready} of {replicas} pods of Deployment {name} are available: {before} until all are"


def _unavailable(
    observed: ObservedEndpoint, name: str, reason: RouterReason, effect: str
) -> Iterator[tuple[str, str]]:
    deployment = observed.children.get(ObjectRef("apps/v1", "Deployment", name))
    if deployment is None:
        yield RouterReason.PENDING, f"Deployment {name} does not exist yet"
    elif not (deployment.get("status") or {}).get("availableReplicas"):
        yield reason, f"no pod of Deployment {name} is available{effect}"
