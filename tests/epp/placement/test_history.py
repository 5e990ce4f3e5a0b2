"""The history of decisions: content, order, and what then happened."""

import gc
import tracemalloc

import msgspec
import pytest

from tandem_contract import headers as wire
from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing
from tandem_contract.trace import MAX_SAME_ID, CandidateTrace, CostTrace
from tandem_epp.estimates.cost_record import Prediction
from tandem_epp.exchange import HttpRequest, ResponseHeaders
from tandem_epp.placement.history import EXPLAINED, Decision, History
from tandem_epp.placement.preparation import MAX_MODEL

from .test_picker import NOW, PickerSetup

LONG = "word " * 4000
"""A prompt whose prefill is split."""


def test_a_split_is_recorded_with_candidates_and_outcome() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    setup["p"].in_flight = 3
    placement, _ = setup.place()
    (before,) = setup.history.find("r")
    assert (before.path, before.reason) == (RoutingPath.PREFILL_THEN_DECODE, "worth_it")
    assert (before.model, before.prompt_tokens, before.cached_tokens) == ("m", 500, 0)
    assert before.decode == (CandidateTrace("d", "10.0.0.1:8000"),)
    assert before.prefill == (CandidateTrace("p", "10.0.0.2:8000", 3),)
    assert (before.status, before.timing, before.ended) == (None, None, None)
    assert before.decision_seconds > 0
    response = ResponseHeaders("compute=0.5;computed=500", 200, "p")
    placement.on_response_headers(response, NOW)
    placement.end(NOW)
    (after,) = setup.history.find("r")
    assert (after.status, after.timing) == (200, Timing(compute=0.5, computed=500))
    assert after.ended is not None


def test_local_replies_are_recorded_with_their_reason() -> None:
    setup = PickerSetup(d="decode")
    setup.refusal(b'{"model": "x"}', **{"x-request-id": "r"})
    (trace,) = setup.history.find("r")
    assert (trace.path, trace.reason, trace.status) == (None, "unknown_model", 404)
    assert (trace.model, trace.decode) == ("x", ())
    assert trace.ended is not None


def test_no_prompt_is_recorded() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    setup.place("secret " * 300)
    assert b"secret" not in msgspec.json.encode(setup.history.find("r"))


def test_a_decision_takes_little_memory_whatever_the_client_sends() -> None:
    roles = {f"{role[0]}{n}": role for role in ("decode", "prefill") for n in range(50)}
    setup, number = PickerSetup(**roles), 2 * EXPLAINED
    setup.picker._history = history = History(number)
    tracemalloc.start()
    try:
        for i in range(number):
            headers = {wire.REQUEST_ID: f"{i:0128}", wire.MODEL_REWRITE: "m"}
            headers[wire.TRACEPARENT] = headers["x-other"] = f"{i:04000}"
            body = {"model": f"{i:0{MAX_MODEL}}", "prompt": f"{i} " * 300}
            request = HttpRequest("POST", "/v1/completions", headers)
            placement = setup.picker.place(request, msgspec.json.encode(body), NOW)
            placement.on_response_headers(ResponseHeaders("computed=5", 200, "p1"), NOW)
            placement.end(NOW)
        del placement, request, headers, body
        # The metrics count decisions late.
        list(setup.metrics.registry.collect())
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        history._decisions.clear()
        history._explained.clear()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Half of them with the costs of all pods. A name of the client kept whole would be 4 KB more.
    assert before - after < 4_000 * number


def test_the_oldest_decisions_are_dropped_and_the_newest_comes_last() -> None:
    history = History(10)
    for second in range(12):
        history.add(Decision("same", float(second)))
    assert [each.decided for each in history.find("same")] == [
        float(second) for second in range(12 - MAX_SAME_ID, 12)
    ]
    for second in range(10):
        history.add(Decision("other", float(second)))
    assert history.find("same") == []
    none = History(0)
    none.add(Decision("x", 1.0))
    assert none.find("x") == []


