"""Requests of this pod that another pod serves after this one's engine failed, or since it drains.

The signed plan of a request names other pods that may serve it. The sidecar sends what is left of a
stream to the sidecar of one of them, or the whole request if its client has nothing yet, with a
plan of its own: the same prefill pods, and no further alternates, since this sidecar alone decides
how often a request moves.

A stream that left because this pod drains returns to its engine if the other pod cannot go on: it
drains, too, or fails. The engine still finishes what runs, within the drain's timeout. Until the
other pod generates, it also hands off the KV: the plan names this pod as the one that the stream
left, which has all but the last block in its prefix cache.
"""

from collections.abc import Callable

from msgspec.structs import replace

from tandem_contract.commandline import HostPort, parse_host_port
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import RESUME, Target
from tandem_contract.plan_keys import PlanKeys
from tandem_http1.client import ClientConnection
from tandem_http1.messages import Headers

from ..bodies.parse import Body
from ..observability.record import NO_ENGINE, NOT_PARSED, MoveMethod
from ..security.route import SPLIT, Candidate
from .context import GenerationRequest, SidecarContext
from .planned import plan_header
from .render_question import RenderQuestion
from .single_engine import SingleEngineGeneration


class Alternates:
    """The pods that may still serve one request; it is the request's `Failover`."""

    def __init__(
        self,
        context: SidecarContext,
        client: ClientConnection,
        generation: GenerationRequest,
        engine: HostPort,
        decode_name: str,
        *,
        keys: PlanKeys,
        max_moves: int,
    ) -> None:
        """`generation`: the request. `engine`: the one that it was sent to, whose name is
        `decode_name`. `keys`: with those in force by then the plan of the rest is signed, since a
        stream may last longer than a key. `max_moves`: as in `plan.ResumeLimits`."""
        self._context, self._client, self._generation = context, client, generation
        self._engine, self._decode_name, self._keys = engine, decode_name, keys
        self._left, self._moves_left = list(generation.route.alternates), max_moves
        self._may_return = False
        """Whether the stream left `engine` only because it drains."""
        self._question: RenderQuestion | None = None
        """To the next pod, which may get the stream as this one drains."""
        self._rendered: bytes | None = None
        """Its answer."""

    @property
    def resumes(self) -> bool:
        return True

    def try_take_over(self) -> bool:
        """Give the rest of the request to the next pod, or back; returns whether there is one."""
        generation = self._generation
        leaves = bool(self._left) and self._moves_left > 0
        if not leaves and not self._may_return:
            generation.record.not_resumed = NO_ENGINE
            return False
        if generation.kept is None:
            # The client has nothing, and all of the request is left.
            generation.record.begin_move(MoveMethod.BEGUN_AGAIN)
            rest: Body | None = generation.body
        else:
            rest = generation.kept.move()
        if rest is None:
            return False
        if leaves:
            self._moves_left -= 1
            self._send_to_another_pod(rest)
        else:
            self._send_back(rest)
        return True

    def try_wait(self, problem: str) -> bool:
        """No: only the pods that the plan names may serve it."""
        return False

    def try_move(self, again: Callable[[], None]) -> bool:
        """Give the rest of the stream to the next pod, if it is at this pod's engine."""
        kept, alternates = self._generation.kept, self._generation.route.alternates
        if kept is None or len(self._left) < len(alternates):
            return False
        if kept.needs_question and self._rendered is None and self._left:
            if self._question is None:
                self._question = self._ask_next_pod(kept.asked, again)
            return False
        rest = kept.move_by_ids(self._rendered)
        if rest is None:
            return False
        self._may_return = True
        route = self._generation.route
        # Not split: a hand-off was not worth it, or the other pod may not be able to read the KV.
        # If nothing was delivered, the engine may not have computed the prompt; what is parsed, the
        # other pod's engine serves alone.
        is_read = route.path is SPLIT and kept.is_continued and kept.rest is None
        own = Target(route.decode_name, route.decode_address, route.decode_rank, True)
        self._send_to_another_pod(rest, own if is_read else None)
        return True

    def _ask_next_pod(self, chat: Body, again: Callable[[], None]) -> RenderQuestion:
        """Ask whether it can go on with a `chat` that is parsed; `again`: as of `try_move`."""
        record = self._generation.record

        def answered(rendered: bytes | None) -> None:
            self._rendered = rendered
            if rendered is None:
                record.not_resumed = NOT_PARSED
            else:
                again()

        generation, engine = self._generation, parse_host_port(self._left[0].address)
        return RenderQuestion(
            self._context,
            engine,
            generation.request,
            record,
            chat=chat.data,
            answered=answered,
        )

    def _send_to_another_pod(self, rest: Body, own: Target | None = None) -> None:
        target = self._left.pop(0)
        leg = _LegToAnotherPod(
            self._context, self._client, self._generation, self, target, self._keys, own
        )
        self._start(leg, parse_host_port(target.address), target.name, rest)

    def _send_back(self, rest: Body) -> None:
        self._may_return = False
        leg = _LegAfterFirst(self._context, self._client, self._generation, self)
        rank = self._generation.route.decode_rank
        self._start(leg, self._engine, self._decode_name, rest, rank=rank)

    def _start(
        self,
        leg: "_LegAfterFirst",
        engine: HostPort,
        name: str,
        rest: Body,
        *,
        rank: int | None = None,
    ) -> None:
        leg.start(engine, name, rest.data, rank=rank)
        self._client.continue_with(leg)


class _LegAfterFirst(SingleEngineGeneration):
    """What the first engine left of a request: the rest of a stream, or all of a request whose
    client has nothing yet."""

    def __init__(
        self,
        context: SidecarContext,
        client: ClientConnection,
        generation: GenerationRequest,
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
        self.route = generation.route
        if generation.kept is not None and generation.kept.rest is not None:
            # The engine serves it by several requests, alone.
            self.route = replace(self.route, path=RoutingPath.UNIFIED, candidates=())


class _LegToAnotherPod(_LegAfterFirst):
    """The same, served by another pod's sidecar."""

    def __init__(  # noqa: PLR0917 - those of the base class, and three more
        self,
        context: SidecarContext,
        client: ClientConnection,
        generation: GenerationRequest,
        alternates: Alternates,
        target: Target,
        keys: PlanKeys,
        own: Target | None,
    ) -> None:
        """`target`: the pod; `keys`: as of `Alternates`; `own`: this pod, if its engine hands off
        the KV."""
        super().__init__(context, client, generation, alternates)
        self._target, self._keys, self._own = target, keys, own
        self.is_split = bool(self.route.candidates)

    def added_headers(self, _engine: HostPort) -> Headers:
        route = self.route
        return plan_header(
            route,
            RESUME,
            self._target,
            tuple([_target(each) for each in route.candidates]),
            request_id=self.leg.attempt_id,
            keys=self._keys,
            left=self._own,
        )

    def _begin(self, data: bytes) -> None:
        # Not before: until then the stream may return to this pod's engine.
        self.context.lifecycle.has_moved(self)
        super()._begin(data)


def _target(candidate: Candidate) -> Target:
    """A prefill pod as a plan names it."""
    return Target(candidate.name, str(candidate.address), candidate.rank, candidate.asks_for_proof)
