"""One case that breaks each CEL rule of the CRDs, and the evaluation of rules."""

from typing import Any

import pytest

from tandem_operator.crd import KINDS, RULES, load_crd
from tandem_operator.resources.cel import broken_rules
from tandem_operator.resources.schema import defaulted, problems

from .pool_yaml import decode_pool, prefill_pool
from .test_crd import nodes

TORCH = {"type": "torch"}
LOCAL = {"name": "m", "source": {"path": "/m"}}
VALUE_FROM = {"secretKeyRef": {"name": "s", "key": "k"}}

# (spec fields, where the error is, a part of its message)
SHARED: list[tuple[dict[str, Any], str, str]] = [
    ({"scaling": {"maxReplicas": 2}}, "replicas", "replicas and scaling exclude each other"),
    ({"accelerator": {"count": 4}, "parallelism": {"tensor": 2}}, "accelerator.count",
     "must be tensor × pipeline × data"),
    ({"parallelism": {"nodes": 2}}, "parallelism.nodes", "one pod on one node"),
    ({"parallelism": {"all2allBackend": "deepep_low_latency"}}, "parallelism.all2allBackend",
     "needs expert: true"),
    ({"engine": {"image": "vllm/vllm-openai:latest"}}, "engine.image", "is no version"),
    ({"engine": {"image": "registry:5000/vllm"}}, "engine.image", "is no version"),
    ({"engine": {"extraArgs": ["--port=1"]}}, "engine.extraArgs", "are set by Tandem"),
    ({"engine": {"env": [{"name": "POD_IP", "value": "1"}]}}, "engine.env.0.name",
     "is set by Tandem"),
    ({"engine": {"env": [{"name": "A", "value": "1", "valueFrom": VALUE_FROM}]}},
     "engine.env.0", "exclude each other"),
    ({"engine": {"env": [{"name": "A", "valueFrom": {}}]}}, "engine.env.0.valueFrom",
     "give one of"),
    ({"engine": {"dtype": "float64"}}, "engine.dtype", "float64 needs type: torch"),
    ({"model": LOCAL, "engine": {**TORCH, "gpuMemoryUtilization": 0.9}}, "engine.type",
     "neither kvCacheDtype nor"),
    ({"model": LOCAL, "engine": TORCH, "accelerator": {"count": 2}},
     "accelerator.count", "one device"),
    ({"model": LOCAL, "engine": TORCH, "parallelism": {"data": 2}, "accelerator": {}},
     "parallelism", "one device"),
    ({"model": LOCAL, "engine": TORCH, "transfer": {"connector": "mooncake"}},
     "transfer.connector", "connectors nixl and storage only"),
    ({"model": {**LOCAL, "loraAdapters": [{"name": "a", "path": "/a"}]}, "engine": TORCH},
     "model", "no LoRA adapters"),
    ({"model": {"name": "m"}, "engine": TORCH}, "model", "downloads nothing"),
    ({"model": {"name": "m", "source": {"path": "/m", "huggingface": {}}}}, "model.source",
     "one source"),
    ({"model": {"name": "m", "source": {"path": "/m", "tiny": {}}}, "engine": TORCH},
     "model.source", "one source"),
    ({"model": {"name": "m", "source": {"tiny": {}}}}, "model", "made by the torch engine"),
    ({"model": {**LOCAL, "revision": "main"}}, "model.revision", "Hugging Face repository"),
    ({"model": {**LOCAL, "cache": {"claimName": "hub"}}}, "model.cache", "every other source"),
    ({"model": {"name": "m", "source": {"s3": {"uri": "s3://models/m"}}}, "engine": TORCH}, "model",
     "downloads nothing"),
    ({"engine": {"envFrom": [{"prefix": "A_"}]}}, "engine.envFrom.0", "give one of"),
    ({"transfer": {"connector": "multi"}}, "transfer.connectors", "multi needs connectors"),
    ({"transfer": {"connectors": [{"connector": "nixl"}]}}, "transfer.connectors", "multi"),
    ({"transfer": {"connector": "storage"}}, "transfer.storage", "needs storage.endpoint"),
    ({"transfer": {"storage": {"endpoint": "http://s", "maxAge": "0h"}}},
     "transfer.storage.maxAge", "give a time above 0"),
    ({"transfer": {"storage": {"endpoint": "http://s", "capacity": "0.0Ti"}}},
     "transfer.storage.capacity", "give a capacity above 0"),
    ({"transfer": {"storage": {"endpoint": "http://s?key=hush"}}}, "transfer.storage.endpoint",
     "without a query"),
    ({"transfer": {"storage": {"endpoint": "http://user:hush@s"}}}, "transfer.storage.endpoint",
     "put keys into the Secret"),
    ({"transfer": {"connector": "multi", "connectors": [{"connector": "storage"}]}},
     "transfer.storage", "in a chain needs storage.endpoint"),
    ({"transfer": {"dataPorts": {"first": 20_001, "last": 20_000}}}, "transfer.dataPorts.last",
     "below first"),
    ({"transfer": {"dataPorts": {"first": 8_300, "last": 9_100}}}, "transfer.dataPorts.first",
     "between 5557 and 8998"),
    ({"transfer": {"dataPorts": {"first": 20_000, "last": 20_999}, "sideChannelPort": 20_999}},
     "transfer.dataPorts", "outside dataPorts"),
    ({"transfer": {"leaseDuration": "0.0s"}}, "transfer.leaseDuration", "above 0"),
    ({"replicas": None, "scaling": {"minReplicas": 3, "maxReplicas": 2}}, "scaling.minReplicas",
     "above maxReplicas"),
    ({"rollout": {"maxSurge": "0%", "maxUnavailable": 0}}, "rollout.maxUnavailable",
     "both zero"),
]  # fmt: skip
DECODE_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"prefillRef": None, "model": {"name": "m"}}, "prefillRef", "or say role: unified"),
    ({"prefillRef": None, "role": "unified"}, "model", "inherits no model"),
    ({"sidecar": {"prefillTimeout": "0s"}}, "sidecar.prefillTimeout", "above 0"),
    ({"sidecar": {"kvTransferTimeout": "0ms"}}, "sidecar.kvTransferTimeout", "above 0"),
    ({"routing": {"resume": {"enabled": "always"}, "epp": {"enabled": False}}}, "routing.resume",
     "enable epp"),
    ({"routing": {"flowControl": {"enabled": True}, "epp": {"enabled": False}}},
     "routing.flowControl", "enable epp"),
    ({"routing": {"flowControl": {"ttl": "0s"}}}, "routing.flowControl.ttl", "above 0"),
    ({"routing": {"flowControl": {"bands": [{"priority": 1, "ttl": "0s"}]}}},
     "routing.flowControl.bands.0.ttl", "above 0"),
    ({"routing": {"slo": {"attainment": 0.9}}}, "routing.slo", "give ttft, itl or both"),
    ({"routing": {"slo": {"ttft": "0s"}}}, "routing.slo.ttft", "above 0"),
    ({"routing": {"slo": {"itl": "0.0ms"}}}, "routing.slo.itl", "above 0"),
    ({"routing": {"front": "router", "envoy": {"enabled": False}}}, "routing.front",
     "write front: envoy"),
    ({"routing": {"gatewayRef": {"name": "g"}}}, "routing.gatewayRef", "inferencePool.enabled"),
    ({"replicas": None, "scaling": {"maxReplicas": 1, "ratio": {"min": 1, "max": 0.5}}},
     "scaling.ratio.min", "above ratio.max"),
    ({"routing": {"tls": {"secretName": "t"}, "envoy": {"enabled": False}}}, "routing.tls",
     "enable epp and envoy"),
    ({"role": "unified", "routing": {"tls": {"secretName": "t"}}}, "routing.tls", "in clear text"),
]  # fmt: skip

