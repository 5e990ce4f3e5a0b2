"""The samples behind a pod's fits, as one replica of the EPP gives them to another."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

from tandem_contract.fabric_classes import FabricClass
from tandem_planner.sample_window import SampleWindow

from .pod_estimates import PodEstimates

Samples = Mapping[str, Sequence[Sequence[float]]]
"""Name of a fit → samples, the oldest first: features, seconds, and the Unix time of the
measurement."""

MOST_SAMPLES: Final = 32
"""Samples given of one fit: half of a window, enough to be robust."""


def samples_of(estimates: PodEstimates) -> Samples:
    """The latest samples of each fit that has any."""
    return {
        name: [[*s.features, s.seconds, s.at] for s in window.samples[-MOST_SAMPLES:]]
        for name, window in _windows(estimates).items()
        if window.count
    }


def add_samples(estimates: PodEstimates, samples: Samples, now: float) -> None:
    """Take over samples for the fits that have none yet; `now` is Unix seconds. Fits of unknown
    names, and samples of another form, are ignored."""
    for fabric in FabricClass:
        if _name(fabric) in samples:
            estimates.fabrics.fit(fabric)
    for name, window in _windows(estimates).items():
        if window.count:
            continue
        for row in islice(samples.get(name, ()), MOST_SAMPLES):
            *features, seconds, at = row if len(row) == len(window.prior) + 2 else (0.0, 0.0)
            if seconds > 0:
                # Clocks differ: no sample is of the future. NaN compares as False.
                window.add(tuple(features), seconds, at if 0.0 <= at <= now else now)
                if name == "prefill":
                    estimates.prefill.end_cold_start()
    estimates.learned()


def _windows(estimates: PodEstimates) -> dict[str, SampleWindow]:
    return {
        "prefill": estimates.prefill.window,
        "decode": estimates.decode.window,
        "transfer": estimates.transfer.window,
        **{_name(fabric): fit.window for fabric, fit in estimates.fabrics.fits.items()},
    }


def _name(fabric: FabricClass) -> str:
    return f"transfer_{fabric.word}"
