"""A request that was placed: started on its engines, and on others if its decode engine fails."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import time
from typing import Final

from msgspec.structs import replace

from tandem_contract.paths import Role, RoutingPath
from tandem_contract.plan import Timeouts
from tandem_contract.plan_keys import PlanKeys
from tandem_contract.response_ids import response_id_in
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pairing import is_kv_compatible
from tandem_epp.backends.pods import Pod
from tandem_epp.exchange import HttpRequest, NotPlaced
from tandem_epp.placement.picker import EndpointPicker
from tandem_epp.placement.placement import Placement
from tandem_epp.placement.placement_headers import prefill_target_of, target_of
from tandem_http1.client import ActiveRequest, ClientConnection
from tandem_http1.connection import Call
from tandem_http1.messages import Request
from tandem_sidecar.bodies.edit import with_response_id
from tandem_sidecar.bodies.kinds import kind_of, previous_response
from tandem_sidecar.bodies.parse import Body
from tandem_sidecar.handoff.context import GenerationRequest, SidecarContext
from tandem_sidecar.handoff.generation import start_generation, start_passthrough
from tandem_sidecar.handoff.planned import PlannedGeneration
from tandem_sidecar.observability.record import NO_ENGINE, MoveMethod, Record
from tandem_sidecar.resume.kept_stream import KeptStream, keep
from tandem_sidecar.security.route import Candidate, Route

from .configuration import address_of
from .placements import Placements

FAILOVERS: Final = 1
"""Other backends that a request is sent to after its decode engine failed. More: a request that
makes engines crash takes as many with it."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What all requests of a process share."""

    context: SidecarContext
    picker: EndpointPicker
    fleet: Fleet
    placements: Placements
    keys: PlanKeys | None = None
    """By which sidecars trust this router: all backends but those for prefill have one in front of
    their engine. None: no backend has one, and this process hands off itself."""
    sidecars_verify: bool = False
    """Whether sidecars take requests only with a client's certificate, which this process has, and
    sidecars have not."""


