"""Pools from files: sets, inheritance, mismatches, and errors with file and line."""

import copy
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem_contract.documents import Document, DocumentError, parse_documents
from tandem_contract.paths import Role
from tandem_operator.errors import InvalidPool, InvalidSet, PoolsError
from tandem_operator.pods.manifests import pods
from tandem_operator.resources.pool_files import parse_pools
from tandem_operator.resources.pools import Pools
from tandem_sidecar.connectors import PLANNED

from .pool_yaml import DECODE, FILE, PREFILL, decode_pool, documents, pair, prefill_pool

MINIMAL = """\
apiVersion: tandem.dev/v1alpha1
kind: PrefillPool
metadata: {name: p}
spec:
  model: {name: org/model}
  accelerator: {count: 2}
  replicas: 1
---
apiVersion: tandem.dev/v1alpha1
kind: DecodePool
metadata: {name: d}
spec:
  prefillRef: {name: p}
  accelerator: {count: 1}
  replicas: 2
"""


def errors(*objects: object) -> tuple[str, ...]:
    with pytest.raises(PoolsError) as caught:
        parse_pools(documents(*objects))
    return caught.value.lines


def test_a_minimal_pair_is_a_model_an_accelerator_count_and_replicas() -> None:
    (pool_set,) = parse_pools(parse_documents(MINIMAL, FILE))
    (decode,) = pool_set.decodes
    assert pool_set.prefill is not None
    assert pool_set.name == "p"
    assert (pool_set.prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
    assert pool_set.prefill.spec.parallelism.tensor == 2
    assert decode.spec.parallelism.tensor == 1
    assert decode.spec.model.name == "org/model"
    assert decode.spec.sidecar.prefill_timeout == 30.0
    assert decode.spec.drain.timeout == 120.0
    assert decode.spec.routing.endpoint == "d"
    assert decode.compat == pool_set.prefill.compat


def test_a_unified_pool_needs_no_prefill_pool() -> None:
    alone = decode_pool(prefillRef=None, role="unified", model={"name": "m"})
    (pool_set,) = parse_pools(documents(alone))
    assert pool_set.prefill is None
    assert pool_set.name == "d"
    assert pool_set.decodes[0].role is Role.UNIFIED


def test_a_set_is_identified_by_prefill_pool_and_namespace() -> None:
    elsewhere = {"name": "p", "namespace": "other"}
    sets = parse_pools(
        documents(
            DECODE,
            PREFILL,
            {**PREFILL, "metadata": elsewhere},
            {**DECODE, "metadata": {"name": "d", "namespace": "other"}},
            {**DECODE, "metadata": {"name": "e"}},
        )
    )
    assert [[(p.namespace, p.name) for p in s.pools] for s in sets] == [
        [("default", "p"), ("default", "d"), ("default", "e")],
        [("other", "p"), ("other", "d")],
    ]


def test_no_document_gives_no_set() -> None:
    assert parse_pools([]) == ()


def test_a_decode_pool_inherits_the_fields_both_must_agree_on() -> None:
    (pool_set,) = pair(
        {
            "model": {"name": "m", "servedNames": ["a"], "source": {"path": "/m"}},
            "engine": {"version": "0.31.0", "image": "mine", "dtype": "bfloat16",
                       "kvCacheDtype": "fp8", "blockSize": 32, "maxModelLen": 4096,
                       "maxNumSeqs": 8},
            "transfer": {"connector": "nixl-push", "backends": ["UCX"], "leaseDuration": "10s"},
        },
        {"engine": {"maxNumBatchedTokens": 64}, "transfer": {"loadFailurePolicy": "fail"}},
    )  # fmt: skip
    (decode,) = pool_set.decodes
    engine, transfer = decode.spec.engine, decode.spec.transfer
    assert decode.spec.model == pool_set.pools[0].spec.model
    assert (engine.version, engine.image, engine.dtype) == ("0.31.0", "mine", "bfloat16")
    assert (engine.kv_cache_dtype, engine.block_size, engine.max_model_len) == ("fp8", 32, 4096)
    assert (transfer.connector, transfer.backends, transfer.lease_duration) == (
        "nixl-push", ("UCX",), 10.0,
    )  # fmt: skip
    assert transfer.load_failure_policy == "fail"
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (None, 64)


def test_a_pools_own_image_determines_its_version() -> None:
    (pool_set,) = pair(
        {"engine": {"version": "0.32.0"}}, {"engine": {"image": "mine/decode:v0.32.0"}}
    )
    assert pool_set.decodes[0].spec.engine.image == "mine/decode:v0.32.0"
    assert pool_set.decodes[0].compat == pool_set.pools[0].compat


def test_writing_a_default_explicitly_is_no_mismatch() -> None:
    pair({}, {"engine": {"type": "vllm", "dtype": "auto"}, "transfer": {"connector": "nixl"}})


@pytest.mark.parametrize(
    ("prefill", "decode", "field"),
    [
        ({}, {"model": {"name": "other"}}, "model.name"),
        ({"model": {"name": "m", "source": {"path": "/a"}}},
         {"model": {"name": "m", "source": {"path": "/b"}}}, "model.source"),
        ({"model": {"name": "m", "revision": "v1"}}, {"model": {"name": "m", "revision": "v2"}},
         "model.revision"),
        ({}, {"model": {"name": "org/model", "servedNames": ["x"]}}, "model.servedNames"),
        ({}, {"model": {"name": "org/model", "loraAdapters": [{"name": "a", "path": "a"}]}},
         "model.loraAdapters"),
        ({}, {"engine": {"type": "torch"}, "model": {"name": "org/model", "source": {"path": "/m"}},
              "accelerator": {}}, "engine.type"),
        ({"engine": {"version": "0.31.0"}}, {"engine": {"version": "0.32.0"}}, "engine.version"),
        ({"engine": {"version": "0.31.0"}}, {"engine": {"image": "a:v0.32.0"}}, "engine.image"),
        ({"engine": {"dtype": "float16"}}, {"engine": {"dtype": "bfloat16"}}, "engine.dtype"),
        ({}, {"engine": {"kvCacheDtype": "fp8"}}, "engine.kvCacheDtype"),
        ({"engine": {"blockSize": 16}}, {"engine": {"blockSize": 32}}, "engine.blockSize"),
        ({}, {"engine": {"maxModelLen": 4096}}, "engine.maxModelLen"),
        ({"transfer": {"connector": "mooncake"}}, {"transfer": {"connector": "nixl"}},
         "transfer.connector"),
    ],
)  # fmt: skip
def test_a_mismatch_names_field_both_values_both_places_and_the_fix(
    prefill: dict[str, Any], decode: dict[str, Any], field: str
) -> None:
    lines = errors(prefill_pool(**prefill), decode_pool(**decode))
    line = next(text for text in lines if f" spec.{field}: " in text)
    compared = field.replace("image", "version")
    assert line.startswith(f"{FILE}:")
    assert f"{compared} is " in line
    assert "in PrefillPool p (pools.yaml:" in line
    assert "leave it out of DecodePool d to inherit it" in line


def test_the_full_text_of_a_mismatch() -> None:
    text = MINIMAL.replace("  replicas: 1", "  engine:\n    blockSize: 16").replace(
        "  replicas: 2", "  engine:\n    blockSize: 32"
    )
    with pytest.raises(InvalidSet) as caught:
        parse_pools(parse_documents(text, FILE))
    assert str(caught.value) == (
        "pools.yaml:17: spec.engine.blockSize: engine.blockSize is 32 here and 16 in PrefillPool p"
        " (pools.yaml:8): both sides of a hand-off must agree; leave it out of DecodePool d to"
        " inherit it, or change it in both"
    )


def test_rules_are_checked_with_inherited_fields() -> None:
    torch = {"engine": {"type": "torch"}, "model": {"name": "m", "source": {"path": "/m"}}}
    (line,) = errors(prefill_pool(**torch), decode_pool(accelerator={"count": 4}))
    assert "spec.accelerator.count: the torch engine runs on one device" in line
    assert "with what PrefillPool p gives" in line


@pytest.mark.parametrize("name", ["pp", "q"])
def test_an_unknown_prefill_ref_lists_the_existing_pools(name: str) -> None:
    (line,) = errors(prefill_pool(), decode_pool(prefillRef={"name": name}))
    assert f"no PrefillPool {name!r} in namespace default" in line
    assert ("did you mean 'p'?" if name == "pp" else "there are p") in line


def test_a_duplicate_name_is_reported_with_both_places() -> None:
    (line,) = errors(PREFILL, PREFILL, DECODE)
    assert line == (
        "pools.yaml:22: metadata.name: PrefillPool p is at pools.yaml:5 already:"
        " give one of them another name"
    )


def test_pools_of_two_kinds_may_share_a_name() -> None:
    (pool_set,) = parse_pools(documents(PREFILL, {**DECODE, "metadata": {"name": "p"}}))
    names = [pod["metadata"]["name"] for pod in pods(pool_set)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "PrefilPool"}, "'PrefilPool' is not PrefillPool or DecodePool (did you mean"),
        ({"kind": "Pod"}, "'Pod' is not PrefillPool or DecodePool"),
        ({"kind": None}, "kind: is required: PrefillPool or DecodePool"),
        ({"apiVersion": "tandem.dev/v1"}, "'tandem.dev/v1' is not tandem.dev/v1alpha1"),
        ({"metadata": {}}, "metadata.name: is required"),
        ({"metadata": None}, "metadata: is required"),
        ({"spec": None}, "spec: is required"),
    ],
)
def test_a_document_of_another_kind_is_an_error(change: dict[str, Any], message: str) -> None:
    (line,) = errors({**PREFILL, **change})
    assert message in line
    assert line.startswith("pools.yaml:")


