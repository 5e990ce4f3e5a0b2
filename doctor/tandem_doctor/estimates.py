"""Checks what EPPs estimate of their pods: where the figures come from, their age, and slow pods.
Pure."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Final

from tandem_contract.pod_reports import (
    KV_BYTES,
    PREFILL_RATE,
    PREFILL_TOKENS,
    TRANSFER_EXPOSED,
    TRANSFER_RATE,
    TRANSFER_SECONDS,
    Estimate,
    PodReport,
    Reporter,
    Source,
)

from .facts import EppReport
from .findings import Finding, Severity

CHECK: Final = "estimates"
"""Name of the check."""
_SLOW: Final = 0.5
"""A prefill rate below this share of the median of alike pods is a warning."""
_MIN_SAMPLES: Final = 10
"""Samples from which a rate is compared with others."""
_HITS_DIFFER: Final = 0.2
"""By how much the estimated share of cached tokens may exceed the measured one."""
_MIN_PROMPT_TOKENS: Final = 100_000
"""Prompt tokens from which both shares are compared."""
_REPORTERS: Final = {
    Reporter.EPP: "the EPP",
    Reporter.ENGINE: "the engine's counters",
    Reporter.ANSWERS: "the usage in answers",
}
_OLD: Final = 3600.0
"""Age in seconds from which an estimate of a pod with requests is a warning."""
_UNITS: Final[Mapping[str, str]] = {
    PREFILL_RATE: f"tokens/s for a prompt of {PREFILL_TOKENS:,}",
    TRANSFER_RATE: "GB/s",
    KV_BYTES: "bytes of KV per token",
    TRANSFER_EXPOSED: "of a transfer is waited for",
}
"""Figure → what stands behind its number."""
_PER: Final[Mapping[str, str]] = {
    "seconds_per_request": "per request",
    "seconds_per_token": "per token",
    "seconds_per_pair": "per pair of tokens",
    "seconds_per_step": "per decode step",
    "seconds_per_step_and_decode": "more per decode in the step",
    TRANSFER_SECONDS: "per transfer",
}
"""Figure in seconds → what it is counted per."""
_DURATIONS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def check_estimates(reports: Sequence[EppReport]) -> Iterator[Finding]:
    """One finding for each estimate of a pod, and one for each pod that is slower than others."""
    for report in reports:
        if report.error is not None:
            yield Finding(Severity.UNKNOWN, CHECK, report.epp, report.error)
        for pod in report.pods:
            for name, estimate in pod.estimates.items():
                yield _check_estimate(report.epp, pod, name, estimate)
            yield from _check_hits(report.epp, pod)
        yield from _check_speed(report)


def _check_estimate(epp: str, pod: PodReport, name: str, estimate: Estimate) -> Finding:
    detail = f"{name} {_origin(estimate)}: {_figures(estimate.figures)}"
    if estimate.own:
        detail += (
            ", shared with alike pods, which samples do not tell apart; "
            f"by its own samples: {_figures(estimate.own)}"
        )
    severity, fix = Severity.OK, ""
    if estimate.source is Source.PRIOR:
        severity = Severity.UNKNOWN
        fix = "send requests: the EPP learns from the sidecar's answers and the engine's metrics"
    elif estimate.age is not None and estimate.age > _OLD and pod.in_flight:
        severity = Severity.WARNING
        fix = (
            "check that the EPP can scrape the engine's /metrics, and that its sidecar is Tandem's"
        )
    return Finding(severity, CHECK, f"{epp}: {pod.name}", detail, fix)


def _check_hits(epp: str, pod: PodReport) -> Iterator[Finding]:
    estimated, measured = pod.hits.get("estimated"), pod.hits.get("measured")
    if estimated is None or measured is None:
        return
    detail = (
        f"cached share of prompts: estimated {estimated.ratio:.0%}, measured {measured.ratio:.0%} "
        f"(by {_REPORTERS[measured.reported_by]})"
    )
    severity, fix = Severity.OK, ""
    least_tokens = min(estimated.prompt_tokens, measured.prompt_tokens)
    if estimated.ratio - measured.ratio > _HITS_DIFFER and least_tokens >= _MIN_PROMPT_TOKENS:
        severity = Severity.WARNING
        fix = (
            "check that the engine's prefix cache is on and not reset; with KV events "
            "(precise-prefix-cache-producer) the EPP knows what is cached"
        )
    yield Finding(severity, CHECK, f"{epp}: {pod.name}", detail, fix)


def _check_speed(report: EppReport) -> Iterator[Finding]:
    rates = [(pod, rate) for pod in report.pods if (rate := _measured_rate(pod)) is not None]
    for pod, rate in rates:
        alike = [r for p, r in rates if (p.role, p.models) == (pod.role, pod.models)]
        usual = median(alike)
        # With two pods the median lies between them, and neither is the usual one.
        if len(alike) > 2 and rate < _SLOW * usual:
            yield Finding(
                Severity.WARNING,
                CHECK,
                f"{report.epp}: {pod.name}",
                f"prefills {_number(rate)} tokens/s, alike pods {_number(usual)}",
                "check the pod's node: other processes, a throttled GPU, another GPU type",
            )


def _measured_rate(pod: PodReport) -> float | None:
    estimate = pod.estimates.get("prefill")
    if estimate is None or estimate.samples < _MIN_SAMPLES:
        return None
    return estimate.figures.get(PREFILL_RATE)


def _origin(estimate: Estimate) -> str:
    if estimate.source is not Source.LEARNED:
        assumed = {Source.PRIOR: "assumed", Source.ALIKE: "taken over from alike pods"}
        return assumed[estimate.source]
    age = "" if estimate.age is None else f", newest {_age(estimate.age)} ago"
    plural = "" if estimate.samples == 1 else "s"
    return f"learned from {estimate.samples} sample{plural}{age}"


def _age(age: float) -> str:
    return f"{age:.0f} s" if age < 120 else f"{age / 60:.0f} min"


def _figures(figures: Mapping[str, float]) -> str:
    text = ", ".join(_figure(name, value) for name, value in figures.items())
    if TRANSFER_SECONDS in figures and TRANSFER_RATE not in figures:
        text += ", no rate: the transfers were too small to tell one"
    return text


def _figure(name: str, value: float) -> str:
    """The figure with a suitable unit; one that an EPP of another version sends, as it is."""
    if name in _PER:
        return f"{_duration(value)} {_PER[name]}"
    return f"{_number(value)} {_UNITS[name]}" if name in _UNITS else f"{name} {_number(value)}"


def _duration(value: float) -> str:
    size, unit = next((d for d in _DURATIONS if value >= d[0]), _DURATIONS[-1])
    return f"{_number(value / size)} {unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
