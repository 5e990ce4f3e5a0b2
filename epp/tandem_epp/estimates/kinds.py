"""Pods without samples start from the figures of alike pods: same role, models and compat hash."""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from statistics import median
from typing import Final

from tandem_planner.decode_fit import DecodeCost
from tandem_planner.prefill_fit import PrefillCost
from tandem_planner.transfer import TransferCost

from .pod_estimates import PodEstimates

MIN_SAMPLES: Final = 1
"""Samples from which a pod's fit is taken over by others."""


def fill_in(pods: Iterable[tuple[Hashable, PodEstimates]]) -> None:
    """Give each pod without samples the medians of those of its kind; `pods` are (kind, estimates)
    pairs."""
    kinds = defaultdict(list)
    for kind, estimates in pods:
        kinds[kind].append(estimates)
    for alike in kinds.values():
        _fill_in_prefill(alike)
        _fill_in_decode(alike)
        _fill_in_transfer(alike)


def _fill_in_prefill(alike: list[PodEstimates]) -> None:
    costs = [pod.prefill.cost for pod in alike if pod.prefill.count >= MIN_SAMPLES]
    if costs:
        shared = PrefillCost(*map(median, zip(*costs, strict=True)))
        for pod in alike:
            if not pod.prefill.count and pod.prefill.cost != shared:
                pod.prefill.set_prior(shared)
                pod.changed()


def _fill_in_decode(alike: list[PodEstimates]) -> None:
    costs = [pod.decode.cost for pod in alike if pod.decode.count >= MIN_SAMPLES]
    if costs:
        shared = DecodeCost(*map(median, zip(*costs, strict=True)))
        for pod in alike:
            if pod.shared_slope != shared.slope:
                pod.shared_slope = shared.slope
                pod.changed()
            if not pod.decode.count and pod.decode.cost != shared:
                pod.decode.set_prior(shared)
                pod.changed()


def _fill_in_transfer(alike: list[PodEstimates]) -> None:
    costs = [pod.transfer.cost for pod in alike if pod.transfer.count >= MIN_SAMPLES]
    sizes = [size for pod in alike if (size := pod.transfer.bytes_per_token) is not None]
    for pod in alike:
        if costs and not pod.transfer.count:
            pod.transfer.set_prior(TransferCost(*map(median, zip(*costs, strict=True))))
            pod.changed()
        if sizes and pod.transfer.bytes_per_token is None:
            pod.transfer.add_size(1.0, median(sizes))
            pod.changed()