@pytest.mark.parametrize("data", ["text", [1], 5])
def test_a_document_that_is_no_mapping(data: object) -> None:
    (line,) = errors(data)
    assert line.startswith("pools.yaml:1: expected a mapping with apiVersion, kind, metadata")


@pytest.mark.parametrize("value", ["2024-01-01", ".nan", ".inf", "{1: a}"])
def test_yaml_values_without_json_equivalent_are_errors(value: str) -> None:
    text = f"{MINIMAL.split('---', maxsplit=1)[0]}  template:\n    spec:\n      x: {value}\n"
    with pytest.raises(InvalidPool, match=r"pools\.yaml:10: spec\.template\.spec\.x: "):
        parse_pools(parse_documents(text, FILE))


def test_an_unknown_field_is_named_with_its_line_and_the_nearest() -> None:
    text = MINIMAL.replace("replicas: 2", "replica: 2")
    with pytest.raises(InvalidPool) as caught:
        parse_pools(parse_documents(text, FILE))
    assert caught.value.lines == (
        "pools.yaml:15: spec.replica: unknown field (did you mean 'replicas'?)",
    )


def test_all_faults_of_all_objects_are_reported_at_once() -> None:
    assert len(errors(prefill_pool(a=1), decode_pool(b=2), {"kind": "x"})) == 4


