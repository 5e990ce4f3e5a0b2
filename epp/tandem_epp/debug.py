"""What the EPP decided, and why, over HTTP: for `tandem trace` and for people.

    GET /requests/ID                     the decisions for one request, for `tandem trace`
    GET /debug/decisions?request_id=ID   the same
    GET /debug/decisions                 the latest decisions

Each answer is a JSON list of `tandem_contract.trace.DecisionTrace`, newest last; an empty list with
status 404 for an unknown id. No answer holds prompt text.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
from aiohttp import web

from tandem_contract.endpoints import DEBUG_DECISIONS, REQUESTS
from tandem_contract.trace import DecisionTrace

from .history import History

LATEST: Final = 32
"""Decisions in an answer that names no id."""


def routes(history: History) -> list[web.RouteDef]:
    """The routes of the metrics port."""

    async def requests(request: web.Request) -> web.Response:
        return _answer(history.find(request.match_info["id"]))

    async def decisions(request: web.Request) -> web.Response:
        request_id = request.query.get("request_id")
        if request_id is None:
            return _answer(history.latest(LATEST), status=200)
        return _answer(history.find(request_id))

    return [web.get(REQUESTS + "{id}", requests), web.get(DEBUG_DECISIONS, decisions)]


def _answer(traces: Sequence[DecisionTrace], status: int | None = None) -> web.Response:
    return web.Response(
        status=status or (200 if traces else 404),
        body=msgspec.json.encode(traces),
        content_type="application/json",
    )
