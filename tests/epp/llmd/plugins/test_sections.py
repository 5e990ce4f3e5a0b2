"""Sections without effect are checked, and each is named with its line."""

import pytest

from tandem_contract.config import DisaggregatedServing
from tandem_contract.documents import DocumentError, parse_documents
from tandem_epp.choice.routing import Notice
from tandem_epp.llmd.plugins.config import load_scheduling


def notices(text: str) -> tuple[Notice, ...]:
    document = parse_documents(text, "router.yaml")[0]
    return load_scheduling(document, document.data, DisaggregatedServing()).notices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("featureGates: [flowControl, flowcontol]", ":1: .*did you mean 'flowControl'"),
        ("featureGates:\n- flowControl=maybe", ":2: .*write flowControl=true or"),
        ("flowControl: {maxRequest: 1}", ":1: .*unknown field `maxRequest`"),
        ("dataLayer:\n  sources:\n  - {pluginRef: metric-source}", ":3: .*'metric-source'"),
        (
            "dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: "
            "[{pluginRef: core}]}]}",
            "unknown plugin reference 'core'",
        ),
        ("dataLayer: {discovery: {pluginRef: files}}", "unknown plugin reference 'files'"),
        (
            "dataLayer:\n  discovery:\n    endpoints: {pluginRef: files}",
            r":3: dataLayer\.discovery\.endpoints\.pluginRef: .*'files'",
        ),
        ("dataLayer: {crossReplica: {syncTime: 1s}}", "unknown field `syncTime`"),
        ("flowControl: {endpointGatePluginRef: gate}", r"endpointGatePluginRef: .*'gate'"),
        ("flowControl: {bandSelectionPolicyPluginRef: band}", "'band'"),
        ("apiVersion: llm-d.ai/v2", "'llm-d.ai/v2' is none of llm-d.ai/v1, llm-d.ai/v1alpha1"),
        ("plugins: [{type: thunder-agent}]", "nearest: 'session-affinity-scorer'"),
        ("plugins: [{type: outlen-bucket}]", "nearest: 'predicted-cost'"),
        ("requestHandler: {parsers: [{pluginRef: openai}]}", "did you mean 'openai-parser'"),
        ("parser: {pluginRef: my-parser}", r"parser\.pluginRef"),
        ("saturationDetector: {pluginRef: detect}", r"saturationDetector\.pluginRef"),
        ("flowControl:\n  usageLimitPolicyPluginRef: none-such", ":2: .*'none-such'"),
        ("flowControl: {saturationDetector: {pluginRef: detect}}", "'detect'"),
        (
            "flowControl:\n  priorityBands:\n  - {priority: 1}\n  - {fairnessPolicyRef: fair}",
            r":4: flowControl\.priorityBands\[1\]\.fairnessPolicyRef",
        ),
        ("plugins: [{type: file-discovery}]", "'file-discovery' is not supported: backends come"),
    ],
)
def test_a_section_with_a_mistake_is_refused(text: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        notices(text)


def test_sections_are_named_with_their_lines() -> None:
    text = """\
featureGates: [haPopulateNonLeaderDatastore, flowControl=false]
flowControl:
  maxBytes: 1Gi
  defaultRequestTTL: 60s
  priorityBands: [{priority: 1, maxRequests: 10, orderingPolicyRef: fcfs-ordering-policy}]
requestHandler: {parsers: [{pluginRef: openai-parser}]}
dataLayer:
  injectDefaults: false
  crossReplicaSyncerPluginRef: local-syncer
  crossReplicaPublishTimeout: 2s
"""
    found = [(notice.line, notice.part, notice.is_lost) for notice in notices(text)]
    assert found == [
        (1, "feature gate haPopulateNonLeaderDatastore", False),
        (2, "flowControl", True),
        (6, "requestHandler", False),
        (7, "dataLayer", False),
        (9, "dataLayer.crossReplicaSyncerPluginRef", True),
        (10, "dataLayer.crossReplicaPublishTimeout", True),
    ]


def test_the_last_entry_of_a_gate_counts() -> None:
    text = "featureGates:\n- flowControl\n- dataLayer\n- flowControl=false\n"
    assert [(notice.line, notice.part, notice.is_lost) for notice in notices(text)] == [
        (3, "feature gate dataLayer", False),
    ]


def test_version_1_has_the_fields_of_the_data_layer_in_groups() -> None:
    text = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
dataLayer:
  discovery:
    endpoints: {pluginRef: metrics-data-source}
    peers: {pluginRef: by-service}
  crossReplica:
    syncerPluginRef: local-syncer
    syncInterval: 500ms
    publishTimeout: 2s
requestHandler: {propagatePriority: false}
flowControl:
  priorityBands: [{priority: 1, defaultRequestTTL: 5s}]
"""
    assert [(notice.line, notice.part, notice.is_lost) for notice in notices(text)] == [
        (3, "dataLayer", False),
        (6, "dataLayer.discovery.peers", True),
        (7, "dataLayer.crossReplica", True),
        (11, "requestHandler", False),
        (12, "flowControl", True),
    ]


def test_sections_alone_leave_the_choice_to_the_cost() -> None:
    document = parse_documents("featureGates: [flowControl]", "router.yaml")[0]
    assert load_scheduling(document, document.data, DisaggregatedServing()).chooser is None
