"""Engine and sidecar containers: command lines, ports, volumes, probes, resources."""

import json
from typing import Any

import pytest

from tandem_contract import labels
from tandem_operator.pods.manifests import pods
from tandem_operator.resources.pool_files import parse_pools
from tandem_operator.resources.pools import PrefillPool
from tandem_operator.resources.resolve import Defaults, own_version

from .pool_yaml import decode_pool, documents, pair
from .rendered_pods import TORCH, engine, rendered, sidecar, value_of


def test_nothing_listens_at_or_connects_to_loopback() -> None:
    for spec in ({}, TORCH):
        for pod in rendered(spec, {"accelerator": {}}):
            assert "127.0.0.1" not in json.dumps(pod)
            assert "localhost" not in json.dumps(pod)


def test_transfer_config_of_both_sides_of_a_handoff() -> None:
    prefill, decode = rendered(
        {"transfer": {"leaseDuration": "1500ms", "backends": ["UCX"], "bufferDevice": "cpu"}},
        {"transfer": {"loadFailurePolicy": "fail"}},
    )
    prefill_config = json.loads(value_of("--kv-transfer-config", engine(prefill)))
    decode_config = json.loads(value_of("--kv-transfer-config", engine(decode)))
    assert prefill_config == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "engine_id": "$(POD_NAME)-$(POD_UID)",
        "kv_load_failure_policy": "recompute",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": 1.5, "backends": ["UCX"]},
    }
    assert decode_config == {
        **prefill_config,
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "fail",
    }


def test_extra_config_of_a_single_connector_is_inherited_and_wins() -> None:
    extra = {"num_threads": 4, "kv_lease_duration": 45}
    for decode_extra in (None, {"num_threads": 2}):
        own = {} if decode_extra is None else {"transfer": {"extraConfig": decode_extra}}
        configs = [
            json.loads(value_of("--kv-transfer-config", engine(pod)))["kv_connector_extra_config"]
            for pod in rendered({"transfer": {"backends": ["UCX"], "extraConfig": extra}}, own)
        ]
        rest = {"kv_lease_duration": 30, "backends": ["UCX"]}
        assert configs == [{**rest, **extra}, {**rest, **(decode_extra or extra)}]


def test_extra_config_sizes_the_offloaded_kv() -> None:
    transfer = {"connector": "offloading", "extraConfig": {"cpu_bytes_to_use": 24 * 1024**3}}
    for pod in rendered({"transfer": transfer}):
        (shm,) = [v["emptyDir"] for v in pod["spec"]["volumes"] if v["name"] == "shm"]
        assert shm["sizeLimit"] == "26Gi"
        config = json.loads(value_of("--kv-transfer-config", engine(pod)))
        assert config["kv_connector_extra_config"]["cpu_bytes_to_use"] == 24 * 1024**3


def test_a_unified_engine_produces_and_consumes() -> None:
    _, unified = rendered({"transfer": {"connector": "mooncake"}}, {"role": "unified"})
    config = json.loads(value_of("--kv-transfer-config", engine(unified)))
    assert config["kv_role"] == "kv_both"
    assert "bootstrap" in {port["name"] for port in engine(unified)["ports"]}


def test_a_chain_of_connectors() -> None:
    links = [
        {"connector": "nixl"},
        {"connector": "offloading", "extraConfig": {"cpu_bytes_to_use": 10**10}},
    ]
    prefill, _ = rendered({"transfer": {"connector": "multi", "connectors": links}})
    config = json.loads(value_of("--kv-transfer-config", engine(prefill)))
    assert config["kv_connector"] == "MultiConnector"
    nixl, offloading = config["kv_connector_extra_config"]["connectors"]
    assert nixl["kv_connector_extra_config"] == {"kv_lease_duration": 30}
    assert offloading["kv_connector_extra_config"] == {"cpu_bytes_to_use": 10**10}


