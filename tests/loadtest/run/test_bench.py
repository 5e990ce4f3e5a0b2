"""Whole benchmarks against real servers."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_loadtest.figures import distributions
from tandem_loadtest.figures.model import Report, Slo
from tandem_loadtest.run.bench import run_bench
from tandem_loadtest.run.errors import BenchError, NotReadyError, OptionsError, WorkloadFailed
from tandem_loadtest.run.options import (
    BenchOptions,
    BenchProgress,
    Reference,
    Search,
    TimedCommand,
    check_options,
)
from tandem_loadtest.run.spec import Target
from tandem_loadtest.workload.settings import Arrivals, Prompts, Workload

from .engines import TOKENS_PER_WORD, FakeOpenAI

pytestmark = pytest.mark.component


def options(url: str, **changes: Any) -> BenchOptions:
    """20 completions in 0.1 s, without a warm-up."""
    values: dict[str, Any] = {
        "target": Target(url=url, model="m", endpoint=RequestKind.COMPLETIONS),
        "arrivals": Arrivals(process="constant", rate=200.0),
        "workload": Workload(preset="chat", prompt_tokens=20, output_tokens=2, turns=1),
        "prompts": Prompts(style="token-ids"),
        "limit": 20,
        "warm_up": 0,
    }
    return BenchOptions(**(values | changes))


async def run(
    settings: BenchOptions,
    stop: asyncio.Event | None = None,
    states: list[BenchProgress] | None = None,
) -> Report:
    states = [] if states is None else states
    return await run_bench(settings, states.append, stop or asyncio.Event())


async def test_a_report_has_every_request_of_every_repeat() -> None:
    engine = FakeOpenAI()
    states: list[BenchProgress] = []
    async with engine.serve() as url:
        report = await run(options(url, repeats=2, processes=2, gpus=2), states=states)
    assert [repeat.all.outcomes for repeat in report.repeats] == [{"ok": 20}] * 2
    assert [repeat.all.output_tokens for repeat in report.repeats] == [40, 40]
    assert [len(repeat.generator.cpu_share) for repeat in report.repeats] == [2, 2]
    assert (report.model, report.endpoint, report.gpus) == ("m", "completions", 2)
    assert report.workload["workload"] == "chat"
    # Prompts of a repeat are not those of another, which the server may have cached.
    assert len({str(body["prompt"]) for body in engine.bodies}) == 40
    assert (states[0].phase, states[-1].phase) == ("checking", "repeat")
    assert (states[-1].step, states[-1].finished, states[-1].in_flight) == (2, 20, 0)
    assert states[-1].outcomes == {"ok": 20}


async def test_the_warm_up_counts_nowhere_and_calibrates_words() -> None:
    engine = FakeOpenAI()
    chat = Target(url="", model="m", endpoint=RequestKind.CHAT, stream=False)
    async with engine.serve() as url:
        settings = options(
            url,
            target=msgspec.structs.replace(chat, url=url),
            workload=Workload(preset="chat", prompt_tokens=200, output_tokens=2, turns=2, think=0),
            prompts=Prompts(style="words", tokens_per_word=1.0),
            arrivals=Arrivals(process="closed", concurrency=4),
            warm_up=6,
        )
        report = await run(settings)
    (repeat,) = report.repeats
    # 20 sessions of 2 turns; the warm-up sent the first turns of 6 sessions.
    assert repeat.all.outcomes == {"ok": 40}
    assert len(engine.bodies) == 46
    assert repeat.generator.warnings == []
    warm_up, run_first = engine.bodies[:6], [b for b in engine.bodies[6:] if len(b["messages"]) < 4]
    # A word has more tokens than was assumed, so the calibrated prompts have fewer words.
    assert mean_words(run_first) < 1.4 / TOKENS_PER_WORD * mean_words(warm_up)


def mean_words(bodies: list[dict[str, Any]]) -> float:
    words = [sum(len(m["content"].split()) for m in body["messages"]) for body in bodies]
    return sum(words) / len(words)


async def test_the_warm_up_does_not_think() -> None:
    engine = FakeOpenAI()
    async with engine.serve() as url:
        await run(options(url, workload=Workload(preset="chat", think=3600.0), warm_up=4, limit=2))
    assert len(engine.bodies) == 6


async def test_failing_warm_up_requests_do_not_keep_the_losses_from_the_report() -> None:
    engine = FakeOpenAI()
    engine.status = 503
    async with engine.serve() as url:
        report = await run(options(url, warm_up=2))
    (repeat,) = report.repeats
    assert repeat.all.outcomes == {"shed": 20}
    assert any("requests of the warm-up were lost" in w for w in repeat.generator.warnings)


async def test_a_stop_gives_a_report_of_what_was_measured() -> None:
    engine = FakeOpenAI()
    stop = asyncio.Event()

    async def stop_when_begun() -> None:
        await engine.holds(5)
        engine.is_open.clear()
        await engine.holds(8)
        stop.set()

    async with engine.serve() as url:
        stopper = asyncio.create_task(stop_when_begun())
        arrivals = Arrivals(process="constant", rate=20.0)
        report = await run(options(url, arrivals=arrivals, limit=1000, repeats=3), stop)
        await stopper
    (repeat,) = report.repeats
    assert repeat.stopped
    assert repeat.all.requests == 1000
    assert set(repeat.all.outcomes) == {"ok", "unsent"}
    reasons = {failure.reason: failure.count for failure in repeat.failures}
    assert reasons["the run was stopped while it was in flight"] >= 1
    assert reasons["the run was stopped before its time"] >= 1000 - repeat.rates.due > 0
    # Only requests whose time had come are in the rates: 20 per second, and the one at the start.
    assert repeat.rates.due >= 8
    assert repeat.rates.scheduled == pytest.approx(20.0, rel=0.2)
    assert repeat.rates.lost == repeat.rates.due - repeat.all.outcomes["ok"]


async def test_a_stop_during_the_warm_up_is_an_error_as_nothing_was_measured() -> None:
    engine = FakeOpenAI()
    engine.is_open.clear()
    stop = asyncio.Event()
    async with engine.serve() as url:
        running = asyncio.create_task(run(options(url, warm_up=2), stop))
        await engine.holds(1)
        stop.set()
        with pytest.raises(BenchError, match="stopped before its first request"):
            await running


def searching(url: str, **changes: Any) -> BenchOptions:
    """A search from 50 sessions per second on, with steps of 0.2 s."""
    values: dict[str, Any] = {
        "slo": Slo(e2e=1000.0),
        "search": Search(attainment=0.5, most_steps=3),
        "arrivals": Arrivals(process="constant", rate=50.0),
        "limit": None,
        "duration": 0.2,
    }
    return options(url, **(values | changes))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no step invalid."""
    monkeypatch.setattr(distributions, "INVALID_SECONDS", 1000.0)


