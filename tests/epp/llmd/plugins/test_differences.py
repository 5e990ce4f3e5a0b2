"""Plugins that refer to each other, handlers, and what of them differs from llm-d."""

from typing import Any

import pytest

from tandem_contract.config import DisaggregatedServing
from tandem_contract.documents import DocumentError, parse_documents
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.choice.routing import Scheduling
from tandem_epp.llmd.plugins.config import load_scheduling
from tandem_epp.llmd.plugins.decider import DeciderInputs, DeciderSettings, decide_path
from tandem_epp.llmd.plugins.sessions import IdSession

from .pods import make_pod


def loaded(text: str) -> Scheduling:
    document = parse_documents(text, "router.yaml")[0]
    return load_scheduling(document, document.data, DisaggregatedServing())


def parts(text: str) -> list[str]:
    return [notice.part for notice in loaded(text).notices if notice.is_lost]


@pytest.mark.parametrize(
    "parameters",
    [
        "{deciders: {prefill: always}}",
        "{deciderPluginName: always}",
        "{prefillDeciderPluginName: always, decodeProfile: decode, prefillProfile: prefill}",
    ],
)
@pytest.mark.parametrize("handler", ["disagg-profile-handler", "pd-profile-handler"])
def test_handlers_of_all_ages_split(handler: str, parameters: str) -> None:
    if handler == "pd-profile-handler" and "deciderPluginName" not in parameters:
        parameters = "{deciderPluginName: always, primaryPort: 8000}"
    scheduling = loaded(
        f"plugins: [{{type: {handler}, parameters: {parameters}}}, "
        "{type: always-disagg-pd-decider, name: always}]"
    )
    assert scheduling.chooser.is_split_by_handler
    assert scheduling.chooser.decider == DeciderSettings(always=True)


def test_the_older_handler_has_a_decider_by_default() -> None:
    scheduling = loaded("plugins: [{type: pd-profile-handler}]")
    assert (scheduling.chooser.is_split_by_handler, scheduling.chooser.decider) == (
        True,
        DeciderSettings(),
    )


PROFILES = """
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 16}}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: prefix-based-pd-decider}}}
schedulingProfiles:
"""


def test_without_a_prefill_profile_nothing_is_split() -> None:
    text = f"plugins:{PROFILES}- {{name: decode}}"
    assert not loaded(text).chooser.decider.split
    assert not loaded(text).chooser.is_split_by_handler
    assert parts(text) == ["the decider"]


def test_a_profile_that_no_phase_uses_is_named() -> None:
    text = f"plugins:{PROFILES}- {{name: decode}}\n- {{name: prefill}}\n- {{name: other}}"
    assert loaded(text).chooser.is_split_by_handler
    assert parts(text) == ["profile other"]


def test_one_handler_counts() -> None:
    text = "plugins: [{type: disagg-profile-handler}, {type: pd-profile-handler}]"
    assert parts(text) == ["pd-profile-handler"]
    assert not loaded(text).chooser.is_split_by_handler


def test_a_decider_without_its_parameter_differs_from_llm_d() -> None:
    text = "plugins: [{type: pd-profile-handler}, {type: prefix-based-pd-decider%s}]"
    assert "llm-d's default nonCachedTokens: 0" in parts(text % "")[0]
    assert parts(text % ", parameters: {nonCachedTokens: 0}") == []
    assert parts("plugins: [{type: prefix-based-pd-decider}]") == []


def test_prompts_below_a_length_are_not_split() -> None:
    text = "plugins: [{type: prefix-based-pd-decider, parameters: {nonCachedTokens: 16, %s}}]"
    settings = loaded(text % "promptTokens: 100").chooser.decider
    reasons = [
        decide_path(
            DeciderInputs(tokens, 0, 16, is_disaggregated=True, has_prefill_candidate=True),
            settings,
        ).reason
        for tokens in (99, 100)
    ]
    assert reasons == ["short_prompt", "worth_it"]


def test_a_stage_order_that_is_not_built_is_refused() -> None:
    text = "plugins: [{type: disagg-profile-handler, parameters: {stageOrder: prefill-first}}]"
    with pytest.raises(DocumentError, match="'prefill-first'"):
        loaded(text)


