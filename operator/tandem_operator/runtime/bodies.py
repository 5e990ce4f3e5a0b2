"""What the runtime reads from API objects. Pure."""

from collections.abc import Mapping
from typing import Any

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL, PREFILL_POOL
from tandem_contract.paths import Role

from ..observed import KINDS, Body, EndpointKey, Kind, PoolKey, PoolResource, SetKey
from ..planning.api_objects import FIELD_MANAGER
from ..pods.containers import PLAN_KEYS
from ..pods.manifests import plan_key_secret
from .store import WatchScope


def endpoint_of(pool: PoolResource) -> EndpointKey:
    """The endpoint of a DecodePool: `spec.routing.endpoint`, by default the pool's own name."""
    name = _text_at(pool.body, "spec", "routing", "endpoint")
    return EndpointKey(pool.key.namespace, name or pool.key.name)


def pool_key_of(body: Body) -> PoolKey:
    """The pool that an object's labels name."""
    metadata = body["metadata"]
    object_labels = metadata.get("labels") or {}
    is_prefill = object_labels.get(labels.ROLE) == Role.PREFILL
    kind: Kind = PREFILL_POOL if is_prefill else DECODE_POOL
    return PoolKey(metadata["namespace"], kind, object_labels.get(labels.POOL, ""))


def pull_key_of(body: Body) -> SetKey | None:
    """The set that an object downloads a model for; None for any other object."""
    metadata = body["metadata"]
    object_labels = metadata.get("labels") or {}
    kind: Kind | None = next((k for k in KINDS if k == object_labels.get(labels.MODEL_PULL)), None)
    return SetKey(metadata["namespace"], object_labels.get(labels.POOL, ""), kind) if kind else None


def version_of(body: Body) -> int:
    """The resourceVersion. Kubernetes 1.35 documents that versions are growing numbers, which
    etcd-backed API servers have always sent."""
    return int(body["metadata"]["resourceVersion"])


def scope_of(body: Body) -> WatchScope:
    return WatchScope(body["apiVersion"], body["kind"], body["metadata"].get("namespace"))


def trimmed(body: Body, *without: str) -> Body:
    """The object without fields that change with every write and that the operator does not read.

    Objects that differ in these alone compare equal, and so cause no reconciliation.
    """
    dropped = ("managedFields", "resourceVersion")
    metadata = {k: v for k, v in body["metadata"].items() if k not in dropped}
    return {**{k: v for k, v in body.items() if k not in without}, "metadata": metadata}


def is_foreign(existing: Body, key: EndpointKey) -> bool:
    """Whether an object belongs to someone else or to another endpoint.

    Endpoints can collide: the Service of an endpoint `a-epp` has the name of endpoint `a`'s EPP.
    """
    metadata = existing["metadata"]
    managers = {entry.get("manager") for entry in metadata.get("managedFields", ())}
    endpoint = (metadata.get("labels") or {}).get(labels.ENDPOINT, key.name)
    return FIELD_MANAGER not in managers or endpoint != key.name


def pool_and_owners(body: Body) -> tuple[str | None, list[str]]:
    """Pool label and owners' uids: equal for two versions of one object of a pool.

    A pod whose pool label someone removed in order to debug it no longer belongs to the pool,
    although it keeps its name and owner.
    """
    metadata = body["metadata"]
    owners = sorted(owner["uid"] for owner in metadata.get("ownerReferences", ()))
    return (metadata.get("labels") or {}).get(labels.POOL), owners


def endpoint_of_plan_keys(pod: Body) -> EndpointKey | None:
    """The endpoint whose Secret of plan keys a pod mounts; None: it mounts none."""
    for volume in pod["spec"].get("volumes", ()):
        if volume["name"] == PLAN_KEYS and "secret" in volume:
            name = volume["secret"]["secretName"].removesuffix(plan_key_secret(""))
            return EndpointKey(pod["metadata"]["namespace"], name)
    return None


def _text_at(body: Body, *path: str) -> str | None:
    """The string at `path`; None when it or a parent is missing or of another type."""
    value: Any = body
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) and value else None
