"""Command lines of vLLM, one golden file for each version in which something changed.

`python -m tests.operator.test_engines` writes the files anew: read the difference before you keep
it. `tests/vllm/test_arguments.py` has vLLM's own parser read them.
"""

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tandem_operator.errors import InvalidSet, PoolsError
from tandem_operator.pods.manifests import pods
from tandem_operator.resources import vllm_versions
from tandem_operator.resources.pool_files import parse_pools
from tandem_operator.resources.pools import PoolSet

from .pool_yaml import decode_pool, documents, pair

GOLDEN = Path(__file__).parent / "golden" / "argv"
VERSIONS = (
    "0.10.0", "0.12.0", "0.13.0", "0.14.0", "0.18.1", "0.22.1", "0.24.0", "0.25.0", "0.26.0",
    "0.32.0",
)  # fmt: skip
"""A release for every version in which rendered flags change, and the newest one last."""

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nixl": ({"accelerator": {"count": 4}}, {"accelerator": {"count": 2}}),
    "nixl-untuned": ({"engine": {"tuning": "off"}}, {"engine": {"tuning": "off"}}),
    "nixl-rdma": (
        {"transfer": {"requireRdma": True, "rdma": {"resource": "rdma/ib", "count": 2},
                      "backends": ["UCX", "GDS"], "bufferDevice": "cuda",
                      "leaseDuration": "45s"}},
        {"transfer": {"loadFailurePolicy": "fail"}},
    ),
    "nixl-extra": ({"transfer": {"extraConfig": {"num_threads": 4}}}, {}),
    "nixl-chunks": ({}, {"routing": {"maxPrefillOnDecode": 512}}),
    "nixl-push": ({"transfer": {"connector": "nixl-push"}}, {}),
    "lmcache": (
        {"transfer": {"connector": "lmcache",
                      "extraConfig": {"lmcache.remote_url": "redis://store:6379"}}},
        {},
    ),
    "lmcache-mp": ({"transfer": {"connector": "lmcache-mp"}}, {}),
    "mooncake": ({"transfer": {"connector": "mooncake"}}, {}),
    "offloading": ({"transfer": {"connector": "offloading"}}, {}),
    "multi": (
        {"transfer": {"connector": "multi", "bufferDevice": "cpu", "connectors": [
            {"connector": "nixl"},
            {"connector": "offloading", "extraConfig": {"cpu_bytes_to_use": 64 * 1024**3}}]}},
        {},
    ),
    "storage": (
        {"transfer": {"connector": "storage", "extraConfig": {"chunk_tokens": 512},
                      "storage": {"endpoint": "http://store:9000", "protocol": "s3",
                                  "kvNamespace": "bucket/kv",
                                  "credentialsSecretRef": {"name": "store-keys"}}}},
        {},
    ),
    "nixl-storage": (
        {"transfer": {"bufferDevice": "cpu", "storage": {"endpoint": "http://store:8080"}}},
        {},
    ),
    "multi-storage": (
        {"transfer": {"connector": "multi", "storage": {"endpoint": "http://store:8080"},
                      "connectors": [
                          {"connector": "storage", "extraConfig": {"weights": "c0ffee"}},
                          {"connector": "nixl"}, {"connector": "offloading"}]}},
        {},
    ),
    "moe": (
        {"accelerator": {}, "parallelism": {"data": 8, "expert": True}},
        {"accelerator": {}, "parallelism": {"data": 8, "expert": True}},
    ),
    "moe-chosen": (
        {"accelerator": {}, "parallelism": {"data": 2, "expert": True,
                                            "all2allBackend": "nixl_ep"}},
        {},
    ),
    "pipeline": ({"accelerator": {}, "parallelism": {"tensor": 2, "pipeline": 2}}, {}),
    "s3": (
        {"model": {"name": "org/model", "source": {"s3": {
            "uri": "s3://models/org/model", "endpoint": "http://store:9000",
            "credentialsSecretRef": {"name": "store"}}}}},
        {},
    ),
    "oci": (
        {"model": {"name": "org/model", "source": {"oci": {
            "reference": "registry/models/model@sha256:" + "0" * 64, "path": "weights"}}}},
        {},
    ),
    "cached": (
        {"model": {"name": "org/model", "revision": "v1", "cache": {"claimName": "hub"}}},
        {"imagePullSecrets": [{"name": "registry"}],
         "engine": {"envFrom": [{"secretRef": {"name": "s"}}],
                    "env": [{"name": "NODE",
                             "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]}},
    ),
    "lora": (
        {"model": {"name": "org/model", "servedNames": ["chat", "model"], "revision": "v1",
                   "loraAdapters": [{"name": "sql", "path": "org/sql"},
                                    {"name": "law", "path": "/model/law"}]},
         "engine": {"dtype": "bfloat16", "kvCacheDtype": "fp8", "blockSize": 32,
                    "maxModelLen": 4096, "maxNumSeqs": 64, "extraArgs": ["--enforce-eager"]}},
        {},
    ),
}  # fmt: skip
"""Spec fields of the two pools of a set."""


def rendered(case: str, version: str) -> dict[str, Any]:
    """Command line and variables of each side, or why the pools are refused."""
    prefill, decode = CASES[case]
    return _rendered({**prefill, "engine": {**prefill.get("engine", {}), "version": version}},
                     decode)  # fmt: skip


def _rendered(prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    try:
        bodies = pods(pair(prefill, decode)[0])
    except InvalidSet as err:
        return {"refused": [line.partition(": ")[2] for line in err.lines]}
    return {
        side: _engine_settings(pod)
        for side, pod in zip(("prefill", "decode"), bodies, strict=False)
    }


def _rendered_unified(version: str) -> dict[str, Any]:
    pool = decode_pool(prefillRef=None, role="unified", model={"name": "org/model"},
                       engine={"version": version}, accelerator={},
                       parallelism={"data": 2, "expert": True,
                                    "all2allBackend": "deepep_low_latency"})  # fmt: skip
    return {"unified": _engine_settings(pods(parse_pools(documents(pool))[0])[0])}


def _rendered_offloading(version: str) -> dict[str, Any]:
    """A unified pool without a peer that keeps KV in host memory as well."""
    try:
        pool = _unified({"transfer": {"connector": "offloading"}, "engine": {"version": version}})
    except InvalidSet as err:
        return {"refused": [line.partition(": ")[2] for line in err.lines]}
    return {"unified": _engine_settings(pods(pool)[0])}


def _unified(spec: dict[str, Any]) -> PoolSet:
    pool = decode_pool(prefillRef=None, role="unified", **{"model": {"name": "org/model"}, **spec})
    return parse_pools(documents(pool))[0]


def _engine_settings(pod: dict[str, Any]) -> dict[str, Any]:
    container = pod["spec"]["containers"][0]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    engine_variables = {
        name: value for name, value in variables.items() if name.startswith(("VLLM_", "UCX_"))
    }
    return {
        "argv": shlex.join([*container["command"], *container["args"]]),
        "env": engine_variables,
    }


def golden(version: str) -> dict[str, Any]:
    """Everything rendered for `version`."""
    return {
        **{case: rendered(case, version) for case in CASES},
        "alone": _rendered_unified(version),
        "offloading-alone": _rendered_offloading(version),
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_command_lines(version: str) -> None:
    assert golden(version) == json.loads((GOLDEN / f"{version}.json").read_text())


def test_a_newer_vllm_is_treated_as_the_newest_known() -> None:
    newest, newer = (
        json.dumps(golden(version)).replace(version, "") for version in (VERSIONS[-1], "0.45.1")
    )
    assert vllm_versions.parse_release(VERSIONS[-1]) == vllm_versions.NEWEST
    assert newest == newer


def test_every_step_of_the_table_has_a_golden_file() -> None:
    features = [
        value for value in vars(vllm_versions).values()
        if isinstance(value, vllm_versions.VersionRange)
    ]  # fmt: skip
    connectors = [versions for _, versions in vllm_versions.CONNECTORS.values()]
    steps = {versions.since for versions in features + connectors}
    rendered_releases = {vllm_versions.parse_release(version) for version in VERSIONS}
    # 0.11 has a new connector, but no hand-off: nothing is rendered for it before 0.13.
    assert steps - {(0, 11)} <= rendered_releases


@pytest.mark.parametrize(
    ("prefill", "message"),
    [
        ({"engine": {"version": "0.9.1"}}, "spec.engine.version: Tandem needs vLLM 0.10 or later"),
        ({"engine": {"version": "0.12.0"}}, "a hand-off needs vLLM 0.13 or later"),
        ({"transfer": {"connector": "p2p-nccl"}}, "removed P2pNcclConnector in 0.24: use nixl"),
        ({"engine": {"version": "0.31.0"}, "transfer": {"storage": {"endpoint": "http://s"}}},
         "transfer.storage needs vLLM 0.32 or later"),
        ({"transfer": {"connector": "mooncake", "storage": {"endpoint": "http://s"}}},
         "storage stands beside nixl and offloading only, not beside mooncake"),
        ({"engine": {"blockSize": 48}, "transfer": {"storage": {"endpoint": "http://s"}}},
         "spec.engine.blockSize: a stored chunk has 256 tokens, which must be a multiple of"),
        ({"engine": {"blockSize": 48}, "transfer": {
            "connector": "storage", "storage": {"endpoint": "http://s"},
            "extraConfig": {"chunk_tokens": 512}}},
         "spec.transfer.extraConfig.chunk_tokens: a stored chunk has 512 tokens"),
        ({"engine": {"blockSize": 48}, "transfer": {
            "connector": "multi", "storage": {"endpoint": "http://s"}, "connectors": [
                {"connector": "nixl"},
                {"connector": "storage", "extraConfig": {"chunk_tokens": 512}}]}},
         "spec.transfer.connectors[1].extraConfig.chunk_tokens: a stored chunk has 512 tokens"),
        ({"model": {"name": "tiny", "source": {"tiny": {"seed": 3}}},
          "engine": {"type": "torch", "blockSize": 16}, "transfer": {
            "connector": "storage", "storage": {"endpoint": "http://s"},
            "extraConfig": {"chunk_tokens": 100}}},
         "spec.transfer.extraConfig.chunk_tokens: a stored chunk has 100 tokens"),
        ({"model": {"name": "tiny", "source": {"tiny": {}}}, "engine": {"type": "torch"},
          "transfer": {"connector": "storage", "storage": {"endpoint": "http://s"},
                       "extraConfig": {"host_byte": 1}}},
         "spec.transfer.extraConfig.host_byte: the torch engine knows no such setting of its store"
         " (did you mean 'host_bytes'?)"),
        ({"transfer": {"connector": "multi", "storage": {"endpoint": "http://s"}, "connectors": [
            {"connector": "nixl"}, {"connector": "storage", "extraConfig": {"host_bytes": 1}}]}},
         "spec.transfer.connectors[1].extraConfig.host_bytes: the vllm engine knows no such setting"
         " of its store: known are bounds_file"),
        ({"model": {"name": "tiny", "source": {"tiny": {}}}, "engine": {"type": "torch"},
          "transfer": {"extraConfig": {"kv_lease_durations": 5}}},
         "spec.transfer.extraConfig.kv_lease_durations: the torch engine knows no such setting of"
         " nixl (did you mean 'kv_lease_duration'?)"),
        ({"model": {"name": "tiny", "source": {"tiny": {}}}, "engine": {"type": "torch"},
          "transfer": {"storage": {"endpoint": "http://s"}, "extraConfig": {"chunk_tokens": 512}}},
         "spec.transfer.extraConfig.chunk_tokens: the torch engine knows no such setting of nixl:"
         " known are backends, kv_lease_duration"),
        ({"engine": {"extraArgs": ["--no-enable-prefix-caching"]},
          "transfer": {"storage": {"endpoint": "http://s"}}},
         "spec.engine.extraArgs[0]: --no-enable-prefix-caching and transfer.storage exclude"),
        ({"engine": {"env": [{"name": "PYTHONPATH", "value": "/mine"}]},
          "transfer": {"storage": {"endpoint": "http://s"}}},
         "spec.engine.env[0].value: vLLM imports the storage connector from /opt/tandem/python"),
        ({"model": {"name": "m", "source": {"s3": {"uri": "s3://bucket/model"}}},
          "transfer": {"storage": {"endpoint": "http://s"}}},
         "spec.model.source.s3: stored KV is keyed by the weights"),
        ({"transfer": {"connector": "storage", "storage": {"endpoint": "http://s"},
                       "extraConfig": {"capacity_bytes": 1000}}},
         "spec.transfer.extraConfig.capacity_bytes: has no effect in a pool: write"
         " transfer.storage.capacity instead"),
        ({"transfer": {"connector": "multi", "storage": {"endpoint": "http://s"},
                       "connectors": [{"connector": "nixl"}, {"connector": "storage",
                           "extraConfig": {"max_age_seconds": 60}}]}},
         "spec.transfer.connectors[1].extraConfig.max_age_seconds: has no effect in a pool"),
        ({"transfer": {"requireRdma": True}}, "needs transfer.rdma.resource beside it"),
        ({"parallelism": {"expert": True, "all2allBackend": "mori"}, "accelerator": {}},
         "mori needs vLLM 0.15 or later and before 0.23"),
        ({"transfer": {"connector": "multi", "connectors": [
            {"connector": "offloading", "extraConfig": {"cpu_bytes_to_use": "64Gi"}}]}},
         "spec.transfer.connectors[0].extraConfig.cpu_bytes_to_use: '64Gi' is not a number of"
         " bytes"),
        ({"transfer": {"connector": "offloading", "extraConfig": {"cpu_bytes_to_use": "64Gi"}}},
         "spec.transfer.extraConfig.cpu_bytes_to_use: '64Gi' is not a number of bytes"),
        ({"transfer": {"connector": "multi", "extraConfig": {"a": 1},
                       "connectors": [{"connector": "nixl"}]}},
         "spec.transfer.extraConfig: belongs to a single connector: move it to the one of"),
    ],
)  # fmt: skip
def test_unsupported_settings_are_refused_with_the_fix(
    prefill: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSet) as caught:
        pair(prefill)
    assert message in str(caught.value)
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"engine": {"version": "0.13.0"}, "transfer": {"connector": "offloading"}},
         "spec.transfer.connector: connector offloading as it is used here needs vLLM 0.14"),
        ({"accelerator": {"count": 0}, "transfer": {"connector": "offloading"}},
         "spec.transfer.connector: vLLM does not start connector offloading on a CPU"),
        ({"transfer": {"connector": "multi", "connectors": [
            {"connector": "offloading", "extraConfig": {"cpu_bytes_to_use": 0}}]}},
         "spec.transfer.connectors[0].extraConfig.cpu_bytes_to_use: 0 is not a number of bytes"),
        ({"engine": {"type": "torch"}, "model": {"name": "m", "source": {"path": "/m"}},
          "transfer": {"connector": "offloading"}},
         "the torch engine has the connectors nixl and storage only"),
    ],
)  # fmt: skip
def test_offloading_without_a_peer_is_refused_where_the_engine_has_none(
    spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(PoolsError) as caught:
        _unified(spec)
    assert message in str(caught.value)
    assert len(caught.value.lines) == 1


def test_leases_without_renewal_are_long_by_default() -> None:
    def timeout(transfer: dict[str, Any]) -> str:
        settings = _rendered({"engine": {"version": "0.21.0"}, "transfer": transfer}, {})
        value: str = settings["prefill"]["env"]["VLLM_NIXL_ABORT_REQUEST_TIMEOUT"]
        return value

    assert timeout({}) == "480"
    assert timeout({"leaseDuration": "1500ms"}) == "2"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, None),
        ({"routing": {"maxPrefillOnDecode": 512}}, "512"),
        # vLLM does not start with a chunk that is longer than its longest prompt.
        ({"routing": {"maxPrefillOnDecode": 512}, "engine": {"maxModelLen": 256}}, "256"),
        ({"routing": {"maxPrefillOnDecode": 512}, "role": "unified"}, None),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "torch"])
def test_decode_pods_compute_small_chunks_only_if_a_limit_is_stated(
    engine: str, spec: dict[str, Any], expected: str | None
) -> None:
    model = {"name": "m", "source": {"path": "/m"}}
    chosen = {"type": engine, **spec.get("engine", {})}
    bodies = pods(pair({"model": model, "engine": chosen}, {**spec, "engine": chosen})[0])
    flags = [
        [value for flag, value in pairwise(args) if flag == "--long-prefill-token-threshold"]
        for pod in (bodies[0], bodies[-1])
        for args in [pod["spec"]["containers"][0]["args"]]
    ]
    assert flags == [[], [expected] if expected else []]


def test_a_users_variable_replaces_ours() -> None:
    bodies = pods(pair({"engine": {"env": [{"name": "UCX_TLS", "value": "rc,cuda"}]}})[0])
    env = bodies[0]["spec"]["containers"][0]["env"]
    assert [v for v in env if v["name"] == "UCX_TLS"] == [{"name": "UCX_TLS", "value": "rc,cuda"}]


if __name__ == "__main__":
    for one in VERSIONS:
        (GOLDEN / f"{one}.json").write_text(json.dumps(golden(one), indent=2) + "\n")
