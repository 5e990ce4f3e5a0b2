"""EndpointPickerConfig: llm-d's files load, and errors name their line."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from textwrap import dedent

import pytest

from tandem_contract.config import Backend, DisaggregatedServing
from tandem_contract.documents import DocumentError, parse_documents
from tandem_contract.paths import Role
from tandem_contract.slo import Slo
from tandem_epp.backends.pods import Pod
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.choice.cost_choice import CostSettings
from tandem_epp.choice.routing import Scheduling
from tandem_epp.llmd.plugins import listed_plugins
from tandem_epp.llmd.plugins.config import load_scheduling
from tandem_epp.llmd.plugins.decider import DeciderSettings
from tandem_epp.llmd.plugins.parameters import NoParameters
from tandem_epp.llmd.plugins.plugin_types import Kind, Plugin
from tandem_epp.llmd.plugins.registry import REGISTRY
from tandem_epp.request.inference import InferenceRequest
from tandem_planner.objective import make_objective

LLMD = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: openai-parser
- type: approx-prefix-cache-producer
  parameters: {maxPrefixBlocksToMatch: 256, lruCapacityPerServer: 1000}
- type: prefix-cache-scorer
- type: queue-scorer
  name: q
- type: prefill-filter
- type: decode-filter
- type: max-score-picker
  parameters: {maxNumOfEndpoints: 2}
- type: prefix-based-pd-decider
  parameters: {nonCachedTokens: 16}
- type: disagg-profile-handler
  parameters: {deciders: {prefill: prefix-based-pd-decider}}
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: prefill-filter}, {pluginRef: max-score-picker}, {pluginRef: q}]
- name: decode
  plugins:
  - {pluginRef: decode-filter, weight: 0}
  - {pluginRef: max-score-picker}
  - {pluginRef: prefix-cache-scorer, weight: 2}
"""


def loaded(text: str, *, fallback: bool = True) -> Scheduling:
    documents = parse_documents(dedent(text) or "{}", "router.yaml")
    serving = DisaggregatedServing(fallback_to_unified=fallback)
    return load_scheduling(documents[0], documents[0].data, serving)


def pods() -> list[Pod]:
    roles = [Role.DECODE, Role.DECODE, Role.PREFILL]
    return [
        Pod(Backend(name=f"{role}-{i}", url="http://127.0.0.1:1", role=role))
        for i, role in enumerate(roles)
    ]


def test_an_llmd_file_loads() -> None:
    scheduling = loaded(LLMD)
    assert scheduling.chooser.decider == DeciderSettings(non_cached_tokens=16)
    assert (scheduling.chooser.decode.max_endpoints, scheduling.index.capacity_blocks) == (2, 1000)
    request = InferenceRequest("m", b"x" * 640)
    fleet = pods()
    context = ChoiceContext(request, fleet[1].prefixes)
    fleet[1].prefixes.place(fleet[1], request.chain)
    decode = scheduling.chooser.decode.run(fleet, context, 2, Random(1))
    assert [pod.name for pod in decode] == ["decode-1", "decode-0"]
    prefill = scheduling.chooser.prefill.run(fleet, context, 2, Random(1))
    assert [pod.name for pod in prefill] == ["prefill-2"]


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "plugins: [{type: predicted-cost}]",
        "plugins: [{type: approx-prefix-cache-producer}, {type: openai-parser}]",
    ],
)
def test_the_cost_chooses_unless_scores_are_configured(text: str) -> None:
    assert loaded(text).cost == CostSettings()


@pytest.mark.parametrize(
    "other", ["queue-scorer", "max-score-picker", "disagg-profile-handler", "decode-filter"]
)
def test_scores_choose_where_they_are_configured_and_never_with_the_cost(other: str) -> None:
    assert loaded(f"plugins: [{{type: {other}}}]").chooser is not None
    with pytest.raises(DocumentError, match=f"stands alone: remove it, or {other}"):
        loaded(f"plugins: [{{type: {other}}}, {{type: predicted-cost}}]")


def test_objectives_of_the_section_count_before_those_of_the_plugin() -> None:
    plugin = (
        "plugins: [{type: predicted-cost, parameters: {slo: {a: {ttft: 1s}, b.1: {itl: 5ms}}}}]"
    )
    section = {"a": Slo(ttft=2.0)}
    document = parse_documents(plugin, "router.yaml")[0]
    scheduling = load_scheduling(document, document.data, DisaggregatedServing(), section)
    assert scheduling.cost.slos == {"a": Slo(ttft=2.0), "b.1": Slo(itl=0.005)}
    assert scheduling.objectives["a"] == make_objective(2.0, None, 0.9)


def test_a_mistake_in_the_plugins_objectives_is_named_with_its_line() -> None:
    text = "plugins:\n- type: predicted-cost\n  parameters:\n    slo:\n      m.1: {ttft: 1}"
    with pytest.raises(DocumentError, match=r"router.yaml:5: .*slo.m.1.ttft: 1 has no unit"):
        loaded(text)


def test_scores_know_no_objectives_and_the_log_says_so() -> None:
    text = "plugins: [{type: queue-scorer}]\nslo: {m: {ttft: 1s}}"
    document = parse_documents(text, "router.yaml")[0]
    fields = {"plugins": document.data["plugins"]}
    serving, slos = DisaggregatedServing(), {"m": Slo(ttft=1.0)}
    (notice,) = load_scheduling(document, fields, serving, slos).notices
    assert str(notice).startswith("router.yaml:2: slo has no effect: the listed plugins choose")
    assert not load_scheduling(document, {}, serving, slos).notices


