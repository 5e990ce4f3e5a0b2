"""One request on its pods, whichever replica placed it: counts, load, cached prompts, outcome."""

from array import array
from collections.abc import Sequence
from typing import Final

from tandem_contract.chains import Chain
from tandem_contract.timing import UNKNOWN, Timing

from ..backends.fleet import Fleet
from ..backends.outcomes import Outcome
from ..backends.pairing import known_fabric
from ..backends.pods import Pod
from ..estimates.prompt_hits import HandOver
from ..estimates.request_load import PlacedPrompt, RequestLoad
from ..exchange import ResponseHeaders
from .prompt_entries import PromptEntries
from .verdicts import PlacedPods

NO_CHAIN: Final = array("Q")
"""The prefix chain of a request that is not read."""


class CountedRequest:
    """Counts one request: on the decode pod until `end`, on the prefill pod until the response
    headers pass, because the prefill is over then.

    Every count is taken once in `__init__` and returned exactly once, in whatever order
    response and end come. It holds Pods, not names: a pod that left the fleet meanwhile is still
    decremented.
    """

    __slots__ = (
        "_computing",
        "_entries",
        "_hand_over",
        "_load",
        "_outcome",
        "_pods",
        "_prefill_in_flight",
        "alternate",
        "assumed_tokens",
        "can_fall_back",
        "chain",
        "decode",
        "fingerprint",
        "fleet",
        "has_failed",
        "is_judged",
        "is_own",
        "media_parts",
        "model",
        "placed",
        "prefill",
        "size",
    )

    def __init__(  # noqa: PLR0917 - what was placed, in its order
        self,
        fleet: Fleet,
        decode: Pod,
        prefill: Sequence[Pod],
        placed: float,
        size: PlacedPrompt,
        chain: Chain,
        model: str | None = None,
        assumed_tokens: int = 0,
        can_fall_back: bool = True,
        is_own: bool = True,
        is_judged: bool = False,
        media_parts: int = 0,
        fingerprint: int = 0,
        alternate: Pod | None = None,
    ) -> None:
        self.fleet, self.decode = fleet, decode
        self.alternate = alternate
        """The pod that Envoy asks when the chosen one takes nothing."""
        self.prefill = prefill
        """The choice, then the retries. The request counts on the choice alone."""
        self.placed = placed
        """When the request was placed; Unix seconds."""
        self.size = size
        """What the request was predicted to take."""
        self.chain = chain
        """The prompt's prefix chain."""
        self.model = model
        """The model or LoRA adapter that the client asked for."""
        self.assumed_tokens = assumed_tokens
        """Length of the prompt's texts at BYTES_PER_TOKEN, of which the engine's count tells the
        tokens; 0: token ids, or a request that is not read."""
        self.media_parts = media_parts
        """Media in the prompt, which have tokens too."""
        self.fingerprint = fingerprint
        """`InferenceRequest.fingerprint`; 0: the prompt is not known."""
        self.can_fall_back = can_fall_back
        """Whether the sidecar may serve a split request alone when the prefill fails."""
        self.is_own = is_own
        """Whether this EPP placed the request, and not another replica."""
        self.is_judged = is_judged
        """Whether the outcome is counted: response headers have passed, here or at the replica that
        placed the request."""
        self._outcome: Outcome | None = Outcome.UNKNOWN
        """The decode pod's, as response headers told here; None: only the end will tell."""
        self.has_failed = False
        """Whether a failure after the response headers is counted: at most one is."""
        self._hand_over: HandOver | None = None
        self._prefill_in_flight = prefill[0] if prefill else None
        """The prefill pod on which the request counts; None once that count is returned."""
        self._computing: Pod | None = self._prefill_in_flight or decode
        """The pod on which the uncached tokens count; None once they are returned."""
        self._count(decode, 1)
        if self._prefill_in_flight is not None:
            self._count(self._prefill_in_flight, 1)
        self._computing.tokens_in_flight += self._uncached
        try:
            self._begin()
        except BaseException:
            # A request whose construction failed is never ended.
            self._count(decode, -1)
            self._end_prefill()
            self._return_tokens()
            raise

    def _begin(self) -> None:
        """Tell the rest of the fleet of the request."""
        decode, prefill = self.decode, self.prefill
        self.fleet.use_adapter(self.model, (decode, *prefill[:1]))
        self._pods = self._placed_pods()
        if not self.is_judged:
            self._pods.start(self.fleet)
        computing = prefill[0].estimates if prefill else None
        fabric = known_fabric(prefill[0], decode) if prefill else None
        self._load = RequestLoad(
            decode.estimates,
            computing,
            self.size,
            self.placed,
            fabric,
            self.fleet.objective(self.model),
        )
        try:
            if prefill:
                self._hand_over = decode.hits.hand_over(self.size.prompt)
            # Before the answer, so that requests arriving now with this prefix go to the same pods.
            self._entries = PromptEntries(self.fleet.prefixes, self.chain, decode, prefill)
        except BaseException:
            self._load.end(self.placed)
            raise

    def on_response_headers(
        self, response: ResponseHeaders, now: float, report: Timing = UNKNOWN
    ) -> None:
        """The response headers passed at `now` (Unix seconds). Learns from `report`, what the
        response says about its times."""
        # The response begins when decoding does: the prefill is over.
        self._end_prefill()
        self._return_tokens()
        self._correct_decode(response.served, now)
        is_first = not self.is_judged
        if is_first:
            self.is_judged = True
            self._outcome = self._pods.judge_response(self.fleet, response, now)
        self._entries.on_response_headers(response)
        computing = self._computing_pod(response.prefill)
        prompt_tokens = report.prompt_tokens if report is not UNKNOWN else None
        self._settle_hand_over(response.status, computing, prompt_tokens)
        if response.status // 100 == 2:
            fabric = known_fabric(computing, self.decode) if computing is not self.decode else None
            self._load.on_response(now, report, computing.estimates, fabric)
            if is_first:
                self._count_hits(computing, prompt_tokens, report)
        else:
            self._load.end(now)
        if (self.assumed_tokens or self.media_parts) and prompt_tokens is not None:
            self._learn_scale(prompt_tokens)

    def end(self, now: float) -> None:
        """The request has ended at `now` (Unix seconds)."""
        if not self.is_judged:
            self.is_judged = True
            self._pods.judge_silence(self.fleet, now)
        elif not self.has_failed:
            outcome = self._pods.judge_end(self.fleet, self._outcome, now)
            self.has_failed = outcome.is_failure
        self.drop(now)

    def drop(self, now: float) -> None:
        """Return the counts that are left, without an outcome. At most once, and not after
        `end`."""
        # The counts first: they must be returned even if an estimate fails.
        self._count(self.decode, -1)
        # The stream may end before response headers: then the prefill count is still held.
        self._end_prefill()
        self._return_tokens()
        # Without effect on entries that were confirmed.
        self._entries.withdraw()
        self._load.end(now)
        if self._hand_over is not None:
            # Most clients that leave before the headers leave before the KV is transferred. A
            # request of a peer that runs on is in the snapshot that follows.
            self._hand_over.settle(0)

    def _placed_pods(self) -> PlacedPods:
        return PlacedPods(
            self.decode,
            self.prefill,
            self.placed,
            self.can_fall_back,
            self.is_own,
            fingerprint=self.fingerprint,
        )

    def _count_hits(self, computing: Pod, prompt: int | None, report: Timing) -> None:
        """Count what of the prompt was cached on the pod that computed it."""
        size = self.size
        chosen = self.prefill[0] if self.prefill else self.decode
        if computing is chosen:
            computing.hits.estimated.add(size.prompt, min(size.cached, size.prompt))
        if prompt is not None and report.cached is not None:
            computing.hits.on_answer(prompt, report.cached)

    def _settle_hand_over(self, status: int, computing: Pod, prompt_tokens: int | None) -> None:
        if self._hand_over is not None:
            is_handed_over = status // 100 == 2 and computing is not self.decode
            prompt = self.size.prompt if prompt_tokens is None else prompt_tokens
            self._hand_over.settle(prompt if is_handed_over else 0)

    def _learn_scale(self, prompt_tokens: int) -> None:
        """Learn how many tokens texts or media have, from a prompt of `prompt_tokens` tokens."""
        scales = self.fleet.token_scales
        if self.media_parts:
            scales.learn_media(self.model, self.assumed_tokens, self.media_parts, prompt_tokens)
            return
        scales.learn(self.model, self.assumed_tokens, prompt_tokens)
        for pod in (self.decode, *self.prefill[:1]):
            pod.token_scale = scales.scale(self.model)

    def _count(self, pod: Pod, requests: int) -> None:
        pod.in_flight += requests
        if not self.is_own:
            pod.remote_in_flight += requests

    def _end_prefill(self) -> None:
        if self._prefill_in_flight is not None:
            self._count(self._prefill_in_flight, -1)
            self._prefill_in_flight = None

    @property
    def _uncached(self) -> int:
        return max(0, self.size.prompt - self.size.cached)

    def _return_tokens(self) -> None:
        if self._computing is not None:
            self._computing.tokens_in_flight -= self._uncached
            self._computing = None

    def _correct_decode(self, served: str | None, now: float) -> None:
        """Count the request on the pod at the address `served` from now on, if Envoy used another
        pod than the chosen one: an alternate, or a pod that a gateway chose itself."""
        if served is None or served == self.decode.address:
            return
        pod = self.alternate
        if pod is not None and pod.address == served:
            # Envoy asks it only after the chosen one took nothing.
            self._pods.judge_unreachable(self.fleet, now)
        else:
            # An address of no pod is that of a proxy in between.
            pod = next((pod for pod in self.fleet if pod.address == served), None)
        if pod is not None:
            self._count(self.decode, -1)
            self._count(pod, 1)
            self.decode = pod
            self._pods = self._placed_pods()
            if self._hand_over is not None:
                self._hand_over.settle(0)
                self._hand_over = pod.hits.hand_over(self.size.prompt)
            self._entries.move_decode(pod)
            fabric = known_fabric(self.prefill[0], pod) if self.prefill else None
            self._load.move_decode(pod.estimates, fabric)

    def _computing_pod(self, prefill: str | None) -> Pod:
        """The pod that computed the prompt."""
        return next((pod for pod in self.prefill if pod.is_named(prefill)), self.decode)
