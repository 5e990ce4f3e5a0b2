"""What the doctor says about the figures that EPPs have learned."""

import msgspec
import pytest

from tandem_contract.paths import Role
from tandem_contract.pod_reports import (
    PREFILL_RATE,
    TRANSFER_RATE,
    Estimate,
    HitReport,
    PodReport,
    Reporter,
    Source,
)
from tandem_doctor.estimates import check_estimates
from tandem_doctor.facts import EppReport
from tandem_doctor.findings import Finding, Severity
from tandem_doctor.gather import gather_estimates
from tandem_doctor.pod_http import NoAnswer
from tandem_epp.estimates.pod_estimates import PodEstimates
from tandem_epp.process.pages import fit_reports


def pod(name: str, estimate: Estimate, in_flight: int = 0) -> PodReport:
    estimates = {"prefill": estimate}
    return PodReport(
        name, "10.0.0.1:8000", "prefill", ("m",), in_flight=in_flight, estimates=estimates
    )


def learned(rate: float, samples: int = 20, age: float = 3.0) -> Estimate:
    return Estimate(Source.LEARNED, samples, age, {PREFILL_RATE: rate})


def findings(*pods: PodReport) -> list[Finding]:
    return list(check_estimates([EppReport("epp-0", pods)]))


def test_each_estimate_says_where_it_comes_from_and_how_old_it_is() -> None:
    [finding] = findings(pod("p-0", learned(9800.0, samples=210, age=150.0)))
    assert finding == Finding(
        Severity.OK,
        "estimates",
        "epp-0: p-0",
        "prefill learned from 210 samples, newest 2 min ago: 9,800 tokens/s for a prompt of 1,000",
    )
    [taken_over] = findings(pod("p-0", Estimate(Source.ALIKE, figures={PREFILL_RATE: 12.5})))
    assert taken_over.severity is Severity.OK
    assert taken_over.detail == (
        "prefill taken over from alike pods: 12.5 tokens/s for a prompt of 1,000"
    )


def test_figures_that_alike_pods_share_stand_beside_the_pods_own() -> None:
    estimate = Estimate(Source.LEARNED, 20, 3.0, {PREFILL_RATE: 9800.0}, {PREFILL_RATE: 9400.0})
    [finding] = findings(pod("p-0", estimate))
    assert finding.severity is Severity.OK
    assert finding.detail == (
        "prefill learned from 20 samples, newest 3 s ago: 9,800 tokens/s for a prompt of 1,000, "
        "shared with alike pods, which samples do not tell apart; "
        "by its own samples: 9,400 tokens/s for a prompt of 1,000"
    )


@pytest.mark.parametrize(
    ("estimated", "tokens", "severity"),
    [(0.62, 1e6, Severity.OK), (0.9, 1e6, Severity.WARNING), (0.9, 50_000, Severity.OK)],
)
def test_cached_shares_are_compared(estimated: float, tokens: float, severity: Severity) -> None:
    hits = {
        "estimated": HitReport(estimated, tokens, Reporter.EPP),
        "measured": HitReport(0.6, tokens, Reporter.ENGINE),
    }
    [_, finding] = findings(msgspec.structs.replace(pod("p-0", learned(9800.0)), hits=hits))
    assert finding.severity is severity
    assert finding.detail == (
        f"cached share of prompts: estimated {estimated:.0%}, measured 60% "
        "(by the engine's counters)"
    )
    assert bool(finding.fix) == (severity is Severity.WARNING)


@pytest.mark.parametrize(
    ("figure", "value", "text"),
    [
        ("seconds_per_request", 2.5, "2.5 s per request"),
        ("seconds_per_step_and_decode", 1.3e-5, "13 µs more per decode in the step"),
        ("seconds_per_pair", 4.89e-10, "0.489 ns per pair of tokens"),
        ("seconds_per_token", 0.0, "0 ns per token"),
        ("gigabytes_per_second", 13.7, "13.7 GB/s"),
        ("kv_bytes_per_token", 2053.4, "2,053 bytes of KV per token"),
        ("of_a_later_version", 3.0, "of_a_later_version 3"),
    ],
)
def test_a_figure_has_a_unit(figure: str, value: float, text: str) -> None:
    [finding] = findings(pod("p-0", Estimate(Source.LEARNED, 1, 3.0, {figure: value})))
    assert finding.detail == f"prefill learned from 1 sample, newest 3 s ago: {text}"


def test_transfers_without_a_rate_say_why() -> None:
    figures = {"seconds_per_transfer": 0.0828}
    [finding] = findings(pod("p-0", Estimate(Source.LEARNED, 4, 3.0, figures)))
    assert finding.detail.endswith(
        ": 82.8 ms per transfer, no rate: the transfers were too small to tell one"
    )
    rated = Estimate(Source.LEARNED, 4, 3.0, figures | {TRANSFER_RATE: 2.0})
    [finding] = findings(pod("p-0", rated))
    assert finding.detail.endswith(": 82.8 ms per transfer, 2 GB/s")


def test_every_figure_of_the_epp_has_a_unit() -> None:
    fits = PodEstimates()
    for estimate in fit_reports(fits, Role.DECODE, 1.0).values():
        [finding] = findings(pod("p-0", estimate))
        assert "_" not in finding.detail


def test_an_assumed_figure_is_unknown() -> None:
    [finding] = findings(pod("p-0", Estimate(Source.PRIOR)))
    assert finding.severity is Severity.UNKNOWN
    assert "assumed" in finding.detail


@pytest.mark.parametrize(
    ("age", "in_flight", "severity"),
    [(3601.0, 1, Severity.WARNING), (3601.0, 0, Severity.OK), (3599.0, 1, Severity.OK)],
)
def test_a_pod_whose_requests_teach_nothing_is_a_warning(
    age: float, in_flight: int, severity: Severity
) -> None:
    [finding] = findings(pod("p-0", learned(1.0, age=age), in_flight))
    assert finding.severity is severity


def test_a_pod_far_slower_than_alike_ones_is_a_warning() -> None:
    fast = [pod(f"p-{i}", learned(1000.0)) for i in range(3)]
    slow, barely = pod("slow", learned(499.0)), pod("barely", learned(501.0))
    assert [f.subject for f in findings(*fast, slow, barely) if f.severity is Severity.WARNING] == [
        "epp-0: slow"
    ]
    few_samples = pod("new", learned(1.0, samples=9))
    other_model = msgspec.structs.replace(slow, models=("other",))
    for odd in (few_samples, other_model):
        assert all(f.severity is Severity.OK for f in findings(*fast, odd))
    assert all(f.severity is Severity.OK for f in findings(fast[0], slow)), "which one is usual?"


async def test_an_epp_that_does_not_answer_or_is_of_another_version_is_unknown() -> None:
    async def refused(path: str) -> bytes:
        raise NoAnswer(path, "refused")

    async def odd(_path: str) -> bytes:
        return b'[{"name": 1}]'

    async def good(path: str) -> bytes:
        if path == "/metrics":
            return b"tandem_epp_flow_asked_seconds 60.0\n"
        assert path == "/debug/pods"
        return msgspec.json.encode([pod("p-0", learned(1000.0))])

    reports = await gather_estimates([("a", refused), ("b", odd), ("c", good)])
    assert reports[2] == EppReport("c", (pod("p-0", learned(1000.0)),), 60.0)
    unknown = [f for f in check_estimates(reports) if f.severity is Severity.UNKNOWN]
    assert [f.subject for f in unknown] == ["a", "b"]
    assert unknown[0].detail == "refused"
    assert "unreadable" in unknown[1].detail
