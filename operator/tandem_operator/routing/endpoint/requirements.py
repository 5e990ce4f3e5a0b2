"""The routing settings of all DecodePools of an endpoint combined, and where they conflict. Pure.

Each object of an endpoint has one value per setting, while every pool brings its own. A component
exists when any pool enables it; the longest drain timeout of any pool counts; fallback to unified
serving, the router as the front and splitting every request need the consent of every pool; the
smallest limit of prefills on decode pods counts; of several EPP configurations, health checks and
settings of resumed streams those of the first pool by name win. Of the objectives of a model those
of the first pool of that model win.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, Literal, TypeVar

import msgspec

from tandem_contract import ports
from tandem_contract.durations import Seconds, format_duration

from ...observed import Body
from ...pods.manifests import pod_names
from ...resources.pools import DecodePool, PoolSet, PrefillPool
from ...resources.spec import (
    GatewayRef,
    Resume,
    RouteMatch,
    RouterPodMetadata,
    Routing,
    RoutingService,
)
from ...resources.vllm_versions import RESUME, parse_release
from .flow_control import flow_control, stated_flow
from .observed import EndpointPool
from .settings import RouterSettings

T = TypeVar("T")

RESUME_DEFAULT: Final = Resume(enabled="auto", max_regeneration=Seconds(10), max_moves=2)
"""`routing.resume` of endpoints none of whose pools states it."""


@dataclass(frozen=True)
class EndpointRequirements:
    """The combined value of each setting."""

    epp: bool
    """Whether the operator runs an EPP."""
    epp_replicas: int | None
    """None when no pool sets it."""
    epp_config: Mapping[str, Any]
    """EndpointPickerConfig as the user wrote it; empty when no pool sets it."""
    health_checks: Mapping[str, Any]
    """The section of that name in the router configuration; empty when no pool sets it."""
    resume: Mapping[str, Any]
    """As `health_checks`."""
    flow_control: Mapping[str, Any]
    """As `health_checks`."""
    slo: Mapping[str, Any]
    """As `health_checks`; by the names of models and adapters."""
    has_front: bool
    """Whether the operator runs what clients connect to."""
    front: Literal["envoy", "router"]
    """Which program that is, if `has_front`. The router takes the place of Envoy and EPP."""
    api_key_secret: str | None
    """Name of the Secret with the clients' API keys; None: clients need none."""
    tls_secret: str | None
    """Name of the Secret for TLS between Envoy, EPP and sidecars; None: clear text."""
    inference_pool: bool
    """Whether an InferencePool is to exist."""
    gateways: tuple[GatewayRef, ...]
    """Gateways that get an HTTPRoute to the InferencePool."""
    hostnames: tuple[str, ...]
    """Of the HTTPRoute; empty: all."""
    matches: tuple[RouteMatch, ...]
    """Of the HTTPRoute; empty: every request."""
    disaggregated_serving: Mapping[str, Any]
    """The section of that name in the router configuration."""
    api_paths: tuple[str, ...]
    """Paths that clients may request beside the API's: those of all pools."""
    max_request_bytes: int | None
    """The largest limit of any pool; None when no pool sets it."""
    service: RoutingService
    """Of the first pool by name that states it, as is the next one."""
    pod_metadata: RouterPodMetadata
    drain_timeout: float
    """Seconds that responses in progress may still take when Envoy is stopped."""

    @property
    def separates_tenants(self) -> bool:
        """Whether the EPP gives each request a salt of its tenant."""
        section = self.epp_config.get("cache_salt")
        return isinstance(section, Mapping) and bool(section.get("from_header"))


