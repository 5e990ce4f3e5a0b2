"""Where requests go without a hand-off: unified pods, then any pod, per model."""

import json
from random import Random

import pytest

from tandem_contract import headers as wire
from tandem_contract import metrics
from tandem_contract.config import Backend
from tandem_contract.paths import Role, RoutingPath
from tandem_contract.plan import Plan
from tandem_contract.plan_verification import verify
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.choice.fallback import choose_alone
from tandem_epp.exchange import HttpRequest, NotPlaced, ResponseHeaders

from ..placement.test_picker import KEYS, LONG, NOW, PickerSetup

MIXED = {
    # Model a is disaggregated, b has a unified pod of another KV layout besides, c is unified.
    "a-decode": (Role.DECODE, "a", "1"),
    "a-prefill": (Role.PREFILL, "a", "1"),
    "b-decode": (Role.DECODE, "b", "1"),
    "b-prefill": (Role.PREFILL, "b", "1"),
    "b-unified": (Role.UNIFIED, "b", "2"),
    "c-unified": (Role.UNIFIED, "c", None),
}
SPLIT, FALLBACK, UNIFIED = (
    RoutingPath.PREFILL_THEN_DECODE,
    RoutingPath.FALLBACK,
    RoutingPath.UNIFIED,
)
REFUSED = 503


def mixed_fleet(*down: str, strict: bool = False) -> PickerSetup:
    setup = PickerSetup(**({"strict": ""} if strict else {}))
    setup.fleet.apply(
        DiscoveredBackend(
            Backend(name, f"http://10.0.0.{i}:8000", role, models=(model,), compat=compat)
        )
        for i, (name, (role, model, compat)) in enumerate(MIXED.items(), 1)
    )
    for name in down:
        setup.down(name)
    return setup


def placed(setup: PickerSetup, model: str) -> Plan | int:
    """The plan for a long prompt, or the status of the refusal."""
    request = HttpRequest("POST", "/v1/completions", {wire.REQUEST_ID: "r"})
    body = json.dumps({"model": model, "prompt": LONG}).encode()
    try:
        placement = setup.picker.place(request, body, NOW)
    except NotPlaced as refusal:
        return refusal.reply.status
    return verify(dict(placement.mutation.set)[wire.PLAN], KEYS, request_id="r", now=NOW)


CASES = [
    # Pods that are down → for each model: path, reason and pod.
    pytest.param(
        (),
        {"a": (SPLIT, "a-decode"), "b": (SPLIT, None), "c": (UNIFIED, "c-unified")},
        id="all are ready",
    ),
    pytest.param(
        ("a-prefill", "b-prefill"),
        {"a": (FALLBACK, "a-decode"), "b": (FALLBACK, "b-unified"), "c": (UNIFIED, "c-unified")},
        id="no prefill pod",
    ),
    pytest.param(
        ("a-decode", "b-decode"),
        {"a": (FALLBACK, "a-prefill"), "b": (FALLBACK, "b-unified"), "c": (UNIFIED, "c-unified")},
        id="no decode pod",
    ),
    pytest.param(
        ("b-prefill", "b-unified"),
        {"a": (SPLIT, "a-decode"), "b": (FALLBACK, "b-decode"), "c": (UNIFIED, "c-unified")},
        id="one model has lost its prefill and unified pods",
    ),
    pytest.param(
        ("b-prefill", "b-decode", "b-unified"),
        {"a": (SPLIT, "a-decode"), "b": REFUSED, "c": (UNIFIED, "c-unified")},
        id="one model has lost all",
    ),
]


@pytest.mark.parametrize(("down", "expected"), CASES)
def test_each_model_falls_back_by_itself(
    down: tuple[str, ...], expected: dict[str, tuple[RoutingPath, str | None] | int]
) -> None:
    setup = mixed_fleet(*down)
    for model, outcome in expected.items():
        plan = placed(setup, model)
        if isinstance(outcome, int):
            assert plan == outcome
            continue
        path, pod = outcome
        assert isinstance(plan, Plan)
        assert (plan.path, plan.decode.name) == (path, pod or plan.decode.name)