@pytest.mark.usefixtures("patient")
async def test_a_stop_of_a_search_keeps_its_steps() -> None:
    engine = FakeOpenAI()
    stop = asyncio.Event()

    async def stop_in_second_step() -> None:
        await engine.holds(15)
        stop.set()

    async with engine.serve() as url:
        stopper = asyncio.create_task(stop_in_second_step())
        report = await run(searching(url, search=Search()), stop)
        await stopper
    assert [step.rate for step in report.search][:1] == [50.0]
    assert report.repeats[-1].stopped
    assert "the search was stopped before its end" in report.repeats[0].generator.warnings


async def test_events_and_metrics_pages_are_in_the_report(tmp_path: Path) -> None:
    engine = FakeOpenAI()
    engine.metrics = "# TYPE sent_total counter\nsent_total 3\n"
    async with engine.serve() as url:
        settings = options(
            url,
            commands=(TimedCommand(at=0.0, command="echo killed; exit 1"),),
            metrics_urls=(f"{url}/metrics",),
            arrivals=Arrivals(process="constant", rate=20.0),
        )
        (repeat,) = (await run(settings)).repeats
    (event,) = repeat.events
    assert (event.command, event.exit_status, event.output) == ("echo killed; exit 1", 1, "killed")
    (metrics,) = repeat.server
    assert (metrics.before_after, metrics.error) == ({"sent_total": 0.0}, None)


async def test_a_metrics_page_that_cannot_be_read_is_a_warning() -> None:
    metrics = FakeOpenAI()
    metrics.metrics = "# TYPE sent_total counter\nsent_total 3\n"
    metrics.authorization = "Bearer key"
    async with FakeOpenAI().serve() as url, metrics.serve() as guarded:
        target = Target(
            url=url,
            model="m",
            endpoint=RequestKind.COMPLETIONS,
            headers={"authorization": "Bearer key"},
        )
        page = f"{guarded}/metrics"
        (repeat,) = (await run(options(url, target=target, metrics_urls=(page,)))).repeats
    assert repeat.all.outcomes == {"ok": 20}
    # The target's key is for the target alone.
    assert f"{page} cannot be read: HTTP 401" in repeat.generator.warnings


