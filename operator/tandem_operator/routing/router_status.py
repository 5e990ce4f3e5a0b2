"""What is said of an endpoint: the DecodePools' condition RouterReady, and their URL. Pure."""

from collections.abc import Iterator
from enum import StrEnum

from tandem_contract import ports

from ..observed import RouterState
from .router_objects import Names
from .router_observed import (
    HTTP_ROUTE,
    INFERENCE_POOL,
    INFERENCE_POOL_ALPHA,
    ObservedEndpoint,
    Ref,
)
from .router_wants import Wants, conflicts, wants


class RouterReason(StrEnum):
    """Reasons of RouterReady, beside those of refused writes (`Failure.reason`)."""

    ROUTER_READY = "RouterReady"
    EXTERNAL = "External"
    """Ready: neither EPP nor Envoy is ours to run."""
    SETTINGS_DIFFER = "SettingsDiffer"
    """Ready: but pools of the endpoint want different things."""
    PENDING = "Pending"
    EPP_UNAVAILABLE = "EppUnavailable"
    ENVOY_UNAVAILABLE = "EnvoyUnavailable"
    NO_SUCH_KIND = "NoSuchKind"
    UNREAD = "Unread"


def router_state(observed: ObservedEndpoint) -> RouterState:
    """Whether requests reach the pods as the pools ask, and at which URL.

    The URL is Envoy's; None where a gateway of the cluster is the way in.
    """
    where = f"http://{observed.key.name}.{observed.key.namespace}.svc:{ports.ENVOY}"
    if not observed.pools:
        envoy = Ref("apps/v1", "Deployment", Names(observed.key.name).envoy)
        message, there = "no pool of it can be read", envoy in observed.children
        if there:
            message += ": it goes on serving as it was"
        return RouterState(False, RouterReason.UNREAD, message, where if there else None)
    wanted = wants(observed.pools)
    url = where if wanted.envoy else None
    for reason, message in _troubles(observed, wanted):
        return RouterState(False, reason, message, url)
    return RouterState(True, *_well(observed, wanted), url)


def has_inference_pools(observed: ObservedEndpoint) -> bool:
    """Whether the cluster has any version of the kind."""
    return not observed.kinds.isdisjoint({INFERENCE_POOL, INFERENCE_POOL_ALPHA})


def _well(observed: ObservedEndpoint, wanted: Wants) -> tuple[str, str]:
    if lines := conflicts(observed.pools):
        return RouterReason.SETTINGS_DIFFER, "; ".join(lines)
    if not (wanted.epp or wanted.envoy):
        message = "routing is another's: neither EPP nor Envoy is asked for"
        return RouterReason.EXTERNAL, message
    return RouterReason.ROUTER_READY, "requests are routed"


def _troubles(observed: ObservedEndpoint, wanted: Wants) -> Iterator[tuple[str, str]]:
    """Reason and message of each thing that is amiss, the most telling first."""
    for ref, failure in sorted(observed.failures.items(), key=lambda item: str(item[0])):
        yield failure.reason, f"{ref.kind} {ref.name}: {failure.message}"
    missing = "%s is asked for: install the CRDs of %s"
    if wanted.inference_pool and not has_inference_pools(observed):
        extension = "the Gateway API Inference Extension"
        yield RouterReason.NO_SUCH_KIND, missing % ("inferencePool", extension)
    if wanted.gateways and HTTP_ROUTE not in observed.kinds:
        yield RouterReason.NO_SUCH_KIND, missing % ("gatewayRef", "the Gateway API")
    names = Names(observed.key.name)
    # Without Envoy nobody is served; without the EPP alone, everybody is.
    if wanted.envoy:
        yield from _unavailable(observed, names.envoy, RouterReason.ENVOY_UNAVAILABLE, "")
    if wanted.epp:
        meanwhile = ": Envoy balances over the decode pods meanwhile" if wanted.envoy else ""
        yield from _unavailable(observed, names.epp, RouterReason.EPP_UNAVAILABLE, meanwhile)


def _unavailable(
    observed: ObservedEndpoint, name: str, reason: RouterReason, meanwhile: str
) -> Iterator[tuple[str, str]]:
    found = observed.children.get(Ref("apps/v1", "Deployment", name))
    if found is None:
        yield RouterReason.PENDING, f"Deployment {name} is not there yet"
    elif not (found.get("status") or {}).get("availableReplicas"):
        yield reason, f"no pod of Deployment {name} is available{meanwhile}"
