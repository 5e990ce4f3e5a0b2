"""Entry of every client request: refuse it, hand it off, or forward it to this pod's engine.

The HTTP server calls `Proxy.handle` with every request. It returns at once; callbacks of the event
loop do the rest.
"""

import logging
import random
import time
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from tandem_contract.api_paths import NOT_SERVED, SCRAPED
from tandem_contract.commandline import HostPort
from tandem_contract.connectors import ConnectorName
from tandem_contract.plan import RESUME, PlanRejected, ResumeLimits, Target
from tandem_contract.plan_keys import PlanKeys
from tandem_contract.prompt_length import EXHAUSTING, length_problem
from tandem_contract.request_kinds import RequestKind
from tandem_contract.response_ids import has_tag_of, response_id_in
from tandem_http1.client import ActiveRequest, ClientConnection
from tandem_http1.messages import Request

from ..bodies.edit import with_prompt_of, with_response_id
from ..bodies.kinds import kind_of, previous_response
from ..bodies.parse import BadBody, Body, parse_body
from ..resume.kept_stream import keep
from ..resume.rules import once_obstacle
from ..security.route import PROOF, ProvenLeg, Route, UsedPlans, proven_leg, rank_of, route
from .alternates import Alternates
from .context import GenerationRequest, SidecarContext
from .driver import HandoffDriver
from .generation import (
    OwnGeneration,
    apply_single_engine_rules,
    start_generation,
    start_passthrough,
)
from .outbound import client_request_id
from .proven_prefill import ProvenPrefill
from .reply import new_record, not_sent, refuse_generation, send_error

log = logging.getLogger(__name__)

_PROXIED: Final = frozenset(
    {b"x-forwarded-for", b"x-forwarded-proto", b"x-envoy-external-address", b"forwarded", b"via"}
)
"""Headers that proxies add to the requests of their clients; a scrape of the EPP has none."""
DRAINING_MESSAGE = "the pod is shutting down: send the request to another pod"


