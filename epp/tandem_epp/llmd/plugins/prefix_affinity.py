"""prefix-cache-affinity-filter: requests stay with pods that cache most of their prompt, until
these have much more to compute than others.

Rule and defaults are llm-d's (llm-d-router at ebab687, and maxTokensInFlightPenalty of the versions
before, which its guides still set).
"""

from collections.abc import Sequence
from random import Random

from ...backends.pods import Pod
from ...choice.context import ChoiceContext
from .llmd_parameters import PrefixAffinityParameters
from .predicted_latency import predicted_ttft
from .profile import Scorer


class PrefixAffinityFilter:
    """Keeps pods that cache at least `affinityThreshold` of the prompt; all, where none does or
    where the best of them is behind the best other pod by more than a penalty.

    Compared are prompt tokens in flight, over the backend's weight: in seconds, at
    `peakPrefillThroughput` tokens per second, or as they are. What is computed elsewhere or in
    decodes does not count. With `latencyPredictor` seconds are the EPP's own prediction of the
    time until the pod has computed this prompt.
    """

    is_steady = False

    def __init__(
        self, parameters: PrefixAffinityParameters, shares: Scorer, random: Random | None = None
    ) -> None:
        """`shares`: scores each pod by the share of the prompt that it caches."""
        self._parameters, self.shares, self._random = parameters, shares, random or Random()

    def keep(self, pods: Sequence[Pod], context: ChoiceContext) -> Sequence[Pod]:
        settings = self._parameters
        if len(pods) <= 1 or settings.affinityThreshold <= 0:
            return pods
        if self._random.random() < settings.explorationProbability:
            return pods
        shares = self.shares.score(pods, context)
        is_warm = [share >= settings.affinityThreshold for share in shares]
        warm = [pod for pod, is_kept in zip(pods, is_warm, strict=True) if is_kept]
        if not warm or len(warm) == len(pods):
            return pods
        others = [pod for pod, is_kept in zip(pods, is_warm, strict=True) if not is_kept]
        return pods if self._is_too_far_behind(warm, others, context) else warm

    def _is_too_far_behind(
        self, warm: Sequence[Pod], others: Sequence[Pod], context: ChoiceContext
    ) -> bool:
        settings = self._parameters
        tokens = _fewest_tokens(warm) - _fewest_tokens(others)
        if 0 < settings.maxTokensInFlightPenalty < tokens:
            return True
        if not settings.maxTTFTPenaltyMs:
            return False
        if settings.ttftSource == "latencyPredictor":
            seconds = _least_ttft(warm, context) - _least_ttft(others, context)
        else:
            seconds = tokens / settings.peakPrefillThroughput
        return settings.maxTTFTPenaltyMs < 1000 * seconds


def _fewest_tokens(pods: Sequence[Pod]) -> float:
    return min(pod.tokens_in_flight / pod.backend.weight for pod in pods)


def _least_ttft(pods: Sequence[Pod], context: ChoiceContext) -> float:
    return min(predicted_ttft(pod, context) for pod in pods)
