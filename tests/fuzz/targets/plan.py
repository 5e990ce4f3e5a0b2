"""Signed plans, as the sidecar reads them.

First byte: 0, the rest is an unsigned header; 1, the rest is a payload that the EPP's key
signs; else the rest says how a valid header is changed.
"""

from base64 import urlsafe_b64encode
from contextlib import suppress

from tandem_contract import headers
from tandem_contract.commandline import HostPort
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import Plan, PlanRejected, Target, plan_head, sign
from tandem_contract.plan_mac import signed
from tandem_contract.plan_verification import verify
from tandem_http1.messages import Request
from tandem_sidecar.security.route import AllowList, Route, UsedPlans, route

_NOW = 1_700_000_000.0
_ID = "request-1"
_KEYS = {"20200101T000000Z": b"a secret of the set", "other": b"another secret of it"}
_PLAN = Plan(
    RoutingPath.PREFILL_THEN_DECODE,
    "split",
    Target("decode-0", "10.0.0.1:8000"),
    (Target("prefill-0", "10.0.0.2:8000", rank=1),),
    request_id=_ID,
    expires=_NOW + 60,
)
_VALID = sign(_PLAN, _KEYS, now=_NOW)
_EVERYWHERE = AllowList(addresses=frozenset({HostPort("10.0.0.2", 8000)}))


def check(data: bytes) -> None:
    mode, rest = data[0] if data else 0, data[1:]
    if mode == 1:
        _check_payload(rest)
        return
    value = rest.decode("latin-1") if mode == 0 else _changed(mode, rest)
    if value == _VALID:
        return
    plan = _verified(value)
    assert plan is None, "an unsigned header was accepted"
    routed = _routed(value)
    assert routed is None or routed.error is not None


def _changed(mode: int, changes: bytes) -> str:
    """The valid header with bytes replaced, removed or inserted: a place and a byte for each."""
    header = bytearray(_VALID.encode())
    for place, byte in zip(changes[::2], changes[1::2], strict=False):
        at = place % max(1, len(header))
        match mode % 3:
            case 0:
                header[at : at + 1] = bytes([byte])
            case 1:
                del header[at : at + 1 + byte % 8]
            case _:
                header.insert(at, byte)
    return header.decode("latin-1")


def _check_payload(payload: bytes) -> None:
    key_id = "20200101T000000Z"
    text = urlsafe_b64encode(payload).rstrip(b"=")
    value = signed(plan_head(key_id), payload, _KEYS[key_id])
    assert text in value.encode()
    plan = _verified(value)
    routed = _routed(value)
    if plan is None:
        assert routed is None or (routed.error is not None and not routed.candidates)
        return
    assert plan.request_id == _ID
    assert plan.expires >= _NOW
    assert _verified(sign(plan, _KEYS, now=_NOW)) == plan
    if plan.path is not RoutingPath.PREFILL_THEN_DECODE:
        assert routed is None or not routed.candidates


def _verified(value: str) -> Plan | None:
    with suppress(PlanRejected):
        return verify(value, _KEYS, request_id=_ID, now=_NOW)
    return None


def _routed(value: str) -> Route | None:
    """None: the request is refused, as the rest of a stream whose plan does not hold."""
    fields = [
        (headers.PLAN.encode(), value.encode("latin-1")),
        (headers.PREFILLER_HOST_PORT.encode(), b"10.0.0.2:8000"),
    ]
    request = Request(b"POST", b"/v1/completions", fields, dict(fields), b"", False, True)
    used = UsedPlans()
    with suppress(PlanRejected):
        return route(request, _ID, _KEYS, _EVERYWHERE, _NOW, is_own=lambda _: True, used=used)
    return None
