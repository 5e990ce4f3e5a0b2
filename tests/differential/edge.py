"""What the EPP and the sidecar read of a body, and what they forward."""

from contextlib import suppress
from dataclasses import dataclass

from tandem_contract.request_kinds import RequestKind
from tandem_epp.request.body_fields import BadBody as RefusedByEpp
from tandem_epp.request.form import form_model
from tandem_epp.request.inference import parse_request
from tandem_sidecar.bodies.parse import BadBody, clean_passthrough, parse_body


@dataclass(frozen=True)
class EdgeReading:
    """What was read of an accepted body."""

    forwarded: bytes
    model: str | None
    stream: bool = False
    max_tokens: int | None = None
    is_alone: bool = False
    """Whether one engine must serve the request, because of `n` or another field."""


def read_json(kind: RequestKind, body: bytes) -> EdgeReading | None:
    """None: the edge refuses the body."""
    with suppress(RefusedByEpp, BadBody):
        parsed = parse_request(kind, body)
        return EdgeReading(
            parse_body(body).data,
            parsed.model,
            parsed.is_stream,
            parsed.max_tokens,
            parsed.single_engine_reason is not None,
        )
    return None


def read_form(content_type: str, body: bytes) -> EdgeReading | None:
    """None: the edge refuses the form."""
    with suppress(RefusedByEpp, BadBody):
        model = form_model(content_type, body)
        return EdgeReading(clean_passthrough(body, content_type.encode("latin-1")), model)
    return None
