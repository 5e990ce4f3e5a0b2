"""What is kept of decisions, in what order, and how it is told."""

import json

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing
from tandem_contract.trace import MAX_SAME_ID, CandidateTrace, DecisionTrace, trace_path
from tandem_epp.history import Decision, History, route

from .test_picker import World


def test_a_split_is_kept_with_what_was_known_and_what_came_of_it() -> None:
    world = World(d="decode", p="prefill")
    world["p"].in_flight = 3
    placement, _ = world.place()
    (before,) = world.history.find("r")
    assert (before.path, before.reason) == (RoutingPath.PREFILL_THEN_DECODE, "worth_it")
    assert (before.model, before.prompt_tokens, before.cached_tokens) == ("m", 500, 0)
    assert before.decode == (CandidateTrace("d", "10.0.0.1:8000"),)
    assert before.prefill == (CandidateTrace("p", "10.0.0.2:8000", 3),)
    assert (before.status, before.timing, before.ended) == (None, None, None)
    assert before.decision_seconds > 0
    placement.on_response_headers("compute=0.5;computed=500", 200, "p")
    placement.end()
    (after,) = world.history.find("r")
    assert (after.status, after.timing) == (200, Timing(compute=0.5, computed=500))
    assert after.ended is not None


def test_refusals_are_kept_with_their_reason() -> None:
    world = World(d="decode")
    world.refused(b'{"model": "x"}', **{"x-request-id": "r"})
    (found,) = world.history.find("r")
    assert (found.path, found.reason, found.status) == (None, "unknown_model", 404)
    assert (found.model, found.decode) == ("x", ())
    assert found.ended is not None


def test_nothing_of_a_prompt_is_kept() -> None:
    world = World(d="decode", p="prefill")
    world.place("secret " * 300)
    assert b"secret" not in msgspec.json.encode(world.history.find("r"))


def test_the_oldest_is_forgotten_and_the_newest_of_one_id_stands_last() -> None:
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


async def test_it_is_told_over_http_whatever_the_id_looks_like() -> None:
    history = History(4)
    history.add(Decision("a/b?c d", 1.5, path=RoutingPath.UNIFIED, reason="short_prompt"))
    app = web.Application()
    app.add_routes([route(history)])
    async with TestClient(TestServer(app)) as client:
        url = client.make_url("/").with_path(trace_path("a/b?c d"), encoded=True)
        async with client.session.get(url) as answer:
            assert answer.status == 200
            (found,) = msgspec.json.decode(await answer.read(), type=list[DecisionTrace])
            assert (found.request_id, found.reason) == ("a/b?c d", "short_prompt")
        async with client.get(trace_path("nobody")) as answer:
            assert (answer.status, json.loads(await answer.text())) == (404, [])
