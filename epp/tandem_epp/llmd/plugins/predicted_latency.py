"""llm-d's plugins that choose by predicted latencies: slo-headroom-tier-filter and latency-scorer.

Rules, headers and defaults are llm-d's (llm-d-router at ebab687). Predictions are not those of its
latency predictor, a program beside its EPP, but the EPP's own, of which the cost is made: seconds
until the pod has computed the prompt, and the ITL of the decodes that it would run then.

*Headroom* is the request's target less the prediction, in milliseconds. A request without a target
has one of 0, so that all headrooms are negative and the smallest prediction is the best.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Final, NamedTuple

from tandem_contract.headers import ITL_TARGETS, TTFT_TARGETS
from tandem_planner.cost import RequestFigures, first_token_seconds

from ...backends.pods import Pod
from ...choice.context import ChoiceContext
from .latency_parameters import LatencyScorerParameters, TierParameters

_EPSILON: Final = 1e-9
_STEPS: Final = 100
"""Scores are multiples of 1 ÷ _STEPS, and at least one of them."""


class Headroom(NamedTuple):
    """What a pod leaves of the targets, in milliseconds; negative: it misses them."""

    ttft: float
    itl: float

    @property
    def is_positive(self) -> bool:
        """Whether both targets are met."""
        return self.ttft >= 0.0 and self.itl >= 0.0


def predicted_ttft(pod: Pod, context: ChoiceContext) -> float:
    """Seconds until `pod` has computed the prompt: wait and prefill. 0 for a request that is not
    read."""
    if context.request is None:
        return 0.0
    prompt = context.request.prompt_tokens
    request = RequestFigures(prompt, 0.0, context.now)
    cached = min(prompt, context.placed_tokens(pod))
    return first_token_seconds(request, pod.estimates.figures(context.now), cached)


def predicted_itl(pod: Pod) -> float:
    """Seconds between two tokens, with one decode more than run on `pod`."""
    decode = pod.estimates.best_decode
    return decode.step + decode.slope * (pod.estimates.decodes + 1)


def headroom(pod: Pod, context: ChoiceContext, itl_share: float = 1.0) -> Headroom:
    """That of `pod`; `itl_share`: share of the target for the ITL that counts. A pod that prefills
    for another one has no ITL."""
    ttft = _target(context, TTFT_TARGETS) - 1000.0 * predicted_ttft(pod, context)
    if context.peer is not None:
        return Headroom(ttft, 0.0)
    itl = itl_share * _target(context, ITL_TARGETS) - 1000.0 * predicted_itl(pod)
    return Headroom(ttft, itl)


def _target(context: ChoiceContext, names: Sequence[str]) -> float:
    """Milliseconds; 0: none, or no number."""
    text = next((context.headers[name] for name in names if name in context.headers), "0")
    try:
        return float(text)
    except ValueError:
        return 0.0


class TierFilter:
    """Keeps pods that meet both targets, and for a few requests those that do not, so that a pod
    which has recovered is noticed; all, where there are pods of one kind alone."""

    is_steady = False

    def __init__(
        self, parameters: TierParameters, itl_share: float, random: Random | None = None
    ) -> None:
        self._share, self._itl_share = parameters.epsilonExploreNeg, itl_share
        self._random = random or Random()

    def keep(self, pods: Sequence[Pod], context: ChoiceContext) -> Sequence[Pod]:
        are_positive = [headroom(pod, context, self._itl_share).is_positive for pod in pods]
        if all(are_positive) or not any(are_positive):
            return pods
        is_exploring = self._random.random() < self._share
        return [
            pod
            for pod, is_positive in zip(pods, are_positive, strict=True)
            if is_positive is not is_exploring
        ]


class LatencyScorer:
    """Headroom, from 1 ÷ 100 to 1.01, higher is better, by comparison with the other pods:

        ttftWeight × headroom of TTFT + tpotWeight × that of the ITL, each from 0 to 1

    Pods that meet the targets are scored, and by `least` the closest to them is the best; the
    others score 0. Where none meets them, pods without requests are scored, else those that miss
    the ITL only, else the TTFT only, else all of them, and the closest is the best. Equal headrooms
    tie.
    """

    is_steady = False

    def __init__(self, parameters: LatencyScorerParameters, itl_share: float) -> None:
        self._parameters, self._itl_share = parameters, itl_share

    def score(self, pods: Sequence[Pod], context: ChoiceContext) -> list[float]:
        rooms = [headroom(pod, context, self._itl_share) for pod in pods]
        scores = [0.0] * len(pods)
        kept, is_positive = _best_kind(pods, rooms)
        prefers_most = is_positive and self._parameters.headroomSelectionStrategy == "most"
        for i, far in zip(kept, self._distances([rooms[i] for i in kept]), strict=True):
            scores[i] = (int((far if prefers_most else 1.0 - far) * _STEPS) + 1) / _STEPS
        return scores

    def _distances(self, rooms: Sequence[Headroom]) -> list[float]:
        """How far each is from the targets, from 0 to 1."""
        ttfts = _normalized([abs(room.ttft) for room in rooms])
        itls = _normalized([abs(room.itl) for room in rooms])
        first, second = self._parameters.ttftWeight, self._parameters.tpotWeight
        if ttfts is None or itls is None or first + second <= 0.0:
            return ttfts or itls or [0.5] * len(rooms)
        share = first / (first + second)
        return [share * a + (1.0 - share) * b for a, b in zip(ttfts, itls, strict=True)]


def _best_kind(pods: Sequence[Pod], rooms: Sequence[Headroom]) -> tuple[list[int], bool]:
    """The pods that are scored, and whether they meet the targets."""
    kinds: tuple[Callable[[int], bool], ...] = (
        lambda i: not pods[i].in_flight,
        lambda i: rooms[i].ttft >= 0.0,
        lambda i: rooms[i].itl >= 0.0,
        lambda i: True,
    )
    everything = range(len(pods))
    if positive := [i for i in everything if rooms[i].is_positive]:
        return positive, True
    of_kinds = ([i for i in everything if is_kind(i)] for is_kind in kinds)
    return next((kept for kept in of_kinds if kept), []), False


def _normalized(values: Sequence[float]) -> list[float] | None:
    """From 0 to 1; None: all are equal."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high - low <= _EPSILON:
        return None
    return [(value - low) / (high - low) for value in values]