class Proxy:
    """The handler of every client request."""

    def __init__(
        self,
        context: SidecarContext,
        keys: PlanKeys,
        max_model_len: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`max_model_len`: tokens of the longest prompt that the engine takes; None: not known."""
        self._context = context
        self._max_model_len = max_model_len
        self._keys = keys
        self._used_plans = UsedPlans(context.settings.used_plans)

    def handle(self, request: Request, client: ClientConnection) -> ActiveRequest | None:
        """Serve `request` with this pod's engine; None: it is already answered."""
        settings = self._context.settings
        if settings.ranks == 1:
            return self.serve(request, client, settings.engine)
        try:
            # With plan keys no unsigned header counts.
            arrived = client.local_port - settings.listen.port
            is_trusted = not self._keys.current
            rank = rank_of(request, arrived, settings.listen.port) if is_trusted else arrived
            engine = settings.engine_of(rank)
        except ValueError as err:
            send_error(client, request, 400, str(err), self.refuse(request), close=False)
            return None
        return self.serve(request, client, engine)

    def refuse(self, request: Request) -> bytes:
        settings = self._context.settings
        name = settings.pod_name or str(settings.engine)
        return refuse_generation(self._context.observer, request, name)

    def serve(
        self, request: Request, client: ClientConnection, engine: HostPort
    ) -> ActiveRequest | None:
        """Serve `request`, decoding on `engine`."""
        kind = kind_of(request.method, request.target)
        if kind is not None:
            return self._generate(kind, request, client, engine)
        if not self._is_served(request):
            send_error(client, request, 404, NOT_SERVED, b"", close=False)
            return None
        if self._context.lifecycle.draining:
            send_error(client, request, 503, DRAINING_MESSAGE, not_sent(request), close=True)
            return None
        target = request.target.decode("latin-1")
        engine = self._engine_storing(response_id_in(target), engine)
        return start_passthrough(self._context, client, request, engine, str(engine))

    def _engine_storing(self, response_id: str, engine: HostPort) -> HostPort:
        """The engine of this pod that stores a response; `engine` if none is known to."""
        settings = self._context.settings
        if settings.ranks > 1 and response_id:
            for rank in range(settings.ranks):
                other = settings.engine_of(rank)
                if has_tag_of(response_id, settings.backend_name(other)):
                    return other
        return engine

    def _is_served(self, request: Request) -> bool:
        """Whether this request, which generates nothing, may reach the engine."""
        target = request.target.decode("latin-1")
        if target in self._context.settings.api:
            return True
        # No proxy is between a scrape and this pod.
        return (
            target in SCRAPED
            and request.method == b"GET"
            and request.values.keys().isdisjoint(_PROXIED)
        )

    def _generate(
        self, kind: RequestKind, request: Request, client: ClientConnection, engine: HostPort
    ) -> ActiveRequest | None:
        request_id = client_request_id(request)
        is_stored = kind is RequestKind.RESPONSES
        lifecycle = self._context.lifecycle
        # Also in a drain: a stream that moved reads the KV that this pod's engine has of it.
        if PROOF in request.values and not lifecycle.has_expired:
            leg = self._proven_leg(request, client, engine)
            if leg is not None:
                return self._prefill_for_another(request, client, engine, leg)
        if lifecycle.draining:
            lines = self.refuse(request) + not_sent(request)
            send_error(client, request, 503, DRAINING_MESSAGE, lines, close=True)
            return None
        try:
            body = parse_body(request.body)
            self._check_length(kind, body)
            # The rules overrule the route: another EPP than Tandem's, or none, may have chosen it.
            asked_for = self._route(request, request_id, client, engine)
            if asked_for.reason == RESUME:
                body = with_prompt_of(body, request.body)
            chosen = apply_single_engine_rules(asked_for, kind, body)
            if is_stored:
                engine = self._engine_storing(previous_response(kind, body), engine)
        except BadBody as err:
            send_error(client, request, 400, str(err), self.refuse(request), close=False)
            return None
        except PlanRejected as err:
            log.warning("%s", err, extra={"request_id": request_id})
            send_error(client, request, 503, str(err), self.refuse(request), close=False)
            return None
        # A refused request gets no record: it never reached an engine.
        record = new_record(self._context, request, request_id, kind)
        settings = self._context.settings
        if is_stored:
            # Its own name first: a gateway may use an alternate of the pod that the plan names.
            name = chosen.decode_name if not settings.pod_name else ""
            body = with_response_id(kind, body, name or settings.backend_name(engine))
        generation = GenerationRequest(
            request, request_id, kind, body, chosen, record, settings, self._keys.current
        )
        decode_name = settings.pod_name or chosen.decode_name or str(engine)
        if chosen.alternates and (limits := chosen.resume or settings.resume_limits) is not None:
            generation = self._kept(generation, client, engine, decode_name, limits)
        return start_generation(self._context, client, generation, engine, decode_name)

    def _kept(
        self,
        generation: GenerationRequest,
        client: ClientConnection,
        engine: HostPort,
        decode_name: str,
        limits: ResumeLimits,
    ) -> GenerationRequest:
        """The request as a stream that another pod can continue, if it is one; otherwise another
        pod may begin it again as long as the client has nothing."""
        context, body = self._context, generation.body
        kept = keep(
            client,
            generation.request,
            generation.kind,
            body,
            record=generation.record,
            vocabularies=context.vocabularies,
            max_regeneration=limits.max_regeneration,
        )
        if kept is not None:
            generation = replace(generation, request=kept.request, body=kept.asked, kept=kept)
        elif once_obstacle(generation.kind, body.members) is not None:
            return generation
        alternates = Alternates(
            context,
            client,
            generation,
            engine,
            decode_name,
            keys=self._keys,
            max_moves=limits.max_moves,
        )
        return replace(generation, failover=alternates)

    def _check_length(self, kind: RequestKind, body: Body) -> None:
        """Raises BadBody for a text that cannot fit the model."""
        size = len(body.data)
        if size > EXHAUSTING:
            problem = length_problem(kind, body.members, size, self._max_model_len())
            if problem is not None:
                raise BadBody(problem)

    def _proven_leg(
        self, request: Request, client: ClientConnection, engine: HostPort
    ) -> ProvenLeg | None:
        """The prefill leg that `request` is proven to be, and that was signed for this pod."""
        keys = self._keys
        try:
            return proven_leg(
                request,
                keys.current,
                time.time(),
                is_own=lambda target: self._is_own(target, client, engine),
                used=self._used_plans,
            )
        except PlanRejected as err:
            # It goes on as the request of a client, whose transfer parameters are removed.
            log.warning("%s", err, extra={"request_id": client_request_id(request)})
            return None

    def _is_own(self, target: Target, client: ClientConnection, engine: HostPort) -> bool:
        """Whether `target`, of something signed, is `engine` of this pod: by name, or without
        --pod-name by the address that the request came to."""
        settings = self._context.settings
        if settings.pod_name and target.name == settings.pod_name:
            return True
        # The EPP has a name for each port of a pod, and one for each data-parallel rank behind it.
        name = target.name.removesuffix(f"_dp{target.rank}")
        if settings.pod_name and name in (settings.pod_name, settings.backend_name(engine)):
            return True
        return target.address == client.local_address

    def _prefill_for_another(
        self, request: Request, client: ClientConnection, engine: HostPort, leg: ProvenLeg
    ) -> ActiveRequest:
        if leg.left_plan:
            self._free_engine(leg.left_plan)
        forward = ProvenPrefill(self._context, client, request, leg.attempt_id)
        forward.start(engine, str(engine), request.body, rank=leg.target.rank)
        return forward

    def _free_engine(self, plan: str) -> None:
        """End the generation of the stream that leaves, which has the `plan` of this MAC: the
        engine may have no room for the leg as long as it runs. The router closes its request once
        the KV was read; until then that is work, so that the engine is kept."""
        for work in self._context.lifecycle.work:
            if isinstance(work, HandoffDriver | OwnGeneration) and work.serves_stream(plan):
                work.free_engine()
                return

    def _route(
        self, request: Request, request_id: str, client: ClientConnection, engine: HostPort
    ) -> Route:
        settings, keys = self._context.settings, self._keys
        chosen = route(
            request,
            request_id,
            keys.current,
            settings.allow,
            time.time(),
            is_own=lambda target: self._is_own(target, client, engine),
            used=self._used_plans,
        )
        if settings.sample_prefillers and not self._keys.current:
            shuffled = random.sample(chosen.candidates, len(chosen.candidates))
            chosen = replace(chosen, candidates=tuple(shuffled))
        if chosen.left is not None:
            # With other connectors only the engines of prefill pods hand off. A sidecar that wants
            # a certificate gets none from this one.
            tls, is_nixl = settings.listen_tls, settings.connector == ConnectorName.NIXL
            asks = is_nixl and (tls is None or not tls.is_mutual)
            first = (chosen.left,) if asks else ()
            left = chosen.left if asks else None
            chosen = replace(chosen, candidates=(*first, *chosen.candidates), left=left)
        if chosen.error is not None:
            log.warning("%s", chosen.error, extra={"request_id": request_id})
        return chosen
