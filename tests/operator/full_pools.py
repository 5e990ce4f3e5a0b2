"""Valid pools that together set every field of the CRDs, and random changes to them."""

import copy
from random import Random
from typing import Any

from .pool_yaml import decode_pool, prefill_pool

_SHARED: dict[str, Any] = {
    "model": {
        "name": "org/model",
        "source": {"pvc": {"claimName": "models", "path": "model"}},
        "servedNames": ["a", "b"],
        "loraAdapters": [{"name": "x", "path": "adapters/x"}],
    },
    "engine": {
        "type": "vllm", "version": "0.32.0", "image": "vllm/vllm-openai:v0.32.0",
        "imagePullPolicy": "IfNotPresent", "tuning": "off", "dtype": "bfloat16",
        "kvCacheDtype": "fp8", "blockSize": 16, "maxModelLen": 4096, "gpuMemoryUtilization": 0.5,
        "maxNumSeqs": 2, "maxNumBatchedTokens": 4096, "extraArgs": ["--enforce-eager"],
        "resources": {
            "requests": {"cpu": 4, "memory": "32Gi", "ephemeral-storage": "20Gi"},
            "limits": {"cpu": "8.5", "memory": "64Gi", "ephemeral-storage": 1000000},
        },
        "env": [
            {"name": "A", "value": "b"},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k",
                                                         "optional": True}}},
            {"name": "D", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k",
                                                            "optional": True}}},
        ],
        "envFrom": [
            {"prefix": "P_", "secretRef": {"name": "s", "optional": True}},
            {"configMapRef": {"name": "c", "optional": True}},
        ],
    },
    "imagePullSecrets": [{"name": "registry"}],
    "parallelism": {"tensor": 2, "pipeline": 1, "data": 1, "expert": True,
                    "all2allBackend": "deepep_low_latency", "nodes": 1},
    "accelerator": {
        "resource": "nvidia.com/gpu", "count": 2, "type": "H100", "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoExecute",
                         "tolerationSeconds": 60}],
    },
    "transfer": {
        "connector": "multi", "backends": ["UCX"], "bufferDevice": "cuda", "sideChannelPort": 5600,
        "leaseDuration": "30s", "rdma": {"resource": "rdma/ib", "count": 2}, "requireRdma": True,
        "dataPorts": {"first": 21000, "last": 21063},
        "storage": {"endpoint": "http://store", "protocol": "s3", "region": "eu-central-1",
                    "kvNamespace": "kv", "credentialsSecretRef": {"name": "store"},
                    "image": "registry/storage:1", "capacity": "2Ti", "maxAge": "168h"},
        "connectors": [{"connector": "nixl"},
                       {"connector": "offloading", "extraConfig": {"block_size": 64}}],
    },
    "replicas": 2,
    "rollout": {"maxSurge": "10%", "maxUnavailable": 0, "minReadySeconds": 20,
                "progressDeadline": "30m"},
    "drain": {"timeout": "60s"},
    "healthChecks": {
        "path": "/healthz", "startupTimeout": "45m",
        "readiness": {"interval": "5s", "timeout": "3s", "unhealthyThreshold": 4,
                      "healthyThreshold": 2},
        "liveness": {"interval": "30s", "timeout": "20s", "unhealthyThreshold": 9},
    },
    "placement": {"topologyKey": "topology.kubernetes.io/zone"},
    "paused": True,
    "template": {
        "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
        "spec": {"priorityClassName": "high", "containers": [{"name": "engine", "tty": True}]},
    },
}  # fmt: skip
_SCALED: dict[str, Any] = {
    "model": {"name": "org/model", "revision": "main",
              "cache": {"claimName": "hub", "prePull": False},
              "source": {"huggingface": {"repository": "org/model",
                                         "tokenSecretRef": {"name": "hf", "key": "token"}}}},
    "replicas": None,
    "scaling": {"minReplicas": 1, "maxReplicas": 4, "slo": {"ttft": "500ms", "itl": "50ms"}},
}  # fmt: skip
_TINY: dict[str, Any] = {
    "model": {"name": "tiny", "source": {"tiny": {"seed": 3}}},
    "engine": {"type": "torch", "dtype": "float64"},
    "accelerator": {},
}
_OCI: dict[str, Any] = {
    "model": {
        "name": "m",
        "source": {"oci": {"reference": "registry/m:1", "path": "weights", "pullPolicy": "Always"}},
    }
}
_S3: dict[str, Any] = {
    "model": {
        "name": "m",
        "source": {
            "s3": {
                "uri": "s3://models/m",
                "endpoint": "http://store:9000",
                "region": "eu-west-1",
                "credentialsSecretRef": {"name": "store"},
            }
        },
    }
}
_PATH: dict[str, Any] = {
    "model": {"name": "m", "source": {"path": "/models/m"}},
    "transfer": {"extraConfig": {"num_threads": 4}},
}
_PROGRAM: dict[str, Any] = {
    "image": "registry:5000/tandem@sha256:" + "a" * 64,
    "env": _SHARED["engine"]["env"],
    "envFrom": _SHARED["engine"]["envFrom"],
}
_DECODE: dict[str, Any] = {
    "role": "decode",
    "transfer": {**_SHARED["transfer"], "loadFailurePolicy": "recompute"},
    "sidecar": {"prefillTimeout": "20s", "kvTransferTimeout": "5s", "fallbackToUnified": False,
                "retries": 1, "breakerFailures": 3, "breakerCooldown": "8s",
                "streamKv": False},
    "routing": {
        "endpoint": "chat", "front": "envoy", "split": "off", "maxPrefillOnDecode": 512,
        "apiPaths": ["/version"],
        "resume": {"enabled": "always", "maxRegeneration": "5s", "maxMoves": 1},
        "flowControl": {"enabled": True, "ttl": "20s", "noEndpointTTL": "5m", "maxRequests": 100,
                        "maxBytes": 1048576, "fairness": "tokens", "order": "deadline",
                        "displace": True, "propagatePriority": True,
                        "bands": [{"priority": 10, "ttl": "5s", "maxRequests": 10}],
                        "clients": [{"name": "ci", "priority": -1, "tenant": "builds"}]},
        "slo": {"ttft": "2s", "itl": "25ms", "attainment": 0.95},
        "maxRequestBytes": 67108864,
        "service": {"type": "LoadBalancer", "annotations": {"cloud": "internal"}},
        "podMetadata": {"labels": {"sidecar.istio.io/inject": "true"}, "annotations": {"a": "b"}},
        "nodeSelector": {"pool": "routers"},
        "tolerations": _SHARED["accelerator"]["tolerations"],
        "imagePullSecrets": [{"name": "registry"}],
        "envoy": {**_PROGRAM, "enabled": False, "apiKeySecretRef": {"name": "clients"}},
        "epp": {**_PROGRAM, "enabled": True, "replicas": 2, "config": {"plugins": []},
                "healthChecks": {"path": "/health", "interval": "5s", "timeout": "500ms",
                                 "unhealthyThreshold": 2, "healthyThreshold": 3}},
        "inferencePool": {"enabled": True},
        "gatewayRef": {
            "name": "g", "namespace": "n", "sectionName": "s", "hostnames": ["*.example.com"],
            "matches": [{"path": {"type": "Exact", "value": "/v1/completions"},
                         "headers": [{"name": "x-tenant", "value": "a"}]}],
        },
    },
}  # fmt: skip
_DECODE_SCALED: dict[str, Any] = {
    **_SCALED,
    "scaling": {**_SCALED["scaling"], "ratio": {"min": 0.5, "max": 2}, "gpuBudget": 8,
                "scaleToZero": {"enabled": True, "idleAfter": "30m"}},
}  # fmt: skip

