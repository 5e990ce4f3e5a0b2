"""KV that is known not to have arrived is given up; a leg that only waits is not."""

import asyncio

import pytest

from tandem_contract import metrics
from tandem_contract.commandline import HostPort
from tandem_contract.headers import READS_STREAMS
from tandem_sidecar.handoff.transfer_monitor import TransferMonitor

from ..conftest import Harness
from ..peers import PARAMS, Turn

ENGINE = HostPort("10.0.0.1", 8200)
BODY = b'{"model": "m", "prompt": "Hi"}'
OFTEN = 0.01
"""Seconds between two checks."""


def page(*loading: int) -> bytes:
    """The metrics of an engine with ranks that load the KV of so many requests."""
    lines = [
        f'{metrics.ENGINE_KV_FETCH}{{engine="{i}",model_name="m",stage="in_progress"}} {n}.0'
        for i, n in enumerate(loading)
    ]
    return "\n".join(["# TYPE", *lines, f"{metrics.ENGINE_RUNNING} 3.0", ""]).encode()


class Leg:
    def __init__(self) -> None:
        self.given_up: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def kv_did_not_arrive(self, seconds: float) -> None:
        self.given_up.set_result(seconds)


class FakeEngine:
    """An engine whose pages the test gives, one for each check."""

    def __init__(self, *legs: Leg, timeout: float = 0.0) -> None:
        self._pages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._questions: asyncio.Queue[HostPort] = asyncio.Queue()
        self.monitor = TransferMonitor(self._fetch, OFTEN)
        for leg in legs:
            self.monitor.watch(ENGINE, leg, timeout)

    async def _fetch(self, engine: HostPort) -> bytes | None:
        self._questions.put_nowait(engine)
        return await self._pages.get()

    async def is_asked(self) -> None:
        """Return with the next check; the ones before it are done."""
        assert await asyncio.wait_for(self._questions.get(), 10) == ENGINE

    async def answers(self, *pages: bytes | None) -> None:
        for answer in pages:
            await self.is_asked()
            self._pages.put_nowait(answer)


async def test_legs_that_load_at_every_check_are_given_up() -> None:
    legs = Leg(), Leg()
    engine = FakeEngine(*legs, timeout=OFTEN / 2)
    await engine.answers(page(1, 1), page(1, 1))
    given_up = await asyncio.wait_for(asyncio.gather(*(leg.given_up for leg in legs)), 10)
    assert given_up == [OFTEN / 2, OFTEN / 2]
    engine.monitor.close()


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(page(1), id="one of two has its KV"),
        pytest.param(page(), id="an engine that does not tell"),
        pytest.param(None, id="an engine that does not answer"),
    ],
)
async def test_a_leg_of_which_nothing_is_known_is_not_given_up(answer: bytes | None) -> None:
    legs = Leg(), Leg()
    engine = FakeEngine(*legs)
    await engine.answers(answer, answer, answer)
    await engine.is_asked()
    assert not any(leg.given_up.done() for leg in legs)
    engine.monitor.close()


async def test_a_leg_that_comes_while_the_page_does_counts() -> None:
    first, second = Leg(), Leg()
    engine = FakeEngine(first)
    await engine.answers(page(1))
    await engine.is_asked()
    engine.monitor.watch(ENGINE, second, 0.0)
    engine._pages.put_nowait(page(1))
    await engine.is_asked()
    assert not first.given_up.done(), "the KV that is loading may be the second's"
    engine.monitor.unwatch(ENGINE, second)
    engine._pages.put_nowait(page(1))
    await engine.is_asked()
    assert not first.given_up.done(), "the second was there when this page was asked for"
    engine._pages.put_nowait(page(1))
    await engine.answers(page(1))
    await asyncio.wait_for(first.given_up, 10)
    engine.monitor.close()


@pytest.mark.parametrize("between", [page(0), page(), None])
async def test_a_check_that_does_not_tell_begins_the_time_anew(between: bytes | None) -> None:
    leg = Leg()
    engine = FakeEngine(leg)
    await engine.answers(page(1), between, page(1))
    await engine.is_asked()
    assert not leg.given_up.done(), "it was not loading at each check"
    engine._pages.put_nowait(page(1))
    await asyncio.wait_for(leg.given_up, 10)
    engine.monitor.close()


async def test_an_engine_without_legs_is_not_asked() -> None:
    leg, other = Leg(), Leg()
    engine = FakeEngine(leg)
    engine.monitor.unwatch(ENGINE, leg)
    engine.monitor.watch(ENGINE, other, 0.0)
    await engine.answers(page(1), page(1))
    await asyncio.wait_for(other.given_up, 10)
    assert not leg.given_up.done()
    engine.monitor.close()


async def test_where_other_processes_send_legs_none_is_given_up() -> None:
    monitor = TransferMonitor(None, OFTEN)
    monitor.watch(ENGINE, Leg(), 0.0)
    assert not monitor._waits


async def waits_for_kv(turn: Turn) -> None:
    if b"kv_transfer_params" in turn.request.body:
        await turn.gone.wait()
    else:
        turn.answer(200, b'{"mine": true}')


async def test_kv_that_does_not_arrive_in_time_is_computed(harness: Harness) -> None:
    async def metrics_page(turn: Turn) -> None:
        turn.answer(200, page(1))

    await harness.prefill()
    await harness.start(waits_for_kv, kv_transfer_timeout=0.1)
    harness.decode.metrics = metrics_page
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert (answer.status, await answer.read()) == (200, b'{"mine": true}')
        assert answer.headers["X-Continuum-Routing-Path"] == "fallback"
    assert await harness.metric('disaggregated_errors_total{phase="kv_transfer"}') == 1
    legs = 'tandem_sidecar_legs_total{phase="decode",result="deadline"}'
    assert await harness.metric(legs) == 1


async def test_streamed_kv_has_its_time_from_the_prefills_answer_on(harness: Harness) -> None:
    async def metrics_page(turn: Turn) -> None:
        turn.answer(200, page(1))

    async def prefills(turn: Turn) -> None:
        params = PARAMS[:-1] + b', "tandem_serves_streams": true}'
        turn.answer(200, b'{"id": "c", "choices": [], "kv_transfer_params": ' + params + b"}")

    async def reads_streams(turn: Turn) -> None:
        params = turn.request.json.get("kv_transfer_params", {})
        if "tandem_stream" in params:
            await turn.gone.wait()
        else:
            turn.answer(200, b'{"choices": []}', f"{READS_STREAMS}: 1")

    await harness.prefill(prefills)
    await harness.start(reads_streams, kv_transfer_timeout=0.1)
    harness.decode.metrics = metrics_page
    paths = []
    for _ in range(2):
        async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as reply:
            assert (reply.status, await reply.read()) == (200, b'{"choices": []}')
            paths.append(reply.headers["X-Continuum-Routing-Path"])
    # The first hand-off tells the sidecar that both engines stream.
    assert paths == ["prefill_then_decode", "fallback"]
    assert await harness.metric('disaggregated_errors_total{phase="kv_transfer"}') == 1
