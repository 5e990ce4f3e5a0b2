"""Reports of unusual runs."""

from msgspec import structs

from tandem_loadtest.figures.model import (
    Event,
    Failure,
    Figures,
    Generator,
    Rates,
    Repeat,
    Report,
    SearchStep,
    Timeline,
)
from tandem_loadtest.records import Outcome

from ..figures.samples import sample_report

HOSTILE = """</script><script>alert(1)</script><b onmouseover='alert(2)'>&lt;"x"</b>{{ 7 * 7 }}"""


def plain_report(
    *, requests: int = 3, outcome: Outcome = Outcome.OK, within_slo: int | None = None
) -> Report:
    """Requests that were not streamed, all with this outcome; no SLO, no events, one repeat."""
    repeat = Repeat(
        started="2026-01-02T03:04:05+00:00",
        seconds=2.0,
        stopped=False,
        all=Figures(
            requests=requests,
            outcomes={outcome: requests} if requests else {},
            within_slo=within_slo,
        ),
        rates=Rates(
            due=requests,
            lost=0 if outcome is Outcome.OK else requests,
            scheduled=1.5,
            requests=1.5,
            output_tokens=0.0,
            total_tokens=0.0,
        ),
        paths={},
        prefill_backends={},
        decode_backends={},
        models={},
        failures=[]
        if outcome is Outcome.OK or not requests
        else [Failure(outcome=outcome, reason="the reason", count=requests)],
        timeline=Timeline(
            interval=1.0,
            scheduled=[requests, 0],
            in_flight=[requests, 0],
            ttft_p50=[None, None],
            ttft_p99=[None, None],
            itl_p50=[None, None],
            itl_p99=[None, None],
            losses={} if outcome is Outcome.OK else {outcome: [requests, 0]},
            paths={},
            backends={},
        ),
        generator=Generator(lateness=None, read_lag=None, cpu_share=[]),
    )
    report = sample_report(repeats=1, count=20)
    return structs.replace(report, repeats=[repeat], summary={}, slo=None, gpus=None)


def searched_report() -> Report:
    """A report after a search, of which one step is invalid."""
    steps = [
        SearchStep(rate=2.0, scheduled=2.1, achieved=2.0, attainment=1.0),
        SearchStep(rate=8.0, scheduled=8.2, achieved=5.0, attainment=0.4, invalid="was too late"),
        SearchStep(rate=4.0, scheduled=3.9, achieved=3.9, attainment=0.97),
    ]
    return structs.replace(sample_report(repeats=1, count=50), search=steps)


def hostile_report() -> Report:
    """A report in which every text from outside is `HOSTILE`."""
    report = sample_report(repeats=1, count=200)
    (repeat,) = report.repeats
    line = repeat.timeline
    zeros = [0] * len(line.scheduled)
    hostile = structs.replace(
        repeat,
        started=HOSTILE,
        paths={HOSTILE: repeat.all},
        prefill_backends={HOSTILE: repeat.all},
        decode_backends={HOSTILE: repeat.all},
        models={HOSTILE: repeat.all},
        failures=[Failure(outcome=HOSTILE, reason=HOSTILE, count=1)],
        timeline=structs.replace(
            line,
            paths={HOSTILE: zeros},
            backends={HOSTILE: [1, *zeros[1:]]},
            losses={HOSTILE: [1, *zeros[1:]]},
        ),
        generator=structs.replace(repeat.generator, warnings=[HOSTILE]),
        events=[Event(at=1.0, command=HOSTILE, seconds=1.0, exit_status=1, output=HOSTILE)],
        server=[
            structs.replace(
                server,
                url=HOSTILE,
                error=HOSTILE,
                before_after={HOSTILE: 1.0},
                gauges={HOSTILE: [1.0]},
            )
            for server in repeat.server
        ],
    )
    return structs.replace(
        report,
        repeats=[hostile],
        model=HOSTILE,
        url=f"http://user:secret@{HOSTILE}/",
        machine=HOSTILE,
        workload={HOSTILE: HOSTILE},
        summary={**report.summary, HOSTILE: report.summary["goodput"]},
    )
