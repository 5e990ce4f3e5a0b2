"""What the EPP decided, and why, over HTTP: for `tandem trace` and for people.

    GET /requests/ID                     the decisions for one request, for `tandem trace`
    GET /debug/decisions?request_id=ID   the same
    GET /debug/decisions?limit=N         the N latest decisions; 32 without it
    GET /debug/pods                      load, health and estimates of every pod

Each answer is a JSON list: of `tandem_contract.trace.DecisionTrace`, newest last, or of
`tandem_contract.pod_reports.PodReport`, indented for people, who ask it with curl. An unknown id is
an empty list with status 404. No answer holds prompt text.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import time
from typing import Final

import msgspec
from aiohttp import web

from tandem_contract.endpoints import DEBUG_DECISIONS, DEBUG_PODS, REQUESTS
from tandem_contract.fabric_classes import FabricClass
from tandem_contract.paths import Role
from tandem_contract.pod_reports import (
    KV_BYTES,
    PREFILL_RATE,
    PREFILL_TOKENS,
    TRANSFER_EXPOSED,
    TRANSFER_RATE,
    TRANSFER_SECONDS,
    Estimate,
    HitReport,
    PodReport,
    Reporter,
    Source,
)
from tandem_contract.trace import DecisionTrace
from tandem_planner.cost import wait_seconds
from tandem_planner.decode_fit import DECODE_PRIOR, DecodeCost
from tandem_planner.learned_cost import CostT, LearnedCost
from tandem_planner.prefill_fit import PREFILL_PRIOR, PrefillCost
from tandem_planner.transfer import TRANSFER_PRIOR, TransferCost, TransferFit

from ..backends.pods import Pod
from ..estimates.pod_estimates import PodEstimates
from ..estimates.prompt_hits import PromptHits
from ..placement.history import History

_GIGABYTE: Final = 1e9


def pod_report(pod: Pod, now: float) -> PodReport:
    """The report of one pod; `now` is Unix seconds."""
    gauges = pod.gauges
    return PodReport(
        name=pod.name,
        address=pod.address or "",
        role=pod.backend.role.value,
        models=tuple(pod.backend.models),
        ready=pod.ready,
        health=pod.health.state.value,
        failure_rate=pod.health.failure_rate,
        in_flight=pod.in_flight,
        running=gauges.running if gauges else None,
        waiting=gauges.waiting if gauges else None,
        kv_usage=gauges.kv_usage if gauges else None,
        wait=wait_seconds(pod.estimates.figures(now), now),
        estimates=fit_reports(pod.estimates, pod.backend.role, now, receives_kv=pod.receives_kv),
        node=pod.place.node or "",
        domain=pod.place.domain or "",
        hits=_hit_reports(pod.hits),
    )


def _hit_reports(hits: PromptHits) -> Mapping[str, HitReport]:
    reporter, measured = hits.measured
    reports = {
        "estimated": hits.estimated.report(Reporter.EPP),
        "measured": measured.report(reporter),
    }
    return {name: report for name, report in reports.items() if report is not None}


def fit_reports(
    fits: PodEstimates, role: Role, now: float, *, receives_kv: bool = False
) -> Mapping[str, Estimate]:
    """The estimates that the cost of a pod in `role` is computed from; `now` is Unix seconds.
    `receives_kv`: other pods may prefill for it, as they do for each decode pod."""
    reports = {"prefill": _estimate(fits.prefill, fits.prefill.best, _prefill, PREFILL_PRIOR, now)}
    if role is not Role.PREFILL:
        best = fits.best_decode
        reports["decode"] = _estimate(fits.decode, best, _decode, DECODE_PRIOR, now)
    if receives_kv or role is Role.DECODE:
        reports["transfer"] = _transfer(fits.transfer, now, fits.exposed.value)
        for fabric in filter(fits.fabrics.is_known, FabricClass):
            reports[f"transfer_{fabric.word}"] = _transfer(fits.fabrics.fit(fabric), now)
    return reports


def _prefill(cost: PrefillCost) -> Mapping[str, float]:
    seconds = cost.seconds(PREFILL_TOKENS)
    return {
        PREFILL_RATE: PREFILL_TOKENS / seconds if seconds > 0 else 0.0,
        "seconds_per_request": cost.fixed,
        "seconds_per_token": cost.per_token,
        "seconds_per_pair": cost.per_pair,
    }


def _decode(cost: DecodeCost) -> Mapping[str, float]:
    return {"seconds_per_step": cost.step, "seconds_per_step_and_decode": cost.slope}


def _transfer(fit: TransferFit, now: float, exposed: float = 1.0) -> Estimate:
    def figures(cost: TransferCost) -> Mapping[str, float]:
        figures = {TRANSFER_SECONDS: cost.latency}
        if exposed < 1.0:
            figures[TRANSFER_EXPOSED] = exposed
        if cost.per_byte > 0:
            # Small transfers take about the same time whatever their size: then no rate is known.
            figures[TRANSFER_RATE] = 1 / cost.per_byte / _GIGABYTE
        if fit.bytes_per_token is not None:
            figures[KV_BYTES] = fit.bytes_per_token
        return figures

    return _estimate(fit, fit.best, figures, TRANSFER_PRIOR, now)


def _estimate(
    fit: LearnedCost[CostT],
    best: CostT,
    figures: Callable[[CostT], Mapping[str, float]],
    prior: CostT,
    now: float,
) -> Estimate:
    """`best`: what the choice takes of `fit`. A fit without samples has the figures of the stated
    `prior`, or those of alike pods."""
    updated_at, own = fit.updated_at, fit.cost
    assumed = Source.PRIOR if best == prior else Source.ALIKE
    return Estimate(
        Source.LEARNED if fit.count else assumed,
        fit.count,
        None if updated_at is None else max(0.0, now - updated_at),
        figures(best),
        figures(own) if fit.count and own != best else {},
    )


LATEST: Final = 32
"""Decisions in an answer that names no id and no limit."""
_DIGITS: Final = 9
"""Most digits of a limit: no history is longer."""


def routes(history: History, fleet: Iterable[Pod]) -> list[web.RouteDef]:
    """The routes of the metrics port."""

    async def requests(request: web.Request) -> web.Response:
        return _answer(history.find(request.match_info["id"]))

    async def decisions(request: web.Request) -> web.Response:
        request_id = request.query.get("request_id")
        if request_id is None:
            limit = request.query.get("limit", str(LATEST))
            if not limit.isdecimal() or len(limit) > _DIGITS:
                raise web.HTTPBadRequest(text="limit takes a number of decisions, as in ?limit=5\n")
            return _answer(history.latest(int(limit)), status=200)
        return _answer(history.find(request_id))

    async def pods(_request: web.Request) -> web.Response:
        now = time()
        return _answer([pod_report(pod, now) for pod in fleet], status=200)

    return [
        web.get(REQUESTS + "{id}", requests),
        web.get(DEBUG_DECISIONS, decisions),
        web.get(DEBUG_PODS, pods),
    ]


def _answer(
    records: Sequence[DecisionTrace] | Sequence[PodReport], status: int | None = None
) -> web.Response:
    return web.Response(
        status=status or (200 if records else 404),
        body=msgspec.json.format(msgspec.json.encode(records)) + b"\n",
        content_type="application/json",
    )