def test_vllm_flags_follow_the_spec() -> None:
    prefill, _ = rendered(
        {
            "model": {"name": "m", "revision": "v1", "servedNames": ["a", "b"],
                      "loraAdapters": [{"name": "l", "path": "/l"}]},
            "engine": {"kvCacheDtype": "fp8", "extraArgs": ["--enforce-eager"],
                       "env": [{"name": "A", "value": "1"}]},
            "parallelism": {"tensor": 2, "data": 4, "expert": True,
                            "all2allBackend": "deepep_low_latency"},
            "accelerator": {"resource": "amd.com/gpu"},
        }
    )  # fmt: skip
    container = engine(prefill)
    assert container["command"] == ["vllm", "serve"]
    assert container["args"][:4] == ["m", "--served-model-name", "a", "b"]
    assert value_of("--max-loras", container) == "1"
    assert value_of("--revision", container) == "v1"
    assert value_of("--kv-cache-dtype", container) == "fp8"
    assert value_of("--tensor-parallel-size", container) == "2"
    assert value_of("--data-parallel-size", container) == "4"
    assert "--pipeline-parallel-size" not in container["args"]
    assert "--enable-expert-parallel" in container["args"]
    assert value_of("--lora-modules", container) == '{"name":"l","path":"/l"}'
    assert container["args"][-1] == "--enforce-eager"
    assert container["env"][-1] == {"name": "A", "value": "1"}
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "32Gi"},
        "limits": {"amd.com/gpu": "8"},
    }


@pytest.mark.parametrize(
    ("source", "argument", "volume"),
    [
        (None, "m", None),
        ({"huggingface": {"repository": "o/r"}}, "o/r", None),
        ({"pvc": {"claimName": "c", "path": "a/b"}}, "/model/a/b", "persistentVolumeClaim"),
        ({"pvc": {"claimName": "c"}}, "/model", "persistentVolumeClaim"),
        ({"oci": {"reference": "registry/m:1", "path": "dir/m"}}, "/model/dir/m", "image"),
        ({"s3": {"uri": "s3://models/m"}}, "s3://models/m", None),
        ({"path": "/models/x"}, "/models/x", "hostPath"),
    ],
)
def test_model_sources(source: dict[str, Any] | None, argument: str, volume: str | None) -> None:
    prefill, _ = rendered({"model": {"name": "m", "source": source}})
    assert engine(prefill)["args"][0] == argument
    named = {v["name"]: v for v in prefill["spec"]["volumes"]}
    assert ("model" in named) == (volume is not None)
    if volume:
        assert volume in named["model"]
    mounted = {m["name"] for m in engine(prefill)["volumeMounts"]}
    assert mounted == set(named)


def test_a_token_comes_from_its_secret() -> None:
    source = {"huggingface": {"tokenSecretRef": {"name": "s", "key": "k"}}}
    prefill, _ = rendered({"model": {"name": "m", "source": source}})
    reference = {"secretKeyRef": {"name": "s", "key": "k"}}
    assert {"name": "HF_TOKEN", "valueFrom": reference} in engine(prefill)["env"]


def test_an_image_volume_is_pulled_as_the_pool_says() -> None:
    source = {"oci": {"reference": "registry/m:1", "pullPolicy": "Always"}}
    for pod in rendered({"model": {"name": "m", "source": source}}, {}):
        (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "model")
        assert volume["image"] == {"reference": "registry/m:1", "pullPolicy": "Always"}
        mounts = {m["name"]: m for m in engine(pod)["volumeMounts"]}
        assert mounts["model"]["readOnly"] is True


def test_vllm_streams_from_s3_with_the_secrets_credentials() -> None:
    s3 = {
        "uri": "s3://models/m", "endpoint": "http://store:9000", "region": "eu-west-1",
        "credentialsSecretRef": {"name": "store"},
    }  # fmt: skip
    prefill, _ = rendered({"model": {"name": "m", "source": {"s3": s3}}})
    container = engine(prefill)
    assert value_of("--load-format", container) == "runai_streamer"
    assert value_of("--served-model-name", container) == "m"
    env = {variable["name"]: variable for variable in container["env"]}
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert env[key]["valueFrom"] == {"secretKeyRef": {"name": "store", "key": key}}
    assert env["AWS_ENDPOINT_URL"]["value"] == "http://store:9000"
    assert env["AWS_DEFAULT_REGION"]["value"] == "eu-west-1"
    own, _ = rendered({"model": {"name": "m", "source": {"s3": {"uri": "s3://models/m"}}}})
    assert not [v for v in engine(own)["env"] if v["name"].startswith("AWS_")]


