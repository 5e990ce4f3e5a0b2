"""One request's pick: parse → candidates → decode pick → split or not → prefill pick → headers.

`EndpointPicker` is the stream logic's `Placer`. It holds what a reload may replace (`Routing`) and
the shared `Fleet`; it does no I/O. What refuses a request is answered in OpenAI's error shape:

    400 no JSON, or not of its kind     404 no backend has the model     413 body too large
    503 no backend, or no split where one is required; retryable
"""

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

from tandem_contract import headers as wire
from tandem_contract.openai_errors import error_body
from tandem_contract.paths import Role, RoutingPath
from tandem_contract.plan import Plan, Target, sign

from .backends.fleet import Fleet
from .backends.pods import Pod, may_hand_over, may_prefill
from .configuration import Routing
from .ext_proc.messages import HttpRequest, Immediate, Mutation
from .ext_proc.stream import Refused
from .history import Decision, History, candidates
from .metrics import Metrics
from .models_endpoint import asks_for_models, list_of_models
from .placement import Placement
from .request import (
    BadRequest,
    InferenceRequest,
    is_bare,
    is_json,
    kind_of,
    model_named,
    parse_request,
)
from .scheduling.decider import Situation, SplitImpossible, Verdict, decide, splits
from .scheduling.profile import Context

PREFILL_CANDIDATES: Final = 3
"""The choice and two retries, as many as the sidecar makes by default."""
PLAN_SECONDS: Final = 120.0
"""How long a plan may be under way: a minute in Envoy's queue, and another by which the clocks of
two nodes may differ. Not the request."""

_MODELS_SHOWN: Final = 8
"""Names listed to a client that asked for one there is not: an answer is no catalogue."""
_NO_BACKEND: Final = "no backend can take the request: try again"
_INTERNAL: Final = tuple(sorted(wire.INTERNAL))
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pick:
    """A decision: the pods by rank, and why."""

    verdict: Verdict
    decode: Sequence[Pod]
    prefill: Sequence[Pod] = ()
    cached_tokens: int = 0


class Spans(Protocol):
    """Who tells a collector of decisions."""

    def decided(self, decision: Decision, traceparent: str | None) -> str:
        """Tell of a decision below the client's `traceparent`; the one to pass on."""


