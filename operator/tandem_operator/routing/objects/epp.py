"""The EPP's objects: Deployment, ConfigMap, RBAC, Services, InferencePool, HTTPRoute. Pure."""

import json
from collections.abc import Mapping
from typing import Any, Final

from tandem_contract import endpoints, labels, ports

from ...observed import Body
from ...pods import probes
from ...pods.containers import body_limit_flag, tls_flags, tls_mounts, tls_volumes
from ...resources.spec import GatewayRef, RouteMatch
from ..endpoint.observed import (
    HTTP_ROUTE,
    INFERENCE_POOL,
    INFERENCE_POOL_ALPHA,
    ObservedEndpoint,
)
from ..endpoint.requirements import EndpointRequirements
from ..endpoint.settings import RouterSettings
from .common import (
    EPP,
    Names,
    Object,
    body,
    budget,
    config_map,
    container,
    deployment,
    pod_spec,
    service,
)

CONFIG_DIRECTORY: Final = "/etc/tandem/router"
CONFIG_FILE: Final = "router.yaml"
KEY_DIRECTORY: Final = "/var/run/tandem/plan-keys"
_PRE_STOP_SECONDS: Final = 15
"""Seconds for which a pod that is being stopped keeps answering: Envoy looks the EPP's addresses up
every 2 s, and DNS servers cache an answer for a few seconds."""
_STORAGE_OFFLOADING: Final = {"kv_cache_index": {"storage_offloading": {"enabled": True}}}
_RBAC: Final = "rbac.authorization.k8s.io"
_GATEWAY_GROUP: Final = "gateway.networking.k8s.io"
_READ: Final = ["get", "list", "watch"]
_POOL_GROUPS: Final = ["inference.networking.k8s.io", "inference.networking.x-k8s.io"]
_POOL_OBJECT_GROUPS: Final = ["llm-d.ai", "inference.networking.x-k8s.io"]
_POOL_OBJECTS: Final = ["inferencemodelrewrites", "inferenceobjectives"]
"""Kinds that refer to an InferencePool and that the EPP reads, in both groups."""


def epp_objects(
    observed: ObservedEndpoint, required: EndpointRequirements, settings: RouterSettings
) -> list[Object]:
    """The EPP's objects except its key Secret and its account, which come before them.

    The EPP reloads its configuration, so a changed ConfigMap starts no new pods.
    """
    names = Names(observed.key.name)
    document = decision_config(required, settings)
    replicas = required.epp_replicas or settings.epp_replicas
    return [
        # Gateways name the first Service; our Envoy resolves single pods through the headless one.
        service(observed, names.epp, EPP, ("grpc", ports.EPP_GRPC)),
        service(observed, names.epp_pods, EPP, ("grpc", ports.EPP_GRPC), headless=True),
        # Unready pods too: a new EPP gets the others' knowledge before it gets requests.
        service(
            observed, names.epp_peers, EPP, ("peers", ports.EPP_PEERS), headless=True, unready=True
        ),
        config_map(observed, names.epp, EPP, {CONFIG_FILE: document}),
        deployment(
            observed,
            names.epp,
            EPP,
            replicas,
            _template(observed, required, settings),
            stated=required.pod_metadata,
        ),
        budget(observed, names.epp, EPP),
    ]


def decision_config(required: EndpointRequirements, settings: RouterSettings) -> str:
    """The file of what decides where requests go: an EPP, or the router."""
    config = {
        **required.epp_config,
        # Last: the operator's sections replace those in the user's configuration.
        "disaggregated_serving": required.disaggregated_serving,
        **(_STORAGE_OFFLOADING if settings.storage_offloading else {}),
        **({"health_checks": required.health_checks} if required.health_checks else {}),
        **({"resume": required.resume} if required.resume else {}),
        **({"flow_control": required.flow_control} if required.flow_control else {}),
        **({"slo": required.slo} if required.slo else {}),
    }
    return json.dumps(config, indent=1, sort_keys=True)


