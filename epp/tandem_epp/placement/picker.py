"""One request's pick: parse, choose a decode pod, decide on a split, choose prefill pods, headers.

`EndpointPicker` is the `RequestPicker` of `server.ext_proc.stream`. It holds the configuration,
which a reload replaces, and the shared `Fleet`; it does no I/O. It replies with errors itself:

    400  not JSON, not a request of its kind, or a text that cannot fit the model's length
    404  no backend lists the model, or the path is none of the API's
    413, 415  body too large, or with a Content-Encoding
    500  a bug, which tandem_epp_faults_total counts; only if no pod can be picked in spite of it
    503  no backend, or no split where the configuration requires one; retryable
"""

import logging
import uuid
from collections.abc import Mapping
from contextlib import suppress
from random import Random
from time import perf_counter
from typing import Final, Protocol

from msgspec.structs import replace

from tandem_contract import headers as wire
from tandem_contract.api_paths import NOT_SERVED
from tandem_contract.body_coding import REFUSED_MESSAGE as CODING_REFUSED
from tandem_contract.paths import Role, RoutingPath
from tandem_contract.plan_signer import PlanSigner
from tandem_contract.request_ids import usable_request_id
from tandem_contract.response_ids import has_tag_of, response_id_in

from ..backends.fleet import Fleet
from ..backends.pods import Pod, in_subset
from ..choice.context import ChoiceContext
from ..choice.fallback import FAULT, choose_alone
from ..choice.prompt_tokens import prompt_tokens
from ..choice.result import NoBackend, SchedulingResult, SplitImpossible
from ..choice.routing import Routing
from ..choice.scheduler import Scheduler
from ..exchange import NO_BACKEND, HttpRequest, NotPlaced
from ..flow.control import Outlook
from ..metrics.counters import Metrics
from ..request.bodies import is_coded, is_form, is_json, kind_of, named_model
from ..request.body_fields import BadBody
from ..request.engine_priority import takes_priority, with_priority
from ..request.inference import InferenceRequest
from ..request.model_rewrites import ModelRewrites, Rewrite
from ..request.objectives import Objectives
from ..request.prompt_key import PromptForm
from ..request.tenant_salts import TenantSalts
from .counted_request import NO_CHAIN, CountedRequest
from .history import Decision, History, candidates
from .placement import Placement, PlacementObserver
from .placement_headers import header_changes
from .preparation import NO_PREPARATION, Preparation, preparation_of, read_body
from .refusals import Refusals, check_length, is_models_request, models_response, unknown_model

_NO_BACKEND: Final = "no backend can serve the request now: try again"
_LENGTH: Final = "content-length"
_NOT_JSON: Final = "the body is not JSON: send it with content-type: application/json"
_NOT_SENT: Final = (
    "cache_salt.from_header needs the request's body: have the gateway send bodies to the endpoint"
    " picker"
)
_FAULT: Final = (
    "the endpoint picker could not place the request because of a bug: its log says more"
)
_log: Final = logging.getLogger(__name__)


class DecisionTracer(Protocol):
    """Exports decisions as OpenTelemetry spans."""

    def export(self, decision: Decision, traceparent: str | None) -> str:
        """Export a decision as a child of the client's `traceparent`; returns the traceparent to
        send on."""