@pytest.mark.parametrize(
    "transfer",
    [{"connector": "p2p-nccl"},
     {"connector": "mooncake", "storage": {"endpoint": "http://s"}}],
)  # fmt: skip
def test_connectors_that_are_not_rendered_are_refused_by_name(transfer: dict[str, Any]) -> None:
    (line,) = errors(prefill_pool(transfer=transfer), DECODE)
    assert ": use nixl" in line


@pytest.mark.parametrize("connector", PLANNED)
def test_a_connector_for_which_the_sidecar_exits_is_refused_by_name(connector: str) -> None:
    transfer = {"connector": connector}
    unified = decode_pool(role="unified", model={"name": "m"}, transfer=transfer)
    del unified["spec"]["prefillRef"]
    for pools in ([prefill_pool(transfer=transfer), DECODE], [unified]):
        (line,) = errors(*pools)
        assert "spec.transfer.connector: " in line
        assert ": use nixl" in line
        assert connector.replace("p2p-nccl", "P2pNccl") in line


def test_the_revision_depends_on_the_user_spec_of_the_pods() -> None:
    def revision(**spec: Any) -> str:
        return pair({}, spec)[0].decodes[0].revision

    base = revision()
    assert revision(replicas=7) == base
    assert revision(paused=True, rollout={"maxSurge": 1}) == base
    assert revision(routing={"split": "off"}) == base
    assert revision(routing={"split": "always"}) == base
    assert revision(routing={"maxPrefillOnDecode": 512}) != base
    assert revision(routing={"resume": {"enabled": "always", "maxRegeneration": "1m"}}) == base
    assert revision(routing={"slo": {"ttft": "2s"}}) == base
    assert revision(drain={"timeout": "120s"}) == base
    assert revision(drain={"timeout": "60s"}) != base
    assert revision(engine={"maxNumSeqs": 1}) != base
    assert revision(routing={"endpoint": "chat"}) != base


