"""Pools with LMCache: what is refused, and what its engines get."""

from typing import Any

import pytest

from tandem_operator.errors import InvalidSet, PoolsError
from tandem_operator.pods.manifests import pods
from tandem_operator.resources.pool_files import parse_pools

from .pool_yaml import decode_pool, documents, pair
from .test_containers import sidecar, value_of

STORE = {"lmcache.remote_url": "redis://store:6379"}
SHARED: dict[str, Any] = {"connector": "lmcache", "extraConfig": STORE}
MP: dict[str, Any] = {"connector": "lmcache-mp"}
OWN_SIDECAR = {
    "template": {"spec": {"initContainers": [{"name": "sidecar", "image": "sidecar:1"}]}}
}


def refusal(prefill: dict[str, Any], decode: dict[str, Any] | None = None) -> str:
    """The one problem of a set."""
    with pytest.raises(InvalidSet) as caught:
        pair(prefill, decode or {})
    (line,) = caught.value.lines
    return line


@pytest.mark.parametrize(
    ("transfer", "env"),
    [
        (SHARED, {}),
        (MP, {}),
        ({"connector": "lmcache"}, {"LMCACHE_REMOTE_URL": "lm://store:65432"}),
        ({"connector": "lmcache"}, {"LMCACHE_CONFIG_FILE": "/etc/lmcache.yaml"}),
        ({"connector": "multi", "connectors": [{"connector": "offloading"}, SHARED]}, {}),
    ],
)
def test_the_sidecar_hands_off_with_lmcache(transfer: dict[str, Any], env: dict[str, str]) -> None:
    engine = {"engine": {"env": [{"name": name, "value": value} for name, value in env.items()]}}
    (pool_set,) = pair({"transfer": transfer, **engine}, engine)
    decode = pods(pool_set)[1]
    spoken = "lmcache-mp" if transfer is MP else "lmcache"
    assert value_of("--connector", sidecar(decode)) == spoken


def test_a_setting_that_is_off_names_no_store() -> None:
    extra = {"lmcache.enable_p2p": False, "lmcache.remote_url": None}
    refusal({"transfer": {"connector": "lmcache", "extraConfig": extra}})
    secret = {"secretKeyRef": {"name": "store", "key": "url"}}
    env = [{"name": "LMCACHE_REMOTE_URL", "valueFrom": secret}]
    assert pair({"transfer": {"connector": "lmcache"}}, {"engine": {"env": env}})


@pytest.mark.parametrize(
    "connectors",
    [[{"connector": "lmcache"}], [{"connector": "lmcache"}, {"connector": "nixl"}]],
)
def test_a_store_of_each_pod_alone_is_refused(connectors: list[dict[str, Any]]) -> None:
    line = refusal({"transfer": {"connector": "multi", "connectors": connectors}})
    assert "spec.transfer.connectors[0].extraConfig: " in line
    assert "lmcache.remote_url" in line
    assert "spec.transfer.extraConfig: " in refusal({"transfer": {"connector": "lmcache"}})


def test_a_chain_behind_nixl_needs_no_shared_store() -> None:
    links = [{"connector": "nixl"}, {"connector": "lmcache"}]
    assert pair({"transfer": {"connector": "multi", "connectors": links}})


def test_lmcaches_own_disaggregation_is_refused_with_the_reason() -> None:
    extra = {"lmcache.enable_pd": True, "lmcache.remote_url": "lm://store:1"}
    line = refusal({"transfer": {"connector": "lmcache", "extraConfig": extra}})
    assert "blocks that were not written" in line
    enabled = {"engine": {"env": [{"name": "LMCACHE_ENABLE_PD", "value": "true"}]}}
    assert "blocks that were not written" in refusal({"transfer": SHARED}, enabled)
    assert pair({"transfer": {"connector": "lmcache", "extraConfig": extra}}, OWN_SIDECAR)


@pytest.mark.parametrize(
    "transfer",
    [SHARED, MP, {"connector": "multi", "connectors": [{"connector": "nixl"}, SHARED]}],
)
def test_adapters_whose_kv_would_be_mixed_up_are_refused(transfer: dict[str, Any]) -> None:
    model = {"name": "org/model", "loraAdapters": [{"name": "sql", "path": "org/sql"}]}
    assert "loraAdapters: LMCache's keys" in refusal({"model": model, "transfer": transfer})


@pytest.mark.parametrize("flag", ["--enable-prompt-embeds", "--enable_lora"])
def test_what_lmcaches_keys_do_not_contain_is_refused(flag: str) -> None:
    engine = {"engine": {"extraArgs": [flag]}}
    for pools in (({"transfer": MP, **engine}, {}), ({"transfer": MP}, engine)):
        assert "extraArgs: --enable-" in refusal(*pools)


def test_both_sides_have_as_many_workers() -> None:
    line = refusal({"transfer": SHARED, "accelerator": {"count": 2}})
    assert "parallelism.tensor is 1 here and 2 in" in line
    chain = {"connector": "multi", "connectors": [{"connector": "nixl"}, SHARED]}
    assert pair({"transfer": chain, "accelerator": {"count": 2}})


@pytest.mark.parametrize("transfer", [SHARED, MP])
def test_a_pool_without_a_peer_is_refused(transfer: dict[str, Any]) -> None:
    pool = decode_pool(prefillRef=None, role="unified", model={"name": "m"}, transfer=transfer)
    with pytest.raises(PoolsError, match="has no prefillRef"):
        parse_pools(documents(pool))


def seed(prefill: dict[str, Any], side: int = 0) -> str:
    (pool_set,) = pair({"transfer": SHARED, **prefill})
    (container,) = pods(pool_set)[side]["spec"]["containers"]
    return next(v["value"] for v in container["env"] if v["name"] == "PYTHONHASHSEED")


def test_pods_share_keys_only_with_pods_of_their_compat_hash() -> None:
    assert seed({}) == seed({}, side=1)
    assert 0 <= int(seed({})) < 2**32
    for other in (
        {"model": {"name": "org/model", "revision": "v2"}},
        {"engine": {"dtype": "float16"}},
    ):
        assert seed(other) != seed({})


def test_models_of_two_volumes_have_two_names_in_lmcaches_server() -> None:
    """The server's keys name the model as `--model` does, which for volumes is a directory."""
    names = set()
    for claim in ("a", "b"):
        source = {"pvc": {"claimName": claim, "path": "weights"}}
        (pool_set,) = pair({"model": {"name": "m", "source": source}, "transfer": MP})
        engines = [pod["spec"]["containers"][0] for pod in pods(pool_set)[:2]]
        (name,) = {engine["args"][0] for engine in engines}
        mounts = {m["name"]: m["mountPath"] for m in engines[0]["volumeMounts"]}
        assert name == f"{mounts['model']}/weights"
        names.add(name)
    assert len(names) == 2
