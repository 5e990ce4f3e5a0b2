"""A request that was placed: started on its engines, and on others if its decode engine fails."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from math import inf
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
from tandem_http1.answers import CutPoint
from tandem_http1.client import ActiveRequest, ClientConnection
from tandem_http1.messages import Request
from tandem_sidecar.bodies.edit import with_response_id
from tandem_sidecar.bodies.kinds import kind_of, previous_response
from tandem_sidecar.bodies.parse import Body
from tandem_sidecar.handoff.context import GenerationRequest, SidecarContext
from tandem_sidecar.handoff.generation import start_generation, start_passthrough
from tandem_sidecar.handoff.planned import KeptCall, PlannedGeneration
from tandem_sidecar.handoff.render_question import RenderQuestion
from tandem_sidecar.handoff.reply import ServedBy, send_error
from tandem_sidecar.observability.record import (
    NO_ENGINE,
    NOT_PARSED,
    MoveMethod,
    Outcome,
    Phase,
    Record,
    Result,
)
from tandem_sidecar.resume.kept_stream import KeptStream, keep
from tandem_sidecar.security.route import Candidate, Route

from .configuration import address_of
from .placements import Placements
from .waiting import WaitingRequest, WaitingRequests

FAILOVERS: Final = 1
"""Other backends that a request is sent to after its decode engine failed. More: a request that
makes engines crash takes as many with it."""


MAX_REFUSALS: Final = 16
"""Backends that may refuse the connection for one request. They got nothing of it, so it is not at
fault; but one may pass its checks and never accept a request."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What all requests of a process share."""

    context: SidecarContext
    picker: EndpointPicker
    fleet: Fleet
    placements: Placements
    waiting: WaitingRequests
    keys: PlanKeys | None = None
    """By which sidecars trust this router: all backends but those for prefill have one in front of
    their engine. None: no backend has one, and this process hands off itself."""
    sidecars_verify: bool = False
    """Whether sidecars take requests only with a client's certificate, which this process has, and
    sidecars have not."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A backend failed a request."""

    address: str | None
    at: float
    """Unix seconds."""
    is_sent: bool
    """Whether it got something of the request, which may be what made it fail."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A backend that can go on with a chat that is parsed, and what it makes of it."""

    placement: Placement
    rendered: bytes


