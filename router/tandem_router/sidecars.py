"""A generation that the sidecar of its decode pod serves, by a plan which this router signs.

In a cluster of the operator each pod that decodes has a sidecar in front of its engine. It hands
off, counts the request, and ends with its pod; the router keeps the stream. So the plan names no
alternates: this router alone decides where a request goes on.
"""

from time import time
from typing import Final

from tandem_contract import headers
from tandem_contract.commandline import HostPort
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import RESUME, Plan, sign
from tandem_contract.plan_keys import PlanKeys
from tandem_epp.placement.placement import Placement
from tandem_epp.placement.placement_headers import PLAN_SECONDS, prefill_target_of, target_of
from tandem_http1.client import ClientConnection
from tandem_http1.messages import Headers, ResponseHead
from tandem_sidecar.handoff.context import GenerationRequest, SidecarContext
from tandem_sidecar.handoff.forward import SingleEngineGeneration
from tandem_sidecar.handoff.reply import ServedBy

_PLAN: Final = headers.PLAN.encode()
_TIMING: Final = headers.TIMING.encode()
_PATH: Final = headers.ROUTING_PATH.encode()
_PREFILL: Final = headers.PREFILL_BACKEND.encode()
_PATHS: Final = frozenset(path.value for path in RoutingPath)
"""Those that this version knows. A sidecar of a later one may name another."""


class SidecarGeneration(SingleEngineGeneration):
    """One leg: what a sidecar serves of a request, all of it or the rest of a stream."""

    def __init__(
        self,
        context: SidecarContext,
        client: ClientConnection,
        generation: GenerationRequest,
        placement: Placement,
        keys: PlanKeys,
        *,
        is_rest: bool,
    ) -> None:
        """`placement`: where the request goes, as `generation.route` says for engines. `keys` sign
        the plan. `is_rest`: the client has the beginning of the answer."""
        super().__init__(
            context,
            client,
            generation.request,
            generation.record,
            generation.failover,
            kept=generation.kept,
            kind=generation.kind,
            routed=False,
            may_exhaust=generation.may_exhaust,
        )
        self._route, self._placement, self._keys = generation.route, placement, keys
        self._is_rest = is_rest
        self._prefill = ""

    def attempt_id(self) -> str:
        """The client's own: the sidecar makes another one for each leg to an engine, and
        `tandem trace` finds the request at both."""
        return self.record.request_id

    def added_headers(self, _engine: HostPort) -> Headers:
        route, placement, now = self._route, self._placement, time()
        plan = Plan(
            route.path,
            RESUME if self._is_rest else route.reason,
            target_of(placement.decode),
            tuple(map(prefill_target_of, placement.prefill)) if route.candidates else (),
            request_id=self.record.request_id,
            expires=now + PLAN_SECONDS,
            timeouts=route.timeouts,
            alternates=(),
        )
        return [(_PLAN, sign(plan, self._keys.current, now=now).encode())]

    def header_lines(self) -> bytes:
        record = self.record
        path = record.path or RoutingPath.UNIFIED
        return ServedBy(record.request_id, path, self.leg.backend, self._prefill).encode()

    def inspect_first_bytes(self, head: ResponseHead, data: bytes) -> None:
        super().inspect_first_bytes(head, data)
        record = self.record
        # The sidecar has measured its legs; what they took together is no time of an engine.
        record.timing = self.leg.timing if head.value(_TIMING) else None
        self._prefill = head.value(_PREFILL).decode("latin-1")
        path = head.value(_PATH).decode("latin-1")
        if path in _PATHS:
            record.path = RoutingPath(path)
