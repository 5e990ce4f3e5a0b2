"""Requests and attempts that the connectors' tests share."""

import json
from typing import Any

from tandem_contract.commandline import HostPort
from tandem_contract.request_kinds import RequestKind
from tandem_sidecar.bodies.parse import Body, parse_body
from tandem_sidecar.connectors.protocol import HandoffAttempt

ATTEMPT = HandoffAttempt("r-1", HostPort("10.0.0.1", 8000))

BODY = parse_body(
    b'{"model":"m","stop":["x"],"stop_token_ids":[1],"stream":true,"stream_options":{},'
    b'"min_tokens":5,"max_tokens":100,"tools":[{"a":1}],"seed":9007199254740993}'
)

KINDS = list(RequestKind)


def chat(content: object, **more: Any) -> Body:
    """A chat whose last message has that content."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    return parse_body(json.dumps({"model": "m", "messages": messages, **more}).encode())


def params_of(leg: bytes) -> dict[str, Any]:
    """The kv_transfer_params of a leg."""
    params: dict[str, Any] = json.loads(leg)["kv_transfer_params"]
    return params