def combine_requirements(pools: Sequence[EndpointPool]) -> EndpointRequirements:
    """The combined requirements of `pools`, of which there is at least one."""
    decodes = [pool.pool for pool in _by_name(pools)]
    routings = [pool.spec.routing for pool in decodes]
    replicas = [r.epp.replicas for r in routings if r.epp.replicas is not None]
    references = [r.gateway_ref for r in routings if r.gateway_ref]
    gateways = {_gateway_key(reference): reference for reference in references}
    return EndpointRequirements(
        epp=any(r.epp.enabled for r in routings),
        epp_replicas=max(replicas, default=None),
        epp_config=epp_config(decodes),
        health_checks=health_checks(decodes),
        resume=resume(decodes),
        flow_control=flow_control(decodes),
        slo=slo(decodes),
        has_front=any(r.envoy.enabled for r in routings),
        # One pool alone takes Envoy from no other, which may need what only Envoy has.
        front="router" if all(r.front == "router" for r in routings) else "envoy",
        api_key_secret=next(filter(None, map(_api_key_secret, routings)), None),
        tls_secret=next(filter(None, map(_tls_secret, routings)), None),
        inference_pool=any(r.inference_pool.enabled for r in routings),
        gateways=tuple(gateways[key] for key in sorted(gateways)),
        hostnames=_union([reference.hostnames for reference in references]),
        matches=_union([reference.matches for reference in references]),
        disaggregated_serving=disaggregated_serving(decodes),
        api_paths=api_paths(decodes),
        max_request_bytes=max_request_bytes(decodes),
        service=next((r.service for r in routings if r.service), RoutingService()),
        pod_metadata=next(
            (r.pod_metadata for r in routings if r.pod_metadata), RouterPodMetadata()
        ),
        drain_timeout=max(pool.spec.drain.timeout for pool in decodes),
    )


def epp_config(decodes: Sequence[DecodePool]) -> Mapping[str, Any]:
    """The EndpointPickerConfig in effect for all `decodes` together, in order of their names;
    without the sections `resume` and `flow_control` where the pools' fields turn them off."""
    config = next((d.spec.routing.epp.config for d in decodes if d.spec.routing.epp.config), {})
    resumed, flow = _stated_resume(decodes), stated_flow(decodes)
    off = set()
    if resumed is not None and resumed.enabled == "never":
        off.add("resume")
    if flow is not None and not flow.enabled:
        off.add("flow_control")
    kept = {name: value for name, value in config.items() if name not in off}
    if "flow_control" in off and (gates := kept.get("featureGates")):
        # llm-d's name for the same.
        kept["featureGates"] = [*gates, "flowControl=false"]
    return kept


def health_checks(decodes: Iterable[DecodePool]) -> Mapping[str, Any]:
    """The router configuration's section `health_checks` for all `decodes` together, in order of
    their names; empty when none states it."""
    return next(filter(None, (_health_checks(d.spec.routing) for d in decodes)), {})


def _health_checks(routing: Routing) -> dict[str, Any]:
    checks = routing.epp.health_checks
    fields = {
        "path": checks.path,
        "interval": _duration(checks.interval),
        "timeout": _duration(checks.timeout),
        "unhealthy_threshold": checks.unhealthy_threshold,
        "healthy_threshold": checks.healthy_threshold,
    }
    return {name: value for name, value in fields.items() if value is not None}


def resume(decodes: Sequence[DecodePool]) -> Mapping[str, Any]:
    """The router configuration's section `resume` for all `decodes` together, in order of their
    names; empty when their streams do not go on: an EPP of an earlier version refuses a file with
    it."""
    stated = _stated_resume(decodes) or RESUME_DEFAULT
    is_on = stated.enabled == "always" or (
        stated.enabled == "auto" and bool(decodes) and not resume_obstacles(decodes)
    )
    limits = {
        "max_regeneration": format_duration(stated.max_regeneration),
        "max_moves": stated.max_moves,
    }
    return {"enabled": True, **limits} if is_on else {}


def slo(decodes: Iterable[DecodePool]) -> dict[str, Any]:
    """The router configuration's section `slo` for all `decodes` together, in order of their names;
    empty when none states it: an EPP of an earlier version refuses a file with it."""
    stated: dict[str, Any] = {}
    for decode in decodes:
        if objectives := _slo(decode):
            for name in decode.spec.model.names:
                stated.setdefault(name, objectives)
    return stated


def _slo(decode: DecodePool) -> dict[str, Any] | None:
    if (stated := decode.spec.routing.slo) is None:
        return None
    times = {"ttft": _duration(stated.ttft), "itl": _duration(stated.itl)}
    given = {name: time for name, time in times.items() if time is not None}
    return {**given, "attainment": stated.attainment}