class EndpointPicker:
    """Decides where requests go."""

    def __init__(
        self, fleet: Fleet, routing: Routing, metrics: Metrics, history: History, random: Random
    ) -> None:
        self.routing = routing
        self.plan_keys: Mapping[str, bytes] = {}
        """Key id → secret; without any, no plan is sent."""
        self._fleet, self._metrics, self._random = fleet, metrics, random
        self._history = history
        self.spans: Spans | None = None
        """Who makes spans; None: nobody."""

    def needs_body(self, request: HttpRequest) -> bool:
        """Prompts in JSON are read, and where backends serve different models, any JSON for its
        model; any other request is placed on its head alone."""
        return kind_of(request) is not None or (self._fleet.mixed and is_json(request))

    def place(self, request: HttpRequest, body: bytes, now: float) -> Placement:
        """Pick pods for `request` and count it there. Raises Refused."""
        known = request.headers.get(wire.REQUEST_ID)
        decision = self._history.add(Decision(known or str(uuid.uuid4()), now))
        try:
            placement = self._decide(request, body, decision)
        except Refused as refused:
            decision.refused(refused.immediate.status, refused.reason)
            self._made(request, decision)
            raise
        if (traceparent := self._made(request, decision)) is not None:
            placement.mutation = placement.mutation.also(wire.TRACEPARENT, traceparent)
        return placement

    def _made(self, request: HttpRequest, decision: Decision) -> str | None:
        """Tell that the decision stands; the traceparent to pass on, where spans are made."""
        self._metrics.decision_seconds.observe(decision.made())
        given = request.headers.get(wire.TRACEPARENT)
        # Probes and lists of models are worth a span only in somebody else's trace.
        if self.spans is None or (given is None and kind_of(request) is None):
            return None
        return self.spans.decided(decision, given)

    def _decide(self, request: HttpRequest, body: bytes, decision: Decision) -> Placement:
        if self._fleet.mixed and asks_for_models(request):
            self._answer_models(request, decision.decided)
        try:
            kind = kind_of(request)
            context = Context(parse_request(kind, body) if kind is not None else None)
            decision.model = context.request.model if context.request else model_named(body)
            pick = self._pick(context, decision, request.subset)
            if pick.decode[0].backend.role is Role.PREFILL and not is_bare(request, body):
                raise self._refused(503, "no_backend", _NO_BACKEND)
        except BadRequest as err:
            raise self._refused(400, "bad_request", str(err)) from err
        except SplitImpossible as err:
            raise self._refused(503, "no_prefill_backend", f"{err}: try again") from err
        return self._placed(request, context, pick, decision)

    def _answer_models(self, request: HttpRequest, now: float) -> None:
        """Raises Refused with the list of models, unless a backend has to be asked for it."""
        answer = list_of_models(_allowed(self._fleet.ready(None), request.subset), now)
        if answer is not None:
            self._metrics.decisions.labels("answered", "models").inc()
            raise Refused(answer, "models")

    def too_large(self, limit: int) -> Immediate:
        """The answer to a body of more than `limit` bytes."""
        message = f"the request body is larger than {limit} bytes"
        return self._refused(413, "too_large", message).immediate

    def _pick(self, context: Context, decision: Decision, subset: frozenset[str] | None) -> Pick:
        model = decision.model
        if model is not None and not self._fleet.serves(model):
            if self._fleet.served(model, decision.decided):
                raise self._refused(503, "model_gone", f"no backend serves `{model}`: try again")
            raise self._refused(404, "unknown_model", self._unknown(model), param="model")
        ready = _allowed(self._fleet.ready(model), subset)
        decode = self._decode(ready, context)
        if not decode:
            return self._any_role(ready)
        partners = _allowed(self._fleet.partners(model, decode[0]), subset)
        situation = self._situation(context, decode[0], partners)
        if situation.configured and not situation.prefill_ready:
            # While the hash changes, pods of one may be without partners, and of another not.
            paired = _allowed(self._fleet.paired(model), subset)
            if paired and (others := self._decode(paired, context)):
                theirs = _allowed(self._fleet.partners(model, others[0]), subset)
                there = self._situation(context, others[0], theirs)
                if splits(there, self.routing.scheduling.rules):
                    decode, partners, situation = others, theirs, there
        return self._decided(context, decode, partners, situation)

    def _decode(self, pods: Sequence[Pod], context: Context) -> Sequence[Pod]:
        scheduling = self.routing.scheduling
        return scheduling.decode.run(pods, context, scheduling.endpoints, self._random)

    def _decided(
        self,
        context: Context,
        decode: Sequence[Pod],
        partners: Sequence[Pod],
        situation: Situation,
    ) -> Pick:
        scheduling = self.routing.scheduling
        verdict = decide(situation, scheduling.rules)
        prefill: Sequence[Pod] = ()
        if verdict.path is RoutingPath.PREFILL_THEN_DECODE:
            prefill = scheduling.prefill.run(partners, context, PREFILL_CANDIDATES, self._random)
            # Whoever stands in for the decode pod is handed the same KV.
            decode = [pod for pod in decode if all(may_hand_over(p, pod) for p in prefill)]
        return Pick(verdict, decode, prefill, situation.cached_tokens)

    def _situation(self, context: Context, decode: Pod, partners: Sequence[Pod]) -> Situation:
        request = context.request
        prompt_tokens = request.prompt_tokens if request else 0
        return Situation(
            prompt_tokens=prompt_tokens,
            cached_tokens=min(prompt_tokens, context.held_tokens(decode)),
            block_tokens=decode.block_tokens,
            configured=self.routing.serving.enabled
            and any(may_prefill(pod, decode) for pod in self._fleet),
            prefill_ready=any(may_hand_over(pod, decode) for pod in partners),
            one_engine=request.one_engine if request else "passthrough",
        )

    def _unknown(self, model: str) -> str:
        names = self._fleet.models
        shown = ", ".join(f"`{name}`" for name in names[:_MODELS_SHOWN])
        more = f" and {len(names) - _MODELS_SHOWN} more" if len(names) > _MODELS_SHOWN else ""
        return f"The model `{model}` does not exist. This endpoint serves {shown}{more}."

    def _any_role(self, ready: Sequence[Pod]) -> Pick:
        """No backend may decode: any engine can still serve a request alone (seed 000)."""
        serving = self.routing.serving
        if not ready or (serving.enabled and not serving.fallback_to_unified):
            raise self._refused(503, "no_backend", _NO_BACKEND)
        verdict = Verdict(RoutingPath.FALLBACK, "no_decode_backend")
        return Pick(verdict, [min(ready, key=lambda pod: pod.load)])

    def _placed(
        self, request: HttpRequest, context: Context, pick: Pick, decision: Decision
    ) -> Placement:
        ident, now = decision.request_id, decision.decided
        headers = {} if wire.REQUEST_ID in request.headers else {wire.REQUEST_ID: ident}
        headers[wire.DESTINATION_ENDPOINT] = destination = _addresses(pick.decode)
        if pick.prefill:
            headers[wire.PREFILLER_HOST_PORT] = _addresses(pick.prefill)
        if self.plan_keys:
            headers[wire.PLAN] = sign(_plan(pick, ident, now), self.plan_keys, now=now)
        self._record(context.request, pick, decision)
        mutation = Mutation(
            tuple(headers.items()),
            tuple(name for name in _INTERNAL if name not in headers),
            destination,
        )
        return Placement(
            mutation,
            pick.decode[0],
            pick.prefill,
            context.request,
            self._fleet,
            self._metrics,
            decision,
        )

    def _record(self, request: InferenceRequest | None, pick: Pick, decision: Decision) -> None:
        """Count the pick, keep it, and note in the index what its pods will cache."""
        path, reason = pick.verdict.path, pick.verdict.reason
        decision.path, decision.reason = path, reason
        decision.decode, decision.prefill = candidates(pick.decode), candidates(pick.prefill)
        decision.cached_tokens = pick.cached_tokens
        decision.prompt_tokens = request.prompt_tokens if request else 0
        self._metrics.decisions.labels(path, reason).inc()
        if request is not None:
            self._metrics.hit(pick.cached_tokens, request.prompt_tokens, "estimated")
            for pod in (pick.decode[0], *pick.prefill[:1]):
                pod.index.add(request.chain(pod.block_tokens))
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "request %s: %s (%s), decode %s, prefill %s, %d of %d tokens cached",
                decision.request_id,
                path,
                reason,
                pick.decode[0].name,
                pick.prefill[0].name if pick.prefill else "none",
                pick.cached_tokens,
                decision.prompt_tokens,
            )

    def _refused(
        self, status: int, reason: str, message: str, *, param: str | None = None
    ) -> Refused:
        self._metrics.decisions.labels("refused", reason).inc()
        _log.debug("refused: %d %s", status, reason)
        headers = [("content-type", "application/json")]
        if status == 503:
            headers.append(("retry-after", "1"))
        answer = Immediate(status, error_body(status, message, param=param), tuple(headers))
        return Refused(answer, reason)


def _allowed(pods: tuple[Pod, ...], subset: frozenset[str] | None) -> tuple[Pod, ...]:
    if subset is None:
        return pods
    return tuple(
        pod
        for pod in pods
        if pod.address in subset or (pod.address or "").rpartition(":")[0] in subset
    )


def _addresses(pods: Sequence[Pod]) -> str:
    return ",".join(pod.address for pod in pods if pod.address is not None)


def _plan(pick: Pick, request_id: str, now: float) -> Plan:
    def target(pod: Pod) -> Target:
        return Target(pod.name, pod.address or "")

    return Plan(
        path=pick.verdict.path,
        reason=pick.verdict.reason,
        decode=target(pick.decode[0]),
        prefill=tuple(map(target, pick.prefill)),
        cached_tokens=pick.cached_tokens,
        request_id=request_id,
        expires=now + PLAN_SECONDS,
    )