def present_section(config_map: Body | None, name: str) -> Mapping[str, Any] | None:
    """The section `name` in the file of what decides, empty if it has none; None: there is no
    file, or someone made it unreadable."""
    try:
        document = json.loads(config_map["data"][CONFIG_FILE]) if config_map else None
    except (KeyError, ValueError):
        return None
    return document.get(name, {}) if isinstance(document, dict) else None


def decision_volumes(
    observed: ObservedEndpoint, required: EndpointRequirements, config: str
) -> list[Object]:
    """The volumes of a pod that decides; `config`: name of the ConfigMap with its file."""
    return [
        {"name": "config", "configMap": {"name": config}},
        {"name": "plan-keys", "secret": {"secretName": Names(observed.key.name).plan_keys}},
        *tls_volumes(required.tls_secret),
    ]


def decision_mounts(required: EndpointRequirements) -> list[Object]:
    """Where they are mounted."""
    return [
        {"name": "config", "mountPath": CONFIG_DIRECTORY, "readOnly": True},
        {"name": "plan-keys", "mountPath": KEY_DIRECTORY, "readOnly": True},
        *tls_mounts(required.tls_secret),
    ]


def account_objects(observed: ObservedEndpoint, required: EndpointRequirements) -> list[Object]:
    """ServiceAccount, Role and RoleBinding that let the EPP, or the router, read the pods of its
    namespace, and what refers to the EPP's InferencePool."""
    name = Names(observed.key.name).epp
    account = ("v1", "ServiceAccount")
    role, binding = (f"{_RBAC}/v1", "Role"), (f"{_RBAC}/v1", "RoleBinding")
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": _READ}]
    if required.inference_pool:
        rules += [
            {"apiGroups": _POOL_OBJECT_GROUPS, "resources": _POOL_OBJECTS, "verbs": _READ},
            # An object may select pools by their labels.
            {"apiGroups": _POOL_GROUPS, "resources": ["inferencepools"], "verbs": _READ[1:]},
        ]
    subject = {"kind": account[1], "name": name, "namespace": observed.key.namespace}
    reference = {"apiGroup": _RBAC, "kind": role[1], "name": name}
    return [
        # The token is mounted by these pods only, not by others that use the account.
        body(observed, account, name, EPP, automountServiceAccountToken=False),
        body(observed, role, name, EPP, rules=rules),
        body(observed, binding, name, EPP, roleRef=reference, subjects=[subject]),
    ]


def _template(
    observed: ObservedEndpoint, required: EndpointRequirements, settings: RouterSettings
) -> Object:
    names = Names(observed.key.name)
    spec = pod_spec(
        observed,
        settings,
        EPP,
        serviceAccountName=names.epp,
        automountServiceAccountToken=True,
        terminationGracePeriodSeconds=_PRE_STOP_SECONDS + 15,
        containers=[_container(observed, required, settings)],
        volumes=decision_volumes(observed, required, names.epp),
    )
    return {"spec": spec}


