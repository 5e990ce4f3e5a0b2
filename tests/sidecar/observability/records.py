"""Records as the data path fills them in, with one second between events."""

from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_contract.timing import Timing
from tandem_sidecar.observability.record import Phase, Record, Result

RECEIVED = 100.0
UNIX = 1_700_000_000.0


def record(request_id: str = "r1", kind: str = "chat") -> Record:
    return Record(request_id, kind, RECEIVED, UNIX, target="/v1/chat/completions")


def end_record(
    request_record: Record, outcome: str = "answered", *, seconds: float = 5.0
) -> Record:
    request_record.outcome, request_record.ended = outcome, RECEIVED + seconds
    return request_record


def handed_off(request_id: str = "r1", timing: Timing | None = None) -> Record:
    """An answered hand-off; `timing` is the decode engine's."""
    request_record = record(request_id)
    request_record.path, request_record.reason, request_record.status = (
        RoutingPath.PREFILL_THEN_DECODE,
        "worth_it",
        200,
    )
    leg = request_record.leg(Phase.PREFILL, "p-0", f"{request_id}-a", RECEIVED + 1)
    leg.timing = Timing(queue=0.25, cached=16, computed=48)
    leg.end(Result.ANSWERED, RECEIVED + 2, status=200)
    leg = request_record.leg(Phase.DECODE, "d-0", f"{request_id}-a", RECEIVED + 2)
    leg.first_byte, leg.timing = RECEIVED + 3, timing
    request_record.first_byte = RECEIVED + 3
    leg.end(Result.ANSWERED, RECEIVED + 4, status=200)
    return end_record(request_record)


def load_failed(request_id: str = "r1") -> Record:
    """A hand-off whose KV load failed, after which the decode engine computed the prompt."""
    request_record = record(request_id)
    request_record.path, request_record.status, request_record.errors = (
        RoutingPath.FALLBACK,
        200,
        (ErrorPhase.KV_TRANSFER,),
    )
    request_record.leg(Phase.PREFILL, "p-0", f"{request_id}-a", 101.0).end(
        Result.ANSWERED, 102.0, status=200
    )
    request_record.leg(Phase.DECODE, "d-0", f"{request_id}-a", 102.0).end(
        Result.ERROR, 103.0, status=500
    )
    request_record.leg(Phase.DECODE, "d-0", f"{request_id}-b", 103.0).end(
        Result.ANSWERED, 104.0, status=200
    )
    return end_record(request_record)