def test_a_profile_without_a_picker_uses_the_one_that_is_listed() -> None:
    text = "plugins: [{type: random-picker, parameters: {maxNumOfEndpoints: 3}}, "
    text += "{type: queue-scorer}]\nschedulingProfiles: [{name: x, plugins: [{pluginRef: %s}]}]"
    assert loaded(text % "queue-scorer").chooser.decode.max_endpoints == 3


def test_an_unknown_producer_is_refused() -> None:
    text = "plugins: [{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: %s}}]"
    assert loaded(text % "precise-prefix-cache-producer")
    with pytest.raises(DocumentError, match="unknown prefixMatchInfoProducerName 'burst'"):
        loaded(text % "burst")


def test_the_scorer_compares_as_many_tokens_as_the_producer_says() -> None:
    text = """
plugins:
- {type: approx-prefix-cache-producer, parameters: {maxPrefixTokensToMatch: 1024, autoTune: false}}
- {type: prefix-cache-scorer}
"""
    scorer, _ = loaded(text).chooser.decode._per_request[0]
    assert scorer._max_tokens == 1024


SESSION = """
plugins:
- type: session-affinity-filter
  parameters: {strategy: session_id, sessionIdConfig: {sources: [%s]}}
%s
"""


@pytest.mark.parametrize(
    ("source", "plugin", "headers"),
    [
        ("{header: X-My-Session}", "", {"x-my-session": "s"}),
        ("{attribute: agent-identity}", "- {type: agent-identity}", {"session_id": "s"}),
        (
            "{attribute: agent-identity}",
            "- {type: agent-identity, parameters: {additionalSessionHeaders: [X-Mine]}}",
            {"x-mine": "s", "session_id": "other"},
        ),
        (
            "{attribute: SessionIDDataKey, producer: session-id-producer}",
            "- {type: session-id-producer, parameters: {cookieName: sid}}",
            {"cookie": "a=b; sid=s"},
        ),
    ],
)
def test_ids_of_sessions(source: str, plugin: str, headers: dict[str, str]) -> None:
    (learner,) = loaded(SESSION % (source, plugin)).chooser.learners
    assert isinstance(learner, IdSession)
    pod = make_pod("a")
    learner.on_placed(ChoiceContext(None, headers=headers), pod, None)
    assert learner.pod([pod], ChoiceContext(None, headers=headers)) is pod
    assert learner.pod([pod], ChoiceContext(None)) is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{attribute: agent-identity}", "needs the plugin agent-identity"),
        ("{attribute: SessionIDDataKey}", "needs the plugin session-id-producer"),
        ("{attribute: mood}", "use agent-identity, SessionIDDataKey, or a header"),
        ("{header: a, attribute: b}", "give either header or attribute"),
        ("{}", "give either header or attribute"),
    ],
)
def test_a_source_without_ids_is_refused(source: str, message: str) -> None:
    with pytest.raises(DocumentError, match=rf"router.yaml:\d: .*{message}"):
        loaded(SESSION % (source, ""))


def test_one_plugin_in_two_profiles_is_one_instance() -> None:
    text = "plugins: [{type: no-hit-lru-scorer}]\nschedulingProfiles: %s"
    names = ("decode", "prefill")
    profiles: list[Any] = [
        {"name": n, "plugins": [{"pluginRef": "no-hit-lru-scorer"}]} for n in names
    ]
    assert len(loaded(text % profiles).chooser.learners) == 1


@pytest.mark.parametrize(
    "parameters",
    ["{udsTokenizerConfig: {socketFile: /x}}", "{estimate: {}, vllm: {}}"],
)
def test_tokenizers_that_do_not_exist_are_refused(parameters: str) -> None:
    with pytest.raises(DocumentError, match=r"router.yaml:1: plugins\[0\].parameters"):
        loaded(f"plugins: [{{type: token-producer, parameters: {parameters}}}]")


def test_an_estimate_is_no_tokenizer() -> None:
    text = "plugins: [{type: token-producer, parameters: {estimate: {image: {mode: static}}}}]"
    assert loaded(text).tokenizers[0].url == ""
    [here] = loaded("plugins: [{type: token-producer, parameters: {vllm: {}}}]").tokenizers
    assert here.url == "http://localhost:8000"
