"""What the EPP decided, and why, over HTTP: for `tandem trace` and for people.

    GET /requests/ID                     the decisions for one request, for `tandem trace`
    GET /debug/decisions?request_id=ID   the same
    GET /debug/decisions?limit=N         the N latest decisions; 32 without it
    GET /debug/pods                      load, health and estimates of every pod

Each answer is a JSON list: of `tandem_contract.trace.DecisionTrace`, newest last, or of
`tandem_contract.pod_reports.PodReport`, indented for people, who ask it with curl. An unknown id is
an empty list with status 404. No answer holds prompt text.
"""

from collections.abc import Iterable, Sequence
from time import time
from typing import Final

import msgspec
from aiohttp import web

from tandem_contract.endpoints import DEBUG_DECISIONS, DEBUG_PODS, REQUESTS
from tandem_contract.pod_reports import PodReport
from tandem_contract.trace import DecisionTrace

from .backends.pods import Pod
from .history import History
from .pod_reports import pod_report

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
