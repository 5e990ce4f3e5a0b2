"""Starts requests whose engine is chosen: `proxy` chooses its pod's, the router any."""

from msgspec.structs import replace

from tandem_contract.commandline import HostPort
from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_contract.request_kinds import RequestKind
from tandem_http1.client import ActiveRequest, ClientConnection
from tandem_http1.messages import Request

from ..bodies.kinds import single_engine_reason
from ..bodies.parse import Body, clean_passthrough
from ..observability.record import Record
from ..security.route import SPLIT, Route
from .context import Failover, GenerationRequest, SidecarContext
from .driver import HandoffDriver
from .passthrough import Passthrough
from .reply import send_error
from .single_engine import SingleEngineGeneration


class OwnGeneration(SingleEngineGeneration):
    """A generation that is at the engine that was chosen first."""

    plan = ""
    """The MAC of the plan that it follows; empty without one."""

    def serves_stream(self, plan: str) -> bool:
        """Whether this pod's engine generates the stream of this plan, which the sender keeps."""
        is_stream = self._has_begun and self._chunks is not None and self._kept is None
        return is_stream and self.plan == plan

    def free_engine(self) -> None:
        """The engine is to end, but the work not before its client leaves."""
        self._abort()
        self._call = None


def start_generation(
    context: SidecarContext,
    client: ClientConnection,
    generation: GenerationRequest,
    engine: HostPort,
    decode_name: str,
) -> ActiveRequest:
    """Serve `generation` as its route says, decoding on `engine`, whose name is `decode_name`."""
    record, chosen = generation.record, generation.route
    record.path, record.reason, record.ignored = chosen.path, chosen.reason, chosen.ignored
    if chosen.error is not None:
        record.errors = (ErrorPhase.ORCHESTRATION,)
    if chosen.path is not SPLIT:
        forward = OwnGeneration(
            context,
            client,
            generation.request,
            record,
            generation.failover,
            kept=generation.kept,
            kind=generation.kind,
            routed=chosen.routed,
            may_exhaust=generation.may_exhaust,
        )
        forward.plan = chosen.plan
        forward.start(engine, decode_name, generation.body.data, rank=chosen.decode_rank)
        return forward
    driver = HandoffDriver(context, client, generation, engine, decode_name)
    driver.start()
    return driver


def start_passthrough(
    context: SidecarContext,
    client: ClientConnection,
    request: Request,
    engine: HostPort,
    backend: str,
    *,
    record: Record | None = None,
    failover: Failover | None = None,
) -> ActiveRequest | None:
    """Forward `request`, which generates nothing, to `engine`, whose name is `backend`; None: it is
    already answered. `record`: None makes one."""
    try:
        content_type = request.single(b"content-type") or b""
        body = clean_passthrough(request.body, content_type)
    except ValueError as err:
        send_error(client, request, 400, str(err), b"", close=False)
        return None
    forward = Passthrough(context, client, request, record=record, failover=failover)
    forward.start(engine, backend, body)
    return forward


def apply_single_engine_rules(chosen: Route, kind: RequestKind, body: Body) -> Route:
    """The route, without a split if one engine must serve the request alone. Raises BadBody."""
    if chosen.path is not SPLIT:
        return chosen
    reason = single_engine_reason(kind, body)
    if reason is None:
        return chosen
    return replace(chosen, path=RoutingPath.UNIFIED, reason=reason, candidates=())
