"""Verifies `x-tandem-plan` (`plan`) and the proof of a prefill leg, as the sidecar does."""

import hmac
from binascii import a2b_base64
from collections.abc import Mapping
from typing import Final

import msgspec

from .plan import PREFILL_LEG, RESUME, VERSION, Plan, PlanRejected, decode_plan
from .plan_mac import header_mac

_BEGINNING: Final = 96
"""Characters of an encoded plan that hold its path and its reason; a multiple of 4."""
_FROM_URL: Final = bytes.maketrans(b"-_", b"+/")


def verify_proof(value: str, keys: Mapping[str, bytes], *, attempt_id: str, now: float) -> Plan:
    """The proof in a header value: its `decode` may compute the prefill leg `attempt_id`.

    Raises PlanRejected unless it is such a proof, and valid at `now` (Unix seconds).
    """
    plan = verify(value, keys, request_id=attempt_id, now=now)
    if plan.reason != PREFILL_LEG:
        raise PlanRejected("the plan is no proof of a prefill leg")
    return plan


def says_resume(value: bytes) -> bool:
    """Whether a header value, which may be forged, says that it is a plan for the rest of a stream.
    Not to be trusted: only to refuse a request."""
    parts = value.split(b".")
    if len(parts) != 4:
        return False
    beginning = parts[2][:_BEGINNING].translate(_FROM_URL)
    try:
        # The array begins with two strings: path and reason.
        return a2b_base64(beginning + b"==").split(b'"', 4)[3:4] == [RESUME.encode()]
    except ValueError:
        return False


def verify(value: str, keys: Mapping[str, bytes], *, request_id: str, now: float) -> Plan:
    """The plan in a header value.

    Raises PlanRejected unless a key of `keys` signed it for `request_id` and it has not expired
    at `now` (Unix seconds).
    """
    # Also makes `encode` below safe: a header may hold any bytes.
    if not value.isascii():
        raise PlanRejected("the plan is malformed")
    whole = value.encode()
    parts = whole.split(b".")
    if len(parts) != 4 or parts[0] != VERSION:
        raise PlanRejected("the plan is malformed")
    _, key_id, payload, mac = parts
    secret = keys.get(key_id.decode())
    if secret is None:
        raise PlanRejected("the plan is signed with an unknown key")
    # Constant time, and before the payload is parsed: unsigned bytes are never parsed as JSON.
    if not hmac.compare_digest(mac, header_mac(whole[: -len(mac) - 1], secret)):
        raise PlanRejected("the plan's signature is wrong")
    try:
        # The padding that `base64url` removed; surplus padding is ignored.
        plan = decode_plan(a2b_base64(payload.translate(_FROM_URL) + b"=="))
    except (ValueError, msgspec.MsgspecError) as err:
        raise PlanRejected("the plan's payload is malformed") from err
    # A plan that was observed in a log cannot be replayed with another request.
    if plan.request_id != request_id:
        raise PlanRejected("the plan is for another request")
    if plan.expires < now:
        raise PlanRejected("the plan has expired")
    return plan
