"""Roles for users: who is bound to one may write, or read, pools and nothing else."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import kubectl
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import Failed

from ..operator.pool_yaml import decode_pool
from . import programs

pytestmark = [pytest.mark.control_plane, pytest.mark.usefixtures("helm")]

_SECONDS = 60
NAME = "{namespace}-tandem-{role}"
"""As docs/run/security.md has it, for the release `tandem`."""
Rule = tuple[str, str, str]
"""API group, resource, verb."""


class User:
    """A user who is bound to one of the chart's ClusterRoles in a namespace."""

    def __init__(self, control_plane: ControlPlane, namespace: str, role: str | None) -> None:
        name = f"{role or 'stranger'}-{namespace}"
        self._namespace, self._kubeconfig = namespace, control_plane.kubeconfig_for(name)
        if role is not None:
            cluster_role = NAME.format(namespace=programs.NAMESPACE, role=role)
            control_plane.kubectl(
                *("create", "rolebinding", name, f"--clusterrole={cluster_role}"),
                *(f"--user={name}", f"--namespace={namespace}"),
            )

    def kubectl(self, *arguments: str, body: object = None) -> str:
        """Raises Failed."""
        text = None if body is None else json.dumps(body)
        return kubectl.run(
            self._kubeconfig, *arguments, f"--namespace={self._namespace}", input=text
        )

    def rules(self) -> set[Rule]:
        """What it may do in its namespace."""
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": self._namespace},
        }
        answer = kubectl.run(
            self._kubeconfig,
            # kubectl checks a review by a list of CRDs, which the user may not read.
            *("create", "--validate=false", "--filename=-", "--output=json"),
            input=json.dumps(review),
        )
        return {
            (group, resource, verb)
            for rule in json.loads(answer)["status"]["resourceRules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }


@pytest.fixture(scope="module")
def roles(crds: ControlPlane) -> Iterator[None]:
    manifests = programs.objects("--set", "crds.install=false")
    users = [m for m in manifests if m["kind"] == "ClusterRole" and _is_for_users(m)]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": users})
    crds.kubectl("create", "--filename=-", input=listed)
    yield
    crds.kubectl("delete", "--filename=-", input=listed)


def _is_for_users(role: dict[str, Any]) -> bool:
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    return any(label.startswith(prefix) for label in role["metadata"]["labels"])


def _until_bound(user: User) -> None:
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            user.kubectl("get", "decodepools")
        except Failed:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return


@pytest.mark.usefixtures("roles")
def test_an_author_may_write_pools_and_nothing_else(crds: ControlPlane, namespace: str) -> None:
    author, stranger = User(crds, namespace, "edit"), User(crds, namespace, None)
    _until_bound(author)
    pool = decode_pool()
    author.kubectl("create", "--filename=-", body=pool)
    name = f"decodepool/{pool['metadata']['name']}"
    author.kubectl("scale", name, "--replicas=2")
    author.kubectl("annotate", name, "a=b")
    author.kubectl("delete", name)
    may = author.rules() - stranger.rules()
    assert {(group, resource.partition("/")[0]) for group, resource, _ in may} == {
        ("tandem.dev", "prefillpools"),
        ("tandem.dev", "decodepools"),
    }
    # The operator alone writes the status.
    of_status = {verb for _, resource, verb in may if resource.endswith("/status")}
    assert of_status == {"get", "list", "watch"}
    with pytest.raises(Failed, match="forbidden"):
        author.kubectl("get", "secrets")


@pytest.mark.usefixtures("roles")
def test_a_reader_may_read_pools_and_nothing_else(crds: ControlPlane, namespace: str) -> None:
    reader, stranger = User(crds, namespace, "view"), User(crds, namespace, None)
    _until_bound(reader)
    may = reader.rules() - stranger.rules()
    assert {group for group, _, _ in may} == {"tandem.dev"}
    assert {verb for _, _, verb in may} == {"get", "list", "watch"}
    with pytest.raises(Failed, match="forbidden"):
        reader.kubectl("create", "--filename=-", body=decode_pool())
