"""What fails while the EPP prepares, picks, learns or counts costs no request its answer."""

import json
import logging
from math import inf
from pathlib import Path

import pytest

from tandem_contract import headers as wire
from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing
from tandem_epp.backends.pods import Pod
from tandem_epp.backends.precise import PrecisePrefixes
from tandem_epp.choice.scheduler import Scheduler
from tandem_epp.estimates.request_load import RequestLoad
from tandem_epp.exchange import HttpRequest, ResponseHeaders
from tandem_epp.llmd.plugins.sessions import TokenSession
from tandem_epp.placement.history import Decision
from tandem_epp.placement.preparation import Preparation
from tandem_epp.placement.prompt_entries import PromptEntries
from tandem_epp.process.configuration import load
from tandem_epp.process.service import Service
from tandem_epp.settings import Settings
from tandem_planner.prefill_fit import PrefillCost

from ..placement.test_picker import LONG, NOW, PickerSetup


def faults(setup: PickerSetup, task: str) -> float | None:
    return setup.metrics.registry.get_sample_value("tandem_epp_faults_total", {"task": task})


@pytest.mark.parametrize(
    "timing",
    [
        f"leg=0.1;prompt=1{'0' * 200}",
        "leg=1e308;prompt=5",
        "compute=1;computed=5;cached=9" + "9" * 90,
    ],
)
def test_an_impossible_timing_is_ignored_and_later_requests_are_placed(
    timing: str, caplog: pytest.LogCaptureFixture
) -> None:
    setup = PickerSetup(d="decode")
    for _ in range(3):
        placement, _ = setup.place()
        placement.on_response_headers(ResponseHeaders(timing, 200), NOW + 0.1)
        placement.end(NOW + 1)
    assert setup["d"].estimates.prefill.cost.seconds(1000) < 60
    assert (setup["d"].in_flight, faults(setup, "timing")) == (0, 3.0)
    (record,) = caplog.records
    assert "backend d" in record.getMessage()


@pytest.mark.interpreted
def test_what_fails_in_learning_is_counted_and_logged_once_without_the_prompt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup = PickerSetup(d="decode", p="prefill")

    def fail(*_: object) -> None:
        raise KeyError(LONG)

    monkeypatch.setattr(RequestLoad, "on_response", fail)
    monkeypatch.setattr(RequestLoad, "end", fail)
    response = ResponseHeaders(Timing(compute=0.1).encode(), 200)
    for _ in range(3):
        placement, _ = setup.place()
        placement.on_response_headers(response, NOW)
        placement.end(NOW)
    assert [pod.in_flight for pod in setup.fleet] == [0, 0]
    assert (faults(setup, "learn"), faults(setup, "end")) == (3.0, 3.0)
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    for record in caplog.records:
        assert "KeyError" in record.getMessage()
        assert "test_faults.py" in record.getMessage()
        assert "word word" not in record.getMessage()