async def test_answers_other_than_the_references_are_wrong_or_differ() -> None:
    def wrong_once(body: dict[str, Any]) -> str:
        return "wrong" if body["prompt"] == engine.bodies[0]["prompt"] else "right"

    engine, reference = FakeOpenAI(wrong_once), FakeOpenAI(lambda _: "right")
    random = FakeOpenAI(lambda _: f"answer {len(random.bodies)}")
    async with engine.serve() as url, reference.serve() as right, random.serve() as unsteady:
        settings = options(url, processes=2, reference=Reference(url=right))
        (repeat,) = (await run(settings)).repeats
        assert repeat.all.outcomes == {"ok": 19, "wrong": 1}
        engine.bodies.clear()
        settings = options(url, limit=5, reference=Reference(url=unsteady))
        (repeat,) = (await run(settings)).repeats
        assert repeat.all.outcomes == {"differs": 5}


async def test_the_check_against_a_reference_shows_its_progress() -> None:
    states: list[BenchProgress] = []
    async with FakeOpenAI().serve() as url, FakeOpenAI().serve() as right:
        settings = options(url, processes=2, reference=Reference(url=right))
        await run(settings, states=states)
    checks = [state for state in states if state.phase == "reference"]
    assert (checks[0].finished, checks[0].scheduled) == (0, 20)
    assert (checks[-1].finished, checks[-1].scheduled) == (20, 20)
    assert checks[-1].outcomes == {"ok": 20}


async def test_a_reference_that_fails_leaves_the_requests_ok_with_a_warning() -> None:
    reference = FakeOpenAI()
    reference.status = 500
    async with FakeOpenAI().serve() as url, reference.serve() as broken:
        settings = options(url, processes=2, reference=Reference(url=broken))
        (repeat,) = (await run(settings)).repeats
    assert repeat.all.outcomes == {"ok": 20}
    (warning,) = [w for w in repeat.generator.warnings if "reference" in w]
    assert warning.startswith("20 answers were not compared with the reference's, because")
    assert "20 × HTTP" in warning


async def test_a_stop_ends_the_check_against_a_reference() -> None:
    reference = FakeOpenAI()
    stop = asyncio.Event()

    async def stop_when_some_are_compared() -> None:
        await reference.holds(8)
        reference.is_open.clear()
        await reference.holds(12)
        stop.set()

    async with FakeOpenAI().serve() as url, reference.serve() as right:
        stopper = asyncio.create_task(stop_when_some_are_compared())
        (repeat,) = (await run(options(url, reference=Reference(url=right)), stop)).repeats
        await stopper
    assert repeat.all.outcomes == {"ok": 20}
    assert not repeat.stopped
    (warning,) = [w for w in repeat.generator.warnings if "reference" in w]
    assert warning.endswith("answers were not compared with the reference's: the run was stopped")
    assert 0 < int(warning.split()[0]) <= 12


@pytest.mark.usefixtures("patient")
async def test_the_search_measures_at_the_highest_rate_that_meets_the_slo() -> None:
    engine = FakeOpenAI()
    states: list[BenchProgress] = []
    async with engine.serve() as url:
        report = await run(searching(url), states=states)
    assert [(step.rate, step.attainment, step.invalid) for step in report.search] == [
        (50.0, 1.0, None),
        (100.0, 1.0, None),
        (200.0, 1.0, None),
    ]
    # Every step lasts as long, so that a higher rate is more requests.
    assert [step.scheduled for step in report.search] == pytest.approx([50.0, 100.0, 200.0])
    assert all(0 < step.achieved <= step.scheduled for step in report.search)
    assert report.workload["rate"] == 200.0
    assert len(engine.bodies) == 10 + 20 + 40 + 40
    assert Counter(state.phase for state in states).keys() == {"checking", "search", "repeat"}
    assert {state.rate for state in states if state.phase == "search"} == {50.0, 100.0, 200.0}
    (warning,) = [w for w in report.repeats[0].generator.warnings if "search" in w]
    assert warning.startswith("the search ended at 200 sessions/s without finding a rate that fail")