def test_both_pools_of_a_set_share_the_cache_and_each_may_write_it() -> None:
    for pod in rendered({"model": {"name": "m", "cache": {"claimName": "hub"}}}, {}):
        (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "model-cache")
        assert volume["persistentVolumeClaim"] == {"claimName": "hub"}
        (mount,) = (m for m in engine(pod)["volumeMounts"] if m["name"] == "model-cache")
        assert "readOnly" not in mount
        assert {"name": "HF_HUB_CACHE", "value": mount["mountPath"]} in engine(pod)["env"]


def test_pull_secrets_of_the_installation_and_of_the_pool() -> None:
    defaults = Defaults(image_pull_secrets=("all", "both"))
    secrets = {"imagePullSecrets": [{"name": "both"}, {"name": "own"}]}
    prefill, *_ = pods(pair(secrets)[0], defaults)
    assert prefill["spec"]["imagePullSecrets"] == [
        {"name": "all"}, {"name": "both"}, {"name": "own"},
    ]  # fmt: skip
    assert "imagePullSecrets" not in pods(pair()[0])[0]["spec"]


def test_variables_from_whole_secrets_and_from_fields_of_the_pod() -> None:
    node = {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    source = {"prefix": "S_", "secretRef": {"name": "s"}}
    prefill, _ = rendered({"engine": {"env": [node], "envFrom": [source]}})
    assert node in engine(prefill)["env"]
    assert engine(prefill)["envFrom"] == [source]


def test_the_sidecar_gets_the_pools_settings() -> None:
    settings = {"prefillTimeout": "1500ms", "fallbackToUnified": False, "retries": 0}
    _, decode = rendered({}, {"sidecar": settings, "drain": {"timeout": "1m"}})
    container = sidecar(decode)
    assert container["restartPolicy"] == "Always"
    assert value_of("--drain-timeout", container) == "1m"
    (volume,) = [v for v in decode["spec"]["volumes"] if "downwardAPI" in v]
    (item,) = volume["downwardAPI"]["items"]
    assert item["fieldRef"] == {"fieldPath": f"metadata.annotations['{labels.SIDECAR_FLAGS}']"}
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == volume["name"]]
    assert value_of("--config", container) == f"{mount['mountPath']}/{item['path']}"
    assert json.loads(decode["metadata"]["annotations"][labels.SIDECAR_FLAGS]) == {
        "prefill-timeout": "1500ms",
        "kv-transfer-timeout": "10s",
        "fallback-to-unified": False,
        "retries": 0,
    }
    assert decode["spec"]["terminationGracePeriodSeconds"] == 75


def test_the_sidecar_gets_the_length_of_the_model() -> None:
    _, decode = rendered({"engine": {"maxModelLen": 4096}})
    assert value_of("--max-model-len", sidecar(decode)) == "4096"
    _, without = rendered({})
    assert "--max-model-len" not in sidecar(without)["args"]


def test_the_sidecar_gets_the_added_paths() -> None:
    _, decode = rendered({}, {"routing": {"apiPaths": ["/version", "/custom/**"]}})
    arguments = sidecar(decode)["args"]
    at = [i for i, word in enumerate(arguments) if word == "--api-path"]
    assert [arguments[i + 1] for i in at] == ["/version", "/custom/**"]
    _, without = rendered({})
    assert "--api-path" not in sidecar(without)["args"]


def test_the_sidecar_gets_the_limit_of_bodies() -> None:
    _, decode = rendered({}, {"routing": {"maxRequestBytes": 64 << 20}})
    assert value_of("--max-body", sidecar(decode)) == str(64 << 20)
    _, without = rendered({})
    assert "--max-body" not in sidecar(without)["args"]


def test_a_pool_without_peer_has_no_transfer_config() -> None:
    alone = decode_pool(prefillRef=None, role="unified", model={"name": "m"})
    (pod, _) = pods(parse_pools(documents(alone))[0])
    assert "--kv-transfer-config" not in engine(pod)["args"]
    assert pod["metadata"]["labels"][labels.LLMD_ROLE] == "both"