def _container(
    observed: ObservedEndpoint, required: EndpointRequirements, settings: RouterSettings
) -> Object:
    peers = Names(observed.key.name).epp_peers
    # Some gateways call an EPP by TLS only, and others, as our Envoy, in clear text.
    accept = () if required.tls_secret else ("--accept-tls",)
    gateway = ("--inference-pool", observed.key.name, *accept)
    pool = gateway if required.inference_pool else ()
    return container(
        settings,
        name=EPP,
        image=settings.tandem_image,
        command=["tandem-epp"],
        args=[
            *("--discovery", "kubernetes"),
            *("--namespace", observed.key.namespace),
            *("--endpoint", observed.key.name),
            *pool,
            *("--config", f"{CONFIG_DIRECTORY}/{CONFIG_FILE}"),
            *("--plan-key-dir", KEY_DIRECTORY),
            *body_limit_flag(required.max_request_bytes),
            *tls_flags(required.tls_secret),
            *("--peers", f"{peers}.{observed.key.namespace}.svc:{ports.EPP_PEERS}"),
        ],
        ports=[
            {"name": "grpc", "containerPort": ports.EPP_GRPC, "protocol": "TCP"},
            {"name": "health", "containerPort": ports.EPP_HEALTH, "protocol": "TCP"},
            {"name": "metrics", "containerPort": ports.EPP_METRICS, "protocol": "TCP"},
            {"name": "peers", "containerPort": ports.EPP_PEERS, "protocol": "TCP"},
        ],
        startupProbe=probes.server_startup(endpoints.LIVE, ports.EPP_HEALTH),
        readinessProbe=probe(endpoints.READY, ports.EPP_HEALTH, failures=2),
        livenessProbe=probe(endpoints.LIVE, ports.EPP_HEALTH, failures=6),
        lifecycle={"preStop": {"sleep": {"seconds": _PRE_STOP_SECONDS}}},
        resources=dict(settings.epp_resources),
        **{name: list(items) for name, items in settings.epp_env.items()},
        volumeMounts=decision_mounts(required),
    )


def probe(path: str, port: int, *, failures: int) -> Object:
    """A probe of a pod that decides."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": 5,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def inference_pool(observed: ObservedEndpoint) -> Object:
    """The decode pods and their EPP in the form that an inference gateway reads.

    Written in the stable version of the kind where the cluster serves it, else in the alpha one.
    FailOpen matches our Envoy: while no EPP answers, any decode pod gets the request.
    """
    pods = {labels.endpoint_label(observed.key.name): "decode"}
    name, epp = observed.key.name, Names(observed.key.name).epp
    picker: dict[str, Any]
    spec: dict[str, Any]
    if INFERENCE_POOL in observed.kinds:
        picker = {"name": epp, "port": {"number": ports.EPP_GRPC}, "failureMode": "FailOpen"}
        spec = {
            "selector": {"matchLabels": pods},
            "targetPorts": [{"number": ports.SIDECAR}],
            "endpointPickerRef": picker,
        }
        return body(observed, INFERENCE_POOL, name, "router", spec=spec)
    picker = {"name": epp, "portNumber": ports.EPP_GRPC, "failureMode": "FailOpen"}
    spec = {"selector": pods, "targetPortNumber": ports.SIDECAR, "extensionRef": picker}
    return body(observed, INFERENCE_POOL_ALPHA, name, "router", spec=spec)


def http_route(observed: ObservedEndpoint, required: EndpointRequirements) -> Object:
    """Routes from the gateways to the InferencePool, without a limit on a response's duration."""
    group, kind = INFERENCE_POOL if INFERENCE_POOL in observed.kinds else INFERENCE_POOL_ALPHA
    backend = {"group": group.partition("/")[0], "kind": kind, "name": observed.key.name}
    rule: Object = {"backendRefs": [backend], "timeouts": {"request": "0s"}}
    if required.matches:
        rule["matches"] = [_match(match) for match in required.matches]
    spec: Object = {
        "parentRefs": [_parent_ref(gateway) for gateway in required.gateways],
        "rules": [rule],
    }
    if required.hostnames:
        spec["hostnames"] = list(required.hostnames)
    return body(observed, HTTP_ROUTE, observed.key.name, "router", spec=spec)


def _match(match: RouteMatch) -> Object:
    fields: Object = {}
    if match.path:
        fields["path"] = {"type": match.path.type, "value": match.path.value}
    if match.headers:
        fields["headers"] = [
            {"name": header.name, "value": header.value} for header in match.headers
        ]
    return fields


def _parent_ref(gateway: GatewayRef) -> dict[str, str]:
    fields = {
        "group": _GATEWAY_GROUP,
        "kind": "Gateway",
        "name": gateway.name,
        "namespace": gateway.namespace,
        "sectionName": gateway.section_name,
    }
    return {key: value for key, value in fields.items() if value is not None}
