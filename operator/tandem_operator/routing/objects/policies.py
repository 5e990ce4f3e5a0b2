"""NetworkPolicies of an endpoint: who may open connections to its pods. Pure.

    pods of        from                                       ports
    prefill pool   decode pods of its set                     engine, side channel, UCX's range
    decode pool    all pods of its set                        side channel, UCX's range
    decode pool    decode pods of the endpoint, Envoy,        sidecar
                   router, gateways
    all            EPP, router                                sidecar or prefill engine, KV events
    all            operator, Prometheus, control plane        engine, the sidecar's admin port
    EPP            Envoy, gateways; other EPPs; monitors      gRPC; peers; metrics
    Envoy          all clients; monitors                      HTTP; health and statistics
    router         all clients; other routers; monitors       HTTP; peers; metrics

A unified pool is a decode pool here. Its pods also prefill, and a pod that drains hands off the KV
of streams that go on at another one: sidecars send each other such requests, with a proof or a
plan.

Envoy, EPP and router are all let in, whichever is the front: after a change the other one drains.

A pod may always connect to itself, so no rule is needed for a sidecar and its engine, and the
kubelet may always connect to the pods of its node. Rules of several policies add up: a pod may be
reached if any of them says so.

The label `handoff-ports` of a pod says at which ports its engine takes connections of engines: none
where KV moves through a store alone. Pods without it (other connectors, or made by an earlier
operator) and pods of a revision with other ports listen anywhere: to these, the set's pods may open
connections at every unprivileged port that is not a server's.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from tandem_contract import labels, ports

from ...pods.connectors import HandoffPorts, earlier_handoff_ports, handoff_ports
from ..endpoint.observed import NETWORK_POLICY, ObservedEndpoint
from ..endpoint.requirements import EndpointRequirements
from ..endpoint.settings import NetworkPolicySettings
from .common import ENVOY, EPP, ROUTER, Names, Object, body, selector

Peer = Mapping[str, Any]
Ports = tuple[tuple[int, int], ...]
"""Ranges of TCP ports, both ends included."""

_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
"""Kubernetes' label of every namespace with its name."""
_UNPRIVILEGED: Final = (1024, 65535)
"""Where an engine may listen whose ports are not known; as no user of the pods is privileged, none
is lower."""
_KV_EVENTS: Final[Ports] = (
    (ports.KV_EVENTS, ports.SIDE_CHANNEL - 1),
    (ports.KV_EVENTS_REPLAY, ports.KV_EVENTS_REPLAY + ports.SIDE_CHANNEL - ports.KV_EVENTS - 1),
)
"""One port for each data-parallel rank; more ranks would take the side channel's."""
_RANKS: Final = ports.SIDE_CHANNEL - ports.KV_EVENTS
"""Data-parallel ranks of a pod, at most, by those ports."""
_DECODE_SERVERS: Final = (ports.SIDECAR, ports.SIDECAR_ADMIN, ports.ENGINE_DECODE)
"""Ports of a decode pod that no other engine connects to, in ascending order."""


def network_policies(
    observed: ObservedEndpoint,
    required: EndpointRequirements,
    settings: NetworkPolicySettings,
    running: Collection[str],
) -> Iterator[Object]:
    """All policies of the endpoint, whose fronts `running` are components."""
    name, names = observed.key.name, Names(observed.key.name)
    monitors = _monitors(settings)
    front = _front(observed, required, settings)
    pickers = _pickers(observed, required, settings)
    decodes = _pods(name, "decode")
    yield _policy(
        observed, names.decode, "decode", decodes,
        (front, _single(ports.SIDECAR)),
        # An alternate of a stream's plan may be in another set.
        ([{"podSelector": decodes}], _single(ports.SIDECAR)),
        (pickers, (*_single(ports.SIDECAR), *_KV_EVENTS)),
        (monitors, (*_single(ports.SIDECAR_ADMIN), *_single(ports.ENGINE_DECODE))),
    )  # fmt: skip
    yield _policy(
        observed, names.prefill, "prefill", _pods(name, "prefill"),
        (pickers, (*_single(ports.ENGINE_PREFILL), *_KV_EVENTS)),
        (monitors, _single(ports.ENGINE_PREFILL)),
    )  # fmt: skip
    yield from _handoff_policies(observed)
    envoys = {"matchLabels": selector(observed, ENVOY)}
    epps = {"matchLabels": selector(observed, EPP)}
    routers = {"matchLabels": selector(observed, ROUTER)}
    if EPP in running:
        yield _policy(
            observed, names.epp, EPP, epps,
            (front, _single(ports.EPP_GRPC)),
            ([{"podSelector": epps}], _single(ports.EPP_PEERS)),
            (monitors, _single(ports.EPP_METRICS)),
        )  # fmt: skip
    if ENVOY in running:
        yield _policy(
            observed, names.envoy, ENVOY, envoys,
            (None, _single(ports.ENVOY)),
            (monitors, _single(ports.ENVOY_HEALTH)),
        )  # fmt: skip
    if ROUTER in running:
        yield _policy(
            observed, names.router, ROUTER, routers,
            (None, _single(ports.ROUTER)),
            ([{"podSelector": routers}], _single(ports.EPP_PEERS)),
            (monitors, _single(ports.ROUTER_ADMIN)),
        )  # fmt: skip