class PlacedRequest:
    """Serves one request; it is its own `handoff.context.Failover`."""

    def __init__(  # noqa: PLR0917 - the request's parts, in their order
        self,
        parts: Parts,
        request: Request,
        client: ClientConnection,
        http: HttpRequest,
        body: Body | None,
        record: Record,
    ) -> None:
        """`body`: parsed; None for a request that generates nothing."""
        self._parts = parts
        self._request, self._client, self._http = request, client, http
        self._body, self._record = body, record
        self._failed: list[Pod] = []
        kind = kind_of(request.method, request.target)
        self._kept: KeptStream | None = None
        self._most = FAILOVERS
        self.resumes = False
        limits = parts.context.settings.resume_limits
        if limits is not None and kind is not None and body is not None:
            self.resumes = True
            context = parts.context
            self._kept = keep(
                client,
                request,
                kind,
                body,
                record=record,
                vocabularies=context.vocabularies,
                max_regeneration=limits.max_regeneration,
            )
            if self._kept is not None:
                self._request, self._body = self._kept.request, self._kept.asked
                # Moves from a backend that drains do not count: it has not failed.
                self._most = limits.max_moves
        self._placement: Placement

    def start(
        self, placement: Placement, left: Pod | None = None, kept_call: Call | None = None
    ) -> ActiveRequest | None:
        """Send the request to the backends of `placement`; None: it is already answered. `left`,
        `kept_call`: of a stream that leaves this pod, and reads its KV."""
        self._placement = placement
        context, request, record = self._parts.context, self._request, self._record
        decode = placement.decode
        engine = address_of(decode.backend)
        kind = kind_of(request.method, request.target)
        if kind is None or self._body is None:
            # A websocket may have begun something at its engine.
            failover = None if request.upgrade else self
            if (changed := placement.take_body()) is not None:
                request = replace(request, body=changed)
            active = start_passthrough(
                context,
                self._client,
                request,
                engine,
                decode.name,
                record=record,
                failover=failover,
            )
            if active is None:
                # Refused before it was sent: the data path reports nothing of it.
                self._parts.placements.drop(record)
            return active
        keys = self._parts.keys if decode.backend.role is not Role.PREFILL else None
        body = self._body
        if keys is None:
            # A sidecar does so itself.
            body = with_response_id(kind, body, decode.name)
        generation = GenerationRequest(
            request,
            record.request_id,
            kind,
            body,
            self._route(),
            record,
            context.settings,
            {},
            self,
            self._kept,
        )
        if keys is None:
            return start_generation(context, self._client, generation, engine, decode.name)
        route = generation.route
        record.path, record.reason = route.path, route.reason
        leg = PlannedGeneration(
            context,
            self._client,
            generation,
            target_of(decode),
            tuple(map(prefill_target_of, placement.prefill)) if route.candidates else (),
            mover=self,
            keys=keys,
            is_rest=self._kept is not None and self._kept.written,
            left=None if left is None else replace(target_of(left), asks_for_proof=True),
            kept_call=kept_call,
        )
        leg.start(engine, decode.name, generation.body.data)
        return leg

    def try_take_over(self) -> bool:
        """Give the request to another backend; returns whether one takes it."""
        if self._needs_stored_response:
            # Another backend would answer that there is no such response.
            return False
        failed = [*self._failed, self._placement.decode]
        kept, body = self._kept, self._body
        subset = self._others(failed) if len(failed) <= self._most else frozenset()
        # Before the stream is cut, as in `try_move`.
        placement = None
        if subset and not self._parts.context.lifecycle.has_expired:
            data = self._request.body if kept is None or body is None else body.data
            placement = self._place(subset, data)
        if placement is None:
            if kept is not None:
                self._record.not_resumed = NO_ENGINE
            return False
        if kept is not None:
            rest = kept.move()
            if rest is None:
                placement.end(time())
                return False
            self._body = rest
        else:
            self._record.begin_move(MoveMethod.BEGUN_AGAIN)
        self._failed = failed
        self._parts.placements.on_failure(self._record)
        self._continue_at(placement)
        return True

    def try_move(self, keep: Callable[[], Call | None] | None = None) -> bool:
        """Give a stream whose backend drains to another one; returns whether one takes it. `keep`:
        as of `planned.Mover`."""
        kept, body, left = self._kept, self._body, self._placement.decode
        subset = self._others([*self._failed, left])
        has_expired = self._parts.context.lifecycle.has_expired
        if kept is None or body is None or not subset or has_expired:
            return False
        # Before the stream is cut: without a place it goes on where it is.
        placement = self._place(subset, body.data)
        if placement is None:
            return False
        rest = kept.move_by_ids()
        if rest is None:
            placement.end(time())
            return False
        self._body = rest
        if keep is not None and self._reads_kv_of(left, placement, kept):
            self._continue_at(placement, left, keep())
        else:
            self._continue_at(placement)
        return True

    def _reads_kv_of(self, left: Pod, placement: Placement, kept: KeptStream) -> bool:
        """Whether the engine of `left` hands off the KV of the stream that leaves it."""
        is_split = placement.decision.path is RoutingPath.PREFILL_THEN_DECODE
        # One that is gone, or hangs, would be waited for.
        is_there = left.leaving and not left.has_left and not self._parts.sidecars_verify
        is_readable = kept.is_continued and is_kv_compatible(left, placement.decode)
        return is_split and is_there and is_readable

    def _place(self, subset: frozenset[str], data: bytes) -> Placement | None:
        """Place the request, whose body is `data` now, at backends with these addresses; None:
        none of them can serve it."""
        try:
            return self._parts.picker.place(replace(self._http, subset=subset), data, time())
        except NotPlaced:
            return None

    def _continue_at(
        self, placement: Placement, left: Pod | None = None, kept_call: Call | None = None
    ) -> None:
        self._parts.placements.replace(self._record, placement)
        active = self.start(placement, left, kept_call)
        if active is not None:
            self._client.continue_with(active)

    @property
    def _needs_stored_response(self) -> bool:
        """Whether the request is about a response that one engine stores."""
        kind = kind_of(self._request.method, self._request.target)
        if kind is None or self._body is None:
            return bool(response_id_in(self._http.path))
        return bool(previous_response(kind, self._body))

    def _others(self, left: Iterable[Pod]) -> frozenset[str]:
        """Addresses of the backends but those that the request `left`; empty if there is none that
        could serve it."""
        ready = self._parts.fleet.ready_pods(self._placement.decision.model)
        return frozenset(pod.address for pod in ready if pod.address) - {
            pod.address for pod in left
        }

    def _route(self) -> Route:
        """The placement as the data path reads it."""
        placement, serving = self._placement, self._parts.picker.routing.serving
        decision = placement.decision
        path = decision.path or RoutingPath.UNIFIED
        if self._kept is not None and self._kept.rest is not None:
            # Its engine serves it by several requests.
            path = RoutingPath.UNIFIED
        split = path is RoutingPath.PREFILL_THEN_DECODE
        return Route(
            path,
            decision.reason,
            tuple(map(candidate, placement.prefill)) if split else (),
            decode_name=placement.decode.name,
            decode_rank=placement.decode.rank,
            timeouts=Timeouts(serving.prefill_timeout, serving.kv_transfer_timeout),
        )


def candidate(pod: Pod) -> Candidate:
    """A backend that may prefill, as the data path reads it."""
    return Candidate(pod.name, address_of(pod.backend), pod.rank)
