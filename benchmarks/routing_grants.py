"""What the simulation grants the picker, each taken away in turn.

    python -m benchmarks.routing --only grants [--trace FILE] [--requests N] [--seeds N]

Rivals are granted as much or more: the rebuilt policies know lengths of prompts exactly, and what
they observe at once.
"""

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from tests.epp.simulation.real_picker import PickerSettings, RealPicker, Reports
from tests.epp.simulation.regimes import REGIMES

from tandem_planner.simulation.loop import TIMING, Timing, simulate

from .figures import Figure, progress, without_target
from .routing_load import Load
from .routing_rivals import UNIFIED, Row, medians, row_text, show, summarize


@dataclass(frozen=True)
class Grant:
    """What one run differs in."""

    picker: PickerSettings | None = None
    timing: Timing = TIMING
    is_spread: bool = False


_SLOW: Final = Timing(scrape=2.0, page_age=1.0, decision=10.0, report=0.05)
_GRANTS: Final[Mapping[str, Grant]] = {
    "as granted": Grant(),
    "requests do not say max_tokens": Grant(PickerSettings(says_max_tokens=False)),
    "sidecars of vLLM report": Grant(PickerSettings(reports=Reports.SIDECAR)),
    "no sidecars": Grant(PickerSettings(reports=Reports.NOTHING)),
    "metrics every 2 s, 1 s old": Grant(timing=TIMING._replace(scrape=2.0, page_age=1.0)),
    "first tokens known after 50 ms": Grant(timing=TIMING._replace(report=0.05)),
    "decisions take ten times as long": Grant(timing=TIMING._replace(decision=10.0)),
    "all of these at once, with sidecars": Grant(
        PickerSettings(says_max_tokens=False, reports=Reports.SIDECAR), _SLOW
    ),
    "times not rounded": Grant(is_spread=True),
}


def compare_grants(load: Load, seeds: int, pool: Executor) -> list[Figure]:
    """A row of medians for each grant, and the figures over those as granted."""
    futures = [
        (name, pool.submit(_run, name, load, seed)) for seed in range(seeds) for name in _GRANTS
    ]
    trials: dict[str, list[Row]] = {name: [] for name in _GRANTS}
    for name, future in futures:
        trials[name].append(future.result())
        progress(f"  {name}: {row_text(trials[name][-1])}")
    rows = {name: medians(each) for name, each in trials.items()}
    title = f"what the simulation grants, at {load.speed:g} ×, median of {seeds} seeds"
    show(UNIFIED, title, rows)
    granted = rows["as granted"]
    return [
        without_target(
            f"{slo.text} goodput, over that as granted: {name}",
            row.goodput[i] / granted.goodput[i],
            "ratio",
        )
        for name, row in rows.items()
        for i, slo in enumerate(UNIFIED.slos[:1])
    ]


def _run(name: str, load: Load, seed: int) -> Row:
    grant = _GRANTS[name]
    pods = REGIMES[load.regime].pods(seed)
    requests = load.times(1.0, is_spread=grant.is_spread).requests(seed)
    picker = RealPicker(pods, seed, grant.picker)
    return summarize(simulate(requests, pods, picker, timing=grant.timing), UNIFIED.slos)
