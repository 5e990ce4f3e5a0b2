"""A generation that another process's sidecar serves, by a plan which this process signs.

plan_header(...)     the plan: this process alone decides where a request goes on, so that it
                     names no alternates
PlannedGeneration    the leg of a router in a cluster, where each pod that decodes has a sidecar
                     in front of its engine, which hands off, counts the request, and ends with
                     its pod, while the router keeps the stream
"""

from collections.abc import Callable
from time import time
from typing import Final, NamedTuple, Protocol

from tandem_contract import headers
from tandem_contract.commandline import HostPort
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import CLOCK_SECONDS, RESUME, Plan, Target, mac_of, sign
from tandem_contract.plan_keys import PlanKeys
from tandem_http1.client import ClientConnection
from tandem_http1.connection import Call, Failure
from tandem_http1.messages import Headers, ResponseHead

from ..observability.record import Outcome
from ..security.route import Route
from .context import Failover, GenerationRequest, SidecarContext
from .reply import ServedBy
from .single_engine import SingleEngineGeneration

_SECONDS: Final = 60.0 + CLOCK_SECONDS
"""For how long a plan is valid: it is followed as soon as it arrives."""
_PLAN: Final = headers.PLAN.encode()
_TIMING: Final = headers.TIMING.encode()
_PATH: Final = headers.ROUTING_PATH.encode()
_PREFILL: Final = headers.PREFILL_BACKEND.encode()
_PATHS: Final = frozenset([path.value for path in RoutingPath])
"""Those that this version knows. A sidecar of a later one may name another."""


def plan_header(
    route: Route,
    reason: str,
    decode: Target,
    prefill: tuple[Target, ...],
    *,
    request_id: str,
    keys: PlanKeys,
    left: Target | None = None,
    left_plan: str = "",
) -> Headers:
    """The header with the plan by which the sidecar of `decode` serves `request_id` as `route`
    says, for `reason`, handing off from one of `prefill`, or from the pod that it `left`, which
    serves it by the plan of the MAC `left_plan`. Raises ValueError without any key."""
    now = time()
    plan = Plan(
        route.path,
        reason,
        decode,
        prefill,
        request_id=request_id,
        expires=now + _SECONDS,
        timeouts=route.timeouts,
        alternates=(),
        left=left,
        left_plan=left_plan,
    )
    return [(_PLAN, sign(plan, keys.current, now=now).encode())]


class KeptCall(NamedTuple):
    """The call to the pod that a stream leaves."""

    call: Call
    plan: str
    """The MAC of the plan by which the pod serves it."""


class Mover(Failover, Protocol):
    """The failover of a request whose pods have sidecars."""

    def try_move(
        self, again: Callable[[], None], keep: Callable[[], KeptCall | None] | None = None
    ) -> bool:
        """`keep`: gives the call that serves the stream up, without ending it, so that the pod's
        engine is kept until the next one has read the KV. If it is not called, the caller ends the
        call."""


class _Unread:
    """Takes an answer that is not needed any more."""

    payload_only = True

    def head(self, head: ResponseHead) -> None:
        pass

    def body(self, data: bytes, last: bool) -> None:
        pass

    def failed(self, failure: Failure, detail: str) -> None:
        pass


class PlannedGeneration(SingleEngineGeneration):
    """One leg: what a sidecar serves of a request, all of it or the rest of a stream."""

    def __init__(
        self,
        context: SidecarContext,
        client: ClientConnection,
        generation: GenerationRequest,
        decode: Target,
        prefill: tuple[Target, ...],
        *,
        mover: Mover,
        keys: PlanKeys,
        is_rest: bool,
        left: Target | None = None,
        kept_call: KeptCall | None = None,
    ) -> None:
        """`decode`, `prefill`: the pods of `generation.route`, as plans name them. `mover`: its
        failover. `keys`: with those in force by then the plan is signed. `is_rest`: the client has
        the answer's begin. `left`: the pod that the stream leaves, if its engine hands off the KV.
        `kept_call`: the one to that pod, to be ended once the KV was read."""
        super().__init__(
            context,
            client,
            generation.request,
            generation.record,
            mover,
            kept=generation.kept,
            kind=generation.kind,
            routed=False,
            may_exhaust=generation.may_exhaust,
        )
        self._route, self._decode, self._prefill = generation.route, decode, prefill
        self.is_split = bool(prefill)
        self._keys, self._is_rest = keys, is_rest
        self._mover, self._left, self._kept_call = mover, left, kept_call
        self._prefilled_by = ""
        self._plan = ""
        """The MAC of the plan that was signed last."""

    def attempt_id(self) -> str:
        """The client's own: the sidecar makes another one for each leg to an engine, and
        `tandem trace` finds the request at both."""
        return self.record.request_id

    def added_headers(self, _engine: HostPort) -> Headers:
        route, kept_call = self._route, self._kept_call
        made = plan_header(
            route,
            RESUME if self._is_rest else route.reason,
            self._decode,
            self._prefill,
            request_id=self.record.request_id,
            keys=self._keys,
            left=self._left,
            left_plan="" if kept_call is None else kept_call.plan,
        )
        [(_, header)] = made
        self._plan = mac_of(header.decode())
        return made

    def end(self, outcome: Outcome) -> None:
        self._end_kept_call()
        super().end(outcome)

    def leave(self) -> None:
        self._end_kept_call()
        super().leave()

    def _begin(self, data: bytes) -> None:
        # The engine generates, so it has read the KV.
        self._end_kept_call()
        super()._begin(data)

    def _end_kept_call(self) -> None:
        if self._kept_call is not None:
            self._kept_call.call.abort()
            self._kept_call = None

    def _try_move(self, again: Callable[[], None]) -> bool:
        # An engine that has not begun may not have read the KV itself.
        return self._mover.try_move(again, self._give_up_call if self._has_begun else None)

    def _give_up_call(self) -> KeptCall | None:
        call = self._call
        if not isinstance(call, Call):
            return None
        self._call, call.receiver = None, _Unread()
        return KeptCall(call, self._plan)

    def header_lines(self) -> bytes:
        record = self.record
        path = record.path or RoutingPath.UNIFIED
        return ServedBy(record.request_id, path, self.leg.backend, self._prefilled_by).encode()

    def inspect_first_bytes(self, head: ResponseHead, data: bytes) -> None:
        super().inspect_first_bytes(head, data)
        record = self.record
        # The sidecar has measured its legs; what they took together is no time of an engine.
        record.timing = self.leg.timing if head.value(_TIMING) else None
        self._prefilled_by = head.value(_PREFILL).decode("latin-1")
        path = head.value(_PATH).decode("latin-1")
        if path in _PATHS:
            record.path = RoutingPath(path)