def test_the_compat_hash_depends_on_shared_fields_only() -> None:
    def compat(**spec: Any) -> str:
        return pair(spec)[0].pools[0].compat

    assert compat(engine={"maxNumSeqs": 1}) == compat()
    assert compat(engine={"version": "0.31.0"}) != compat()
    assert compat(engine={"blockSize": 16}) != compat()
    assert compat(engine={"kvCacheDtype": "fp8"}) != compat()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["30s", "nixl", "multi", "torch", "vllm", "1", "$(POD_IP)", "0%", "/m"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["name", "spec", "count", "containers", "env"]) | st.text(),
                      inner, max_size=3),
    max_leaves=8,
)  # fmt: skip

FULL: dict[str, dict[str, Any]] = {
    "PrefillPool": prefill_pool(
        engine={"version": "0.32.0", "env": [{"name": "A", "value": "b"}], "extraArgs": ["-x"]},
        transfer={"connector": "multi", "connectors": [{"connector": "nixl", "extraConfig": {}}]},
        template={"spec": {"containers": [{"name": "engine"}], "volumes": []}},
        placement={"topologyKey": "zone"},
        accelerator={"tolerations": [{"operator": "Exists"}], "nodeSelector": {"a": "b"}},
    ),
    "DecodePool": decode_pool(
        replicas=None,
        scaling={"maxReplicas": 2, "ratio": {"min": 0.5, "max": 2}},
        rollout={"maxSurge": "10%", "maxUnavailable": 1},
        parallelism={"tensor": 1},
        sidecar={"retries": 1},
        routing={"endpoint": "e", "epp": {"config": {}}},
    ),
}


def paths(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Of every value inside `value`."""
    if isinstance(value, dict):
        below: list[tuple[str | int, Any]] = list(value.items())
    else:
        below = list(enumerate(value)) if isinstance(value, list) else []
    return [path for key, item in below for path in ((*at, key), *paths(item, (*at, key)))]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_value_anywhere_gives_pods_or_an_error_never_a_crash(data: st.DataObject) -> None:
    objects = copy.deepcopy(FULL)
    kind = data.draw(st.sampled_from(list(objects)))
    *parents, last = data.draw(st.sampled_from(paths(objects[kind])))
    node: Any = objects[kind]
    for step in parents:
        node = node[step]
    node[last] = data.draw(JUNK)
    for pool_set in parsed_or_refused([Document(FILE, data) for data in objects.values()]):
        assert all(pod["kind"] == "Pod" for pod in pods(pool_set))


def parsed_or_refused(files: list[Document]) -> Pools:
    """Any other exception than a DocumentError fails the test."""
    with suppress(DocumentError):
        return parse_pools(files)
    return ()


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=JUNK)
def test_an_arbitrary_document_is_an_error(data: Any) -> None:
    with pytest.raises(DocumentError, match=FILE):
        parse_pools([Document(FILE, data)])
