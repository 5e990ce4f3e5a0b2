"""What a configuration would run, as text for `tandem-epp --check-config`. Pure."""

import ssl
from collections.abc import Iterator
from typing import Final

from tandem_contract.config import HealthChecks
from tandem_contract.durations import format_duration
from tandem_contract.slo import Slo

from ...backends.scrape_settings import ScrapeSettings
from ...choice.cost_choice import CostSettings
from ...choice.routing import Routing, Scheduling
from .decider import DeciderSettings
from .explain_flow import flow_lines
from .score_choice import ProfileSummary, ScoreChoice
from .sessions import TokenSession

_OFF: Final = "off, each request is served by one pod"
_ALWAYS: Final = "every request that can be split"


def explain(routing: Routing, checks: HealthChecks) -> str:
    """Profiles, decider, index and health checks that result, and what has no effect."""
    return "\n".join(_lines(routing, checks))


def _lines(routing: Routing, checks: HealthChecks) -> Iterator[str]:
    scheduling, serving = routing.scheduling, routing.serving
    if not isinstance(chooser := scheduling.chooser, ScoreChoice):
        yield "choice: predicted-cost"
        yield f"splitting: {_by_cost(scheduling.cost) if serving.enabled else _OFF}"
        yield from map(_slo, scheduling.cost.slos.items())
    else:
        summary, decider = chooser.summary, chooser.decider
        yield from _profile("decode", summary.decode)
        is_split = serving.enabled and decider.split
        if is_split:
            yield from _profile("prefill", summary.prefill)
        yield f"handler: {summary.handler or 'none'}"
        yield f"decider: {summary.decider if is_split else 'none'}"
        yield f"splitting: {_decider(decider) if is_split else _OFF}"
    if not serving.fallback_to_unified:
        yield "fallback: none, a request that cannot be split is refused"
    yield from _index(scheduling)
    yield from _scraping(scheduling.scraping)
    yield _health_checks(checks)
    yield from flow_lines(scheduling.flow)
    if scheduling.propagates_priority:
        yield "priorities: told to the engines, which need --scheduling-policy priority"
    for header in scheduling.added_headers:
        if isinstance(header, TokenSession):
            yield f"session token: header {header.header}"
    if scheduling.notices:
        yield ""
    yield from map(str, scheduling.notices)


def _by_cost(settings: CostSettings) -> str:
    if settings.split == "always":
        return _ALWAYS
    return f"by the cost{_limit(settings.max_prefill_on_decode)}"


def _slo(stated: tuple[str, Slo]) -> str:
    model, slo = stated
    times = {"TTFT": slo.ttft, "ITL": slo.itl}
    given = [f"{name} {format_duration(time)}" for name, time in times.items() if time is not None]
    return f"objectives of {model}: {', '.join(given)}, for {slo.attainment:g} of the requests"


def _limit(tokens: int | None) -> str:
    return "" if tokens is None else f", and from {tokens + 1} uncached prompt tokens on"


def _profile(phase: str, summary: ProfileSummary) -> Iterator[str]:
    scorers = ", ".join(f"{name} x {weight:g}" for name, weight in summary.scorers)
    yield f"{phase} profile: {summary.name}"
    yield f"  filters: {', '.join(summary.filters)}"
    yield f"  scorers: {scorers or 'none: all candidates are equal'}"
    yield f"  picker: {summary.picker}"


def _decider(settings: DeciderSettings) -> str:
    if settings.always:
        return _ALWAYS
    if not settings.non_cached_tokens:
        return "off: nonCachedTokens is 0"
    longer = f", prompts of {settings.prompt_tokens}" if settings.prompt_tokens else ""
    limit = _limit(settings.max_prefill_on_decode)
    return f"from {settings.non_cached_tokens} uncached prompt tokens on{longer}{limit}"


def _scraping(settings: ScrapeSettings) -> Iterator[str]:
    if settings == ScrapeSettings(tls=settings.tls):
        return
    port = f"port {settings.port}" if settings.port is not None else "the port of requests"
    is_verified = settings.tls is None or settings.tls.verify_mode is ssl.CERT_REQUIRED
    verified = "verified" if is_verified else "not verified"
    certificates = f", certificates {verified}" if settings.scheme == "https" else ""
    yield f"metrics: {settings.scheme}, {port}, {settings.path}{certificates}"


def _health_checks(checks: HealthChecks) -> str:
    path = f"{checks.path}, then " if checks.path else ""
    return (
        f"health checks: {path}the metrics page, every {format_duration(checks.interval)}, timeout "
        f"{format_duration(checks.timeout)}; unhealthy after {checks.unhealthy_threshold} failed, "
        f"healthy after {checks.healthy_threshold} passed"
    )


def _index(scheduling: Scheduling) -> Iterator[str]:
    index = scheduling.index
    yield (
        f"prefix index: {index.capacity_blocks} blocks of {index.block_tokens} tokens per pod, "
        "where its metrics do not tell"
    )
    if (events := scheduling.events) is None:
        return
    yield f"KV events: port {events.port} of every pod, replay from {events.replay_port}"
    for tokenizer in scheduling.tokenizers:
        of = f" of {tokenizer.model}" if len(scheduling.tokenizers) > 1 else ""
        yield f"tokenizer{of}: {tokenizer.directory or tokenizer.url or 'none'}"
    if not scheduling.tokenizers:
        yield "tokenizer: none"
