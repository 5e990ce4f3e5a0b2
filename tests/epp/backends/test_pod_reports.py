"""What `/debug/pods` says of one pod."""

from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest

from tandem_contract.config import Backend
from tandem_contract.fabric_classes import FabricClass
from tandem_contract.paths import Role
from tandem_contract.pod_reports import PREFILL_RATE, HitReport, PodReport, Reporter, Source
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.estimates.engine_figures import EngineCounters, Gauges
from tandem_epp.estimates.exposed_share import ExposedShare
from tandem_epp.estimates.fabric_fits import FabricFits
from tandem_epp.process.pages import fit_reports, pod_report
from tandem_planner.decode_fit import DECODE_PRIOR, DecodeCost, DecodeFit
from tandem_planner.prefill_fit import PrefillCost, PrefillFit, prefill_sample
from tandem_planner.transfer import TransferFit

from ..placement.test_picker import PickerSetup

NOW = 1000.0


@dataclass
class Measured:
    prefill: PrefillFit = field(default_factory=PrefillFit)
    decode: DecodeFit = field(default_factory=DecodeFit)
    transfer: TransferFit = field(default_factory=TransferFit)
    fabrics: FabricFits = field(default_factory=lambda: FabricFits(TransferFit()))
    best_decode: DecodeCost = DECODE_PRIOR
    exposed: ExposedShare = field(default_factory=ExposedShare)


def test_a_pod_before_and_after_its_first_scrape() -> None:
    setup = PickerSetup(d="decode")
    pod = setup["d"]
    before = pod_report(pod, NOW)
    assert before.wait == 0.0
    assert {e.source for e in before.estimates.values()} == {Source.PRIOR}
    before = msgspec.structs.replace(before, wait=None, estimates={})
    assert before == PodReport("d", "10.0.0.1:8000", "decode", ("m",), ready=True, health="serving")
    pod.gauges, pod.in_flight = Gauges(running=2.0, waiting=1.0, kv_usage=0.5), 3
    after = pod_report(pod, NOW)
    assert (after.running, after.waiting, after.kv_usage, after.in_flight) == (2.0, 1.0, 0.5, 3)
    assert msgspec.json.decode(msgspec.json.encode(after), type=PodReport) == after


def test_hits_are_reported_with_their_source() -> None:
    pod = PickerSetup(d="decode")["d"]
    assert pod_report(pod, NOW).hits == {}
    pod.hits.estimated.add(1000, 250)
    pod.hits.on_answer(1000, 500)
    hits = pod_report(pod, NOW).hits
    assert hits == {
        "estimated": HitReport(0.25, 1000, Reporter.EPP),
        "measured": HitReport(0.5, 1000, Reporter.ANSWERS),
    }
    for tokens in (0.0, 400.0):
        counters = EngineCounters(prompt_tokens=tokens, computed_tokens=tokens / 4)
        pod.apply_scrape(ScrapeResult(Gauges(), b"", counters=counters), NOW)
    report = pod_report(pod, NOW)
    assert report.hits["measured"] == HitReport(0.75, 400, Reporter.ENGINE)
    assert msgspec.json.decode(msgspec.json.encode(report), type=PodReport) == report


def test_nothing_measured_is_a_prior() -> None:
    for estimate in fit_reports(Measured(), Role.DECODE, NOW).values():
        assert (estimate.source, estimate.samples, estimate.age) == (Source.PRIOR, 0, None)
        assert all(value > 0 for value in estimate.figures.values())


def test_figures_of_alike_pods_are_no_prior() -> None:
    measured = Measured()
    measured.prefill.set_prior(PrefillCost(0.0, 1e-3, 0.0))
    prefill = fit_reports(measured, Role.DECODE, NOW)["prefill"]
    assert prefill.source is Source.ALIKE
    assert prefill.figures[PREFILL_RATE] == pytest.approx(1000.0)


def test_measurements_are_counted_and_have_an_age() -> None:
    measured = Measured()
    # The first sample after a start is dropped.
    for at in (NOW - 30, NOW - 20, NOW - 10):
        measured.prefill.add(prefill_sample([(1000, 0)], 0.5), at)
    measured.decode.add(4.0, 0.02, NOW - 5)
    measured.transfer.add(1.0, 1e6, 0.1, NOW - 2)
    measured.transfer.add_size(10.0, 1e6)
    reports = fit_reports(measured, Role.DECODE, NOW)
    assert all(estimate.source is Source.LEARNED for estimate in reports.values())
    assert [(e.samples, e.age) for e in reports.values()] == [(2, 10.0), (1, 5.0), (1, 2.0)]
    assert reports["transfer"].figures["kv_bytes_per_token"] == 1e5


