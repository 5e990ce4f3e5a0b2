"""Which fields of a Pod the local runner honours, and which it ignores because nothing is lost.

A field in neither table is refused by name: a pod that runs here runs as it is written.
`a.b` is field b of a, `a[]` every item of a list. A table's entry covers all that is below it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from .errors import Refused

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
        "spec.volumes[].secret.secretName",
        *(f"{container}.{field}" for container in _CONTAINERS for field in _CONTAINER),
    }
)  # fmt: skip

IGNORED: Final = frozenset(
    {
        "status", "metadata.creationTimestamp", "metadata.ownerReferences",
        "metadata.resourceVersion", "metadata.generation", "metadata.managedFields",
        # Where the pod is placed: there is one machine.
        "spec.affinity", "spec.nodeSelector", "spec.nodeName", "spec.tolerations",
        "spec.topologySpreadConstraints", "spec.priorityClassName", "spec.priority",
        "spec.preemptionPolicy", "spec.schedulerName", "spec.runtimeClassName",
        # Who it is: processes run as the person who starts them.
        "spec.securityContext", "spec.serviceAccountName", "spec.serviceAccount",
        "spec.automountServiceAccountToken", "spec.imagePullSecrets",
        # Its name service: pods are given addresses here.
        "spec.dnsPolicy", "spec.enableServiceLinks", "spec.hostname", "spec.subdomain",
        "spec.volumes[].hostPath.type", "spec.volumes[].secret.defaultMode",
        "spec.volumes[].secret.optional",
        *(f"{container}.{field}" for container in _CONTAINERS for field in _CONTAINER_IGNORED),
    }
)  # fmt: skip

_INNER: Final = frozenset(
    path[:i]
    for path in (*HONOURED, *IGNORED)
    for i in range(len(path))
    if path[i] == "." or path.startswith("[]", i)
)
"""Fields with something below them in a table."""


def check_fields(pod: Mapping[str, Any]) -> None:
    """Raises Refused for the first field of a named Pod that is in neither table."""
    for known, written in _leaves(pod, "", ""):
        if known not in HONOURED and known not in IGNORED:
            raise Refused(
                f"pod {pod['metadata']['name']}: {written}: the local runner cannot honour"
                " this: leave it out here, or run the file on Kubernetes"
            )


def _leaves(node: Any, known: str, written: str) -> Iterator[tuple[str, str]]:
    """(path as in the tables, path as a person finds it) of what the tables decide about."""
    if known in HONOURED or known in IGNORED or known not in (_INNER | {""}):
        yield known, written
    elif isinstance(node, Mapping):
        for key, value in node.items():
            dot = "." if known else ""
            yield from _leaves(value, f"{known}{dot}{key}", f"{written}{dot}{key}")
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _leaves(value, f"{known}[]", f"{written}[{i}]")
    elif node is not None:
        yield known, written
