"""Pods on a real API server that no kubelet runs; their engines are HTTP servers of the test."""

import json
from typing import Any

from tandem_contract import labels
from tandem_kube.client import Api
from tandem_kube.resources import PODS

from ..real import Backend

ENDPOINT = {labels.endpoint_label("chat"): "decode"}
_HOST = "127.0.0.1"


class Pods:
    """Pods of one namespace that do not run; the test sets their status instead of a kubelet."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api, self.namespace = api, namespace

    async def create(
        self,
        backend: Backend,
        role: str,
        *,
        models: tuple[str, ...] = ("m",),
        compat: str = "c1",
        host: str = _HOST,
        **more: str,
    ) -> None:
        """A ready pod of the routing endpoint `chat`, whose engine is `backend` at this address."""
        pod_labels = {**ENDPOINT, labels.ROLE: role, labels.KV_COMPAT: compat}
        annotations = {
            labels.SERVED_MODELS: json.dumps(models),
            labels.TARGET_PORT: str(backend.port),
        }
        await self.create_plain(backend.name, pod_labels | more, annotations, host=host)

    async def create_plain(
        self,
        name: str,
        pod_labels: dict[str, str],
        annotations: dict[str, str] | None = None,
        node: str = "none",
        host: str = _HOST,
        **spec: object,
    ) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "labels": pod_labels,
                "annotations": annotations or {},
            },
            # With a node, so that a deletion waits for the kubelet.
            "spec": {"nodeName": node, "containers": [{"name": "c", "image": "x"}], **spec},
        }
        await self._api.create(PODS, body)
        await self.ready(name, host=host)

    async def ready(self, name: str, ready: bool = True, host: str = _HOST) -> None:
        status: dict[str, Any] = {
            "phase": "Running",
            "podIP": host,
            "podIPs": [{"ip": host}],
            "conditions": [{"type": "Ready", "status": str(ready)}],
        }
        await self._api.patch(PODS, name, {"status": status}, self.namespace, subresource="status")

    async def draining(self, name: str, value: str | None = "true") -> None:
        patch = {"metadata": {"labels": {labels.DRAINING: value}}}
        await self._api.patch(PODS, name, patch, self.namespace)

    async def delete(self, name: str, grace: int = 60) -> None:
        await self._api.delete(PODS, name, self.namespace, grace=grace)