@pytest.mark.parametrize("is_chain", [False, True])
def test_a_pool_without_peer_offloads_to_host_memory_only(is_chain: bool) -> None:
    size = 24 * 1024**3 if is_chain else 10 * 1024**3
    links = [
        {"connector": "nixl"},
        {"connector": "offloading", "extraConfig": {"cpu_bytes_to_use": size}},
    ]
    chain = {"connector": "multi", "connectors": links, "rdma": {"resource": "rdma/ib"}}
    transfer = chain if is_chain else {"connector": "offloading"}
    alone = decode_pool(prefillRef=None, role="unified", model={"name": "m"}, transfer=transfer)
    (pod, _) = pods(parse_pools(documents(alone))[0])
    assert json.loads(value_of("--kv-transfer-config", engine(pod))) == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": "$(POD_NAME)-$(POD_UID)",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu_bytes_to_use": size},
    }
    (shm,) = [v["emptyDir"] for v in pod["spec"]["volumes"] if v["name"] == "shm"]
    assert shm["sizeLimit"] == f"{2 + size // 1024**3}Gi"
    # Nothing of a hand-off: no side channel, no RDMA device.
    assert "side-channel" not in {port["name"] for port in engine(pod)["ports"]}
    assert engine(pod)["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert not [v for v in engine(pod)["env"] if v["name"].startswith(("UCX_", "VLLM_"))]


def test_devices_and_resources_are_requested() -> None:
    prefill, _ = rendered(
        {"engine": {"resources": {"requests": {"cpu": 8}, "limits": {"memory": "64Gi"}},
                    "imagePullPolicy": "IfNotPresent"},
         "transfer": {"rdma": {"resource": "rdma/ib", "count": 2}}},
    )  # fmt: skip
    assert engine(prefill)["imagePullPolicy"] == "IfNotPresent"
    assert engine(prefill)["resources"] == {
        "requests": {"cpu": 8},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "1", "rdma/ib": "2"},
    }


def test_each_rank_has_its_ports() -> None:
    prefill, _ = rendered(
        {"parallelism": {"data": 2}, "accelerator": {}, "transfer": {"connector": "mooncake"}}
    )
    named = {port["name"]: port["containerPort"] for port in engine(prefill)["ports"]}
    assert named == {
        "engine": 8000, "kv-events": 5557, "kv-events-1": 5558, "kv-replay": 5657,
        "kv-replay-1": 5658, "side-channel": 5600, "side-channel-1": 5601, "bootstrap": 8998,
    }  # fmt: skip


def test_shared_memory_grows_with_ranks_and_with_offloaded_kv() -> None:
    links = [{"connector": "nixl"}, {"connector": "offloading"}]
    prefill, _ = rendered({"accelerator": {"count": 4},
                           "transfer": {"connector": "multi", "connectors": links}})  # fmt: skip
    shm = {v["name"]: v for v in prefill["spec"]["volumes"]}["shm"]["emptyDir"]
    assert shm == {"medium": "Memory", "sizeLimit": "18Gi"}


def test_only_a_decode_pod_has_a_sidecar() -> None:
    prefill, decode = (pod_["spec"] for pod_ in rendered())
    names = [c["name"] for c in (*prefill.get("initContainers", ()), *prefill["containers"])]
    assert names == ["engine"]
    assert "sidecar" in {c["name"] for c in (*decode["initContainers"], *decode["containers"])}


def test_a_decode_pod_is_ready_by_its_sidecar_and_a_prefill_pod_by_its_engine() -> None:
    prefill, decode = rendered()
    assert "readinessProbe" in engine(prefill)
    assert "readinessProbe" not in engine(decode)
    assert "readinessProbe" in sidecar(decode)
    for pod_ in (prefill, decode):
        startup = engine(pod_)["startupProbe"]
        wait = int(startup["exec"]["command"][-2])
        assert startup["failureThreshold"] * wait == 1800
        assert startup["timeoutSeconds"] > wait


