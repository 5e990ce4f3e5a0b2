"""The precise index in an `EndpointPickerConfig`, with llm-d's parameters."""

import pytest

from tandem_contract.config import DisaggregatedServing
from tandem_contract.documents import DocumentError, parse_documents
from tandem_epp.choice.routing import Scheduling
from tandem_epp.llmd.plugins.config import load_scheduling
from tandem_epp.prefix.kv_events.settings import EventSettings
from tandem_epp.prefix.tokenization.tokenizer import TokenizerSettings


def load(text: str) -> Scheduling:
    document = parse_documents(text, "router.yaml")[0]
    return load_scheduling(document, document.data, DisaggregatedServing())


def test_it_is_off_unless_a_plugin_asks_for_it() -> None:
    assert load("{}").events is None
    assert load("plugins: [{type: token-producer}, {type: prefix-cache-scorer}]").events is None


@pytest.mark.parametrize("kind", ["precise-prefix-cache-producer", "precise-prefix-cache-scorer"])
def test_a_configuration_of_llm_d_loads(kind: str) -> None:
    scheduling = load(f"""
plugins:
- type: {kind}
  parameters:
    tokenProcessorConfig: {{blockSize: 64, hashSeed: "42"}}
    indexerConfig: {{kvBlockIndexConfig: {{enableMetrics: true}}}}
    kvEventsConfig:
      topicFilter: kv@
      concurrency: 8
      discoverPods: true
      podDiscoveryConfig: {{socketPort: 6000, replayPort: 6100}}
    speculativeIndexing: true
    maxBytes: 1048576
- type: prefix-cache-scorer
  parameters: {{prefixMatchInfoProducerName: precise-prefix-cache-producer}}
- type: token-producer
  parameters:
    modelName: llama
    vllm: {{url: http://render:8000, timeout: 5s, mmTimeout: 1m}}
""")
    assert scheduling.events == EventSettings(6000, 6100, "kv@", 1 << 20)
    assert scheduling.tokenizers == (
        TokenizerSettings(
            url="http://render:8000", model="llama", deadline=5.0, media_deadline=60.0
        ),
    )


def test_defaults() -> None:
    scheduling = load("plugins: [{type: precise-prefix-cache-producer}, {type: tokenizer}]")
    assert scheduling.events == EventSettings()
    assert scheduling.tokenizers == (TokenizerSettings(),)


def test_each_of_several_models_has_a_tokenizer() -> None:
    scheduling = load("""
plugins:
- {type: precise-prefix-cache-producer}
- {type: token-producer, parameters: {modelName: llama, path: /models/llama, loraAdapters: [sql]}}
- {type: token-producer, name: second, parameters: {modelName: qwen, vllm: {url: "http://q"}}}
""")
    assert scheduling.tokenizers == (
        TokenizerSettings(directory="/models/llama", model="llama", adapters=("sql",)),
        TokenizerSettings(url="http://q", model="qwen"),
    )


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("path: /b", "modelName: missing"),
        ("modelName: a", "a: another tokenizer"),
        ("{modelName: b, loraAdapters: [c, sql]}", "sql: another tokenizer"),
    ],
)
def test_of_several_tokenizers_each_is_for_a_model_of_its_own(second: str, message: str) -> None:
    second = second if second.startswith("{") else f"{{{second}}}"
    with pytest.raises(DocumentError, match=rf"router\.yaml:3.*{message}"):
        load(f"""plugins:
- {{type: token-producer, parameters: {{modelName: a, loraAdapters: [sql]}}}}
- {{type: token-producer, name: second, parameters: {second}}}
""")


@pytest.mark.parametrize(
    "parameters",
    [
        "{type: token-producer, parameters: {vllm: {timeout: soon}}}",
        "{type: token-producer, parameters: {udsTokenizerConfig: {}}}",
        "{type: precise-prefix-cache-producer, parameters: {maxBytes: 1}}",
        "{type: precise-prefix-cache-producer,"
        " parameters: {kvEventsConfig: {podDiscoveryConfig: {socketPort: 70000}}}}",
    ],
)
def test_mistakes_are_named_with_their_line(parameters: str) -> None:
    with pytest.raises(DocumentError, match=r"router\.yaml:2"):
        load(f"plugins:\n- {parameters}")
