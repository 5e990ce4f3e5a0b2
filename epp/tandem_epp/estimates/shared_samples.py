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
"""Samples given of one fit at most: half of a window, enough to be robust."""
LEAST_SAMPLES: Final = 8
"""Samples given of one fit in the largest fleets. Fewer: one outlier would move the fit."""
SNAPSHOT_SAMPLES: Final = 16_384
"""Samples of one kind of fit that all pods together give: about 3 MiB in a snapshot over all kinds.
In a fleet of more than 512 pods or data-parallel ranks each gives fewer than MOST_SAMPLES, and from
2048 on LEAST_SAMPLES. Too high: a snapshot of a large fleet takes memory and time; too low: a
replica that joins starts from worse estimates."""


def most_samples(pods: int) -> int:
    """How many samples of one fit each of `pods` pods gives at most."""
    return max(LEAST_SAMPLES, min(MOST_SAMPLES, SNAPSHOT_SAMPLES // max(1, pods)))


def samples_of(estimates: PodEstimates, most: int = MOST_SAMPLES) -> Samples:
    """The latest samples of each fit that has any, `most` of each at most."""
    return {
        name: [[*s.features, s.seconds, s.at] for s in window.samples[-most:]]
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
