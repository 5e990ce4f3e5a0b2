"""Worker processes against a real server."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from tandem_loadtest.records import Outcome, Record
from tandem_loadtest.run.errors import WorkloadFailed
from tandem_loadtest.run.load import sessions_of, writer_of
from tandem_loadtest.run.turns import STOPPED_BEFORE, STOPPED_IN_FLIGHT
from tandem_loadtest.run.workers import Measured, Totals, Workers
from tandem_loadtest.workload.settings import Arrivals, Workload

from .engines import FakeOpenAI, run_spec

pytestmark = pytest.mark.component


async def measure(workers: Workers, stop: asyncio.Event | None = None) -> Measured:
    async with workers:
        workers.start()
        return await workers.results(stop or asyncio.Event())


async def test_three_processes_send_the_schedule_exactly_once() -> None:
    engine = FakeOpenAI()
    runs: dict[int, list[Record]] = {1: [], 3: []}
    prompts: dict[int, list[object]] = {}
    async with engine.serve() as url:
        for processes, records in runs.items():
            engine.bodies.clear()
            measured = await measure(Workers(run_spec(url), processes, on_record=records.append))
            assert len(measured.cpu_share) == processes
            assert measured.read_lag.count > 0
            assert measured.stopped_at is None
            prompts[processes] = sorted(body["prompt"] for body in engine.bodies)
    by_processes = [sorted(records, key=lambda r: r.index) for records in runs.values()]
    for records in by_processes:
        assert [record.index for record in records] == list(range(40))
        assert {record.outcome for record in records} == {Outcome.OK}
        assert {record.output_tokens for record in records} == {2}
    first, second = ([record.intended for record in records] for records in by_processes)
    assert first == second
    assert prompts[1] == prompts[3]


async def test_progress_ends_with_every_request() -> None:
    engine = FakeOpenAI()
    states: list[tuple[int, int, int]] = []

    def show(totals: Totals) -> None:
        states.append((totals.sent, totals.in_flight, totals.finished))

    async with engine.serve() as url:
        await measure(Workers(run_spec(url), 2, on_record=lambda _: None, on_progress=show))
    assert states[-1] == (40, 0, 40)


async def test_the_shares_of_closed_loop_and_max_in_flight_sum_to_the_whole() -> None:
    engine = FakeOpenAI()
    engine.is_open.clear()
    records: list[Record] = []
    async with engine.serve() as url:
        closed = run_spec(url, arrivals=Arrivals(process="closed", concurrency=5))
        async with Workers(closed, 3, on_record=records.append) as workers:
            workers.start()
            results = asyncio.create_task(workers.results(asyncio.Event()))
            await engine.holds(5)
            engine.is_open.set()
            measured = await results
        assert measured.peak_in_flight == 5
        assert len(records) == 40
        engine.is_open.clear()
        records.clear()
        stop = asyncio.Event()
        limited = run_spec(url, max_in_flight=4)
        unsent = asyncio.Event()

        def take(record: Record) -> None:
            records.append(record)
            if len(records) == 36:
                unsent.set()

        async with Workers(limited, 3, on_record=take) as workers:
            workers.start()
            results = asyncio.create_task(workers.results(stop))
            await unsent.wait()
            engine.is_open.set()
            await results
    outcomes = [record.outcome for record in records]
    assert (outcomes.count(Outcome.UNSENT), outcomes.count(Outcome.OK)) == (36, 4)


async def test_in_closed_loop_the_users_think_between_sessions() -> None:
    records: list[Record] = []
    async with FakeOpenAI().serve() as url:
        spec = run_spec(
            url,
            arrivals=Arrivals(process="closed", concurrency=1),
            workload=Workload(preset="chat", prompt_tokens=20, output_tokens=2, think=0.02),
            limit=6,
        )
        await measure(Workers(spec, 1, on_record=records.append))
    thinks = [session.turns[0].think for session in sessions_of(spec, writer_of(spec))]
    assert min(thinks) > 0
    assert records[0].intended == 0.0
    ends = [record.ended or 0.0 for record in records]
    assert [record.intended for record in records[1:]] == pytest.approx(
        [end + think for end, think in zip(ends, thinks[1:], strict=False)]
    )


async def test_a_stop_keeps_what_was_measured_and_accounts_for_the_rest() -> None:
    engine = FakeOpenAI()
    records: list[Record] = []
    stop, answered = asyncio.Event(), asyncio.Event()

    def take(record: Record) -> None:
        records.append(record)
        answered.set()

    async with engine.serve() as url:
        spec = run_spec(url, arrivals=Arrivals(process="closed", concurrency=2), limit=200_000)
        async with Workers(spec, 2, on_record=take) as workers:
            workers.start()
            results = asyncio.create_task(workers.results(stop))
            await answered.wait()
            engine.is_open.clear()
            stop.set()
            measured = await results
    assert measured.stopped_at is not None
    assert len(records) == len({record.index for record in records}) == 200_000
    reasons = {record.error for record in records}
    assert reasons <= {"", STOPPED_BEFORE, STOPPED_IN_FLIGHT}
    assert {"", STOPPED_BEFORE} <= reasons


async def test_a_worker_that_dies_ends_the_run_with_a_warning() -> None:
    engine = FakeOpenAI()
    engine.is_open.clear()
    records: list[Record] = []
    async with (
        engine.serve() as url,
        Workers(run_spec(url), 2, on_record=records.append) as workers,
    ):
        workers.start()
        results = asyncio.create_task(workers.results(asyncio.Event()))
        await engine.holds(40)
        os.kill(workers.pids[0], signal.SIGKILL)
        measured = await results
    assert measured.stopped_at is not None
    (warning,) = workers.warnings
    assert "a worker process died" in warning
    assert "-9" in warning
    # Every request is accounted for: the dead worker's half, too.
    assert sorted(record.index for record in records) == list(range(40))
    lost = [record for record in records if "worker process died" in record.error]
    assert {record.index for record in lost} == set(range(0, 40, 2))
    assert {record.model for record in records} == {"m"}


async def test_a_dead_worker_in_closed_loop_leaves_only_the_sessions_that_had_begun() -> None:
    engine = FakeOpenAI()
    engine.is_open.clear()
    records: list[Record] = []
    async with engine.serve() as url:
        closed = run_spec(
            url,
            arrivals=Arrivals(process="closed", concurrency=6),
            workload=Workload(preset="chat", turns=2, think=0, models={"lora": 1.0}),
            limit=1000,
            duration=3600.0,
        )
        in_flight = asyncio.Event()
        async with Workers(
            closed,
            2,
            on_record=records.append,
            on_progress=lambda totals: in_flight.set() if totals.in_flight == 6 else None,
        ) as workers:
            workers.start()
            results = asyncio.create_task(workers.results(asyncio.Event()))
            await in_flight.wait()
            os.kill(workers.pids[0], signal.SIGKILL)
            await results
    lost = [record for record in records if "worker process died" in record.error]
    # Three sessions of two turns each; the other worker had begun as many.
    assert sorted((r.index, r.turn) for r in lost) == [(i, t) for i in (0, 2, 4) for t in (0, 1)]
    assert len(records) == 12
    assert {record.model for record in records} == {"lora"}


async def test_a_workload_that_cannot_be_made_is_an_error_before_the_start(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0}\n')
    spec = run_spec(
        "http://127.0.0.1:1",
        workload=Workload(preset="trace", file=str(trace)),
        arrivals=Arrivals(process="trace"),
    )
    with pytest.raises(WorkloadFailed, match="jsonl:1: "):
        await measure(Workers(spec, 2, on_record=lambda _: None))


async def test_workers_end_when_their_parent_is_killed() -> None:
    engine = FakeOpenAI()
    engine.is_open.clear()
    async with engine.serve() as url:
        spec = msgspec.json.encode(run_spec(url)).decode()
        parent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PARENT, spec), stdout=asyncio.subprocess.PIPE
        )
        assert parent.stdout
        workers = [int(pid) for pid in (await parent.stdout.readline()).split()]
        assert len(workers) == 2
        await engine.holds(40)
        parent.kill()
        # The workers hold the other end of this pipe: it ends when the last one has.
        assert await parent.stdout.read() == b""
        await parent.wait()


PARENT = """
import asyncio, sys
import msgspec
from tandem_loadtest.run.spec import RunSpec
from tandem_loadtest.run.workers import Workers

async def main():
    spec = msgspec.json.decode(sys.argv[1], type=RunSpec)
    async with Workers(spec, 2, on_record=lambda _: None) as workers:
        print(*workers.pids, flush=True)
        workers.start()
        await workers.results(asyncio.Event())

asyncio.run(main())
"""