async def test_what_fails_in_preparing_leaves_the_request_to_the_approximate_index(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def fail(*_: object) -> None:
        raise KeyError(LONG)

    monkeypatch.setattr(PrecisePrefixes, "prepare", fail)
    monkeypatch.setattr(PrecisePrefixes, "is_on", True)
    file = tmp_path / "router.yaml"
    file.write_text("backends: [{name: d, url: 'http://10.0.0.1:8000', role: decode}]")
    service = Service(Settings(config=file), load(file, {}), {})
    for _ in range(2):
        request = HttpRequest("POST", "/v1/completions", {})
        context = service.preparer.prepare(request, b"{}")
        assert context is not None
        async with context as preparation:
            assert isinstance(preparation, Preparation)
            assert preparation.precise is None
    (record,) = caplog.records
    assert "task prepare" in record.getMessage()
    assert "word word" not in record.getMessage()


def test_without_a_finite_cost_the_client_is_told_to_try_again() -> None:
    setup = PickerSetup(d="decode")
    estimates = setup["d"].estimates
    estimates.prefill.set_prior(PrefillCost(inf, 1e-4, 0.0))
    estimates.learned()
    status, answer = setup.refusal(b'{"prompt": "hi"}')
    assert (status, answer["retry-after"]) == (503, "1")


def fail(*_: object, **__: object) -> None:
    raise KeyError(LONG)


def counts(setup: PickerSetup) -> list[tuple[float, ...]]:
    """What requests count for on each pod."""
    return [
        (
            pod.in_flight,
            pod.tokens_in_flight,
            pod.estimates.awaiting_prefill,
            len(pod.estimates.queue),
        )
        for pod in setup.fleet
    ]


@pytest.mark.interpreted
def test_a_request_that_cannot_be_scheduled_is_placed_on_any_pod_that_serves_it_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup = PickerSetup(d="decode", p="prefill")
    monkeypatch.setattr(Scheduler, "schedule", fail)
    for _ in range(2):
        placement, plan = setup.place()
        assert (plan.path, plan.reason) == (RoutingPath.FALLBACK, "fault")
        assert (plan.decode.name, plan.prefill) == ("d", ())
        assert setup["d"].in_flight == 1
        placement.on_response_headers(ResponseHeaders("", 200), NOW)
        placement.end(NOW)
    assert counts(setup) == [(0, 0, 0, 0)] * 2
    assert faults(setup, "place") == 2.0
    assert setup.decisions("fallback", "fault") == 2.0
    (record,) = caplog.records
    assert "KeyError" in record.getMessage()
    assert "word word" not in record.getMessage()


@pytest.mark.interpreted
def test_where_no_fallback_is_allowed_a_bug_is_answered_with_500(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = PickerSetup(d="decode", p="prefill", strict="")
    monkeypatch.setattr(Scheduler, "schedule", fail)
    status, _ = setup.refusal(json.dumps({"model": "m", "prompt": LONG}).encode())
    assert status == 500
    assert (setup.decisions("refused", "fault"), counts(setup)) == (1.0, [(0, 0, 0, 0)] * 2)


@pytest.mark.interpreted
def test_a_request_that_cannot_be_counted_gets_500_and_counts_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = PickerSetup(d="decode", p="prefill")
    monkeypatch.setattr(PromptEntries, "__init__", fail)
    status, answer = setup.refusal(json.dumps({"model": "m", "prompt": LONG}).encode())
    assert (status, answer["type"]) == (500, "InternalServerError")
    assert counts(setup) == [(0, 0, 0, 0)] * 2
    assert faults(setup, "place") == 2.0
    (decision,) = setup.history.latest(1)
    assert (decision.status, decision.reason, decision.path) == (500, "fault", None)


TASKS = ("share", "trace", "learn", "session", "end")


class BrokenSession(TokenSession):
    def response_header(
        self, decode: Pod, prefill: Pod | None, served: str | None
    ) -> tuple[str, str] | None:
        raise KeyError(LONG)


class BrokenParts:
    """An observer and a tracer that fail."""

    def on_started(self, placement: object) -> None:
        fail()

    def on_answered(self, placement: object, response: object) -> None:
        fail()

    def on_ended(self, placement: object) -> None:
        fail()

    def export(self, decision: Decision, traceparent: str | None) -> str:
        raise KeyError(LONG)


def test_a_placement_that_is_not_told_or_traced_is_served_and_ends() -> None:
    setup = PickerSetup(d="decode")
    setup.picker.observer = setup.picker.tracer = BrokenParts()
    placement, _ = setup.place()
    placement.added_headers = (BrokenSession("x-session"),)
    placement.on_response_headers(ResponseHeaders("", 200, path="unified"), NOW)
    assert placement.response_headers == ()
    placement.end(NOW)
    assert counts(setup) == [(0, 0, 0, 0)]
    assert wire.TRACEPARENT not in dict(placement.mutation.set)
    assert [faults(setup, task) for task in TASKS] == [1.0] * len(TASKS)
