"""The objects that llm-d-router's standalone chart (0.10) creates, in our own words: pool, rights,
configuration, Service, and a pod of Envoy and the endpoint picker with the chart's arguments, ports
and probes. For machines that do not have the chart."""

import json
from typing import Any

from tandem_contract import ports
from tandem_operator.routing.envoy.bootstrap import READY, EnvoySettings, envoy_bootstrap
from tandem_operator.routing.envoy.clusters import EPP
from tests.epp.llmd.chart_envoy import call_as_the_chart_does

Object = dict[str, Any]

HTTP = 8081
STATISTICS = 19001
"""Port of Envoy's readiness and of its statistics, in Prometheus' format."""
CLUSTER = "ext_proc"
"""Envoy's name for the endpoint picker."""
CONFIGURATION = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
- type: queue-scorer
- type: prefill-filter
- type: decode-filter
- type: max-score-picker
- type: prefix-based-pd-decider
  parameters: {nonCachedTokens: 16}
- type: disagg-profile-handler
  parameters:
    deciders: {prefill: prefix-based-pd-decider}
schedulingProfiles:
- name: prefill
  plugins:
  - pluginRef: prefill-filter
  - {pluginRef: prefix-cache-scorer, weight: 2}
  - {pluginRef: queue-scorer, weight: 1}
  - pluginRef: max-score-picker
- name: decode
  plugins:
  - pluginRef: decode-filter
  - {pluginRef: prefix-cache-scorer, weight: 2}
  - {pluginRef: queue-scorer, weight: 1}
  - pluginRef: max-score-picker
"""


def router(pool: str, namespace: str, image: str, envoy: str) -> list[Object]:
    """All objects; `image` is the endpoint picker's."""
    name, labels = f"{pool}-epp", {"llm-d-router": f"{pool}-epp"}
    pod = {
        "serviceAccountName": name,
        "containers": [_envoy(envoy), _epp(pool, namespace, image)],
        "volumes": [_volume("envoy", "envoy"), _volume("plugins", name)],
    }
    port = {"name": "http", "port": HTTP, "targetPort": HTTP}
    template = {"metadata": {"labels": labels}, "spec": pod}
    return [
        _object("ServiceAccount", "v1", name),
        *_rights(name, namespace),
        _object("ConfigMap", "v1", name, data={"pd.yaml": CONFIGURATION}),
        _object("ConfigMap", "v1", "envoy", data={"envoy.yaml": json.dumps(_bootstrap())}),
        _object("Service", "v1", name, spec={"selector": labels, "ports": [port]}),
        _object(
            *("Deployment", "apps/v1", name),
            spec={"selector": {"matchLabels": labels}, "template": template},
        ),
        _object(
            *("InferencePool", "inference.networking.k8s.io/v1", pool),
            spec={
                "targetPorts": [{"number": ports.SIDECAR}],
                "appProtocol": "http",
                "selector": {"matchLabels": {"app": "tiny"}},
                "endpointPickerRef": {"name": name, "port": {"number": ports.EPP_GRPC}},
            },
        ),
    ]


def _epp(pool: str, namespace: str, image: str) -> Object:
    # One service name for both probes, as for a single replica.
    probe = {"grpc": {"port": ports.EPP_HEALTH, "service": "inference-extension"}}
    return {
        "name": "epp",
        "image": image,
        "args": [
            *("--pool-name", pool, "--pool-namespace", namespace),
            *("--pool-group", "inference.networking.k8s.io"),
            *("--zap-encoder", "json", "--config-file", "/config/pd.yaml"),
            *("--grpc-health-port", str(ports.EPP_HEALTH), "--tracing=false"),
        ],
        "ports": [
            {"name": "grpc", "containerPort": ports.EPP_GRPC},
            {"name": "grpc-health", "containerPort": ports.EPP_HEALTH},
            {"name": "metrics", "containerPort": ports.EPP_METRICS},
        ],
        "livenessProbe": {**probe, "initialDelaySeconds": 5, "periodSeconds": 10},
        "readinessProbe": {**probe, "periodSeconds": 2},
        "env": [
            {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.{field}"}}}
            for variable, field in (("NAMESPACE", "namespace"), ("POD_NAME", "name"))
        ],
        "volumeMounts": [{"name": "plugins", "mountPath": "/config"}],
    }


def _envoy(image: str) -> Object:
    return {
        "name": "envoy-proxy",
        "image": image,
        "command": ["envoy"],
        "args": ["--log-level", "warn", "--concurrency", "1", "-c", "/etc/envoy/envoy.yaml"],
        "ports": [
            {"name": "http", "containerPort": HTTP},
            {"name": "metrics", "containerPort": STATISTICS},
        ],
        "readinessProbe": {"httpGet": {"path": READY, "port": STATISTICS}, "periodSeconds": 5},
        "volumeMounts": [{"name": "envoy", "mountPath": "/etc/envoy"}],
    }


def _bootstrap() -> Object:
    """Envoy as the chart has it: every body passes the picker, which is called by TLS."""
    bootstrap = envoy_bootstrap(
        EnvoySettings(
            epp_address="127.0.0.1",
            # Serves while no picker answers; here nothing does, so that a test would notice.
            fallback=("127.0.0.1:1",),
            listen_port=HTTP,
            health_port=STATISTICS,
            body_mode="FULL_DUPLEX_STREAMED",
            response_bodies=True,
            reports_broken_answers=False,
        )
    )
    clusters = {each["name"]: each for each in bootstrap["static_resources"]["clusters"]}
    cluster = clusters[EPP]
    # Statistics have the chart's name of the cluster.
    cluster["alt_stat_name"] = CLUSTER
    call_as_the_chart_does(cluster)
    return bootstrap


def _rights(name: str, namespace: str) -> list[Object]:
    group, verbs = "rbac.authorization.k8s.io", ["get", "watch", "list"]
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": verbs},
        {
            "apiGroups": ["inference.networking.k8s.io"],
            "resources": ["inferencepools"],
            "verbs": verbs,
        },
    ]
    account = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    reference = {"apiGroup": group, "kind": "Role", "name": name}
    return [
        _object("Role", f"{group}/v1", name, rules=rules),
        _object("RoleBinding", f"{group}/v1", name, subjects=[account], roleRef=reference),
    ]


def _object(kind: str, version: str, name: str, **fields: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **fields}


def _volume(name: str, config_map: str) -> Object:
    return {"name": name, "configMap": {"name": config_map}}