def test_engines_shut_down_within_the_grace_period() -> None:
    drain = {"drain": {"timeout": "1m"}}
    prefill, decode = rendered(drain, drain)
    assert prefill["spec"]["terminationGracePeriodSeconds"] == 75
    assert engine(prefill)["lifecycle"]["preStop"]["exec"]["command"][4] == "60"
    assert value_of("--shutdown-timeout", engine(decode)) == "10"
    torch_prefill, torch_decode = rendered({**TORCH, **drain}, {**drain, "accelerator": {}})
    assert value_of("--shutdown-timeout", engine(torch_prefill)) == "1m"
    assert "lifecycle" not in engine(torch_prefill)
    assert value_of("--shutdown-timeout", engine(torch_decode)) == "10s"


@pytest.mark.parametrize(
    ("parser", "resume", "version", "has_flag"),
    [
        (["--reasoning-parser", "qwen3"], "always", "0.32.0", True),
        (["--tool-call-parser=hermes"], "always", "0.32.0", True),
        (["--reasoning-parser", "qwen3"], "never", "0.32.0", False),
        (["--reasoning-parser", "qwen3"], None, "0.32.0", False),
        (["--reasoning-parser", "qwen3"], "auto", "0.32.0", False),
        (["--enforce-eager"], "always", "0.32.0", False),
        (["--reasoning-parser", "qwen3"], "always", "0.31.0", False),
    ],
)
def test_only_engines_that_parse_streams_which_are_resumed_parse_tokens(
    parser: list[str], resume: str | None, version: str, has_flag: bool
) -> None:
    engines = {"engine": {"extraArgs": parser, "version": version}}
    routing = {} if resume is None else {"routing": {"resume": {"enabled": resume}}}
    prefill, decode = rendered(engines, {**engines, **routing})
    assert ("--enable-scale-out" in engine(decode)["args"]) is has_flag
    assert "--enable-scale-out" not in engine(prefill)["args"]


def test_only_an_engine_that_has_rdma_devices_and_a_peer_locks_memory() -> None:
    def added(pod: dict[str, Any]) -> list[str]:
        capabilities: dict[str, list[str]] = engine(pod)["securityContext"]["capabilities"]
        assert capabilities["drop"] == ["ALL"]
        return capabilities.get("add", [])

    rdma = {"transfer": {"rdma": {"resource": "rdma/ib", "count": 1}}}
    assert [added(pod) for pod in rendered(rdma, {})] == [["IPC_LOCK"], ["IPC_LOCK"]]
    assert [added(pod) for pod in rendered({}, {})] == [[], []]
    assert "add" not in sidecar(rendered(rdma, {})[1])["securityContext"]["capabilities"]


def test_the_cluster_autoscaler_may_evict_pods_unless_the_user_forbids_it() -> None:
    annotation = "cluster-autoscaler.kubernetes.io/safe-to-evict"
    kept = {"template": {"metadata": {"annotations": {annotation: "false"}}}}
    prefill, decode = rendered({}, kept)
    assert prefill["metadata"]["annotations"][annotation] == "true"
    assert decode["metadata"]["annotations"][annotation] == "false"


