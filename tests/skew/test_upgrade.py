"""An upgrade of the operator restarts no pod: pods of the older version's revisions stay."""

from dataclasses import replace
from typing import Any

import pytest

from tandem_operator.planning import api_objects
from tandem_operator.planning.plan import plan_set

from ..operator.test_golden_manifests import DEFAULTS, NOW, POOLS, observed_set
from .older_pools import older_sets

CHANGING = ("every field", "scaled", "lmcache")
"""Cases whose pools are not those of the older version: the first two get each new field, and the
sidecar of the older version could not hand off with lmcache."""
NEWER = replace(DEFAULTS, tandem_image="tandem:newer", torch_image="tandem-engine:newer")


@pytest.fixture(scope="module")
def older_manifests() -> dict[str, Any]:
    """What the older version created for each case."""
    return older_sets()


@pytest.mark.parametrize("case", sorted(POOLS.keys() - CHANGING))
def test_pods_of_the_older_version_stay(case: str, older_manifests: dict[str, Any]) -> None:
    if case not in older_manifests:
        pytest.skip("the older version has no such case")
    before = older_manifests[case]
    revisions = [_stored(body) for body in before["revisions"]]
    templates = {body["metadata"]["name"]: body["data"] for body in before["revisions"]}
    pods = [_ready_pod(metadata, templates) for metadata in before["pods"]]
    assert pods
    observed = replace(
        observed_set(case),
        revisions=tuple(map(api_objects.revision_state, revisions)),
        pods=tuple(map(api_objects.pod_state, pods)),
    )
    plan = plan_set(observed, NEWER)
    assert (plan.create_revisions, plan.create_pods, plan.delete_pods) == ((), (), ())


def _stored(body: dict[str, Any]) -> dict[str, Any]:
    """An object as the API server has it after its creation."""
    metadata = {
        **body["metadata"],
        "namespace": "default",
        "uid": f"uid of {body['metadata']['name']}",
        "creationTimestamp": api_objects.rfc3339(NOW - 3600),
    }
    return {**body, "metadata": metadata}


def _ready_pod(metadata: dict[str, Any], templates: dict[str, Any]) -> dict[str, Any]:
    spec = templates[metadata["name"].rpartition("-")[0]]["spec"]
    since = api_objects.rfc3339(NOW - 3000)
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": since}
        for kind in ("PodScheduled", "Ready")
    ]
    status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": conditions}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    return {**_stored(pod), "status": status}