_SECURED: dict[str, Any] = {**_TINY, "routing": {"tls": {"secretName": "chat-tls"}}}

FULL = [
    *(prefill_pool(**spec) for spec in (_SHARED, _SCALED, _TINY, _PATH, _OCI, _S3)),
    *(
        decode_pool(**spec)
        for spec in ({**_SHARED, **_DECODE}, _DECODE_SCALED, _TINY, _PATH, _OCI, _S3, _SECURED)
    ),
]

_VALUES: list[Any] = [
    None, True, 0, 1, -1, 16, 1001, 2**31 - 1, 2**31, 2**63 - 1, 0.5, 1.5,
    "", "a", "A", "1", "off", "auto", "nixl", "multi", "storage", "torch", "vllm", "unified",
    "30s", "0s", "0.0s", "1.5m", "1 s", "10%", "0%", "1000%", "500m", "1Gi", "1gi", ".5",
    "x/y", "/m", "m\n", "é", "a" * 64, "a" * 400, "image:latest",
    [], ["a"], ["a", "a"], [1], [None], [{}], [{"name": "A"}], [{"name": "A"}, {"name": "A"}],
    [{"connector": "nixl"}], {}, {"a": "b"}, {"a": 1}, {"a": None}, {"name": "a"},
    {"name": None}, {"unknown": 1}, {"tiny": {}}, {"path": "/m"}, {"huggingface": {}},
]  # fmt: skip
"""Without whole floats such as 2.0, which our validation refuses and the API server takes."""


def changed(random: Random) -> dict[str, Any]:
    """One of `FULL` with a field of its spec left out, added or given another value."""
    pool: dict[str, Any] = copy.deepcopy(random.choice(FULL))
    *parents, last = random.choice(paths(pool["spec"]))
    node: Any = pool["spec"]
    for step in parents:
        node = node[step]
    if isinstance(node, dict) and random.random() < 0.2:
        if random.random() < 0.5:
            del node[last]
        else:
            node[random.choice(["name", "count", "replica"])] = random.choice(_VALUES)
    else:
        node[last] = copy.deepcopy(random.choice(_VALUES))
    return pool


def paths(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The paths of all values inside `value`."""
    if isinstance(value, dict):
        below: list[tuple[str | int, Any]] = list(value.items())
    else:
        below = list(enumerate(value)) if isinstance(value, list) else []
    return [path for key, item in below for path in ((*at, key), *paths(item, (*at, key)))]