class Costs:
    """An explanation that predicts `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.first_token = seconds

    itl = 0.01

    def predict(self) -> Prediction:
        return self.first_token, 0.0, 0.0

    def traces(self) -> list[CostTrace]:
        return [CostTrace("d", "unified", self.first_token, chosen=True)]


def test_the_latest_decisions_keep_the_costs_of_all_candidates() -> None:
    history = History(EXPLAINED + 8)
    for i in range(EXPLAINED + 1):
        history.explain(history.add(Decision(str(i), 1.0)), Costs(2.0))
    [oldest], [second] = history.find("0"), history.find("1")
    assert oldest.costs == ()
    assert oldest.predicted_ttft == 2.0
    assert [cost.cost for cost in second.costs] == [2.0]


def test_a_history_of_no_decisions_keeps_no_explanations() -> None:
    history, decision = History(0), Decision("r", 1.0)
    history.explain(decision, Costs(2.0))
    assert decision.explanation is None
    assert decision.predicted_ttft == 2.0


def test_the_latest_decisions_come_newest_last() -> None:
    history = History(4)
    for second in range(6):
        history.add(Decision("r", float(second)))
    assert [each.decided for each in history.latest(2)] == [4.0, 5.0]
    assert len(history.latest(9)) == 4


@pytest.mark.parametrize(
    ("response", "is_measured", "is_observed"),
    [
        (ResponseHeaders("-", 200, is_stream=True), True, True),
        (ResponseHeaders(None, 200, is_stream=True), False, False),
        (ResponseHeaders(None, 200, path="prefill_then_decode", is_stream=True), True, True),
        (ResponseHeaders(None, 200, path="fallback", is_stream=True), True, False),
        (ResponseHeaders(None, 200), False, False),
        (ResponseHeaders(None, 503, is_stream=True), False, False),
    ],
)
def test_the_prediction_is_compared_with_the_first_token_of_a_stream(
    response: ResponseHeaders, is_measured: bool, is_observed: bool
) -> None:
    setup = PickerSetup(d="decode", p="prefill")
    placement, _ = setup.place()
    setup.history.explain(placement.decision, Costs(1e-9))
    placement.on_response_headers(response, NOW)
    [trace] = setup.history.find("r")
    assert (trace.measured_ttft is not None) == is_measured
    name = "tandem_epp_ttft_prediction_error"
    labels = {"path": "prefill_then_decode"}
    sample = setup.metrics.registry.get_sample_value
    assert bool(sample(f"{name}_count", labels)) == is_observed
    if is_observed:
        error = sample(f"{name}_sum", labels)
        assert error == pytest.approx(1.0, abs=1e-3), "a share of the measured seconds"


def test_what_first_tokens_take_beyond_the_terms_is_predicted_from_then_on() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    for number in range(4):
        placement, _ = setup.place(f"{number} {LONG}")
        setup.history.explain(placement.decision, Costs(1e-9))
        placement.on_response_headers(ResponseHeaders("-", 200, is_stream=True), NOW)
    measured = [trace.measured_ttft or 0.0 for trace in setup.history.latest(4)]
    placement, _ = setup.place(f"4 {LONG}")
    [trace] = setup.history.latest(1)
    explanation = placement.decision.explanation
    assert explanation is not None
    assert trace.predicted_ttft is not None
    predicted = explanation.predict()
    assert trace.predicted_ttft == pytest.approx(predicted[0] + trace.overhead)
    by_pods = predicted[0] - predicted[1]
    assert min(measured) < trace.predicted_ttft - by_pods < max(measured)


def test_the_pod_that_served_is_recorded() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    placement, _ = setup.place()
    placement.on_response_headers(ResponseHeaders(None, 200, served="10.0.0.9:8000"), NOW)
    assert setup.history.find("r")[0].served == "10.0.0.9:8000"
