"""Decisions and pods over HTTP."""

from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from tandem_contract.endpoints import DEBUG_DECISIONS, DEBUG_PODS
from tandem_contract.paths import RoutingPath
from tandem_contract.pod_reports import PodReport
from tandem_contract.trace import DecisionTrace, trace_path
from tandem_epp.placement.history import Decision, History
from tandem_epp.process.pages import LATEST, routes

from ..placement.test_picker import PickerSetup

Client = TestClient[web.Request, web.Application]
ID = "a/b?c d"


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    history = History(64)
    history.add(Decision(ID, 1.5, path=RoutingPath.UNIFIED, reason="short_prompt"))
    for second in range(LATEST):
        history.add(Decision("other", 2.0 + second))
    app = web.Application()
    app.add_routes(routes(history, PickerSetup(d="decode", p="prefill").fleet))
    async with TestClient(TestServer(app)) as client:
        yield client


async def traces(client: Client, path: str) -> tuple[int, list[DecisionTrace]]:
    url = client.make_url("/").join(URL(path, encoded=True))
    async with client.session.get(url) as answer:
        return answer.status, msgspec.json.decode(await answer.read(), type=list[DecisionTrace])


async def test_the_decisions_for_any_id(client: Client) -> None:
    status, [trace] = await traces(client, trace_path(ID))
    assert status == 200
    assert (trace.request_id, trace.reason) == (ID, "short_prompt")
    async with client.get(DEBUG_DECISIONS, params={"request_id": ID}) as answer:
        assert msgspec.json.decode(await answer.read(), type=list[DecisionTrace]) == [trace]


async def test_answers_are_indented_for_people(client: Client) -> None:
    async with client.get(DEBUG_PODS) as answer:
        lines = (await answer.text()).splitlines()
    assert lines[:3] == ["[", "  {", '    "name": "d",']


async def test_an_unknown_id_is_an_empty_list(client: Client) -> None:
    assert await traces(client, trace_path("unknown")) == (404, [])
    async with client.get(DEBUG_DECISIONS, params={"request_id": "unknown"}) as answer:
        assert (answer.status, await answer.json()) == (404, [])


async def test_without_an_id_the_latest_decisions_come_newest_last(client: Client) -> None:
    status, latest = await traces(client, DEBUG_DECISIONS)
    assert status == 200
    assert [trace.decided for trace in latest] == [2.0 + second for second in range(LATEST)]


async def test_a_limit_says_how_many_come(client: Client) -> None:
    status, latest = await traces(client, f"{DEBUG_DECISIONS}?limit=2")
    assert (status, [trace.decided for trace in latest]) == (200, [LATEST, LATEST + 1.0])
    async with client.get(DEBUG_DECISIONS, params={"limit": "many"}) as answer:
        assert answer.status == 400
        assert await answer.text() == "limit takes a number of decisions, as in ?limit=5\n"


async def test_every_pod_is_reported(client: Client) -> None:
    async with client.get(DEBUG_PODS) as answer:
        reports = msgspec.json.decode(await answer.read(), type=list[PodReport])
    assert [(report.name, report.role) for report in reports] == [("d", "decode"), ("p", "prefill")]
