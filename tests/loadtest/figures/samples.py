"""Reports with plausible figures, made from random records."""

import random
from collections.abc import Iterator

from tandem_contract.paths import RoutingPath
from tandem_loadtest.figures.collector import Collector
from tandem_loadtest.figures.histogram import Histogram
from tandem_loadtest.figures.intervals import build_report
from tandem_loadtest.figures.model import Event, Repeat, Report, ServerMetrics, Slo
from tandem_loadtest.records import Outcome, Record

SLO = Slo(ttft=0.4, itl=0.03)
KILL = 20.0
"""Seconds after the start at which the sample's pod is killed."""


def sample_records(
    count: int = 600, *, rate: float = 15.0, seed: int = 0, slower: float = 1.0, lossy: bool = True
) -> Iterator[Record]:
    """Records of Poisson arrivals at `rate` per second on four paths and five pods.

    `slower` multiplies server times. `lossy`: about 5 % of the requests end in each kind of loss,
    and those at `KILL` lose their connection or stall.
    """
    random_ = random.Random(seed)
    time = 0.0
    for index in range(count):
        time += random_.expovariate(rate)
        yield _record(random_, index, time, slower, lossy)


def _record(
    random_: random.Random, index: int, intended: float, slower: float, lossy: bool
) -> Record:
    path = random_.choices(list(RoutingPath), [6, 3, 1, 0.5][: len(RoutingPath)])[0]
    outcome = random_.choices(list(Outcome), [1, 2, 1, 1, 1, 2, 1, 1, 1, 190])[0]
    outcome = outcome if lossy else Outcome.OK
    tokens = random_.randint(16, 96)
    prompt = random_.randint(100, 4000)
    started = intended + random_.expovariate(1 / 0.0002)
    first = started + slower * (0.08 + prompt * 5e-5 + random_.expovariate(1 / 0.02))
    gaps = [slower * random_.gammavariate(20, 0.001) for _ in range(tokens - 1)]
    if lossy and first < KILL < first + sum(gaps):
        if index % 2:
            outcome = Outcome.CONNECTION_LOST
        gaps[len(gaps) // 2] += 2.5
    model = random_.choice(["base", "lora-sql"])
    if outcome is Outcome.UNSENT:
        return Record(index, intended, outcome, "--max-in-flight was reached", model=model)
    if outcome in (Outcome.SHED, Outcome.ERROR_STATUS):
        status = 503 if outcome is Outcome.SHED else 500
        return Record(
            index, intended, outcome, f"HTTP status {status}", status,
            started, started, ended=started + 0.01, model=model,
        )  # fmt: skip
    if outcome not in (Outcome.OK, Outcome.WRONG, Outcome.DIFFERS):
        gaps = gaps[: len(gaps) // 2]
    last = first + sum(gaps)
    prefilled = path == RoutingPath.PREFILL_THEN_DECODE
    return Record(
        index, intended, outcome, "" if outcome is Outcome.OK else f"reason of {outcome}", 200,
        started, started + 0.0002, first, last, last + 0.001, tuple(gaps),
        prompt, tokens, random_.choice([None, prompt // 2]), model, str(path),
        f"prefill-{random_.randint(0, 1)}" if prefilled else "", f"decode-{random_.randint(0, 2)}",
    )  # fmt: skip


def sample_repeat(
    *,
    seed: int = 0,
    count: int = 600,
    slower: float = 1.0,
    lossy: bool = True,
    read_lag: float = 0.0004,
    stopped: bool = False,
    slo: Slo | None = SLO,
) -> Repeat:
    """One repeat of `sample_records`; a `read_lag` of a few milliseconds makes ITL invalid."""
    collector = Collector(slo)
    end = 1.0
    for record in sample_records(count, seed=seed, slower=slower, lossy=lossy):
        collector.add(record)
        end = max(end, record.ended or record.intended)
    lag = Histogram()
    lag.add_all([read_lag] * 1000)
    return collector.repeat(
        started="2026-01-02T03:04:05+00:00",
        seconds=end,
        stopped_at=end if stopped else None,
        read_lag=lag,
        cpu_share=[0.31, 0.35],
        events=[
            Event(at=KILL, command="kubectl delete pod decode-1", seconds=1.2, exit_status=0,
                  output='pod "decode-1" deleted'),
            Event(at=30.0, command="kubectl rollout restart", seconds=None, exit_status=None,
                  output=""),
        ] if lossy else [],
        server=[
            ServerMetrics(
                url="http://127.0.0.1:9090/metrics",
                before_after={"vllm:prompt_tokens_total": 1234567.0},
                gauges={"vllm:num_requests_running": [float(i % 17) for i in range(int(end))]},
            ),
            ServerMetrics(url="http://127.0.0.1:9091/metrics", before_after={}, gauges={},
                          error="connection refused"),
        ],
    )  # fmt: skip


def sample_report(
    *,
    repeats: int = 3,
    seed: int = 0,
    count: int = 600,
    slower: float = 1.0,
    lossy: bool = True,
    read_lag: float = 0.0018,
) -> Report:
    """A report of several repeats; its ITL is invalid by default, as the reads lag."""
    return build_report(
        [
            sample_repeat(
                seed=seed + i, count=count, slower=slower, lossy=lossy, read_lag=read_lag
            )
            for i in range(repeats)
        ],
        tandem_version="0.1.0",
        machine="2 × Example CPU, Linux 6.1, Python 3.11",
        url="http://127.0.0.1:8000",
        model="base",
        endpoint="chat",
        workload={
            "preset": "chat", "arrivals": "poisson", "rate": 15.0, "limit": count, "seed": seed,
            "shared": None, "turns": 3,
        },
        processes=2,
        gpus=4,
        slo=SLO,
    )  # fmt: skip
