"""Nothing in a sidecar grows with what clients choose: prefill pods, paths, ids, headers."""

import asyncio
import gc
import logging
import tracemalloc
from itertools import pairwise

import pytest

from tandem_contract.commandline import HostPort
from tandem_contract.paths import RoutingPath
from tandem_sidecar.connectors.mooncake import MAX_PEERS, Mooncake
from tandem_sidecar.connectors.protocol import HandoffAttempt
from tandem_sidecar.handoff import breaker, outbound, reply
from tandem_sidecar.handoff.breaker import Breakers
from tandem_sidecar.security.route import parse_allow
from tandem_sidecar.settings import Breaker

from .conftest import Harness

pytestmark = pytest.mark.long

REQUESTS = 300
"""In each round; the first ones fill what is bounded."""
AT_ONCE = 20


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning of a failed pod, which pytest would keep; a round fills the table of breakers."""
    caplog.set_level(logging.ERROR, logger="tandem_sidecar")
    monkeypatch.setattr(breaker, "MAX_TARGETS", REQUESTS // 2)


async def serve(harness: Harness, start: int) -> None:
    """Serve a round of requests, each with names of its own."""

    async def ask(number: int) -> None:
        # Nothing listens there, so the pod counts as failed and the request falls back.
        pod = f"127.{number // 65536 % 256}.{number // 256 % 256}.{number % 256}:9"
        headers = {
            "x-prefiller-host-port": pod,
            "x-request-id": f"id-{number}",
            "traceparent": f"00-{number:032x}-{number:016x}-01-{'x' * 4000}{number}",
            f"x-{number}": f"{number}",
        }
        body = {"model": f"name {number}", "prompt": f"{number}", f"member {number}": 1}
        path = "/v1/completions" if number % 3 else f"/v1/responses/{number}"
        async with harness.http.post(harness.url(path), json=body, headers=headers) as answer:
            await answer.read()

    for first in range(start, start + REQUESTS, AT_ONCE):
        await asyncio.gather(*(ask(number) for number in range(first, first + AT_ONCE)))


async def test_hundreds_of_names_leave_no_more_than_the_first_ones(harness: Harness) -> None:
    await harness.start(allow=parse_allow(("127.0.0.0/8",)), history=64)
    tracemalloc.start()
    try:
        # Caches that are bounded, by more names than this test has.
        for port in range(5000):
            outbound._host(HostPort("10.0.0.1", port))
            reply._routing_lines(RoutingPath.FALLBACK, f"p{port}", "d")
        snapshots = []
        for number in range(1, 1 + 8 * REQUESTS, REQUESTS):
            await serve(harness, number)
            harness.decode.requests.clear()
            gc.collect()
            snapshots.append(tracemalloc.take_snapshot())
    finally:
        tracemalloc.stop()
    # In a full cache new names take the place of old ones, which were made elsewhere: so the sum.
    # A table that grows would keep several objects for each request, in every round; a connection
    # that happens to be open counts in one.
    rounds = [after.compare_to(before, "lineno") for before, after in pairwise(snapshots[3:])]
    grown = min(rounds, key=lambda grown: sum(each.count_diff for each in grown))
    assert sum(each.count_diff for each in grown) < REQUESTS, grown[:9]


async def test_metrics_do_not_grow_with_names(harness: Harness) -> None:
    await harness.start(allow=parse_allow(("127.0.0.0/8",)))

    async def lines() -> int:
        async with harness.http.get(harness.admin("/metrics")) as answer:
            return len((await answer.text()).splitlines())

    await serve(harness, 1)
    await serve(harness, 1 + REQUESTS)
    before = await lines()
    await serve(harness, 1 + 2 * REQUESTS)
    assert await lines() <= before + 1


async def test_kept_headers_are_cut(harness: Harness) -> None:
    """The history is bounded by the number of requests, so each must be small."""
    await harness.start(history=200)
    headers = {"traceparent": f"00-{1:032x}-{1:016x}-01-" + "x" * 7000, "x-request-id": "i" * 7000}
    tracemalloc.start()
    try:
        for _ in range(200):
            url = harness.url("/v1/models?" + "q" * 7000)
            async with harness.http.get(url, headers=headers) as answer:
                await answer.read()
            url = harness.url("/v1/responses/" + "q" * 7000)
            async with harness.http.post(url, json={}, headers=headers) as answer:
                await answer.read()
        harness.decode.requests.clear()
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 200 * 7000


def test_breakers_remember_a_bounded_number_of_pods() -> None:
    most = breaker.MAX_TARGETS
    breakers = Breakers(Breaker(failures=1, cooldown=60.0))
    failing = HostPort("10.0.0.1", 8000)
    for number in range(3 * most):
        breakers.record_failure(failing, 0.001 * number)
        breakers.record_failure(HostPort("10.1.0.1", number), 0.001 * number)
    assert len(breakers.snapshot(4.0)) == most
    assert breakers.admit(failing, 4.0) > 0, "the pod that fails all the time is not forgotten"


def test_engine_ids_of_a_bounded_number_of_pods_are_remembered() -> None:
    connector = Mooncake()
    answer = b'{"0":{"engine_id":"e","worker_addr":{}}}'
    attempts = [HandoffAttempt("r", HostPort("10.0.0.1", n)) for n in range(MAX_PEERS + 1)]
    for attempt in (*attempts[:MAX_PEERS], attempts[0], attempts[-1]):
        connector.record_peer(attempt, answer)
    known = [attempt for attempt in attempts if connector.peer_query(attempt) is None]
    assert len(known) == MAX_PEERS
    assert attempts[1] not in known
