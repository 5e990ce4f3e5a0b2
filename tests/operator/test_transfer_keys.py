"""The Secret of a set's transfer keys: which pools mount it, who owns it, how it rotates."""

import copy
from base64 import b64decode
from typing import cast

import pytest

from tandem_contract import labels
from tandem_contract.plan import key_id
from tandem_kube.client import Api
from tandem_kube.errors import NotFound
from tandem_kube.resources import SECRETS, Resource
from tandem_operator.observed import Body
from tandem_operator.planning.key_rotation import (
    AHEAD,
    TransferKeys,
    plan_transfer_keys,
    pools_with_transfer_keys,
)
from tandem_operator.pods.manifests import pods, transfer_key_secrets
from tandem_operator.resources import compatibility, pools
from tandem_operator.resources.resolve import Defaults
from tandem_operator.runtime.reads import TransferKeySecrets

from .pool_yaml import decode_pool, pair, prefill_pool
from .rendered_pods import TORCH
from .simulated_cluster import SimulatedCluster, settled

SECRET = b"0123456789abcdef0123456789abcdef"
DAY = 86400.0


def torch_set() -> SimulatedCluster:
    return settled(prefill_pool(**TORCH), decode_pool(accelerator={}))


def planned(cluster: SimulatedCluster, live: Body | None) -> TransferKeys:
    keys = plan_transfer_keys(cluster.observe(), live, SECRET, DAY)
    assert keys is not None
    return keys


def test_engines_of_both_roles_mount_the_secret_of_their_set() -> None:
    (pool_set,) = pair(TORCH, {"accelerator": {}})
    assert transfer_key_secrets([pool_set]) == {"p-transfer-keys"}
    for pod in pods(pool_set):
        (engine,) = pod["spec"]["containers"]
        directory = engine["args"][engine["args"].index("--transfer-key-dir") + 1]
        (mount,) = (m for m in engine["volumeMounts"] if m["mountPath"] == directory)
        (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == mount["name"])
        assert (volume["secret"], mount["readOnly"]) == ({"secretName": "p-transfer-keys"}, True)


def test_vllm_and_kv_through_a_store_need_no_keys() -> None:
    through_store = {
        "connector": "storage",
        "storage": {"endpoint": "http://store", "kvNamespace": "n"},
    }
    for prefill in ({}, {**TORCH, "transfer": through_store}):
        (pool_set,) = pair(prefill, {"accelerator": {}} if prefill else {})
        assert transfer_key_secrets([pool_set]) == frozenset()
        assert "transfer-key" not in str(pods(pool_set))


def test_a_set_gets_a_secret_that_all_its_pools_own() -> None:
    cluster = torch_set()
    assert len(pools_with_transfer_keys(cluster.plan().pools.values())) == 2
    keys = planned(cluster, None)
    assert keys.body is not None
    metadata = keys.body["metadata"]
    owners = {owner["kind"] for owner in metadata["ownerReferences"]}
    assert owners == {"DecodePool", "PrefillPool"}
    assert metadata["labels"][labels.MANAGED_BY] == "tandem-operator"
    ((name, value),) = keys.body["data"].items()
    assert (name, b64decode(value)) == (key_id(cluster.now), SECRET.hex().encode())
    # The same again changes nothing until the next key is due.
    again = planned(cluster, keys.body)
    assert (again.body, again.requeue_after) == (None, DAY - AHEAD)


def test_a_rotation_keeps_the_key_that_engines_have() -> None:
    cluster = torch_set()
    first = planned(cluster, None).body
    assert first is not None
    cluster.now += DAY
    second = planned(cluster, first).body
    assert second is not None
    assert first["data"].keys() < second["data"].keys()


def test_a_users_own_secret_stays() -> None:
    cluster = torch_set()
    own = copy.deepcopy(planned(cluster, None).body)
    assert own is not None
    del own["metadata"]["labels"]
    assert plan_transfer_keys(cluster.observe(), own, SECRET, DAY) is None


def test_pods_with_keys_and_keyless_ones_of_an_earlier_operator_are_no_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_keys(spec: Body) -> dict[str, object]:
        facts = compatibility.compat_facts(spec)
        return {name: value for name, value in facts.items() if name != "transferKeys"}

    with monkeypatch.context() as earlier:
        earlier.setattr(pools, "compat_facts", without_keys)
        cluster = torch_set()
    keyless = {pod.compat for pod in cluster.pods.values()}
    cluster.defaults = Defaults(tandem_image="newer")
    cluster.settle()
    assert {pod.compat for pod in cluster.pods.values()} == keyless, "an upgrade restarts no engine"
    cluster.edit("PrefillPool", "p", engine={"type": "torch", "maxNumSeqs": 3})
    cluster.settle()
    (keyed,) = {pod.compat for pod in cluster.pods.values()}
    assert keyed not in keyless


class FakeSecrets:
    """An API server with one Secret."""

    def __init__(self) -> None:
        self.secret: Body | None = None
        self.reads = 0

    async def get(self, resource: Resource, name: str, namespace: str) -> Body:
        assert (resource, name) == (SECRETS, "p-transfer-keys")
        self.reads += 1
        if self.secret is None:
            raise NotFound(404, "no such secret")
        return self.secret

    async def apply(self, resource: Resource, body: Body, **_: object) -> None:
        self.secret = body


async def test_the_secret_is_read_again_before_pods_are_made_and_seldom_else() -> None:
    server, secrets, observed = FakeSecrets(), TransferKeySecrets(), torch_set().observe()
    api = cast(Api, server)

    async def keep(*, touches_pods: bool) -> int:
        before = server.reads
        due, failure = await secrets.keep(api, observed, DAY, touches_pods=touches_pods)
        assert failure is None
        assert due is not None
        assert 0 < due <= DAY
        return server.reads - before

    assert await keep(touches_pods=False) == 1
    assert await keep(touches_pods=False) == 0
    server.secret = None
    assert await keep(touches_pods=True) == 1
    assert server.secret is not None