def test_a_models_kv_size_is_read_from_its_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}')
    for path in (file, tmp_path):
        text = f"plugins: [{{type: predicted-cost, parameters: {{modelConfigs: {{m: {path}}}}}}}]"
        cost = loaded(text).cost
        assert cost is not None
        assert cost.kv["m"].bytes(10) == 10 * 2 * 4 * 2 * 16 * 2
    for content in ("{", "{}"):
        file.write_text(content)
        with pytest.raises(DocumentError, match=r"m: .*config\.json"):
            loaded(text)


def test_prefix_hits_weigh_more_than_load_with_more_weight() -> None:
    text = """
plugins: [{type: prefix-cache-scorer}, {type: active-request-scorer}]
schedulingProfiles:
- name: both
  plugins: [{pluginRef: prefix-cache-scorer, weight: 3}, {pluginRef: active-request-scorer}]
"""
    scheduling = loaded(text, fallback=False)
    assert scheduling.chooser.decider == DeciderSettings(fallback_to_unified=False)
    request = InferenceRequest("m", b"x" * 640)
    fleet = pods()
    prefixes = fleet[1].prefixes
    prefixes.place(fleet[1], request.chain)
    fleet[1].in_flight = 1
    for chosen in (1, 0):
        context = ChoiceContext(request, prefixes)
        assert scheduling.chooser.decode.run(fleet, context, 1, Random(1)) == [fleet[chosen]]
        prefixes.clear(fleet[1])


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("plugins: [{type: queue-scorer}]", DeciderSettings()),
        ("plugins: [{type: always-disagg-pd-decider}]", DeciderSettings(always=True)),
        ("plugins: [{type: disagg-profile-handler}]", DeciderSettings(split=False)),
        (
            "plugins: [{type: disagg-profile-handler, parameters: "
            "{deciderPluginName: always-disagg-pd-decider}}, {type: always-disagg-pd-decider}]",
            DeciderSettings(always=True),
        ),
    ],
)
def test_the_decider_follows_from_the_configuration(text: str, settings: DeciderSettings) -> None:
    assert loaded(text).chooser.decider == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\nplugins:\n- type: queue-scorer\n- type: prefix-cache-score",
            r"router.yaml:4: plugins\[1\].type: unknown plugin 'prefix-cache-score'; "
            "did you mean 'prefix-cache-scorer'",
        ),
        ("plugins:\n- type: zzz", "router.yaml:2: .* known: active-request-scorer"),
        ("kind: Pod", "router.yaml:1: kind: 'Pod' is not EndpointPickerConfig"),
        ("apiVersion: v9", "router.yaml:1: apiVersion"),
        ("plugin: []", "router.yaml:1: .*unknown field `plugin`"),
        (
            "plugins:\n- type: max-score-picker\n  parameters:\n    maxNumOfEndpoints: 0",
            ":4: .*Expected `int` >= 1",
        ),
        ("plugins:\n- type: queue-scorer\n  parameters:\n    x: 1", ":3: .*unknown field `x`"),
        ("plugins:\n- {type: queue-scorer}\n- {type: queue-scorer}", ":3: .*is taken"),
        (
            "plugins: [{type: queue-scorer}]\nschedulingProfiles:\n- name: decode\n"
            "  plugins:\n  - pluginRef: queue",
            ":5: .*unknown plugin reference 'queue'; did you mean 'queue-scorer'",
        ),
        (
            "plugins: [{type: queue-scorer}]\nschedulingProfiles:\n- name: decode\n"
            "  plugins:\n  - {pluginRef: queue-scorer, weight: -1}",
            ":5: .*-1.0 is below 0",
        ),
        ("schedulingProfiles: [{name: a}, {name: b}]", ":1: .*unknown profile 'decode'"),
        (
            "plugins: [{type: disagg-profile-handler, parameters: {deciders: {prefill: alway}}}]",
            ":1: .*unknown decider 'alway'",
        ),
    ],
)
def test_an_error_names_its_line(text: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        loaded(text)


def test_steady_scores_are_cached_per_view() -> None:
    scheduling = loaded("plugins: [{type: queue-scorer}]")
    view = tuple(pods())
    first = scheduling.chooser.decode.run(view, ChoiceContext(None), 2, Random(1))
    assert {pod.name for pod in first} == {"decode-0", "decode-1"}
    others = scheduling.chooser.decode.run(view[1:], ChoiceContext(None), 2, Random(1))
    assert {pod.name for pod in others} == {"decode-1"}


class NothingPasses:
    """A filter that rules every backend out."""

    is_steady = True

    def keep(self, _pods: Sequence[Pod], _context: ChoiceContext) -> Sequence[Pod]:
        return ()


@pytest.mark.parametrize(
    ("phase", "decodes", "prefills"),
    [(None, 0, 0), (Role.DECODE, 0, 1), (Role.PREFILL, 2, 0)],
)
def test_without_profiles_a_filter_applies_to_its_phase_or_to_both(
    phase: Role | None, decodes: int, prefills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Plugin(
        "nothing-passes", Kind.FILTER, NoParameters, "", lambda *_: NothingPasses(), phase=phase
    )
    monkeypatch.setattr(listed_plugins, "REGISTRY", {**REGISTRY, entry.type_name: entry})
    scheduling = loaded("plugins: [{type: nothing-passes}]")
    context = ChoiceContext(None)
    assert len(scheduling.chooser.decode.run(pods(), context, 3, Random(0))) == decodes
    assert len(scheduling.chooser.prefill.run(pods(), context, 3, Random(0))) == prefills
