"""Filters by role, label and load, and the order in which a profile applies them."""

from random import Random
from typing import Any

import msgspec
import pytest

from tandem_contract.paths import Role
from tandem_epp.backends.pods import Pod
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.estimates.engine_figures import Gauges
from tandem_epp.llmd.plugins.filters import (
    LabelFilter,
    RoleFilter,
    SelectorFilter,
    UtilizationFilter,
)
from tandem_epp.llmd.plugins.llmd_parameters import (
    LabelParameters,
    LabelSelector,
    UtilizationParameters,
)
from tandem_epp.llmd.plugins.pickers import MaxScorePicker
from tandem_epp.llmd.plugins.profile import Filter, Profile
from tandem_epp.llmd.plugins.scorers import QueueScorer

from .pods import make_pod

NOTHING = ChoiceContext(None)


def kept(by: Filter, pods: list[Pod]) -> list[str]:
    return [pod.name for pod in by.keep(pods, NOTHING)]


def test_roles() -> None:
    pods = [make_pod(role.value, role=role) for role in (Role.UNIFIED, Role.PREFILL, Role.DECODE)]
    assert kept(RoleFilter(Role.DECODE), pods) == ["unified", "decode"]
    assert kept(RoleFilter(Role.PREFILL), pods) == ["unified", "prefill"]
    assert RoleFilter(Role.DECODE).keep(pods[:1], NOTHING) == pods[:1]


def test_labels() -> None:
    pods = [make_pod("a", labels={"tier": "a"}), make_pod("b", labels={"tier": "b"}), make_pod()]
    assert kept(LabelFilter("tier", frozenset("a"), allows_none=False), pods) == ["a"]
    assert kept(LabelFilter("tier", frozenset("a"), allows_none=True), pods) == ["a", "pod"]
    assert kept(LabelFilter("tier", frozenset(), allows_none=True), pods) == ["pod"]


def test_a_backend_without_llm_ds_role_label_has_its_role() -> None:
    pods = [make_pod(role.value, role=role) for role in Role]
    pods.append(make_pod("labelled", labels={"llm-d.ai/role": "decode"}))
    roles = LabelFilter("llm-d.ai/role", frozenset({"decode"}), allows_none=False)
    assert kept(roles, pods) == ["decode", "labelled"]


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ({}, ["a", "b", "none"]),
        ({"matchLabels": {"tier": "a"}}, ["a"]),
        ({"matchLabels": {"tier": "a", "zone": "z"}}, []),
        ({"matchExpressions": [{"key": "tier", "operator": "In", "values": ["b", "c"]}]}, ["b"]),
        (
            {"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["b"]}]},
            ["a", "none"],
        ),
        ({"matchExpressions": [{"key": "tier", "operator": "Exists"}]}, ["a", "b"]),
        ({"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]}, ["none"]),
    ],
)
def test_selectors(selector: dict[str, Any], names: list[str]) -> None:
    pods = [make_pod("a", labels={"tier": "a"}), make_pod("b", labels={"tier": "b"})]
    by = SelectorFilter(msgspec.convert(selector, LabelSelector))
    assert kept(by, [*pods, make_pod("none")]) == names


def utilization(*conditions: dict[str, Any], fallback: bool = False) -> UtilizationFilter:
    parameters = msgspec.convert({"conditions": conditions}, UtilizationParameters)
    return UtilizationFilter(parameters.conditions, fallback)


def test_load_within_limits() -> None:
    pods = [
        make_pod("idle"),
        make_pod("queue", gauges=Gauges(waiting=3, running=1)),
        make_pod("full", gauges=Gauges(kv_usage=0.9)),
    ]
    pods[0].in_flight = 2
    queue = {"metric": "waiting-queue", "maxValue": 2}
    assert kept(utilization(queue), pods) == ["idle", "full"]
    cache = {"metric": "kv-cache-utilization", "maxValue": 0.8}
    assert kept(utilization(queue, cache), pods) == ["idle"]
    active = {"metric": "active-requests", "maxValue": 1}
    assert kept(utilization(active), pods) == ["queue", "full"]
    assert kept(utilization({"metric": "running-requests", "maxValue": 0}), pods[1:2]) == []
    assert kept(utilization(queue, fallback=True), pods[1:2]) == ["queue"]


def test_a_filter_of_requests_in_flight_runs_for_every_request() -> None:
    busy, other = make_pod("busy"), make_pod("other")
    active = utilization({"metric": "active-requests", "maxValue": 0})
    profile = Profile([active], [], MaxScorePicker())
    view = (busy, other)
    for pod, rest in ((busy, other), (other, busy)):
        pod.in_flight, rest.in_flight = 1, 0
        assert profile.run(view, NOTHING, 2, Random(0)) == [rest]


@pytest.mark.parametrize(
    ("to", "parameters", "message"),
    [
        (LabelParameters, {"label": "x"}, "no pod can stay"),
        (LabelParameters, {"label": "", "allowsNoLabel": True}, "length >= 1"),
        (
            LabelSelector,
            {"matchExpressions": [{"key": "x", "operator": "In"}]},
            r"In needs values.*matchExpressions",
        ),
        (
            LabelSelector,
            {"matchExpressions": [{"key": "x", "operator": "Exists", "values": ["y"]}]},
            "Exists takes no values",
        ),
        (UtilizationParameters, {"conditions": []}, "length >= 1"),
        (
            UtilizationParameters,
            {"conditions": [{"metric": "kv-cache-utilization", "maxValue": 80}]},
            "is a share",
        ),
    ],
)
def test_parameters_that_keep_nothing_are_refused(
    to: Any, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(parameters, to)


def test_scorers_compare_what_the_filters_leave() -> None:
    """Among what is left the longest queue scores 0, whatever others have."""
    pods = [
        make_pod(name, labels={"tier": name}, gauges=Gauges(waiting=waiting))
        for name, waiting in (("a", 2), ("b", 4), ("c", 100))
    ]
    tiers = LabelFilter("tier", frozenset("ab"), allows_none=False)
    steady = Profile([tiers], [(QueueScorer(), 1.0)], Recorder())
    steady.run(pods, NOTHING, 3, Random(0))
    assert Recorder.scores == {"a": 1.0, "b": 0.0}
    # A filter that runs for every request has the same effect.
    active = utilization({"metric": "active-requests", "maxValue": 0})
    pods[2].in_flight = 1
    Profile([active], [(QueueScorer(), 1.0)], Recorder()).run(pods, NOTHING, 3, Random(0))
    assert Recorder.scores == {"a": 1.0, "b": 0.0}


class Recorder:
    """A picker that shows the scores."""

    max_endpoints = 1
    scores: dict[str, float] = {}  # noqa: RUF012 - the last run's

    def pick(self, scored: Any, _count: int, _random: Random) -> list[Pod]:
        Recorder.scores = {pod.name: score for score, pod in scored}
        return []
