"""burst-prefix-cache-producer: requests with one prompt that come in a burst stay together.

After llm-d's plugin of that name (llm-d-router 0.10), with one difference: llm-d collects the
requests of a window and holds them until it ends; here none waits. The first request of a prompt is
placed by the other scorers, and those that come within the window follow it.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence

from tandem_contract.prefix import whole_blocks

from ...backends.pods import Pod
from ...choice.context import ChoiceContext
from ...estimates.engine_figures import Gauges
from .llmd_parameters import BurstParameters

_IDLE = Gauges()


class BurstPrefix:
    """1 for the pod that the request shall go to, 0 for the others; 0 each for a prompt that is new
    in this window.

    A prompt fills one pod up to `maxPerReplica` requests, then the one with the least load of this
    window. One that only begins like another, for `minColocateBlocks` blocks, goes to a pod of that
    one which is below its share of the window, else to the one with the least load."""

    is_steady = False

    def __init__(self, parameters: BurstParameters) -> None:
        self._limits = parameters
        self._start = 0.0
        """When the window began; Unix seconds."""
        self._requests = 0
        self._load: Counter[str] = Counter()
        """Pod → requests of this window, or blocks of their prompts."""
        self._prompts: dict[int, OrderedDict[str, int]] = {}
        """Prompt → pod → its requests in this window; the pod that is being filled last."""
        self._beginnings: dict[int, set[str]] = {}
        """Beginning of prompts → their pods."""

    def score(self, pods: Sequence[Pod], context: ChoiceContext) -> list[float]:
        self._advance(context.now)
        target = self._target(pods, context) if pods else None
        return [1.0 if pod is target else 0.0 for pod in pods]

    def on_placed(self, context: ChoiceContext, decode: Pod, prefill: Pod | None) -> None:
        """Count the request on its pods."""
        self._advance(context.now)
        prompt, beginning = self._keys(context)
        if prompt is None or self._is_full():
            return
        if not self._requests:
            self._start = context.now
        self._requests += 1
        blocks = len(context.request.chain) if context.request else 0
        for pod in (decode, prefill):
            if pod is None:
                continue
            requests = self._prompts.setdefault(prompt, OrderedDict())
            is_by_requests = self._limits.balanceBy == "requests"
            # A pod computes a prompt once, however many requests have it.
            added = 1 if is_by_requests else blocks * (pod.name not in requests)
            self._load[pod.name] += added
            requests[pod.name] = requests.get(pod.name, 0) + 1
            requests.move_to_end(pod.name)
            if beginning is not None:
                self._beginnings.setdefault(beginning, set()).add(pod.name)

    def _target(self, pods: Sequence[Pod], context: ChoiceContext) -> Pod | None:
        prompt, beginning = self._keys(context)
        if prompt is None or self._is_full():
            return None
        if (requests := self._prompts.get(prompt)) is not None:
            limit = self._limits.maxPerReplica
            by_name = {pod.name: pod for pod in pods}
            for name in reversed(requests):
                if name in by_name and (limit < 0 or requests[name] < limit):
                    return by_name[name]
            return self._least([p for p in pods if p.name not in requests] or pods)
        holders = self._beginnings.get(beginning) if beginning is not None else None
        if holders is None:
            return None
        share = (self._load.total() + len(pods) - 1) // len(pods)
        return self._least(
            [p for p in pods if p.name in holders and self._load[p.name] < share] or pods
        )

    def _least(self, pods: Sequence[Pod]) -> Pod:
        return min(pods, key=lambda p: (self._load[p.name], (p.gauges or _IDLE).running, p.name))

    def _keys(self, context: ChoiceContext) -> tuple[int | None, int | None]:
        """What identical prompts have in common, and those that begin alike; None: nothing."""
        chain: Sequence[int] = context.request.chain if context.request else ()
        limits = self._limits
        if limits.maxPrefixTokensToMatch:
            chain = chain[: whole_blocks(limits.maxPrefixTokensToMatch)]
        begin = whole_blocks(limits.minColocateBlocks * limits.blockSizeTokens)
        return (
            chain[-1] if chain else None,
            chain[begin - 1] if 0 < begin <= len(chain) else None,
        )

    def _is_full(self) -> bool:
        return 0 <= self._limits.maxBatchSize <= self._requests

    def _advance(self, now: float) -> None:
        if self._requests and now - self._start > self._limits.windowDurationMs / 1000.0:
            self._requests = 0
            self._load.clear()
            self._prompts.clear()
            self._beginnings.clear()