def resume_obstacles(decodes: Iterable[DecodePool]) -> tuple[str, ...]:
    """What keeps `routing.resume.enabled: auto` off, one line for each of `decodes` of which it is
    not known that its streams go on with the same tokens, and that what decides for it knows the
    section `resume`; empty: nothing, or the pools state something else than `auto`."""
    decodes = tuple(decodes)
    if (_stated_resume(decodes) or RESUME_DEFAULT).enabled != "auto":
        return ()
    lines = ((decode.name, _obstacle(decode)) for decode in decodes)
    return tuple(f"{name} {obstacle}" for name, obstacle in lines if obstacle)


def _obstacle(decode: DecodePool) -> str:
    engine, epp = decode.spec.engine, decode.spec.routing.epp
    if not epp.enabled:
        return "has routing.epp disabled"
    if epp.image is not None:
        return "has an epp.image of its own, which may be of an earlier version"
    if engine.type == "torch" or RESUME.includes(parse_release(engine.version)):
        return ""
    return f"runs vLLM {engine.version}, not {RESUME}"


def _stated_resume(decodes: Iterable[DecodePool]) -> Resume | None:
    return next(filter(None, (decode.spec.routing.resume for decode in decodes)), None)


def _duration(seconds: Seconds | None) -> str | None:
    return None if seconds is None else format_duration(seconds)


def api_paths(decodes: Iterable[DecodePool]) -> tuple[str, ...]:
    """The paths that clients may request beside the API's, of all `decodes` together."""
    return tuple(sorted({path for pool in decodes for path in pool.spec.routing.api_paths}))


def max_request_bytes(decodes: Iterable[DecodePool]) -> int | None:
    """The largest body of a request that any of `decodes` takes; None: none states it."""
    limits = (pool.spec.routing.max_request_bytes for pool in decodes)
    return max((limit for limit in limits if limit is not None), default=None)


def disaggregated_serving(decodes: Sequence[DecodePool]) -> dict[str, Any]:
    """The router configuration's section `disaggregated_serving` for all `decodes` together."""
    specs = [pool.spec for pool in decodes]
    # A pool without prefills serves unified either way.
    routings = [spec.routing for spec in specs if spec.prefill_ref]
    split, limit = _split(routings), _max_prefill_on_decode(routings)
    if not specs:
        return {"enabled": False}
    sidecars = [spec.sidecar for spec in specs]
    # A pod that its node selector binds to a domain, or that Kubernetes labels with the topology of
    # its node, tells the EPP where it runs.
    topology_keys = {spec.placement.topology_key for spec in specs if spec.placement}
    domain = {"domain_label": topology_keys.pop()} if len(topology_keys) == 1 else {}
    paths = api_paths(decodes)
    # Without timeouts, which would hold for all pools: each pool's sidecars have its own as flags.
    return {
        **domain,
        **({"api_paths": list(paths)} if paths else {}),
        "enabled": split != "off",
        "fallback_to_unified": all(s.fallback_to_unified for s in sidecars),
        # Only where they are stated: an EPP of an earlier version refuses what it does not know.
        **({"split": split} if split == "always" else {}),
        **({"max_prefill_on_decode": limit} if limit is not None else {}),
    }


def _split(routings: Sequence[Routing]) -> Literal["always", "auto", "off"]:
    """`routing.split` in effect for the pools with a PrefillPool."""
    modes = {routing.split for routing in routings}
    if not modes - {"off"}:
        return "off"
    return "always" if modes == {"always"} else "auto"


def _max_prefill_on_decode(routings: Sequence[Routing]) -> int | None:
    """`routing.maxPrefillOnDecode` in effect for the same; None: no limit."""
    limits = (routing.max_prefill_on_decode for routing in routings)
    return min((limit for limit in limits if limit is not None), default=None)


