"""The Pod fields that the local runner honours, and those that it may safely ignore.

A pod with a field in neither table is refused, and the message names the field: a pod that runs
here runs as it is written. `a.b` is field b of a, `a[]` every item of a list. A table's entry
covers all fields below it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from .errors import SetupError

_HANDLER: Final = (
    "httpGet.path", "httpGet.port", "httpGet.host", "httpGet.scheme", "httpGet.httpHeaders[].name",
    "httpGet.httpHeaders[].value", "tcpSocket.port", "tcpSocket.host", "exec.command",
)  # fmt: skip

_PROBE: Final = (
    *_HANDLER, "initialDelaySeconds", "periodSeconds", "timeoutSeconds", "failureThreshold",
    "successThreshold",
)  # fmt: skip

_CONTAINER: Final = (
    "name", "image", "command", "args", "workingDir", "restartPolicy",
    "env[].name", "env[].value", "env[].valueFrom.fieldRef.fieldPath",
    "ports[].name", "ports[].containerPort", "ports[].protocol",
    "volumeMounts[].name", "volumeMounts[].mountPath", "volumeMounts[].subPath",
    "resources.limits", "resources.requests",
    *(f"{probe}.{field}" for probe in ("startupProbe", "readinessProbe", "livenessProbe")
      for field in _PROBE),
    *(f"lifecycle.preStop.{field}" for field in (*_HANDLER, "sleep.seconds")),
)  # fmt: skip

_CONTAINER_IGNORED: Final = (
    "imagePullPolicy", "securityContext", "terminationMessagePath", "terminationMessagePolicy",
    "resizePolicy", "volumeMounts[].readOnly", "env[].valueFrom.fieldRef.apiVersion",
)  # fmt: skip

_CONTAINERS: Final = ("spec.containers[]", "spec.initContainers[]")

HONOURED: Final = frozenset(
    {
        "apiVersion", "kind",
        "metadata.name", "metadata.namespace", "metadata.uid", "metadata.labels",
        "metadata.annotations",
        "spec.restartPolicy", "spec.terminationGracePeriodSeconds",
        "spec.volumes[].name", "spec.volumes[].emptyDir", "spec.volumes[].hostPath.path",
        "spec.volumes[].secret.secretName", "spec.volumes[].downwardAPI.items[].path",
        "spec.volumes[].downwardAPI.items[].fieldRef.fieldPath",
        *(f"{container}.{field}" for container in _CONTAINERS for field in _CONTAINER),
    }
)  # fmt: skip

IGNORED: Final = frozenset(
    {
        "status", "metadata.creationTimestamp", "metadata.ownerReferences",
        "metadata.resourceVersion", "metadata.generation", "metadata.managedFields",
        # Placement: there is one machine.
        "spec.affinity", "spec.nodeSelector", "spec.nodeName", "spec.tolerations",
        "spec.topologySpreadConstraints", "spec.priorityClassName", "spec.priority",
        "spec.preemptionPolicy", "spec.schedulerName", "spec.runtimeClassName",
        # Identity: processes run as the user who starts them.
        "spec.securityContext", "spec.serviceAccountName", "spec.serviceAccount",
        "spec.automountServiceAccountToken", "spec.imagePullSecrets",
        # Name resolution: pods reach each other by address here.
        "spec.dnsPolicy", "spec.enableServiceLinks", "spec.hostname", "spec.subdomain",
        "spec.volumes[].hostPath.type", "spec.volumes[].secret.defaultMode",
        "spec.volumes[].secret.optional", "spec.volumes[].downwardAPI.defaultMode",
        "spec.volumes[].downwardAPI.items[].mode",
        "spec.volumes[].downwardAPI.items[].fieldRef.apiVersion",
        *(f"{container}.{field}" for container in _CONTAINERS for field in _CONTAINER_IGNORED),
    }
)  # fmt: skip

_INNER: Final = frozenset(
    path[:i]
    for path in (*HONOURED, *IGNORED)
    for i in range(len(path))
    if path[i] == "." or path.startswith("[]", i)
)
"""Prefixes of the tables' entries: their fields are looked at one by one."""


def check_fields(pod: Mapping[str, Any]) -> None:
    """Raises SetupError for the first field of a named Pod that is in neither table."""
    for path, place in _leaves(pod, "", ""):
        if path not in HONOURED and path not in IGNORED:
            raise SetupError(
                f"pod {pod['metadata']['name']}: {place}: the local runner does not support this"
                " field: remove it, or run the file on Kubernetes"
            )


def _leaves(node: Any, path: str, place: str) -> Iterator[tuple[str, str]]:
    """(path as in the tables, path with list indexes for the message) of each field to check."""
    if path in HONOURED or path in IGNORED or path not in (_INNER | {""}):
        yield path, place
    elif isinstance(node, Mapping):
        for key, value in node.items():
            dot = "." if path else ""
            yield from _leaves(value, f"{path}{dot}{key}", f"{place}{dot}{key}")
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _leaves(value, f"{path}[]", f"{place}[{i}]")
    elif node is not None:
        # A scalar where the tables expect a mapping or a list.
        yield path, place