CASES = [
    *(("PrefillPool", prefill_pool(**spec), at, part) for spec, at, part in SHARED),
    *(("DecodePool", decode_pool(**spec), at, part) for spec, at, part in SHARED + DECODE_ONLY),
]


@pytest.mark.parametrize(("kind", "data", "at", "message"), CASES)
def test_a_broken_rule_is_one_error_at_its_field(
    kind: str, data: dict[str, Any], at: str, message: str
) -> None:
    (problem,) = problems(kind, defaulted(kind, data))
    assert ".".join(map(str, problem.path)) == f"spec.{at}"
    assert message in problem.message


def test_every_rule_is_covered_by_a_case() -> None:
    schemas = [load_crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for kind in KINDS]
    messages = {
        rule["message"]
        for schema in schemas
        for _, node in nodes(schema)
        for rule in node.get(RULES, ())
    }
    broken = {
        p.message for kind, data, _, _ in CASES for p in problems(kind, defaulted(kind, data))
    }
    assert messages == broken


@pytest.mark.parametrize(
    "image",
    ["vllm/vllm-openai:v0.32.0", "a/b:0.32", "a:1.2.3-cuda12", "a:v0.32.0rc1",
     "r:5000/a:v0.32.0@sha256:0123abcd"],
)  # fmt: skip
def test_an_image_with_a_version_for_a_tag_needs_no_version(image: str) -> None:
    data = prefill_pool(engine={"image": image})
    assert problems("PrefillPool", defaulted("PrefillPool", data)) == []


def test_an_image_without_tag_is_valid_with_a_version() -> None:
    data = prefill_pool(engine={"image": "mine", "version": "0.32.0"})
    assert problems("PrefillPool", defaulted("PrefillPool", data)) == []


def test_a_count_of_zero_means_cpu_for_any_parallelism() -> None:
    data = prefill_pool(accelerator={"count": 0}, parallelism={"tensor": 2})
    assert problems("PrefillPool", defaulted("PrefillPool", data)) == []


def test_transition_rules_hold_on_create() -> None:
    schema = {"type": "integer", RULES: [{"rule": "self == oldSelf", "message": "immutable"}]}
    assert list(broken_rules(schema, 1)) == []


def test_a_rule_that_cannot_be_evaluated_is_broken() -> None:
    rule = {"rule": "self.absent == 1", "message": "no"}
    assert list(broken_rules({"type": "object", "properties": {}, RULES: [rule]}, {})) == [rule]


def test_a_whole_number_is_a_double() -> None:
    schema = {"type": "number", RULES: [{"rule": "self < 1.5", "message": "no"}]}
    assert list(broken_rules(schema, 1)) == []