def _handoff_policies(observed: ObservedEndpoint) -> Iterator[Object]:
    """Policies of each set behind the endpoint: its pods reach those that they hand off to or from.

    A decode pod's set follows from its pool. Pools of *other* sets are left out by name, instead of
    naming those of the set: pods of a pool that was deleted, which finish their requests, still
    reach their prefill pods.
    """
    references = {pool.name: pool.pool.spec.prefill_ref for pool in observed.pools}
    sets = {pool: reference.name if reference else None for pool, reference in references.items()}
    for prefill_pool in sorted(set(filter(None, sets.values()))):
        others = sorted(pool for pool, name_of_set in sets.items() if name_of_set != prefill_pool)
        # A PrefillPool is not observed here, but its DecodePools inherit its ports.
        known = {
            handoff.label: handoff
            for pool in observed.pools
            if sets[pool.name] == prefill_pool
            for handoff in (handoff_ports(pool.pool), earlier_handoff_ports(pool.pool))
            if handoff is not None
        }
        yield from _set_policies(observed, prefill_pool, others, known)


def _set_policies(
    observed: ObservedEndpoint,
    prefill_pool: str,
    others: Sequence[str],
    known: Mapping[str, HandoffPorts],
) -> Iterator[Object]:
    """Policies of one set; `known`: the ports of its pools, by the label of their pods."""
    name = observed.key.name
    decode = _pods(name, "decode", other_pools=others)
    prefill = _pods(name, "prefill", pool=prefill_pool)
    decodes = [{"podSelector": decode}]
    peers = [{"podSelector": prefill}, *decodes]
    # A dot, which no endpoint's name has, keeps the names of different endpoints apart.
    name = f"{name}.{prefill_pool}"
    for suffix, pods, opened in _by_ports(prefill, known, _single(ports.ENGINE_PREFILL), ()):
        yield _policy(observed, f"{name}-prefill{suffix}", "prefill", pods, (decodes, opened))
    # A decode engine trusts the hand-off parameters of a request, so only its sidecar, which
    # checks them, may send it one.
    for suffix, pods, opened in _by_ports(decode, known, (), _DECODE_SERVERS):
        yield _policy(observed, f"{name}-decode{suffix}", "decode", pods, (peers, opened))


def _by_ports(
    pods: Mapping[str, Any],
    known: Mapping[str, HandoffPorts],
    opened: Ports,
    closed: Sequence[int],
) -> Iterator[tuple[str, Mapping[str, Any], Ports]]:
    """Pods by their hand-off ports: a suffix for the policy's name, a selector, and what is open.

    `opened`: ports that are open beside those of the engine; `closed`: those that never are.
    """
    for label, handoff in sorted(known.items()):
        labelled = {**pods, "matchLabels": {**pods["matchLabels"], labels.HANDOFF_PORTS: label}}
        ranges = (*opened, *_side_channels(handoff.side_channel, closed))
        if handoff.data is not None:
            ranges = (*ranges, (handoff.data.first, handoff.data.last))
        yield f".{label.replace('_', '.')}", labelled, ranges
    # Last: a pod that this selector leaves out has a policy of its own by then.
    rest = [*pods.get("matchExpressions", [])]
    if known:
        rest.append({"key": labels.HANDOFF_PORTS, "operator": "NotIn", "values": sorted(known)})
    yield "", {**pods, "matchExpressions": rest}, _without(_UNPRIVILEGED, closed)