def test_the_torch_engine_can_write_only_to_its_home() -> None:
    prefill, _ = rendered(TORCH, {"accelerator": {}})
    assert engine(prefill)["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"name": "TMPDIR", "value": "/home/tandem"} in engine(prefill)["env"]


STORE = {
    "endpoint": "http://store:8080", "protocol": "s3", "region": "eu-central-1",
    "kvNamespace": "bucket/kv",
    "credentialsSecretRef": {"name": "store-keys"},
}  # fmt: skip


def test_kv_moves_through_the_store_without_a_side_channel() -> None:
    transfer = {"connector": "storage", "storage": STORE}
    prefill, decode = rendered({**TORCH, "transfer": transfer}, {"accelerator": {}})
    for pod_ in (prefill, decode):
        assert json.loads(value_of("--kv-storage-config", engine(pod_))) == {
            "endpoint": "http://store:8080",
            "kv_namespace": "bucket/kv",
            "protocol": "s3",
            "region": "eu-central-1",
            "credentials_dir": "/var/run/tandem/kv-store",
            "bounds_file": "/var/run/tandem/storage-bounds/bounds.json",
        }
        assert "--kv-transfer-config" not in engine(pod_)["args"]
        assert not [p for p in engine(pod_)["ports"] if p["name"].startswith("side-channel")]
        keys = {"name": "kv-store", "mountPath": "/var/run/tandem/kv-store", "readOnly": True}
        assert keys in engine(pod_)["volumeMounts"]
        volume = {"name": "kv-store", "secret": {"secretName": "store-keys"}}
        assert volume in pod_["spec"]["volumes"]
    assert value_of("--connector", sidecar(decode)) == "storage"


def test_the_torch_engine_gets_settings_of_its_store_too() -> None:
    transfer = {"connector": "storage", "storage": STORE, "extraConfig": {"host_bytes": 1000}}
    for pod_ in rendered({**TORCH, "transfer": transfer}, {"accelerator": {}}):
        assert json.loads(value_of("--kv-storage-config", engine(pod_)))["host_bytes"] == 1000


def test_storage_beside_nixl_keeps_the_hand_off_of_nixl() -> None:
    """What the pool leaves out of the store's settings is the engine's default."""
    transfer = {"connector": "nixl", "storage": {"endpoint": "file:///kv"}}
    prefill, decode = rendered({**TORCH, "transfer": transfer}, {"accelerator": {}})
    for pod_ in (prefill, decode):
        config = json.loads(value_of("--kv-storage-config", engine(pod_)))
        bounds = "/var/run/tandem/storage-bounds/bounds.json"
        assert config == {"endpoint": "file:///kv", "bounds_file": bounds}
        transfer_config = json.loads(value_of("--kv-transfer-config", engine(pod_)))
        assert transfer_config["kv_connector"] == "NixlConnector"
        assert "kv-store" not in [v["name"] for v in pod_["spec"]["volumes"]]
    assert value_of("--connector", sidecar(decode)) == "nixl"


def test_an_init_container_brings_the_storage_connector_to_vllm() -> None:
    transfer = {"connector": "storage", "storage": STORE}
    prefill, decode = rendered({"transfer": transfer})
    for pod_ in (prefill, decode):
        packages = pod_["spec"]["initContainers"][-1]
        assert packages["name"] == "storage-packages"
        assert packages["image"] == f"tandem-vllm-storage:{own_version()}"
        assert "command" not in packages
        assert packages["args"] == ["/opt/tandem/python"]
        mount = {"name": "tandem-python", "mountPath": "/opt/tandem/python"}
        assert packages["volumeMounts"] == [mount]
        assert {**mount, "readOnly": True} in engine(pod_)["volumeMounts"]
        assert {"name": "tandem-python", "emptyDir": {}} in pod_["spec"]["volumes"]
        assert {"name": "PYTHONPATH", "value": "/opt/tandem/python"} in engine(pod_)["env"]
        keys = {"name": "kv-store", "mountPath": "/var/run/tandem/kv-store", "readOnly": True}
        assert keys in engine(pod_)["volumeMounts"]
        assert keys["name"] not in [mount["name"] for mount in packages["volumeMounts"]]
        assert not [p for p in engine(pod_)["ports"] if p["name"].startswith("side-channel")]
    assert value_of("--connector", sidecar(decode)) == "storage"


def test_the_image_of_the_storage_connector_is_the_pools_or_the_installations() -> None:
    own = {"endpoint": "http://s", "image": "registry/storage@sha256:" + "0" * 64}
    for storage, image, policy in (
        (STORE, "mirror/storage:1", "Always"),
        (own, own["image"], None),
    ):
        defaults = Defaults(vllm_storage_image="mirror/storage:1", pull_policy="Always")
        (pool_set,) = pair({"transfer": {"storage": storage}}, {})
        for pod_ in pods(pool_set, defaults):
            packages = pod_["spec"]["initContainers"][-1]
            assert (packages["image"], packages.get("imagePullPolicy")) == (image, policy)


def test_a_vllm_without_peer_keeps_kv_in_external_storage() -> None:
    spec = {"model": {"name": "m"}, "transfer": {"storage": {"endpoint": "http://s"}}}
    alone = decode_pool(prefillRef=None, role="unified", **spec)
    pod_, *_ = pods(parse_pools(documents(alone))[0])
    config = json.loads(value_of("--kv-transfer-config", engine(pod_)))
    assert (config["kv_connector"], config["kv_role"]) == ("TandemStorageConnector", "kv_both")


def test_the_image_of_the_storage_connector_is_no_part_of_the_compat_hash() -> None:
    def pool(**storage: str) -> PrefillPool:
        transfer = {"connector": "storage", "storage": {"endpoint": "http://s", **storage}}
        prefill = pair({"transfer": transfer}, {})[0].prefill
        assert prefill is not None
        return prefill

    assert pool(image="a:1").compat == pool(image="b:1").compat == pool().compat
    assert pool(image="a:1").revision != pool(image="b:1").revision


def test_the_sides_of_a_set_may_name_the_storage_image_from_different_registries() -> None:
    store = {"endpoint": "http://s"}
    first, second = {**store, "image": "a:1"}, {**store, "image": "b:1"}
    images = [
        pod_["spec"]["initContainers"][-1]["image"]
        for pod_ in rendered({"transfer": {"storage": first}}, {"transfer": {"storage": second}})
    ]
    assert images == ["a:1", "b:1"]


def test_the_pods_of_pools_with_other_stores_are_not_compatible() -> None:
    def compat(**storage: str) -> str:
        transfer = {"connector": "storage", "storage": {"endpoint": "http://s", **storage}}
        return pair({**TORCH, "transfer": transfer}, {"accelerator": {}})[0].prefill.compat

    assert compat() != compat(endpoint="http://t")
    assert compat() != compat(kvNamespace="other")


def test_a_tiny_model_needs_no_volume() -> None:
    spec = {**TORCH, "model": {"name": "m", "source": {"tiny": {"seed": 3}}}}
    prefill, decode = rendered(spec, {"accelerator": {}})
    for pod_ in (prefill, decode):
        assert value_of("--model", engine(pod_)) == "tiny:3"
    assert [v["name"] for v in prefill["spec"]["volumes"]] == ["home", "transfer-keys"]


def test_another_pickers_choices_are_limited_to_the_pod_networks() -> None:
    narrow = Defaults(pod_networks=("10.2.0.0/16", "fd00::/48"))
    (pool_set,) = pair({}, {"routing": {"epp": {"enabled": False}}})
    args = sidecar(pods(pool_set, narrow)[1])["args"]
    assert args[-4:] == ["--prefill-allow", "10.2.0.0/16", "--prefill-allow", "fd00::/48"]
    assert "--prefill-allow" not in sidecar(pods(pair()[0], narrow)[1])["args"]


@pytest.mark.parametrize(
    ("connectors", "spoken"),
    [(["offloading", "nixl"], "nixl"), (["offloading"], "offloading"),
     (["nixl", "lmcache"], "nixl")],
)  # fmt: skip
def test_the_sidecar_uses_the_handoff_connector_of_a_chain(
    connectors: list[str], spoken: str
) -> None:
    links = [{"connector": name} for name in connectors]
    _, decode = rendered({"transfer": {"connector": "multi", "connectors": links}})
    args = sidecar(decode)
    assert value_of("--connector", args) == spoken
    assert ("--peer-port" in args["args"]) is (spoken == "offloading")


def test_the_sidecar_gets_the_port_of_offloadings_tier() -> None:
    _, decode = rendered({"transfer": {"connector": "offloading", "sideChannelPort": 5700}})
    assert value_of("--peer-port", sidecar(decode)) == "5700"


@pytest.mark.parametrize("broken", [
    {"containers": None}, {"containers": 7}, {"containers": [None, {}]},
    {"containers": [{"name": "engine", "resources": 7}]},
    {"containers": [{"name": "engine", "resources": {"limits": 7}}]},
    {"containers": [{"name": "engine", "resources": {"requests": [7]}}]},
])  # fmt: skip
def test_an_unreadable_template_is_left_to_the_api_server(broken: dict[str, Any]) -> None:
    prefill, _ = rendered({"template": {"spec": broken}})
    assert prefill["kind"] == "Pod"