def static_router_config(sets: Sequence[PoolSet], addresses: Mapping[str, str]) -> dict[str, Any]:
    """The router configuration with a fixed list of backends, for pods whose addresses are known,
    and the EndpointPickerConfig of the pools.

    `addresses` maps pod names to IP addresses. Raises KeyError when a pod has none.
    """
    backends = [
        {
            "name": name,
            "url": f"http://{addresses[name]}:{_serving_port(pool)}",
            "role": pool.role.value,
            "models": list(pool.spec.model.names),
        }
        for pool_set in sets
        for pool in pool_set.pools
        for name in pod_names(pool)
    ]
    decodes = sorted(
        (pool for pool_set in sets for pool in pool_set.decodes), key=lambda pool: pool.name
    )
    return {
        **epp_config(decodes),
        # Last: the rendered sections replace those in the user's configuration.
        "disaggregated_serving": disaggregated_serving(decodes),
        **({"health_checks": checks} if (checks := health_checks(decodes)) else {}),
        **({"resume": resumed} if (resumed := resume(decodes)) else {}),
        **({"flow_control": flow} if (flow := flow_control(decodes)) else {}),
        **({"slo": objectives} if (objectives := slo(decodes)) else {}),
        "backends": backends,
    }


def _serving_port(pool: PrefillPool | DecodePool) -> int:
    return ports.ENGINE_PREFILL if isinstance(pool, PrefillPool) else ports.SIDECAR


def _api_key_secret(routing: Routing) -> str | None:
    reference = routing.envoy.api_key_secret_ref
    return reference.name if reference else None


def _tls_secret(routing: Routing) -> str | None:
    return routing.tls.secret_name if routing.tls else None


_PODS: Mapping[str, Callable[[Routing], Any]] = {
    "nodeSelector": lambda routing: routing.node_selector or None,
    "tolerations": lambda routing: routing.tolerations or None,
    "imagePullSecrets": lambda r: tuple(secret.name for secret in r.image_pull_secrets) or None,
    "epp.image": lambda routing: routing.epp.image,
    "epp.env": lambda routing: routing.epp.env or None,
    "epp.envFrom": lambda routing: routing.epp.env_from or None,
    "envoy.image": lambda routing: routing.envoy.image,
    "envoy.env": lambda routing: routing.envoy.env or None,
    "envoy.envFrom": lambda routing: routing.envoy.env_from or None,
}
"""Fields of `spec.routing` about the pods of EPP and Envoy, with a function that reads each."""


def with_pools_settings(settings: RouterSettings, pools: Sequence[EndpointPool]) -> RouterSettings:
    """`settings` with what the pools say about the pods of their endpoint's EPP and Envoy.

    Of several pools the first by name that states a field counts. Variables and pull secrets are
    added to the installation's; a variable replaces that of the same name.
    """
    routings = [pool.pool.spec.routing for pool in _by_name(pools)]
    stated = {
        name: next((value for r in routings if (value := read(r)) is not None), None)
        for name, read in _PODS.items()
    }
    secrets = (*settings.image_pull_secrets, *(stated["imagePullSecrets"] or ()))
    return replace(
        settings,
        tandem_image=stated["epp.image"] or settings.tandem_image,
        envoy_image=stated["envoy.image"] or settings.envoy_image,
        node_selector=stated["nodeSelector"] or settings.node_selector,
        tolerations=stated["tolerations"] or settings.tolerations,
        image_pull_secrets=tuple(dict.fromkeys(secrets)),
        epp_env=_merged(settings.epp_env, stated["epp.env"], stated["epp.envFrom"]),
        envoy_env=_merged(settings.envoy_env, stated["envoy.env"], stated["envoy.envFrom"]),
    )


def _merged(
    ours: Mapping[str, tuple[Body, ...]],
    env: tuple[Body, ...] | None,
    env_from: tuple[Body, ...] | None,
) -> dict[str, tuple[Body, ...]]:
    """`env` and `envFrom` of a container, each variable once."""
    variables = {each["name"]: each for each in (*ours.get("env", ()), *(env or ()))}
    # The last source of a variable counts, so that the pool's wins.
    merged = {
        "env": tuple(variables.values()),
        "envFrom": (*ours.get("envFrom", ()), *(env_from or ())),
    }
    return {name: items for name, items in merged.items() if items}


def _builtins(section: RoutingService | RouterPodMetadata | None) -> Mapping[str, Any] | None:
    return msgspec.to_builtins(section) if section else None


