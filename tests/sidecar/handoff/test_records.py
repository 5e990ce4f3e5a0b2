"""What a request records about itself and its legs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tandem_contract.commandline import HostPort
from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_contract.plan_keys import PlanKeys
from tandem_http1.messages import ResponseHead
from tandem_http1.server import Server
from tandem_http1.upstream import Pool
from tandem_sidecar.connectors import ConnectorOptions, make_connector
from tandem_sidecar.handoff.breaker import Breakers
from tandem_sidecar.handoff.context import Lifecycle, SidecarContext
from tandem_sidecar.handoff.liveness import LivenessMonitor
from tandem_sidecar.handoff.proxy import Proxy
from tandem_sidecar.handoff.transfer_monitor import TransferMonitor
from tandem_sidecar.observability.record import Leg, Phase, Record, Result
from tandem_sidecar.security.route import AllowList
from tandem_sidecar.settings import Settings

from ..conftest import LOOPBACK
from ..peers import FakeDecode, FakePrefill, Script, Turn, hangs, healthy

BODY = b'{"model": "m", "prompt": "Hi"}'


class Notes:
    """An observer that collects the records."""

    def __init__(self) -> None:
        self.begun: list[Record] = []
        self.answers: list[tuple[Record, RoutingPath | None]] = []
        """Each record, and its path when the answer began."""
        self.ends: asyncio.Queue[Record] = asyncio.Queue()
        self.releases: asyncio.Queue[Leg] = asyncio.Queue()

    def on_request_start(self, record: Record) -> None:
        assert record.legs == []
        self.begun.append(record)

    def on_answer(self, record: Record, head: ResponseHead | None) -> None:
        assert record.status == (record.status if head is None else head.status)
        self.answers.append((record, record.path))

    def on_request_end(self, record: Record) -> None:
        self.ends.put_nowait(record)

    def on_release_end(self, record: Record, leg: Leg) -> None:
        assert leg in record.legs
        self.releases.put_nowait(leg)


@asynccontextmanager
async def serving(
    notes: Notes, decode: FakeDecode, prefills: list[FakePrefill], **changes: Any
) -> AsyncIterator[str]:
    """The URL of a proxy whose observer is `notes`."""
    allow = AllowList(addresses=frozenset(p.address for p in prefills))
    settings = Settings(LOOPBACK, LOOPBACK, decode.address, allow=allow, **changes)
    pool = Pool()
    monitor = LivenessMonitor(pool, settings.silence_timeout, settings.resume_patience)
    connector = make_connector("nixl", ConnectorOptions())
    context = SidecarContext(
        settings,
        pool,
        connector,
        notes,
        Lifecycle(1.0),
        Breakers(settings.breaker),
        monitor,
        TransferMonitor(None),
    )
    clients = Server(Proxy(context, PlanKeys(None)), settings.limits)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(clients.new_connection, *LOOPBACK)
    try:
        yield f"http://{HostPort('127.0.0.1', server.sockets[0].getsockname()[1])}/v1/completions"
    finally:
        server.close()
        monitor.close()
        clients.close()
        await clients.closed()
        pool.close()


async def record_of(
    scripts: list[Script | None],
    decode: Script | None = None,
    health: Script = healthy,
    **changes: Any,
) -> tuple[Record, Notes]:
    """The record of one request to prefill engines with these scripts; `decode` and `health` are
    those of the decode engine."""
    notes = Notes()
    async with FakeDecode(decode) as engine:
        engine.health = health
        prefills = [FakePrefill(script) for script in scripts]
        for prefill in prefills:
            await prefill.__aenter__()
        candidates = ",".join(str(prefill.address) for prefill in prefills)
        async with (
            serving(notes, engine, prefills, **changes) as url,
            aiohttp.ClientSession() as http,
        ):
            headers = (
                {"x-prefiller-host-port": candidates, "x-request-id": "r1"} if candidates else {}
            )
            async with http.post(url + "?a=secret", data=BODY, headers=headers) as answer:
                await answer.read()
            record = await asyncio.wait_for(notes.ends.get(), 10)
        for prefill in prefills:
            await prefill.__aexit__()
    assert notes.begun == [record]
    # The observer knows the path and the status before the client does.
    assert notes.answers == [(record, record.path)]
    return record, notes


def results(record: Record) -> list[tuple[Phase, Result | None]]:
    return [(leg.phase, leg.result) for leg in record.legs]


async def fails(turn: Turn) -> None:
    turn.answer(500, b"{}")


async def test_the_leg_of_a_hung_decode_engine_is_silent() -> None:
    record, _ = await record_of([None], hangs, health=hangs, silence_timeout=0.1)
    (leg,) = [leg for leg in record.legs if leg.phase is Phase.DECODE]
    assert leg.result is Result.SILENT
    assert "no sign of life" in leg.detail


async def test_a_hand_off_records_two_legs_with_one_engine_id() -> None:
    record, _ = await record_of([None])
    prefill, decode = record.legs
    assert results(record) == [(Phase.PREFILL, Result.ANSWERED), (Phase.DECODE, Result.ANSWERED)]
    assert prefill.attempt_id == decode.attempt_id != ""
    assert (record.request_id, record.kind, record.reason) == ("r1", "completions", "named")
    assert (record.method, record.target) == ("POST", "/v1/completions")
    assert record.path is RoutingPath.PREFILL_THEN_DECODE
    assert (record.outcome, record.status, record.errors) == ("answered", 200, ())
    assert prefill.timing is not None
    assert prefill.timing.computed == 9
    assert decode.timing is not None
    assert decode.timing.transfer == 0.125
    times = (prefill.started, prefill.ended, decode.started, decode.first_byte, decode.ended)
    times = (record.received, *times, record.ended)
    assert None not in times
    assert list(times) == sorted(times)  # type: ignore[type-var]  # none is None
    assert record.first_byte is not None


async def test_a_failed_prefill_and_a_fallback_are_recorded() -> None:
    record, _ = await record_of([fails, fails])
    assert results(record) == [
        (Phase.PREFILL, Result.ERROR),
        (Phase.PREFILL, Result.ERROR),
        (Phase.DECODE, Result.ANSWERED),
    ]
    assert [leg.status for leg in record.legs] == [500, 500, 200]
    assert len({leg.attempt_id for leg in record.legs}) == 3
    assert (record.path, record.outcome) == (RoutingPath.FALLBACK, "answered")
    assert record.errors == (ErrorPhase.PREFILL, ErrorPhase.PREFILL)


async def test_a_skipped_pod_with_an_open_circuit_is_recorded() -> None:
    async def busy(turn: Turn) -> None:
        turn.answer(503, b"{}", "retry-after: 20")

    notes = Notes()
    async with (
        FakeDecode() as engine,
        FakePrefill(busy) as prefill,
        serving(notes, engine, [prefill]) as url,
        aiohttp.ClientSession() as http,
    ):
        headers = {"x-prefiller-host-port": str(prefill.address)}
        results = []
        for _ in range(2):
            async with http.post(url, data=BODY, headers=headers) as answer:
                await answer.read()
            results.append((await notes.ends.get()).legs[0].result)
    assert results == [Result.BUSY, Result.CIRCUIT_OPEN]


async def test_a_failed_kv_load_and_its_release_are_recorded() -> None:
    async def once(turn: Turn) -> None:
        if "kv_transfer_params" in turn.request.json:
            turn.answer(500, b"{}")
        else:
            turn.answer(200, b"{}")

    record, notes = await record_of([None], once)
    assert results(record)[0] == (Phase.PREFILL, Result.ANSWERED)
    assert [leg.result for leg in record.legs if leg.phase is Phase.DECODE] == [
        Result.ERROR,
        Result.ANSWERED,
    ]
    assert record.errors == (ErrorPhase.KV_TRANSFER,)
    release = await asyncio.wait_for(notes.releases.get(), 10)
    assert (release.phase, release.result, release.status) == (
        Phase.RELEASE,
        Result.ANSWERED,
        404,
    )


async def test_a_lost_decode_leg_is_recorded() -> None:
    async def dies(turn: Turn) -> None:
        turn.die()

    record, _ = await record_of([], dies)
    assert results(record) == [(Phase.DECODE, Result.LOST)]
    assert (record.path, record.outcome, record.status) == (RoutingPath.UNIFIED, "failed", 502)
    assert record.errors == (ErrorPhase.DECODE,)
