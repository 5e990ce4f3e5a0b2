"""A request on its pods, from the pick to the end of its stream."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tandem_contract.timing import parse_timing

from .backends.fleet import Fleet
from .backends.pods import Pod
from .ext_proc.messages import Mutation
from .history import Decision
from .metrics import Metrics
from .request import InferenceRequest

_UNAVAILABLE: Final = frozenset({502, 503})
"""What Envoy answers for a pod it cannot reach, and a sidecar whose engine is gone or that drains.
A dead pod answers fastest of all: left among the choices, it would draw every request."""


@dataclass(slots=True)
class Placement:
    """A request on its pods. Counted on the decode pod to its end, and on the prefill pod until
    response headers pass: by then the prefill is done."""

    mutation: Mutation
    decode: Pod
    prefill: Sequence[Pod]
    """The choice, then the retries; the request counts on the choice."""
    request: InferenceRequest | None
    fleet: Fleet
    metrics: Metrics
    decision: Decision
    _prefilling: Pod | None = field(init=False)

    def __post_init__(self) -> None:
        self.decode.in_flight += 1
        self._prefilling = self.prefill[0] if self.prefill else None
        if self._prefilling is not None:
            self._prefilling.in_flight += 1

    def responded(self, timing: str | None, status: int, prefill: str | None = None) -> None:
        self._prefilled()
        self.decision.status = status
        if status in _UNAVAILABLE:
            self.fleet.suspect(self.decode)
        elif status // 100 == 2 and self.request is not None:
            # The backend has the prompt's KV by now.
            self.decode.held.add(self.request.chain(self.decode.block_tokens))
        if timing is None:
            return
        self.decision.timing = figures = parse_timing(timing)
        self._computed_on(prefill).learn(figures)
        if figures.cached is not None and figures.computed is not None:
            self.metrics.hit(figures.cached, figures.cached + figures.computed, "measured")

    def end(self) -> None:
        self._prefilled()
        self.decode.in_flight -= 1
        self.decision.end()

    def _prefilled(self) -> None:
        if self._prefilling is not None:
            self._prefilling.in_flight -= 1
            self._prefilling = None

    def _computed_on(self, prefill: str | None) -> Pod:
        """Who computed the prompt. A sidecar without a plan knows backends by address only."""
        return next(
            (pod for pod in self.prefill if prefill in (pod.name, pod.address)), self.decode
        )