class PlacedRequest:
    """Serves one request; it is its own `handoff.context.Failover`, and waits for a backend."""

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
        self._failed: Sequence[Failed] = ()
        self._problem = ""
        """Why its last backend failed, while it waits for another."""
        self._is_asking = False
        """Whether a backend is asked if it can go on with the stream."""
        self._asked: Asked | None = None
        self._tried: tuple[frozenset[str], int] | None = None
        """Among which backends it was placed last since it waits, and of which version of the
        fleet's members."""
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
        self, placement: Placement, left: Pod | None = None, kept_call: KeptCall | None = None
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
        failed = self._failed_by_now()
        # Before the stream is cut, as in `try_move`.
        placement = self._place_after(failed) if self._may_go_on(failed) else None
        if placement is None:
            if self._kept is not None:
                self._record.not_resumed = NO_ENGINE
            return False
        if not self._begin_rest():
            placement.end(time())
            return False
        self._failed = failed
        self._parts.placements.on_failure(self._record)
        self._continue_at(placement)
        return True

    def try_wait(self, problem: str) -> bool:
        """Wait until a backend can serve the request; returns whether it does."""
        failed = self._failed_by_now()
        # Otherwise clients are told, and ask again.
        if not self.resumes or self._needs_stored_response or not self._may_go_on(failed):
            return False
        if not self._begin_rest():
            return False
        self._failed, self._problem, self._tried = failed, problem, None
        self._parts.placements.leave(self._record)
        self._client.continue_with(WaitingRequest(self, self._parts.waiting))
        return True

    def try_start(self) -> bool:
        state = self._others(self._failed), self._parts.fleet.members_version
        if state == self._tried:
            # Each try is a decision that is kept and counted.
            return False
        self._tried = state
        placement = self._place_after(self._failed)
        if placement is None:
            return False
        self._parts.placements.add(self._record, placement)
        self._start_again(placement)
        return True

    def give_up(self) -> None:
        record, kept, context = self._record, self._kept, self._parts.context
        # No engine was given what is left.
        record.moves, record.not_resumed = record.moves[:-1], NO_ENGINE
        record.ended, status = context.loop.time(), HTTPStatus.BAD_GATEWAY
        if kept is not None and kept.written:
            record.outcome = Outcome.CUT
            context.observer.on_request_end(record)
            kept.cut(status, record.cut_message(self._problem), CutPoint.BETWEEN_CHUNKS)
            return
        record.outcome, record.status, record.first_byte = Outcome.FAILED, status, record.ended
        context.observer.on_answer(record, None)
        context.observer.on_request_end(record)
        path, name = record.path or RoutingPath.UNIFIED, self._placement.decode.name
        lines, closes = ServedBy(record.request_id, path, name).encode(), context.lifecycle.draining
        send_error(self._client, self._request, status, self._problem, lines, close=closes)

    def abandon(self) -> None:
        record, context = self._record, self._parts.context
        record.outcome, record.ended = Outcome.ABANDONED, context.loop.time()
        context.observer.on_request_end(record)

    def describe(self) -> dict[str, object]:
        record = self._record
        return {
            "request_id": record.request_id,
            "path": record.path,
            "phase": "waiting",
            "age_seconds": round(self._parts.context.loop.time() - record.received, 3),
        }

    def try_move(
        self, again: Callable[[], None], keep: Callable[[], KeptCall | None] | None = None
    ) -> bool:
        """Give a stream whose backend drains to another one; returns whether one takes it. `again`:
        as of `Failover`; `keep`: as of `planned.Mover`."""
        kept, body, left = self._kept, self._body, self._placement.decode
        subset = self._others([*self._failed, Failed(left.address, time(), is_sent=True)])
        has_expired = self._parts.context.lifecycle.has_expired
        if kept is None or body is None or not subset or has_expired or self._is_asking:
            return False
        # Before the stream is cut: without a place it goes on where it is.
        asked, self._asked = self._asked, None
        placement = self._place(subset, body.data) if asked is None else asked.placement
        if placement is None:
            return False
        if asked is None and kept.needs_question:
            self._ask(placement, kept.asked, again)
            return False
        is_there = placement.decode.address in subset
        rest = kept.move_by_ids(None if asked is None else asked.rendered) if is_there else None
        if rest is None:
            placement.end(time())
            return False
        self._body = rest
        if keep is not None and self._reads_kv_of(left, placement, kept):
            self._continue_at(placement, left, keep())
        else:
            self._continue_at(placement)
        return True

    def _ask(self, placement: Placement, chat: Body, again: Callable[[], None]) -> None:
        """Ask the engine of `placement` whether it can go on with a stream that is parsed, and have
        `again` move the stream there."""
        parts, record, left = self._parts, self._record, self._placement

        def answered(rendered: bytes | None) -> None:
            self._is_asking = False
            if rendered is None:
                record.not_resumed = NOT_PARSED
            # Else it has gone elsewhere meanwhile, as its backend failed.
            elif self._placement is left:
                self._asked = Asked(placement, rendered)
                again()
                if self._asked is None:
                    # The stream is there, or `try_move` has ended the placement.
                    return
                self._asked = None
            placement.end(time())

        self._is_asking = True
        engine = address_of(placement.decode.backend)
        context, request = parts.context, self._request
        RenderQuestion(context, engine, request, record, chat=chat.data, answered=answered)

    def _reads_kv_of(self, left: Pod, placement: Placement, kept: KeptStream) -> bool:
        """Whether the engine of `left` hands off the KV of the stream that leaves it."""
        is_split = placement.decision.path is RoutingPath.PREFILL_THEN_DECODE
        # One that is gone, or hangs, would be waited for.
        is_there = left.leaving and not left.has_left and not self._parts.sidecars_verify
        # The rest of a parsed stream is served by its engine alone.
        is_continued = kept.is_continued and kept.rest is None
        is_readable = is_continued and is_kv_compatible(left, placement.decode)
        return is_split and is_there and is_readable

    def _failed_by_now(self) -> Sequence[Failed]:
        """The backends that failed, with the one that just did."""
        decode = self._placement.decode
        legs = [leg for leg in self._record.legs if leg.phase is Phase.DECODE]
        # A refused connection says nothing of the request.
        is_sent = not legs or legs[-1].result is not Result.UNREACHABLE
        return (*self._failed, Failed(decode.address, time(), is_sent))

    def _may_go_on(self, failed: Collection[Failed]) -> bool:
        """Whether another backend may get the request after these."""
        sent = sum(each.is_sent for each in failed)
        is_allowed = sent <= self._most and len(failed) - sent <= MAX_REFUSALS
        return is_allowed and not self._parts.context.lifecycle.has_expired

    def _begin_rest(self) -> bool:
        """Note that another backend gets what is left; returns whether it can go on with it."""
        if self._kept is None:
            self._record.begin_move(MoveMethod.BEGUN_AGAIN)
            return True
        rest = self._kept.move()
        if rest is not None:
            self._body = rest
        return rest is not None

    def _place_after(self, failed: Collection[Failed]) -> Placement | None:
        """Place the request at a backend but these, which failed; None: there is none."""
        subset = self._others(failed)
        if not subset:
            return None
        kept, body = self._kept, self._body
        return self._place(
            subset, self._request.body if kept is None or body is None else body.data
        )

    def _place(self, subset: frozenset[str], data: bytes) -> Placement | None:
        """Place the request, whose body is `data` now, at backends with these addresses; None:
        none of them can serve it."""
        try:
            return self._parts.picker.place(replace(self._http, subset=subset), data, time())
        except NotPlaced:
            return None

    def _continue_at(
        self, placement: Placement, left: Pod | None = None, kept_call: KeptCall | None = None
    ) -> None:
        self._parts.placements.replace(self._record, placement)
        self._start_again(placement, left, kept_call)

    def _start_again(
        self, placement: Placement, left: Pod | None = None, kept_call: KeptCall | None = None
    ) -> None:
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

    def _others(self, left: Collection[Failed]) -> frozenset[str]:
        """Addresses of the backends but those that the request `left`; empty if there is none that
        could serve it."""
        ready = self._parts.fleet.ready_pods(self._placement.decision.model)
        latest = {each.address: each.at for each in left}
        others = [pod for pod in ready if pod.address and pod.address not in latest]
        if self.resumes and not any(pod.backend.role.serves(Role.DECODE) for pod in others):
            # Rather than none: those that passed a check since, as an engine that was started again
            # does.
            others += [pod for pod in ready if pod.scraped_at > latest.get(pod.address, inf)]
        return frozenset(pod.address for pod in others if pod.address)

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