@pytest.mark.parametrize(("down", "expected"), CASES)
def test_without_the_fallback_only_the_models_that_need_it_are_refused(
    down: tuple[str, ...], expected: dict[str, tuple[RoutingPath, str | None] | int]
) -> None:
    setup = mixed_fleet(*down, strict=True)
    for model, outcome in expected.items():
        is_refused = isinstance(outcome, int) or outcome[0] is FALLBACK
        plan = placed(setup, model)
        assert (plan == REFUSED) == is_refused


def test_fallbacks_are_counted_by_reason_and_by_the_role_that_serves() -> None:
    setup = mixed_fleet("a-decode", "b-prefill")
    for model in "aabc":
        placed(setup, model)
    counts = {
        (sample.labels["reason"], sample.labels["served_by"]): sample.value
        for metric in setup.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "tandem_epp_fallbacks_total"
    }
    assert counts == {
        ("no_decode_backend", "prefill"): 2,
        ("no_prefill_backend", "unified"): 1,
    }


def test_the_least_loaded_pod_serves_and_equal_ones_share() -> None:
    pods = [Pod(Backend(name, "http://10.0.0.1:1", Role.PREFILL)) for name in "abc"]
    pods[0].in_flight = 1
    assert {choose_alone(pods, Random(seed)).name for seed in range(20)} == {"b", "c"}
    unified = Pod(Backend("u", "http://10.0.0.1:1"))
    unified.in_flight = 9
    assert choose_alone([*pods, unified], Random(1)) is unified


def reported(
    setup: PickerSetup, response: ResponseHeaders, prompt: str = LONG
) -> tuple[dict[str, str], list[float]]:
    """The headers that the EPP adds to the response for a placed prompt, and what it counts as
    unified, as fast_decode, as fallback by path, and as fallback."""
    placement, _ = setup.place(prompt)
    placement.on_response_headers(response, NOW)
    headers = dict(placement.response_headers)
    placement.end(NOW)
    value = setup.metrics.registry.get_sample_value
    paths = ("unified", "fast_decode", "fallback")
    counts = [value(metrics.REQUESTS, {"routing_path": path}) for path in paths]
    return headers, [count or 0.0 for count in (*counts, value(metrics.FALLBACKS))]


def test_a_fallback_of_which_no_sidecar_tells_is_reported_by_the_epp() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    assert reported(setup, ResponseHeaders(None, 200)) == ({}, [0.0] * 4), "it was split"
    setup.down("d")
    headers, counts = reported(setup, ResponseHeaders(None, 200))
    assert headers == {
        wire.ROUTING_PATH: "fallback",
        wire.PREFILL_BACKEND: "p",
        wire.DECODE_BACKEND: "p",
    }
    assert counts == [0.0, 0.0, 1.0, 1.0]


def test_a_fallback_that_a_sidecar_reports_is_not_reported_again() -> None:
    setup = PickerSetup(u="unified", p="prefill", d="decode")
    setup.down("d")
    setup.down("p")
    assert reported(setup, ResponseHeaders(None, 200, path="fallback")) == ({}, [0.0] * 4)


def test_an_answer_of_one_engine_without_a_sidecar_is_reported_by_the_epp() -> None:
    setup = PickerSetup(u="unified")
    headers, counts = reported(setup, ResponseHeaders(None, 200), "short")
    assert headers == {wire.ROUTING_PATH: "unified", wire.DECODE_BACKEND: "u"}
    assert counts == [1.0, 0.0, 0.0, 0.0]
    assert reported(setup, ResponseHeaders(None, 200, path="unified"), "short")[0] == {}


@pytest.mark.parametrize("down", [[], ["d"]])
def test_a_request_that_generates_nothing_is_not_reported(down: list[str]) -> None:
    setup = PickerSetup(d="decode", p="prefill")
    for name in down:
        setup.down(name)
    placement = setup.picker.place(HttpRequest("GET", "/health", {}), b"", NOW)
    placement.on_response_headers(ResponseHeaders(None, 200), NOW)
    assert placement.response_headers == ()