class EndpointPicker:
    """Decides where requests go."""

    def __init__(
        self, fleet: Fleet, routing: Routing, metrics: Metrics, history: History, random: Random
    ) -> None:
        self._plan_keys: Mapping[str, bytes] = {}
        self._signer: PlanSigner | None = None
        """None: there are no keys."""
        self.tracer: DecisionTracer | None = None
        """None: no spans."""
        self.observer: PlacementObserver | None = None
        """Is told what happens to each placement; None: no other part needs it."""
        self.cleans_requests = False
        """Whether this process itself removes what clients must not set, so that an engine needs no
        sidecar in front to serve any request."""
        self.follows_hints = True
        """Whether a gateway's list of allowed backends is followed."""
        self._fleet, self._metrics, self._history = fleet, metrics, history
        self.salts = TenantSalts()
        self.rewrites = ModelRewrites(random)
        self.objectives = Objectives()
        self._error = Refusals(metrics).error
        self._random = random
        self._scheduler = Scheduler(fleet, routing, random)

    @property
    def plan_keys(self) -> Mapping[str, bytes]:
        """Key id → secret. Without keys no plan is sent. Replaced as a whole."""
        return self._plan_keys

    @plan_keys.setter
    def plan_keys(self, keys: Mapping[str, bytes]) -> None:
        self._plan_keys, self._signer = keys, PlanSigner(keys) if keys else None

    @property
    def routing(self) -> Routing:
        """The configuration; a reload replaces it as a whole."""
        return self._scheduler.routing

    @routing.setter
    def routing(self, routing: Routing) -> None:
        self._scheduler.routing = routing

    def needs_body(self, request: HttpRequest) -> bool:
        """Whether the body decides: for every request with a prompt, and, if backends serve
        different models or one may be replaced, for any JSON or form that may name a model."""
        if kind_of(request) is not None:
            # A coded body is refused unread.
            return not is_coded(request)
        if is_json(request) and self.salts.apply_to(request, self.routing.api):
            return True
        if is_coded(request) or request.path not in self.routing.api:
            return False
        if self.rewrites.may_apply(request):
            return True
        return self._fleet.has_mixed_models and (is_json(request) or is_form(request))

    def place(self, request: HttpRequest, body: bytes | None, now: float) -> Placement:
        """Pick pods for `request` and count the request on them; a body of None is not read. Raises
        NotPlaced."""
        if not self.follows_hints and request.subset is not None:
            request = replace(request, subset=None)
        changed = self._with_members(request, body)
        placement = self._place_counted(request, changed, now)
        # Where the model was replaced, the body is changed already, and has these members.
        if changed is not body and placement.body is None:
            placement.body = changed
            if _LENGTH in request.headers and changed is not None:
                length = str(len(changed))
                placement.mutation = placement.mutation.with_header(_LENGTH, length)
        return placement

    def placed_body(self, request: HttpRequest, body: bytes) -> bytes:
        """The body as it is placed. One that `place` refuses stays as it is."""
        try:
            return self._with_members(request, body) or body
        except NotPlaced:
            return body

    def _with_members(self, request: HttpRequest, body: bytes | None) -> bytes | None:
        """The body with what engines are told beside the client's own members; the same object if
        that is nothing. Raises NotPlaced."""
        # Without a body there is nothing to tell: some paths need none.
        if body == b"":
            return body
        if self.salts.apply_to(request, self.routing.api):
            body = self._with_salt(request, body)
        if self.routing.scheduling.propagates_priority and body and takes_priority(request):
            # A body that is no JSON object is refused when it is read.
            with suppress(BadBody):
                return with_priority(body, self.objectives.priority(request.headers))
        return body

    def _with_salt(self, request: HttpRequest, body: bytes | None) -> bytes:
        """The body with the salt of its tenant. Raises NotPlaced."""
        # Refused, because an engine might read the body as JSON all the same, without a salt.
        if not is_json(request):
            raise self._error(request, 415, "not_json", _NOT_JSON)
        if body is None:
            raise self._error(request, 500, "no_body", _NOT_SENT)
        try:
            return self.salts.salted(request, body)
        except BadBody as err:
            raise self._error(request, 400, "bad_request", str(err), param=err.param) from err

    def _place_counted(self, request: HttpRequest, body: bytes | None, now: float) -> Placement:
        """Place the request, and keep the decision. Raises NotPlaced."""
        # The sidecar applies the same rule. An id that only one of both accepted would make the
        # plan, which is bound to the id, unusable.
        request_id = usable_request_id(request.headers.get(wire.REQUEST_ID)) or str(uuid.uuid4())
        self._fleet.ejections.advance(now)
        # Added before the pick, so that a refused request can be traced too.
        decision = self._history.add(_new_decision(request_id, now, preparation_of(request)))
        decision.priority = self.objectives.priority(request.headers)
        decision.held = preparation_of(request).held
        try:
            placement = self._place_despite_faults(request, body, decision)
        except NotPlaced as refusal:
            decision.record_reply(refusal.reply.status, refusal.reason)
            self._complete(request, decision)
            decision.end()
            raise
        decision.begin()
        if (traceparent := self._complete(request, decision)) is not None:
            placement.mutation = placement.mutation.with_header(wire.TRACEPARENT, traceparent)
        return placement

    def outlook(self, request: HttpRequest, parsed: InferenceRequest, now: float) -> Outlook:
        """What the choice would do with the request now (Unix seconds), as far as flow control asks
        for it. Nothing is placed."""
        self._set_scale(parsed)
        context = ChoiceContext(parsed, self._fleet.prefixes, None, request.headers, now)
        placed = prompt_tokens(context, self._fleet.figures).placed
        tokens = max(0, parsed.prompt_tokens - max(placed, default=0))
        return Outlook(tokens, self._scheduler.would_split(context, parsed.model, now))

    def _set_scale(self, parsed: InferenceRequest) -> None:
        if parsed.form is not PromptForm.IDS:
            parsed.token_scale = self._fleet.token_scales.prompt_scale(
                parsed.model, parsed.text_tokens, parsed.media_parts
            )

    def body_too_large(self, request: HttpRequest | None, limit: int) -> NotPlaced:
        """The reply to a body of more than `limit` bytes."""
        message = f"the request body is larger than {limit} bytes"
        return self._error(request, 413, "too_large", message)

    def body_too_slow(self, request: HttpRequest | None) -> NotPlaced:
        """The reply to a request whose body does not come in time."""
        return self._error(request, 408, "body_timeout", "the request body did not arrive in time")

    def body_in_pieces(self, request: HttpRequest | None) -> NotPlaced:
        """The reply to a body of too many small parts."""
        message = "the request body comes in too many small parts: send larger ones"
        return self._error(request, 400, "body_in_pieces", message)

    def memory_full(self, request: HttpRequest | None) -> NotPlaced:
        """The reply to a body for which there is no memory now."""
        message = "too many request bodies are under way: try again"
        return self._error(request, 503, "memory_full", message)

    def _complete(self, request: HttpRequest, decision: Decision) -> str | None:
        """Measure and export a decision; returns the traceparent to send on, if there are spans."""
        self._metrics.decision_seconds.observe(decision.complete())
        traceparent = request.headers.get(wire.TRACEPARENT)
        # Probes and lists of models get a span only as part of a client's trace.
        if self.tracer is None or (traceparent is None and kind_of(request) is None):
            return None
        with self._metrics.faults.contained("trace"):
            return self.tracer.export(decision, traceparent)
        return None

    def _place_despite_faults(
        self, request: HttpRequest, body: bytes | None, decision: Decision
    ) -> Placement:
        """Place a request; where a bug prevents that, on any pod. Raises NotPlaced."""
        if (refusal := preparation_of(request).refusal) is not None:
            raise refusal
        for place in (self._place, self._place_anywhere):
            try:
                return place(request, body, decision)
            except NotPlaced:
                raise
            # An exception from here would reset the request.
            except Exception as err:  # noqa: BLE001
                self._metrics.faults.count("place", err)
        decision.path = None
        raise self._error(request, 500, "fault", _FAULT)

    def _place_anywhere(
        self, request: HttpRequest, body: bytes | None, decision: Decision
    ) -> Placement:
        """Place a request without reading its prompt, and without costs or scores: they are where
        the bug may be. Raises NotPlaced."""
        serving = self.routing.serving
        if serving.enabled and not serving.fallback_to_unified:
            raise self._error(request, 500, "fault", _FAULT)
        has_mixed_models = self._fleet.has_mixed_models
        decision.model = named_model(request, body or b"") if has_mixed_models else None
        ready = in_subset(self._fleet.ready_pods(decision.model), request.subset)
        decodes = [pod for pod in ready if pod.backend.role.serves(Role.DECODE)]
        if not decodes:
            raise self._error(request, 503, NO_BACKEND, _NO_BACKEND)
        pods = [choose_alone(decodes, self._random)]
        return self._placement(request, None, SchedulingResult(FAULT, pods), decision)

    def _place(self, request: HttpRequest, body: bytes | None, decision: Decision) -> Placement:
        if request.path not in self.routing.api:
            raise self._error(request, 404, "unknown_path", NOT_SERVED)
        if is_coded(request):
            raise self._error(request, 415, "content_encoding", CODING_REFUSED)
        if self._fleet.has_mixed_models and is_models_request(request):
            self._answer_models(request, decision.decided_at)
        try:
            parsed, rewrite, decision.model = self._read(request, body)
            if rewrite is not None:
                decision.asked, decision.rewritten_by = rewrite.asked, rewrite.source
            self._check_model(request, decision.model, decision.decided_at)
            if parsed is not None:
                self._set_scale(parsed)
            model, now = decision.model, decision.decided_at
            prepared = preparation_of(request)
            precise = prepared.precise_of(parsed)
            check_length(parsed, self._fleet, prepared.sizes)
            context = ChoiceContext(parsed, self._fleet.prefixes, precise, request.headers, now)
            subset = subset_storing_response(request, parsed, self._fleet.ready_pods(model))
            result = self._schedule(context, model, subset, prepared.subset, now)
        except BadBody as err:
            raise self._error(request, 400, "bad_request", str(err), param=err.param) from err
        except NoBackend as err:
            raise self._error(request, 503, NO_BACKEND, _NO_BACKEND) from err
        except SplitImpossible as err:
            raise self._error(request, 503, "no_prefill_backend", f"{err}: try again") from err
        # A prefill pod has no sidecar that would remove what clients must not set.
        is_prefill_pod = result.decode[0].backend.role is Role.PREFILL
        may_lack_sidecar = self.cleans_requests or not _needs_sidecar(request, parsed)
        if is_prefill_pod and not may_lack_sidecar:
            raise self._error(request, 503, NO_BACKEND, _NO_BACKEND)
        return self._placement(request, parsed, result, decision, rewrite)

    def _schedule(
        self,
        context: ChoiceContext,
        model: str | None,
        subset: frozenset[str] | None,
        with_room: frozenset[str] | None,
        now: float,
    ) -> SchedulingResult:
        """Choose among `subset`; of these among the pods `with_room`, if that is possible. Raises
        NoBackend, SplitImpossible."""
        if with_room is not None:
            try:
                narrowed = with_room if subset is None else with_room & subset
                result = self._scheduler.schedule(context, model, narrowed, now)
                if result.alternate is None and len(result.decode) == 1:
                    result.alternate = self._full_alternate(result.decode[0], model, subset)
                return result
            except (NoBackend, SplitImpossible):
                # Pods have left meanwhile, or the request must go to one that is full.
                pass
        return self._scheduler.schedule(context, model, subset, now)

    def _full_alternate(
        self, chosen: Pod, model: str | None, subset: frozenset[str] | None
    ) -> Pod | None:
        """The pod to ask where `chosen` takes nothing and no other one has room: one like it with
        the fewest requests; None: there is none."""
        ready = in_subset(self._fleet.ready_pods(model), subset)
        backend = chosen.backend
        alike = (
            pod
            for pod in ready
            if pod.address != chosen.address
            and pod.backend.role is backend.role
            and pod.backend.compat == backend.compat
        )
        return min(alike, key=lambda pod: pod.load, default=None)

    def _read(
        self, request: HttpRequest, body: bytes | None
    ) -> tuple[InferenceRequest | None, Rewrite | None, str | None]:
        """What a pick reads of the body, the replacement of its model, and the model that is to
        serve it. Raises BadBody."""
        prepared = preparation_of(request)
        rewrite = prepared.rewrite
        parsed, model = read_body(prepared, request, body if rewrite is None else rewrite.body)
        if prepared is NO_PREPARATION and body and self.rewrites.may_apply(request):
            rewrite = self.rewrites.rewrite(request, model, body)
            if rewrite is not None and parsed is not None:
                parsed, _ = read_body(prepared, request, rewrite.body)
        return parsed, rewrite, model if rewrite is None else rewrite.target

    def _answer_models(self, request: HttpRequest, now: float) -> None:
        """Raises NotPlaced with the list of models, unless a backend must answer."""
        pods = in_subset(self._fleet.ready_pods(None), request.subset)
        response = models_response(pods, now)
        if response is not None:
            self._metrics.decisions.child("answered", "models").inc()
            raise NotPlaced(response, "models")

    def _check_model(self, request: HttpRequest, model: str | None, now: float) -> None:
        """Raises NotPlaced for a model that no backend may serve."""
        if model is None or self._fleet.can_serve(model):
            return
        if self._fleet.was_removed_recently(model, now):
            gone = f"no backend serves `{model}` now: try again"
            raise self._error(request, 503, "model_gone", gone)
        message = unknown_model(model, self._fleet.models)
        raise self._error(request, 404, "unknown_model", message, param="model")

    def _placement(
        self,
        request: HttpRequest,
        parsed: InferenceRequest | None,
        result: SchedulingResult,
        decision: Decision,
        rewrite: Rewrite | None = None,
    ) -> Placement:
        now = decision.decided_at
        length = len(rewrite.body) if rewrite is not None else None
        mutation = header_changes(
            request,
            result,
            decision.request_id,
            self._signer,
            now,
            routing=self.routing,
            length=length,
        )
        self._record(parsed, result, decision)
        pods = CountedRequest(
            self._fleet,
            result.decode[0],
            result.prefill,
            now,
            result.size,
            parsed.chain if parsed is not None else NO_CHAIN,
            decision.model,
            parsed.text_tokens if parsed is not None else 0,
            self.routing.serving.fallback_to_unified,
            media_parts=parsed.media_parts if parsed is not None else 0,
            fingerprint=parsed.fingerprint if parsed is not None else 0,
            alternate=result.alternate,
        )
        return Placement(
            mutation,
            pods,
            self._metrics,
            decision,
            self.observer,
            self.routing.scheduling.added_headers,
            rewrite.answered_model if rewrite is not None else None,
            rewrite.body if rewrite is not None else None,
        )

    def _record(
        self, request: InferenceRequest | None, result: SchedulingResult, decision: Decision
    ) -> None:
        """Count the decision and fill it in."""
        path, reason = result.decision.path, result.decision.reason
        decision.path, decision.reason = path, reason
        decision.decode, decision.prefill = candidates(result.decode), candidates(result.prefill)
        decision.cached_tokens = result.cached_tokens
        decision.loaded_tokens = result.loaded_tokens
        decision.prompt_tokens = prompt = request.prompt_tokens if request else 0
        if result.costs is not None and request is not None:
            self._history.explain(decision, result.costs, self._fleet.overheads.seconds(path))
        self._metrics.decisions.child(path, reason).inc()
        if path is RoutingPath.FALLBACK:
            self._metrics.fallbacks.child(reason, result.decode[0].backend.role).inc()
        if request is not None:
            self._metrics.observe_hit_ratio(min(result.size.cached, prompt), prompt, "estimated")
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "request %s: path %s (%s), decode pod %s, prefill pod %s, %d of %d tokens cached, "
                "%d loaded",
                decision.request_id,
                path,
                reason,
                result.decode[0].name,
                result.prefill[0].name if result.prefill else "none",
                result.cached_tokens,
                decision.prompt_tokens,
                result.loaded_tokens,
            )


def _needs_sidecar(request: HttpRequest, parsed: InferenceRequest | None) -> bool:
    """Whether an engine without a sidecar must not get this request. A body that was not read may
    hold anything."""
    if parsed is not None:
        return parsed.needs_sidecar
    return request.method not in ("GET", "HEAD")


def _new_decision(request_id: str, now: float, prepared: Preparation) -> Decision:
    """A decision that began when the body was complete."""
    began = prepared.began if prepared.began is not None else perf_counter()
    return Decision(request_id, now, began=began)


def subset_storing_response(
    request: HttpRequest, parsed: InferenceRequest | None, ready: tuple[Pod, ...]
) -> frozenset[str] | None:
    """Addresses of the backends that may serve `request`: the one of `ready` that stores the
    response which the request is about, else all that the gateway's hint allows. None: any."""
    response_id = parsed.previous_response if parsed is not None else response_id_in(request.path)
    if response_id:
        for pod in in_subset(ready, request.subset):
            # Ranks of one engine share its store, and a sidecar without plans knows no rank.
            names = (pod.name, pod.backend.name)
            if pod.address and any(has_tag_of(response_id, name) for name in names):
                return frozenset((pod.address,))
    return request.subset