_COMPARED: Mapping[str, Callable[[Routing], Any]] = {
    "front": lambda routing: routing.front,
    "epp.enabled": lambda routing: routing.epp.enabled,
    "epp.config": lambda routing: routing.epp.config or None,
    "epp.healthChecks": lambda routing: _health_checks(routing) or None,
    "envoy.enabled": lambda routing: routing.envoy.enabled,
    "envoy.apiKeySecretRef": _api_key_secret,
    "tls.secretName": _tls_secret,
    "service": lambda routing: _builtins(routing.service),
    "podMetadata": lambda routing: _builtins(routing.pod_metadata),
    "resume": lambda r: msgspec.structs.asdict(r.resume) if r.resume else None,
    "flowControl": lambda r: msgspec.structs.asdict(r.flow_control) if r.flow_control else None,
    **_PODS,
}
"""Fields of `spec.routing` that can conflict, with a function that reads each; None: not set."""


def find_conflicts(pools: Sequence[EndpointPool]) -> tuple[str, ...]:
    """One line per setting on which pools of the endpoint disagree; empty when they agree.

    Each line names the pools and their values, the value in effect, and how to resolve it.
    """
    ordered = _by_name(pools)
    lines = [
        line
        for name, read in _COMPARED.items()
        if (line := _conflict(name, [(p.pool.name, read(p.pool.spec.routing)) for p in ordered]))
    ]
    # A pool without prefills serves unified either way, so these two fields contradict nothing.
    of_splitting = [
        (p.pool.name, p.pool.spec.routing) for p in ordered if p.pool.spec.prefill_ref is not None
    ]
    routings = [routing for _, routing in of_splitting]
    split = _conflict("split", [(pool, r.split) for pool, r in of_splitting], _split(routings))
    limit = _conflict(
        "maxPrefillOnDecode",
        [(pool, r.max_prefill_on_decode) for pool, r in of_splitting],
        _max_prefill_on_decode(routings),
    )
    return (*lines, *filter(None, (split, limit)), *_slo_conflicts([p.pool for p in ordered]))


def _slo_conflicts(decodes: Sequence[DecodePool]) -> tuple[str, ...]:
    """The lines about models of which two pools state different objectives, each once."""
    names = dict.fromkeys(name for decode in decodes for name in decode.spec.model.names)
    lines = (
        _conflict("slo", [(d.name, _slo(d)) for d in decodes if name in d.spec.model.names])
        for name in names
    )
    return tuple(dict.fromkeys(filter(None, lines)))


def _conflict(
    name: str, values_by_pool: Sequence[tuple[str, Any]], effective: Any = None
) -> str | None:
    """The line for one field, from the pools' names and values in the order of names. `effective`:
    the value in effect; None: that of a switch, of the front, or of the first pool."""
    stated = [(pool, value) for pool, value in values_by_pool if value is not None]
    values = [value for _, value in stated]
    if all(value == values[0] for value in values):
        return None
    # A whole configuration is too long to quote in a condition.
    if isinstance(values[0], (Mapping, tuple)):
        first, others = stated[0][0], [pool for pool, value in stated if value != values[0]]
        return (
            f"routing.{name} of {', '.join(others)} differs from that of {first}, which is used:"
            f" set it in one pool, or the same in all"
        )
    # As in `combine_requirements`: it is on when any pool turns it on, the front is Envoy when any
    # pool says so; of names the first counts.
    if effective is None:
        effective = next((value for value in ("envoy", True) if value in values), values[0])
    summary = ", ".join(f"{json.dumps(value)} in {pool}" for pool, value in stated)
    return (
        f"routing.{name} is {summary}: {json.dumps(effective)} is used;"
        f" set the same value in all pools of the endpoint"
    )


def _by_name(pools: Sequence[EndpointPool]) -> list[EndpointPool]:
    return sorted(pools, key=lambda pool: pool.name)


def _union(limits: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
    """All values, each once; none when one of the pools has none and thus no limit."""
    return tuple(dict.fromkeys(chain.from_iterable(limits))) if all(limits) else ()


def _gateway_key(ref: GatewayRef) -> tuple[str, str, str]:
    return ref.namespace or "", ref.name, ref.section_name or ""
