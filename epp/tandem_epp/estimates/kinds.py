"""Pods without samples start from the figures of alike pods: same role, models and compat hash.

Pods whose samples do not tell them apart have the same figures, those of one of them. With
figures that differ by chance, the pod that seems faster would get all requests at low load, and the
others, which get none, would never be measured again.

A pod whose samples are old returns to them: a pod that was slow once, and gets no requests because
of that, would otherwise be believed to be slow for ever.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from operator import mul
from statistics import median
from typing import Final

from tandem_contract.fabric_classes import FabricClass
from tandem_planner.decode_fit import DECODE_PRIOR, DecodeCost
from tandem_planner.learned_cost import CostT, LearnedCost
from tandem_planner.prefill_fit import PREFILL_PRIOR, PrefillCost
from tandem_planner.shared_costs import share_costs
from tandem_planner.transfer import KV_BYTES_PRIOR, TRANSFER_PRIOR, TransferCost, TransferFit

from .pod_estimates import PodEstimates

MIN_SAMPLES: Final = 1
"""Samples from which a pod's fit is taken over by others."""
_LEAST_SHARE: Final = 0.1
"""Share of an assumed coefficient, on an engine as fast as the donors, that is passed on at least.
A fit multiplies the coefficients that it starts from, so it would never leave the 0 of a donor
whose samples do not show what the coefficient stands for. Too high: pods without samples seem
slower than their donors."""
_PREFILL: Final = (1.0, 1e3, 1e6)
"""A request of 1,000 tokens, by which the donors' prefills are compared with the assumed ones."""
_DECODE: Final = (1.0, 16.0)
"""A step of 16 requests."""
_TRANSFER: Final = (1.0, 1000 * KV_BYTES_PRIOR)
"""The KV of 1,000 tokens."""
STALE_SECONDS: Final = 1800.0
"""Seconds by which a pod's latest sample may be older than that of an alike pod. Too short: a pod
with few requests forgets that it differs. Too long: a pod that was slow is avoided long after."""


def fill_in(pods: Iterable[tuple[Hashable, PodEstimates]], *, is_same_role: bool = False) -> None:
    """Give each pod without samples the medians of those of its kind; `pods` are (kind, estimates)
    pairs. `is_same_role`: those of a kind have one role. Then also each pod gets them whose samples
    are old beside those of its kind, or do not tell it apart."""
    kinds = defaultdict(list)
    for kind, estimates in pods:
        kinds[kind].append(estimates)
    for alike in kinds.values():
        if is_same_role:
            _drop_stale(alike, [pod.prefill for pod in alike])
            _drop_stale(alike, [pod.decode for pod in alike])
            _drop_stale(alike, [pod.transfer for pod in alike])
            _drop_stale_classes(alike)
        _fill_in_prefill(alike)
        _fill_in_decode(alike)
        _fill_in_transfer(alike)
        classes = {fabric for pod in alike for fabric in pod.fabrics.fits}
        for fabric in classes:
            _fill_in_costs(alike, [pod.fabrics.fit(fabric) for pod in alike])
        if is_same_role:
            _share(alike, [pod.prefill for pod in alike])
            _share(alike, [pod.decode for pod in alike])
            _share(alike, [pod.transfer for pod in alike])
            for fabric in classes:
                _share(alike, [pod.fabrics.fit(fabric) for pod in alike])


def _medians(
    costs: Sequence[tuple[float, ...]], assumed: tuple[float, ...], typical: tuple[float, ...]
) -> Iterator[float]:
    """The median of each coefficient of `costs`, and at least a share of the one in `assumed`,
    scaled by how fast the donors are at something `typical`."""
    medians = [median(column) for column in zip(*costs, strict=True)]
    speed = sum(map(mul, medians, typical)) / sum(map(mul, assumed, typical))
    return (max(m, _LEAST_SHARE * speed * c) for m, c in zip(medians, assumed, strict=True))


def _share(alike: list[PodEstimates], fits: Sequence[LearnedCost[CostT]]) -> None:
    """Let the pods share those of `fits`, one per pod, that samples do not tell apart."""
    for pod, is_changed in zip(alike, share_costs(fits), strict=True):
        if is_changed:
            pod.learned()


def _drop_stale(alike: list[PodEstimates], fits: Sequence[LearnedCost[CostT]]) -> None:
    newest = max((fit.updated_at or 0.0 for fit in fits), default=0.0)
    for pod, fit in zip(alike, fits, strict=True):
        if fit.updated_at is not None and newest - fit.updated_at > STALE_SECONDS:
            fit.window.clear()
            pod.learned()


def _drop_stale_classes(alike: list[PodEstimates]) -> None:
    """Forget a fabric class of which no alike pod has a sample as new as those of other classes:
    pairs that once seemed slow, and are not chosen because of that, are tried again."""
    newest: dict[FabricClass, float] = {}
    for pod in alike:
        for fabric, fit in pod.fabrics.fits.items():
            newest[fabric] = max(newest.get(fabric, 0.0), fit.updated_at or 0.0)
    for fabric, at in newest.items():
        # At 0 it is known from pods of another role alone.
        if 0.0 < at < max(newest.values()) - STALE_SECONDS:
            for pod in alike:
                pod.fabrics.forget(fabric)
                pod.learned()
        else:
            _drop_stale(alike, [pod.fabrics.fit(fabric) for pod in alike])


def _fill_in_prefill(alike: list[PodEstimates]) -> None:
    costs = [pod.prefill.cost for pod in alike if pod.prefill.count >= MIN_SAMPLES]
    if costs:
        shared = PrefillCost._make(_medians(costs, PREFILL_PRIOR, _PREFILL))
        for pod in alike:
            if not pod.prefill.count and pod.prefill.cost != shared:
                pod.prefill.set_prior(shared)
                pod.learned()


def _fill_in_decode(alike: list[PodEstimates]) -> None:
    costs = [pod.decode.cost for pod in alike if pod.decode.count >= MIN_SAMPLES]
    if costs:
        shared = DecodeCost._make(_medians(costs, DECODE_PRIOR, _DECODE))
        for pod in alike:
            if pod.shared_decode != shared:
                pod.shared_decode = shared
                pod.learned()
            if not pod.decode.count and pod.decode.cost != shared:
                pod.decode.set_prior(shared)
                pod.learned()


def _fill_in_transfer(alike: list[PodEstimates]) -> None:
    _fill_in_costs(alike, [pod.transfer for pod in alike])
    sizes = [size for pod in alike if (size := pod.transfer.bytes_per_token) is not None]
    for pod in alike:
        if sizes and pod.transfer.bytes_per_token is None:
            pod.transfer.add_size(1.0, median(sizes))
            pod.learned()


def _fill_in_costs(alike: list[PodEstimates], fits: Sequence[TransferFit]) -> None:
    """Give each of `fits` without samples, one per pod, the medians of those with samples."""
    if all(fit.count for fit in fits):
        return
    costs = [fit.cost for fit in fits if fit.count >= MIN_SAMPLES]
    if not costs:
        return
    shared = TransferCost._make(_medians(costs, TRANSFER_PRIOR, _TRANSFER))
    for pod, fit in zip(alike, fits, strict=True):
        if not fit.count and fit.cost != shared:
            fit.set_prior(shared)
            pod.learned()