def test_fabric_classes_are_reported_once_they_are_measured() -> None:
    measured = Measured()
    measured.fabrics.fit(FabricClass.SAME_NODE).add(1.0, 1e9, 0.1, NOW - 2)
    reports = fit_reports(measured, Role.DECODE, NOW)
    assert list(reports) == ["prefill", "decode", "transfer", "transfer_same_node"]
    near = reports["transfer_same_node"]
    assert (near.source, near.samples, near.age) == (Source.LEARNED, 1, 2.0)
    assert near.figures["gigabytes_per_second"] == pytest.approx(10.0, rel=0.1)


def test_transfers_that_take_equally_long_tell_no_rate() -> None:
    measured = Measured()
    for size, seconds in ((1e6, 0.004), (2e6, 0.003), (4e6, 0.002)):
        for at in range(5):
            measured.transfer.add(1.0, size, seconds, NOW - 10 + at)
    assert measured.transfer.cost.per_byte == 0.0
    figures = fit_reports(measured, Role.DECODE, NOW)["transfer"].figures
    assert list(figures) == ["seconds_per_transfer"]


def test_the_figures_are_those_of_the_choice_where_alike_pods_share_them() -> None:
    setup, random = PickerSetup(a="unified", b="unified"), Random(1)
    pods = [setup[name] for name in "ab"]
    for pod in pods:
        for at in range(20):
            prompt = prefill_sample([(random.randrange(200, 3000), 0)], random.uniform(0.4, 0.6))
            pod.estimates.prefill.add(prompt, NOW - at)
            pod.estimates.decode.add(random.randrange(1, 9), random.uniform(0.02, 0.04), NOW - at)
        pod.estimates.learned()
    assert pods[0].estimates.prefill.cost != pods[1].estimates.prefill.cost
    assert all(not e.own for pod in pods for e in pod_report(pod, NOW).estimates.values())
    setup.fleet.figures.share()
    reports = [pod_report(pod, NOW).estimates for pod in pods]
    names = ("seconds_per_request", "seconds_per_token", "seconds_per_pair")
    for pod, report in zip(pods, reports, strict=True):
        figures = pod.estimates.figures(NOW)
        assert tuple(report["prefill"].figures[name] for name in names) == figures[3:6]
        assert report["decode"].figures["seconds_per_step"] == figures.step
        assert (report["prefill"].source, report["prefill"].samples) == (Source.LEARNED, 19)
    assert reports[0]["prefill"].figures == reports[1]["prefill"].figures
    # The fit of one of both is shared, so its own figures are no others.
    [own] = [report["prefill"].own for report in reports if report["prefill"].own]
    assert own.keys() == reports[0]["prefill"].figures.keys()
    assert own != reports[0]["prefill"].figures
    setup.place("x" * 3000)
    [decision] = setup.history.find("r")
    for trace, report in zip(sorted(decision.costs, key=lambda t: t.pod), reports, strict=True):
        cost = PrefillCost(*(report["prefill"].figures[name] for name in names))
        assert decision.prompt_tokens is not None
        assert trace.terms["prefill"] == pytest.approx(cost.seconds(decision.prompt_tokens))


def test_a_report_says_where_the_pod_runs() -> None:
    setup = PickerSetup()
    place = Backend("d", "http://10.0.0.1:8000", node="n", domain="rack")
    setup.fleet.apply([DiscoveredBackend(place)])
    report = pod_report(setup["d"], NOW)
    assert (report.node, report.domain) == ("n", "rack")


def test_only_the_fits_of_the_role_are_reported() -> None:
    names = {role: list(fit_reports(Measured(), role, NOW)) for role in Role}
    assert names == {
        Role.PREFILL: ["prefill"],
        Role.UNIFIED: ["prefill", "decode"],
        Role.DECODE: ["prefill", "decode", "transfer"],
    }


def test_a_unified_pod_that_others_prefill_for_reports_its_transfers() -> None:
    setup, alone = PickerSetup(p="prefill", u="unified"), PickerSetup(u="unified", v="unified")
    for each in (setup, alone):
        each.place()
    assert "transfer" in pod_report(setup["u"], NOW).estimates
    assert "transfer" not in pod_report(alone["u"], NOW).estimates


@pytest.mark.parametrize(("other", "tokens"), [("prefill", 100), ("unified", 1000)])
def test_kv_from_prefill_pods_is_no_hit_of_a_unified_pod(other: str, tokens: int) -> None:
    setup = PickerSetup(u="unified", o=other)
    setup.place_alone("x")
    unified = setup["u"]
    for prompt, computed in ((0.0, 0.0), (1000.0, 100.0)):
        counters = EngineCounters(
            prompt_tokens=prompt, computed_tokens=computed, external_tokens=prompt - computed
        )
        unified.apply_scrape(ScrapeResult(Gauges(), b"", counters=counters), NOW)
    measured = pod_report(unified, NOW).hits["measured"]
    assert measured.prompt_tokens == tokens
