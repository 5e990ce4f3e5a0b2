"""Streams of this pod that go on at another pod after this one's engine failed.

The signed plan of a request names other pods that may serve it. The sidecar sends what is left of
the stream to the sidecar of one of them, with a plan of its own: the same prefill pods, and no
further alternates, since this sidecar alone decides how often a stream moves.
"""

import time
from typing import Final

from tandem_contract import headers
from tandem_contract.commandline import HostPort, parse_host_port
from tandem_contract.plan import RESUME, Plan, Target, sign
from tandem_http1.client import ClientConnection
from tandem_http1.messages import Headers

from ..security.route import Candidate
from .context import GenerationRequest, SidecarContext
from .forward import SingleEngineGeneration

_PLAN: Final = headers.PLAN.encode()
_SECONDS: Final = 60.0
"""For how long a plan for the rest of a stream is valid."""


class Alternates:
    """The pods that may still serve one kept stream; it is the stream's `Failover`."""

    def __init__(
        self,
        context: SidecarContext,
        client: ClientConnection,
        generation: GenerationRequest,
    ) -> None:
        """`generation`: the request, whose stream is kept."""
        self._context, self._client, self._generation = context, client, generation
        self._left = list(generation.route.alternates)

    def try_take_over(self) -> bool:
        """Give the rest of the stream to the next pod; returns whether there is one."""
        generation = self._generation
        if not self._left:
            generation.record.not_resumed = "no further pod may serve the request"
            return False
        rest = generation.kept.move() if generation.kept is not None else None
        if rest is None:
            return False
        target = self._left.pop(0)
        leg = _LegToAnotherPod(self._context, self._client, generation, target, self)
        leg.start(parse_host_port(target.address), target.name, rest.data)
        self._client.continue_with(leg)
        return True


class _LegToAnotherPod(SingleEngineGeneration):
    """The rest of a stream, from another pod's sidecar."""

    def __init__(
        self,
        context: SidecarContext,
        client: ClientConnection,
        generation: GenerationRequest,
        target: Target,
        alternates: Alternates,
    ) -> None:
        super().__init__(
            context,
            client,
            generation.request,
            generation.record,
            alternates,
            kept=generation.kept,
            kind=generation.kind,
            routed=generation.route.routed,
            may_exhaust=generation.may_exhaust,
        )
        self._target, self._of = target, generation

    def added_headers(self, _engine: HostPort) -> Headers:
        route = self._of.route
        now = time.time()
        plan = Plan(
            route.path,
            RESUME,
            self._target,
            tuple(map(_target, route.candidates)),
            request_id=self.leg.attempt_id,
            expires=now + _SECONDS,
            timeouts=route.timeouts,
            alternates=(),
        )
        return [(_PLAN, sign(plan, self._of.keys, now=now).encode())]


def _target(candidate: Candidate) -> Target:
    """A prefill pod as a plan names it."""
    return Target(candidate.name, str(candidate.address), candidate.rank, candidate.asks_for_proof)