def _side_channels(first: int | None, closed: Sequence[int]) -> Ports:
    """The ports of all ranks; none where KV moves through a store alone."""
    if first is None:
        return ()
    return _without((first, min(first + _RANKS - 1, _UNPRIVILEGED[1])), closed)


def _front(
    observed: ObservedEndpoint, required: EndpointRequirements, settings: NetworkPolicySettings
) -> Sequence[Peer] | None:
    """What sends the clients' requests: our front, and gateways; None for everyone.

    A pool that is routed by the cluster's gateways must be reachable for them. Where the
    installation does not say in which namespaces they run, that is everyone.
    """
    has_gateways = not required.has_front or required.inference_pool or bool(required.gateways)
    if has_gateways and not settings.gateway_namespaces:
        return None
    own = [_component(observed, each) for each in (ENVOY, ROUTER)] if required.has_front else []
    return [*own, *_namespaces(settings.gateway_namespaces)]


def _pickers(
    observed: ObservedEndpoint, required: EndpointRequirements, settings: NetworkPolicySettings
) -> Sequence[Peer]:
    """Our EPP; in its place the user's, which runs in the pools' namespace or with the gateways."""
    if required.epp:
        return [_component(observed, each) for each in (EPP, ROUTER)]
    return [{"podSelector": {}}, *_namespaces(settings.gateway_namespaces)]


def _component(observed: ObservedEndpoint, component: str) -> Peer:
    return {"podSelector": {"matchLabels": selector(observed, component)}}


def _monitors(settings: NetworkPolicySettings) -> Sequence[Peer]:
    operator = {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: settings.operator_namespace}},
        "podSelector": {"matchLabels": dict(settings.operator_labels)},
    }
    return [
        operator,
        *_namespaces(settings.prometheus_namespaces),
        *({"ipBlock": {"cidr": cidr}} for cidr in settings.control_plane_cidrs),
    ]


def _namespaces(names: Sequence[str]) -> list[Peer]:
    if not names:
        return []
    within = {"key": _NAMESPACE_NAME, "operator": "In", "values": sorted(names)}
    return [{"namespaceSelector": {"matchExpressions": [within]}}]


def _pods(
    endpoint: str, role: str, *, pool: str | None = None, other_pools: Sequence[str] = ()
) -> dict[str, Any]:
    """A label selector of the endpoint's pods: those of `pool`, or not those of `other_pools`."""
    matched = {labels.endpoint_label(endpoint): role, **({labels.POOL: pool} if pool else {})}
    if not other_pools:
        return {"matchLabels": matched}
    others = {"key": labels.POOL, "operator": "NotIn", "values": list(other_pools)}
    return {"matchLabels": matched, "matchExpressions": [others]}


def _single(port: int) -> Ports:
    return ((port, port),)


def _without(whole: tuple[int, int], taken: Sequence[int]) -> Ports:
    """A range of ports without those of `taken`, which are in ascending order."""
    taken = [port for port in taken if whole[0] <= port <= whole[1]]
    starts = (whole[0], *(port + 1 for port in taken))
    ends = (*(port - 1 for port in taken), whole[1])
    return tuple((start, end) for start, end in zip(starts, ends, strict=True) if start <= end)


def _policy(
    observed: ObservedEndpoint,
    name: str,
    component: str,
    pods: Mapping[str, Any],
    *rules: tuple[Sequence[Peer] | None, Ports],
) -> Object:
    """A policy that lets into `pods` what `rules` say: peers (None: everyone) and ports."""
    ingress = [
        {
            **({} if peers is None else {"from": list(peers)}),
            "ports": [_port_range(first, last) for first, last in port_ranges],
        }
        # An empty list of peers would mean everyone, and one of ports all ports.
        for peers, port_ranges in rules
        if (peers is None or peers) and port_ranges
    ]
    spec = {"podSelector": dict(pods), "policyTypes": ["Ingress"], "ingress": ingress}
    return body(observed, NETWORK_POLICY, name, component, spec=spec)


def _port_range(first: int, last: int) -> dict[str, Any]:
    single = {"protocol": "TCP", "port": first}
    return single if first == last else {**single, "endPort": last}