async def test_a_late_load_generator_limits_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    # No generator is exact enough for this.
    monkeypatch.setattr(distributions, "INVALID_SECONDS", 1e-9)
    monkeypatch.setattr(distributions, "INVALID_SHARE", 1e-9)
    async with FakeOpenAI().serve() as url:
        arrivals = Arrivals(process="constant", rate=100.0)
        report = await run(searching(url, search=Search(most_steps=2), arrivals=arrivals))
    assert [step.rate for step in report.search] == [100.0, 50.0]
    assert report.workload["rate"] == 50.0
    warnings = " ".join(report.repeats[0].generator.warnings)
    assert "the load generator was the limit of the search, not the server: at 50 " in warnings
    assert "use --processes" in warnings


@pytest.mark.usefixtures("patient")
async def test_a_file_with_too_few_conversations_limits_the_search(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    chat = {"messages": [{"role": r, "content": "hello"} for r in ("user", "assistant")]}
    file.write_text((json.dumps(chat) + "\n") * 12)
    async with FakeOpenAI().serve() as url:
        settings = searching(
            url,
            target=Target(url=url, model="m"),
            prompts=Prompts(style="words"),
            workload=Workload(preset="sharegpt", file=str(file)),
            search=Search(most_steps=2),
        )
        report = await run(settings)
    assert [(step.rate, step.invalid is None) for step in report.search] == [
        (50.0, True),
        (100.0, False),
    ]
    assert report.workload["rate"] == 50.0
    assert "12 sessions, 20 were due" in " ".join(report.repeats[0].generator.warnings)


async def test_without_a_rate_that_meets_the_slo_the_report_says_so() -> None:
    engine = FakeOpenAI()
    engine.status = 500
    async with engine.serve() as url:
        arrivals = Arrivals(process="constant", rate=100.0)
        report = await run(searching(url, search=Search(most_steps=2), arrivals=arrivals))
    assert [step.attainment for step in report.search] == [0.0, 0.0]
    assert report.workload["rate"] == 50.0
    assert "without finding a rate that meets the SLO" in " ".join(
        report.repeats[0].generator.warnings
    )


@pytest.mark.parametrize("process", ["poisson", "closed"])
@pytest.mark.parametrize("preset", ["trace", "sharegpt"])
def test_a_file_needs_neither_limit_nor_duration(preset: str, process: str) -> None:
    arrivals = Arrivals(process=process, rate=1.0, concurrency=2)
    workload = Workload(preset=preset, file="file")
    check_options(options("http://h", limit=None, arrivals=arrivals, workload=workload))


async def test_a_server_that_is_not_ready_is_an_error() -> None:
    with pytest.raises(NotReadyError, match="Connection refused"):
        await run(options("http://127.0.0.1:1"))
    async with FakeOpenAI().serve() as url:
        with pytest.raises(NotReadyError, match=r"no model 'adapter'; it serves m"):
            await run(options(url, workload=Workload(preset="chat", models={"adapter": 1.0})))
        with pytest.raises(NotReadyError, match="Connection refused"):
            await run(options(url, reference=Reference(url="http://127.0.0.1:1")))


async def test_a_workload_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}\n")
    workload = Workload(preset="trace", file=str(trace))
    with pytest.raises(WorkloadFailed, match=r"trace\.jsonl:1: "):
        await run(options("http://h", workload=workload))
    absent = Workload(preset="trace", file=str(tmp_path / "absent.jsonl"))
    with pytest.raises(WorkloadFailed, match=r"absent\.jsonl"):
        await run(options("http://h", workload=absent))
    with pytest.raises(WorkloadFailed):
        await run(options("ftp://h"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "repeats"),
        ({"processes": 0}, "processes"),
        ({"limit": None}, "limit or a duration"),
        ({"duration": 0.0}, "duration"),
        ({"max_in_flight": 0}, "--max-in-flight"),
        ({"arrivals": Arrivals(process="closed")}, "concurrency"),
        ({"search": Search()}, "SLO"),
        ({"search": Search(), "slo": Slo(ttft=1.0)}, "--find-rate needs --duration"),
        ({"search": Search(), "slo": Slo(ttft=1.0), "duration": 1.0}, "exclude each other"),
        (
            {
                "search": Search(),
                "slo": Slo(ttft=1.0),
                "arrivals": Arrivals(process="closed", concurrency=1),
            },
            "poisson",
        ),
        (
            {
                "reference": Reference(url="http://r"),
                "target": Target(url="http://t", model="m", extra_body={"temperature": 0.7}),
            },
            "temperature",
        ),
    ],
)
async def test_options_that_do_not_fit_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message) as caught:
        await run(options("http://127.0.0.1:1", **changes))
    assert isinstance(caught.value, BenchError)
