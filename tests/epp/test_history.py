"""The history of decisions: content, order, and the HTTP answer."""

import json

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing
from tandem_contract.trace import MAX_SAME_ID, CandidateTrace, DecisionTrace, trace_path
from tandem_epp.ext_proc.messages import ResponseHeaders
from tandem_epp.history import Decision, History, route

from .test_picker import NOW, PickerSetup


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


async def test_decisions_are_served_over_http_for_any_id() -> None:
    history = History(4)
    history.add(Decision("a/b?c d", 1.5, path=RoutingPath.UNIFIED, reason="short_prompt"))
    app = web.Application()
    app.add_routes([route(history)])
    async with TestClient(TestServer(app)) as client:
        url = client.make_url("/").with_path(trace_path("a/b?c d"), encoded=True)
        async with client.session.get(url) as answer:
            assert answer.status == 200
            (trace,) = msgspec.json.decode(await answer.read(), type=list[DecisionTrace])
            assert (trace.request_id, trace.reason) == ("a/b?c d", "short_prompt")
        async with client.get(trace_path("unknown")) as answer:
            assert (answer.status, json.loads(await answer.text())) == (404, [])
